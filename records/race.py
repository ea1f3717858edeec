"""A race of two scripts on this machine, in the order A B, B A, A B, ...

A machine drifts: it gets warm, a neighbour wakes up. In this order drift hits both scripts alike. Both runs of a pair
have the same seed and stand next to each other in time, so what they share cancels in their difference: the interval
is that of a paired t-test over the differences.

Each finished run's log is kept in the race's folder. That is all the state there is: the same command again goes on
after the last of them.
"""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from records.logs import UserError, half_interval, many, mean, read_log, same_source, spread
from records.scripts import name_of, open_script

LOGS = Path("logs")  # where a script puts its log, seen from where it is started


def run_race(args, paint):
    a, b = open_script(args.a, args.records), open_script(args.b, args.records)
    if any(word.partition("=")[0] == "--seed" for word in args.settings):
        raise UserError("race gives each pair of runs its own seed; use --first-seed in place of --seed")
    nproc = args.nproc or default_processes()
    plan = {
        "A": {"name": name_of(a), "sha256": sha256(a.source).hexdigest()},
        "B": {"name": name_of(b), "sha256": sha256(b.source).hexdigest()},
        "settings": args.settings,
        "processes": nproc,
        "first_seed": args.first_seed,
    }
    folder = prepare(args.state or default_folder(plan), plan)
    scripts = {"A": a, "B": b}
    paths = {side: runnable(scripts[side], folder, side) for side in "AB"}
    with only_one_race_in(folder) as lock:
        for number, side in order(args.runs):
            log = folder / f"pair{number:02}_{side}.txt"
            if not log.exists():
                seed = args.first_seed + number - 1
                if paths[side].read_bytes() != scripts[side].source:
                    raise UserError(f"{paths[side]}: changed while the race was going on")
                command = launch_command(paths[side], nproc, ["--seed", str(seed), *args.settings])
                print(f"pair {number} of {args.runs}, {side}: {shlex.join(command)}", file=sys.stderr)
                new = run_once(command, nproc, folder / "output.txt", lock)
                replace(log, find_log(new, scripts[side], seed).read_bytes())
            describe_run(number, side, log, args.target)
            compare_tracks(folder, args.target)
    return report(plan, folder, args.runs, args.target, paint)


def order(runs):
    for number in range(1, runs + 1):
        yield from ((number, side) for side in ("AB" if number % 2 else "BA"))


# ----------------------------------------------------------------------------------------------------------------------
# The race's folder
# ----------------------------------------------------------------------------------------------------------------------


def default_folder(plan):
    """A name that changes with the scripts and the settings, so that a changed script starts another race."""
    digest = sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:8]
    names = "_".join(re.sub(r"[^\w.-]+", "-", plan[side]["name"]) for side in "AB")
    return LOGS / f"race_{names}_{digest}"


def prepare(folder, plan):
    try:
        folder.mkdir(parents=True, exist_ok=True)
        memory = folder / "race.json"
        if not memory.exists():
            replace(memory, json.dumps(plan, indent=1).encode())
        known = json.loads(memory.read_bytes())
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror or error}") from None
    except ValueError:
        raise UserError(f"{memory}: is not JSON, so this is no race to go on with; choose another --state") from None
    other = [key for key in plan if not isinstance(known, dict) or known.get(key) != plan[key]]
    if other:
        raise UserError(f"{folder}: holds another race, with a different {' and '.join(other)}; choose another --state")
    return folder


def replace(path, content):
    """All of it or nothing: a run that is killed leaves no half file behind."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


def runnable(script, folder, side):
    """The path to run: the script itself, or a copy of it where it stands in a log."""
    path = Path(script.label)
    if path.suffix != ".py":
        path = folder / f"{side}.py"
        replace(path, script.source)
    return path


@contextmanager
def only_one_race_in(folder):
    """A lock on the folder. The runs inherit it, so a run that outlives a killed race still holds it."""
    import fcntl  # not on Windows, and only a race needs it

    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{folder}: this race, or a run that it left behind, is still going on") from None
        yield file


# ----------------------------------------------------------------------------------------------------------------------
# One run
# ----------------------------------------------------------------------------------------------------------------------


def default_processes():
    """One process a GPU; on a CPU 2, or 1 where there is only one core."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = len([device for device in visible.split(",") if device.strip()])
    elif shutil.which("nvidia-smi"):
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
        gpus = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    else:
        gpus = 0
    return gpus or min(2, cores())


