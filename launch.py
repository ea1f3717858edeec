"""Train on what is here; ./run.sh calls this once the environment is set up.

    ./run.sh [--setting value ...]             train the current script: on every GPU, or else on the CPU
    ./run.sh RECORD [--setting value ...]      train a record's script, by folder or by name: ./run.sh SoftCap
    ./run.sh setup                             only make the virtual environment
    ./run.sh bench [--help]                    measure a step and its parts
    ./run.sh test [--rehearsal] [...]          run the tests; further words are pytest's
    ./run.sh rehearse [RECORD] [...]           try the 8xH100 run without a GPU

Environment: PYTHON (python3) makes the virtual environment, VENV (.venv) is where, PROCESSES says how many to start.
"""

import importlib.metadata
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
# glibc would hand large blocks back to the system after each use, and get them again page by page.
KEEP_MEMORY = dict(MALLOC_MMAP_THRESHOLD_="1073741824", MALLOC_TRIM_THRESHOLD_="4294967296")


class UserError(Exception):
    """Something the user can fix, reported in one line."""


def find_script(name: str) -> Path:
    """The script that a user means: a file, a folder with one, or a record by its name or an unambiguous part of it."""
    for path in (Path(name), Path(name, "train_gpt.py")):
        if path.is_file():
            return path
    records = sorted(Path("records").glob("*/train_gpt.py"))
    names = [record.parent.name for record in records]
    exact = [name.lower() in (known.lower(), known.partition("_")[2].lower()) for known in names]
    partly = [name.lower() in known.lower() for known in names]
    matches = [record for record, match in zip(records, exact if any(exact) else partly, strict=True) if match]
    if len(matches) > 1:
        raise UserError(f"{name}: could be {' or '.join(match.parent.name for match in matches)}")
    if not matches:
        raise UserError(f"{name}: not a command or a record: setup bench test rehearse {' '.join(names)}")
    return matches[0]


def value_of(setting: str, settings: list[str]) -> str:
    """The value that the command line gives a setting, or nothing."""
    words = [part for word in settings for part in word.split("=", 1)]
    return words[words.index(f"--{setting}") + 1] if f"--{setting}" in words[:-1] else ""


def count_gpus() -> int:
    """As torch would count, but without the seconds that importing torch takes."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines()
    except OSError:
        return 0
    present = [str(i) for i in range(sum(line.startswith("GPU ") for line in listed))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(present)).split(",")
    return len([name for name in visible if name.strip() not in ("", "-1")]) if present else 0


def cpu_processes(source: str, cores: int) -> int:
    """How many processes a script needs to keep the cores busy: one if it computes its sequences in threads, as the
    two newest records do; those before are fastest with one for each of the CPU track's two sequences."""
    return 1 if "torch.set_num_threads" in source else min(2, cores)


def plan(script: Path, settings: list[str]) -> tuple[int, list[str]]:
    """How many processes to start, and the command that makes sure of the data. Says what it chose and why."""
    own_data = "your training files" if value_of("train_files", settings) else ""
    if value_of("resume", settings) not in ("", "latest"):
        own_data = own_data or "the checkpoint's training files"
    wanted, gpus = os.environ.get("PROCESSES", ""), count_gpus()
    if wanted and (not wanted.isdecimal() or int(wanted) < 1):
        raise UserError(f"PROCESSES={wanted}: must be a number of processes, 1 or more")
    if gpus and importlib.metadata.version("torch").endswith("+cpu"):
        raise UserError(f"{gpus} GPUs, but {sys.prefix} has the CPU build of torch: remove that folder and start again")
    if gpus:
        processes, command, corpus = int(wanted or gpus), ["data/cached_fineweb10B.py", "10"], "FineWeb"
        how = f"{gpus} GPUs: the record's settings, one process on each of {processes}"
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        processes = int(wanted or cpu_processes(script.read_text(), cores))
        command, corpus = ["data/embedded_corpus.py"], "the embedded corpus"
        threads = os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
        os.environ |= KEEP_MEMORY
        started = "1 process" if processes == 1 else f"{processes} processes"
        how = f"no GPU: the CPU track's settings, {started} with {threads} threads on {cores} cores"
    print(f"{how}; {own_data or corpus}", flush=True)
    return processes, [] if own_data else [sys.executable, *command]


