"""A race of two scripts on this machine, in the order A B, B A, A B, ...

A machine drifts: it gets warm, a neighbour wakes up. In this order drift hits both scripts alike. Both runs of a pair
have the same seed and stand next to each other in time, so what they share cancels in their difference: the interval
is that of a paired t-test over the differences.

Each finished run's log is kept in the race's folder. That is all the state there is: the same command again goes on
after the last of them.
"""

import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import IO, NamedTuple

from launch import KEEP_MEMORY, cpu_processes
from records.evidence import DEFAULT_TARGET
from records.figures import half_interval, have_scipy, mean, with_spread
from records.folders import RACE
from records.logs import Log, read_log, same_source
from records.scripts import Program, open_program, split_files
from records.terminal import Paint, UserError, brief, harmless, many, os_error, print_markdown, shown

LAUNCHER = Path(__file__).resolve().parent / "launch.py"
LOGS = Path("logs")  # where a script puts its log, seen from where it is started


def run_race(args: argparse.Namespace, paint: Paint) -> int:
    if not have_scipy():
        raise UserError("the interval of a race needs scipy: pip install -r requirements-dev.txt")
    programs = {"A": open_program(args.a, args.records), "B": open_program(args.b, args.records)}
    if any(word.partition("=")[0] == "--seed" for word in args.settings):
        raise UserError("race gives each pair of runs its own seed; use --first-seed in place of --seed")
    nproc = {side: args.nproc or default_processes(program.source) for side, program in programs.items()}
    plan = {
        side: {"name": program.name, "sha256": sha256(program.source).hexdigest()} for side, program in programs.items()
    }
    plan |= {"settings": args.settings, "processes": nproc, "first_seed": args.first_seed}
    folder = prepare(args.state or default_folder(plan), plan)
    target = DEFAULT_TARGET if args.target is None else args.target
    paths = {side: runnable(programs[side], folder, side) for side in "AB"}
    with only_one_race_in(folder) as lock:
        if not all(log_of(folder, *run).exists() for run in order(args.runs)):
            make_data(args.settings)
        for number, side in order(args.runs):
            log = log_of(folder, number, side)
            if not log.exists():
                seed = args.first_seed + number - 1
                if paths[side].read_bytes() != programs[side].main:
                    raise UserError(f"{shown(paths[side])}: changed while the race was going on")
                settings = ["--seed", str(seed), *args.settings]
                told = f"{shown(paths[side])} {shlex.join(settings)}"
                print(harmless(f"pair {number} of {args.runs}, {side}: {told}"), file=sys.stderr)
                command = launch_command(paths[side], nproc[side], settings)
                new = run_once(command, nproc[side], folder / "output.txt", lock)
                replace(log, find_log(new, programs[side], seed).read_bytes())
            print(f"pair {number} {side}: {result(log, target).words}", flush=True)
            compare_tracks(folder, target)
    return report(plan, folder, args.runs, target, paint)


def order(runs: int) -> Iterator[tuple[int, str]]:
    for number in range(1, runs + 1):
        yield from ((number, side) for side in ("AB" if number % 2 else "BA"))


# ---- The race's folder -----------------------------------------------------------------------------------------------


def log_of(folder: Path, number: int, side: str) -> Path:
    return folder / f"pair{number:02}_{side}.txt"


def default_folder(plan: dict) -> Path:
    """A name that changes with the scripts and the settings, so that a changed script starts another race."""
    digest = sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:8]
    names = "_".join(re.sub(r"[^\w.-]+", "-", brief(plan[side]["name"], 60)) for side in "AB")
    return LOGS / f"race_{names}_{digest}"


def prepare(folder: Path, plan: dict) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        memory = folder / RACE
        if not memory.exists():
            replace(memory, json.dumps(plan, indent=1).encode())
        known = json.loads(memory.read_bytes())
    except OSError as error:
        raise os_error(folder, error) from None
    except ValueError:
        raise UserError(f"{memory}: is not JSON, so this is no race to go on with; choose another --state") from None
    other = [key for key in plan if not isinstance(known, dict) or known.get(key) != plan[key]]
    if other:
        raise UserError(f"{folder}: holds another race, with a different {' and '.join(other)}; choose another --state")
    return folder