def cores():
    """The cores that this process may use, which may be fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch_command(script, nproc, settings):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"] if nproc > 1 else []
    return [sys.executable, *launcher, str(script), *settings]


def run_once(command, nproc, output, lock):
    """Run to the end; the new logs. However this race is stopped, the run is stopped with it."""
    before = set(LOGS.glob("*.txt"))
    environment = {"OMP_NUM_THREADS": str(max(1, cores() // nproc)), **os.environ}
    with open(output, "wb") as file:
        # A group of its own: it can be stopped with all its processes, and the terminal's Ctrl-C reaches only us.
        run = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
            start_new_session=True, pass_fds=[lock.fileno()],
        )  # fmt: skip
        for sign in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(sign, raise_interrupt)
        try:
            code = run.wait()
        except BaseException:
            stop(run)
            print("stopped; the same command goes on after the last finished run", file=sys.stderr)
            raise
    if code:
        said = output.read_text(errors="replace").split("\n")
        words = next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")
        raise UserError(f"the run ended with exit code {code}: {words} (all of its output: {output})")
    return set(LOGS.glob("*.txt")) - before


def raise_interrupt(*_):
    raise KeyboardInterrupt


def stop(run, patience=60):
    """Ask first, so that a run can tidy up; then insist. torchrun itself needs up to 30 s to end its workers."""
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, signal.SIG_IGN)  # a second Ctrl-C must not leave the run behind
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(run.pid, sign)
            run.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def find_log(new, script, seed):
    """The log of the run that just ended, even if others write logs here too."""
    logs = [log for log in map(read_log, sorted(new)) if log.source and same_source(log.source, script.source)]
    ours = [log for log in logs if log.seed in (None, str(seed))]
    if len(ours) != 1:
        raise UserError(f"the run of {script.label} left {many(ours, 'log')} of its source and seed in {LOGS}, not 1")
    log = ours[0]
    if len(log.runs) != 1 or not log.runs[0].complete:
        raise UserError(f"{log.path}: this run did not come to its last step")
    return log.path


# ----------------------------------------------------------------------------------------------------------------------
# The result
# ----------------------------------------------------------------------------------------------------------------------


def result(log, target):
    """(final loss, time to target or None, the target) of a kept log."""
    read = read_log(log)
    if len(read.runs) != 1:
        raise UserError(f"{log}: not the log of one run any more; delete it to run it again")
    target = read.target or target
    reached = read.runs[0].reached(target)
    return read.runs[0].final.loss, reached.seconds if reached else None, target


def describe_run(number, side, log, default_target):
    final, seconds, target = result(log, default_target)
    reached = f"{target:g} reached after {seconds:.1f} s" if seconds is not None else f"{target:g} not reached"
    print(f"pair {number} {side}: {reached}, final loss {final:.4f}", flush=True)


def compare_tracks(folder, default_target):
    """Stop as soon as the two scripts turn out to run different tracks."""
    logs = [read_log(path) for path in sorted(folder.glob("pair*.txt"))]
    for log in logs:
        for what, value, first in (
            ("target", log.target or default_target, logs[0].target or default_target),
            ("data", log.data, logs[0].data),
        ):
            if value != first:
                raise UserError(f"different tracks cannot race: {what} {value} in {log.path}, before {first}")


def report(plan, folder, runs, default_target, paint):
    results = {
        side: [result(folder / f"pair{n:02}_{side}.txt", default_target) for n in range(1, runs + 1)] for side in "AB"
    }
    names = {side: f"{side} {plan[side]['name']}" for side in "AB"}
    target = results["A"][0][2]
    times = {side: [seconds for _, seconds, _ in results[side]] for side in "AB"}
    losses = {side: [loss for loss, _, _ in results[side]] for side in "AB"}

    print(paint(f"\ntime to target {target:g}", "bold"), "(at the first validation at or below it, not interpolated)")
    if all(None not in times[side] for side in "AB"):
        faster = compare(times, names, "s", 1)
    else:
        for side in "AB":
            reached = [seconds for seconds in times[side] if seconds is not None]
            mean_time = f", those in {mean(reached):.1f} s on average" if reached else ""
            print(f"  {names[side]}: {len(reached)} of {many(times[side], 'run')} reached it{mean_time}")
        print("  no difference is given: leaving out the runs that failed would flatter their script")
        faster = None
    print(paint("final loss", "bold"))
    better = compare(losses, names, "", 4)

    if faster:
        saved = 100 * (1 - mean(times[faster]) / mean(times["B" if faster == "A" else "A"]))
        print(paint(f"{names[faster]} is faster to the target, by {saved:.1f} %", "bold green"))
    else:
        print(paint("no winner in time: the difference is within the noise, or not every run got there", "bold yellow"))
    loss_verdict = f"{names[better]} ends at a lower loss" if better else "no winner in loss: within the noise"
    print(loss_verdict)
    return 0


def compare(values, names, unit, digits):
    """Print both means and the difference with its interval; the side that is lower, None within the noise."""
    unit = f" {unit}" if unit else ""
    for side in "AB":
        noise = f" ± {spread(values[side]):.{digits}f}" if len(values[side]) > 1 else ""
        print(f"  {names[side]}: {mean(values[side]):.{digits}f}{noise}{unit}")
    differences = [b - a for a, b in zip(values["A"], values["B"], strict=True)]
    difference = mean(differences)
    if len(differences) < 2 or not math.isfinite(difference):
        print(f"  B - A: {difference:+.{digits}f}{unit}, without an interval: that takes two pairs, and numbers")
        return None
    half = half_interval(differences)
    low, high = difference - half, difference + half
    interval = f"95 % interval {low:+.{digits}f} to {high:+.{digits}f}{unit}"
    print(f"  B - A: {difference:+.{digits}f}{unit}, {interval} (paired t, {many(differences, 'pair')})")
    if low <= 0 <= high:
        return None
    return "A" if difference > 0 else "B"