def run_alone(script: Path, settings: list[str], get_data: list[str]) -> int:
    """One process, without torchrun, whose import takes seconds. It gets the signals that come here."""
    if get_data and (code := subprocess.call(get_data)):
        return code if code > 0 else 128 - code
    # What torchrun would set. With the last one the script ends when its launcher is gone.
    environment = os.environ | dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", TORCHELASTIC_RUN_ID="none")
    process = subprocess.Popen([sys.executable, str(script), *settings], env=environment)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    passed_on = [number for number in before if before[number] != signal.SIG_IGN]  # nohup ignores SIGHUP
    for number in passed_on:
        signal.signal(number, lambda number, frame: process.send_signal(number))
    code = process.wait()
    for number in passed_on:
        signal.signal(number, before[number])
    if code < 0:
        print(f"run.sh: rank 0 was killed by {signal.Signals(-code).name}", file=sys.stderr)
    return code if code >= 0 else 128 - code


def run_processes(script: Path, processes: int, settings: list[str], get_data: list[str]) -> int:
    """torchrun, except that its exit code is the script's and that a failure adds no traceback."""
    data = subprocess.Popen(get_data) if get_data else None
    # After a signal the processes have this many seconds to finish their step and save.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
    from torch.distributed.elastic.multiprocessing.api import SignalException  # takes as long as the data's check
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    if data and (code := data.wait()):
        return code if code > 0 else 128 - code
    logging.disable(logging.ERROR)
    try:
        main(["--standalone", f"--nproc_per_node={processes}", str(script), *settings])
        return 0
    except SignalException as received:
        return 128 + received.sigval
    except ChildFailedError as failed:
        for rank, failure in failed.failures.items():
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:  # torchrun ends the others by SIGTERM
                print(f"run.sh: rank {rank} was killed by {signal.Signals(-failure.exitcode).name}", file=sys.stderr)
                return 128 - failure.exitcode
        code = failed.get_first_failure()[1].exitcode
        return code if code >= 0 else 128 - code


def newest(paths: Iterable[Path], since: float) -> Path | None:
    """The last of these files that this run wrote, if any."""
    return max((p for p in paths if p.stat().st_mtime >= since), key=lambda p: p.stat().st_mtime_ns, default=None)


def newest_checkpoint(settings: list[str], since: float) -> Path | None:
    """A resumed run writes where it was resumed from."""
    resumed = value_of("resume", settings)
    folder = value_of("checkpoint_dir", settings) or (Path(resumed).parent.parent if "/" in resumed else "checkpoints")
    return newest(Path(folder).glob("*/step_*.pt"), since)


def show_result(command: list[str], settings: list[str], since: float, sample: list[str]) -> None:
    """The result, a page and what to try next. The run is done and well, whatever goes wrong here."""
    log = newest(Path(value_of("log_dir", settings) or "logs").glob("*.txt"), since)
    try:
        if log:
            from records.after_run import after_run

            print()
            for line in after_run(log, command, sample):
                print(line, flush=True)
    except Exception as error:
        print(f"run.sh: no page for {log}: {type(error).__name__}: {error}", file=sys.stderr)


def main(arguments: list[str]) -> int:
    os.chdir(HERE)
    named = bool(arguments) and not arguments[0].startswith("-")
    script, settings = find_script(arguments[0]) if named else Path("train_gpt.py"), arguments[named:]
    if {"-h", "--help"} & set(settings):
        print(__doc__, flush=True)
        return subprocess.call([sys.executable, str(script), "--help"])
    started = time.time()
    processes, get_data = plan(script, settings)
    if processes == 1:
        code = run_alone(script, settings, get_data)
    else:
        code = run_processes(script, processes, settings, get_data)
    saved = newest_checkpoint(settings, started)
    if saved and code:
        command = ["./run.sh", *arguments[:named], "--resume", str(saved)]
        print(f"to go on from here: {shlex.join(command)}", flush=True)
    if code == 0:
        sampled = [str(saved), *(["--script", str(script)] if named else [])] if saved else []
        show_result(["./run.sh", *arguments], settings, started, sampled)
    if saved and code == 0:
        import sample

        print(f"\nwhat the model writes (python sample.py {shlex.join(sampled)}):", flush=True)
        sample.main([*sampled, "--tokens", "300"])
    return code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"run.sh: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