def replace(path: Path, content: bytes) -> None:
    """All of it or nothing: a run that is killed leaves no half file behind."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


def runnable(program: Program, folder: Path, side: str) -> Path:
    """The path to run: the script itself, or a copy of its files where they stand in a log."""
    if program.path.suffix == ".py":
        return program.path
    home = folder / side
    home.mkdir(exist_ok=True)
    for name, script in program.files.items():
        replace(home / name, script.source)
    return home / next(iter(program.files))


@contextmanager
def only_one_race_in(folder: Path) -> Iterator[IO]:
    """A lock on the folder. The runs inherit it, so a run that outlives a killed race still holds it."""
    import fcntl  # not on Windows, and only a race needs it

    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{folder}: this race, or a run that it left behind, is still going on") from None
        yield file


# ---- One run ---------------------------------------------------------------------------------------------------------


def count_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip()])
    if not shutil.which("nvidia-smi"):
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def default_processes(source: bytes) -> int:
    """As many as run.sh would start for this script: one per GPU, or what keeps the cores busy."""
    return count_gpus() or cpu_processes(source.decode(errors="replace"), cores())


def make_data(settings: list[str]) -> None:
    """The default data, as run.sh makes it; not where the user names files, or away from the data scripts."""
    script = Path("data/cached_fineweb10B.py" if count_gpus() else "data/embedded_corpus.py")
    if not script.is_file() or any(word.partition("=")[0] == "--train_files" for word in settings):
        return
    command = [sys.executable, str(script), *(["10"] if count_gpus() else [])]
    made = subprocess.run(command, stdout=sys.stderr.fileno(), stderr=subprocess.PIPE, text=True, errors="replace")
    if made.returncode:
        raise UserError(f"{script} ended with exit code {made.returncode}: {last_words(made.stderr, script)}")


def cores() -> int:
    """The cores that this process may use, which may be fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch_command(script: Path, nproc: int, settings: list[str]) -> list[str]:
    launcher = [str(LAUNCHER), "--standalone", f"--nproc_per_node={nproc}"] if nproc > 1 else []
    return [sys.executable, *launcher, str(script), *settings]


def run_once(command: list[str], nproc: int, output: Path, lock: IO) -> set[Path]:
    """Run to the end; the new logs. However this race is stopped, the run is stopped with it."""
    before = set(LOGS.glob("*.txt"))
    environment = KEEP_MEMORY | {"OMP_NUM_THREADS": str(max(1, cores() // nproc)), **os.environ}
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
        script = next(Path(word) for word in command if word.endswith(".py") and word != str(LAUNCHER))
        words = last_words(output.read_text(errors="replace"), script)
        raise UserError(f"the run ended with exit code {code}: {words} (all of its output: {shown(output)})")
    return set(LOGS.glob("*.txt")) - before


def last_words(output: str, script: Path) -> str:
    """The script's own line about what went wrong, or else the last one."""
    lines = [line.strip() for line in output.split("\n") if line.strip()]
    own = [line for line in lines if line.startswith((f"{script.stem}: ", f"{script.name}: ", "train_gpt: "))]
    return brief((own or lines or ["it said nothing"])[-1], 500)


def raise_interrupt(*_) -> None:
    raise KeyboardInterrupt


def stop(run: subprocess.Popen, patience: float = 60) -> None:
    """Ask first, so that a run can tidy up; then insist. torchrun itself needs up to 30 s to end its workers."""
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, signal.SIG_IGN)  # a second Ctrl-C must not leave the run behind
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(run.pid, sign)
            run.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def find_log(new: set[Path], program: Program, seed: int) -> Path:
    """The log of the run that just ended, even if others write logs here too."""
    logs = [log for log in map(read_log, sorted(new)) if log.source and is_source_of(log, program)]
    ours = [log for log in logs if log.seed in (None, str(seed))]
    if len(ours) != 1:
        raise UserError(f"the run of {program.name} left {many(ours, 'log')} of its source and seed in {LOGS}, not 1")
    log = ours[0]
    if len(log.runs) != 1 or not log.runs[0].complete:
        raise UserError(f"{shown(log.path)}: this run did not come to its last step")
    return log.path


def is_source_of(log: Log, program: Program) -> bool:
    return same_source(next(iter(split_files(log.source).values())), program.main)


# ---- The result ------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """What a kept log says of its run."""

    target: float
    step: int
    loss: float
    seconds: float
    to_target: float | None  # seconds

    @property
    def step_ms(self) -> float:
        return 1000 * self.seconds / max(self.step, 1)

    @property
    def words(self) -> str:
        reached = "" if self.to_target is None else f"; {self.target:g} reached after {self.to_target:.1f} s"
        pace = f"{self.step} steps in {self.seconds:.1f} s, {self.step_ms:.1f} ms per step"
        return f"final loss {self.loss:.4f}, {pace}{reached}"


def result(path: Path, default_target: float) -> Result:
    log = read_log(path)
    if len(log.runs) != 1:
        raise UserError(f"{shown(path)}: not the log of one run any more; delete it to run it again")
    target = default_target if log.target is None else log.target
    run = log.runs[0]
    reached = run.reached(target)
    return Result(target, run.final.step, run.final.loss, run.final.seconds, reached.seconds if reached else None)


def compare_tracks(folder: Path, default_target: float) -> None:
    """Stop as soon as the two scripts turn out to run different tracks."""
    logs = [read_log(path) for path in sorted(folder.glob("pair*.txt"))]
    for log in logs:
        for what, value, first in (
            ("target", *(default_target if one.target is None else one.target for one in (log, logs[0]))),
            ("data", log.data, logs[0].data),
            ("dtype", *((one.settings or {}).get("dtype") for one in (log, logs[0]))),
        ):
            if value != first:
                raise UserError(f"different tracks cannot race: {what} {value} in {shown(log.path)}, before {first}")


def report(plan: dict, folder: Path, runs: int, default_target: float, paint: Paint) -> int:
    results = {side: [result(log_of(folder, n, side), default_target) for n in range(1, runs + 1)] for side in "AB"}
    names = {side: harmless(f"{side} {plan[side]['name']}") for side in "AB"}
    target = results["A"][0].target
    times, step_times, losses = (
        {side: [getattr(one, of) for one in results[side]] for side in "AB"} for of in ("to_target", "step_ms", "loss")
    )
    print()
    faster = report_times(times, names, target, paint)
    print(paint("time per step", "bold"))
    quicker = compare(step_times, names, "ms", 2)
    print(paint("final loss", "bold"))
    better = compare(losses, names, "", 4)
    if faster:
        percent = saved(times, faster)
        print(paint(f"{names[faster]} is faster to the target, by {percent:.1f} %", "bold green"))
    elif runs > 1:
        print(paint("no winner in time: the difference is within the noise, or not every run got there", "bold yellow"))
        if quicker:
            print(f"the steps of {names[quicker]} take less time, by {saved(step_times, quicker):.1f} %")
    if runs > 1:
        print(f"{names[better]} ends at a lower loss" if better else "no winner in loss: within the noise")
    else:
        print(paint("no verdict: one pair does not show the noise; --runs 2 or more goes on from here", "bold yellow"))
    print(paint("\nto paste", "bold"))
    summarize(plan, folder, runs, {"time to target": times, "time per step": step_times, "final loss": losses})
    return 0


def saved(values: dict, winner: str) -> float:
    return 100 * (1 - mean(values[winner]) / mean(values["B" if winner == "A" else "A"]))


def report_times(times: dict, names: dict, target: float, paint: Paint) -> str | None:
    """The side that is faster to the target; None if that cannot be said."""
    reached = {side: [seconds for seconds in times[side] if seconds is not None] for side in "AB"}
    if not any(reached.values()):
        print(f"{paint(f'time to target {target:g}', 'bold')}: no run reached it")
        return None
    print(paint(f"time to target {target:g}", "bold"), "(at the first validation at or below it, not interpolated)")
    if all(None not in times[side] for side in "AB"):
        return compare(times, names, "s", 1)
    for side in "AB":
        mean_time = f", those in {mean(reached[side]):.1f} s on average" if reached[side] else ""
        print(f"  {names[side]}: {len(reached[side])} of {many(times[side], 'run')} reached it{mean_time}")
    print("  no difference is given: leaving out the runs that failed would flatter their script")
    return None


def compare(values: dict, names: dict, unit: str, digits: int) -> str | None:
    """Print both means and the difference with its interval; the side that is lower, None within the noise."""
    unit = f" {unit}" if unit else ""
    for side in "AB":
        print(f"  {names[side]}: {with_spread(values[side], digits, unit)}")
    differences = [b - a for a, b in zip(values["A"], values["B"], strict=True)]
    difference = mean(differences)
    if len(differences) < 2 or not math.isfinite(difference):
        why = "that takes two pairs" if math.isfinite(difference) else "a run did not end with a number"
        print(f"  B - A: {difference:+.{digits}f}{unit}, without an interval: {why}")
        return None
    half = half_interval(differences)
    low, high = difference - half, difference + half
    interval = f"95 % interval {low:+.{digits}f} to {high:+.{digits}f}{unit}"
    print(f"  B - A: {difference:+.{digits}f}{unit}, {interval} (paired t, {many(differences, 'pair')})")
    if low <= 0 <= high:
        return None
    return "A" if difference > 0 else "B"


def summarize(plan: dict, folder: Path, runs: int, measured: dict) -> None:
    """What a pull request needs: figures, and on what they were measured."""
    rows = [["", *(plan[side]["name"] for side in "AB")]]
    for (name, values), (unit, digits) in zip(measured.items(), ((" s", 2), (" ms", 2), ("", 4)), strict=True):
        if all(None not in values[side] for side in "AB"):
            rows.append([name, *(with_spread(values[side], digits, unit) for side in "AB")])
    print_markdown(rows)
    log = read_log(log_of(folder, 1, "A"))
    first = plan["first_seed"]
    about = {
        "commit": commit(),
        "settings": shlex.join(plan["settings"]) or "the scripts' own",
        "dtype": (log.settings or {}).get("dtype", "not named"),
        "hardware": log.hardware or "not named",
        "processes": " and ".join(str(count) for count in dict.fromkeys(plan["processes"].values())),
        "seeds": f"{first} to {first + runs - 1}, in the order A B, B A" if runs > 1 else first,
    }
    print()
    for name, value in about.items():
        print(harmless(f"- {name}: {value}"))


def commit() -> str:
    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        name = git("rev-parse", "--short", "HEAD")
    except OSError:
        return "git is not here"
    if name is None:
        return "not in git"
    return f"{name} with local changes" if git("status", "--porcelain", "--untracked-files=no") else name
