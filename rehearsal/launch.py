"""Running a training script on null GPUs: what torchrun starts, in which environment, with which settings."""

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rehearsal import readings, shards

HERE = Path(__file__).resolve().parent
PLENTY_GIB = 4096  # a card on which nothing is too large: to learn what a run would need
SMALL_RUN = {  # a few steps that touch everything: window changes, validation, checkpoint
    "num_iterations": "4",
    "warmup_steps": "2",
    "kernel_warmup_steps": "2",  # newer scripts' name for it
    "val_loss_every": "2",
    "save_every": "4",
}
STEPS_PER_STAGE = 4  # of a run in stages: one with a validation, then more than a period of optimizers that skip steps
VALIDATION_SEQUENCES = 8
CAPABILITIES = ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")  # that card.c has a card for
MOST_CARDS = 64
# What the user has set for other runs, and would change or hide what a rehearsal sees.
NOT_INHERITED = re.compile(
    "PYTHONWARNINGS|VIRTUAL_ENV|CUDA_VISIBLE_DEVICES|TORCH_COMPILE_DISABLE|"
    r"TORCHDYNAMO_DISABLE|PYTORCH_(\w+_)?ALLOC_CONF"
)
SPARE_STEPS = 4  # shard tokens beyond the steps: warm-up, and loaders that read ahead


class UserError(Exception):
    """Bad usage or a machine on which it cannot be done: one line, exit code 2."""


class DidNotCompile(UserError):
    """The null GPU itself is at fault, not the machine."""


@dataclass(frozen=True)
class Card:
    count: int
    memory_gib: float | None = None
    capability: str | None = None

    def environment(self) -> dict[str, str]:
        values = {
            "NULLGPU_COUNT": self.count,
            "NULLGPU_MEMORY_GIB": self.memory_gib,
            "NULLGPU_CAPABILITY": self.capability,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Run:
    folder: Path
    processes: int
    exit_code: int | None  # None: it took too long and was ended
    seconds: float
    checkpoints: int


def home() -> Path:
    return Path(os.environ.get("REHEARSAL_HOME") or Path.home() / ".cache" / "speedrun-rehearsal")


def venv() -> Path:
    return Path(os.environ.get("REHEARSAL_VENV") or home() / "venv")


def set_up() -> None:
    # What it says while it works goes to the user at once: standard error, as the report has standard output.
    result = subprocess.run([HERE / "setup.sh"], stdout=2, stderr=subprocess.PIPE, text=True)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["setup.sh failed"])[-1].removeprefix("rehearsal: ")
        raise (DidNotCompile if result.returncode == 3 else UserError)(reason)


def new_folder() -> Path:
    """A folder that no other rehearsal has, also of those that begin in the same second."""
    began = time.strftime("%Y%m%d-%H%M%S")
    names = itertools.chain([began], (f"{began}-{number}" for number in itertools.count(2)))
    for folder in (home() / "runs" / name for name in names):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def fingerprint(script: Path, given: dict[str, str], processes: int, card: Card) -> str:
    """The same for two rehearsals that cannot differ: script, settings, cards, and the rehearsal's own sources."""
    sources = [path for path in HERE.rglob("*") if path.suffix in (".py", ".c", ".h", ".sh", ".json")]
    told = [script.read_text(), json.dumps([sorted(given.items()), processes, card.environment()])]
    told += [path.read_text() for path in sorted([*sources, HERE.parent / "requirements.txt"])]
    return hashlib.sha256("\0".join(told).encode()).hexdigest()


def stored_report(key: str) -> Path:
    return home() / "reports" / f"{key}.json"


def cuobjdump() -> Path:
    return next(venv().glob("lib/python3*/site-packages/triton/backends/nvidia/bin/cuobjdump"))


def find_script(name: str) -> Path:
    """A path to a script or a record's folder, or a record's name or the end of it."""
    root = HERE.parent
    candidates = [Path(name), Path(name) / "train_gpt.py", *sorted(root.glob(f"records/*{name}/train_gpt.py"))]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    raise UserError(f"{name} is neither a script nor a record")


def check_settings(script: Path, given: dict[str, str]) -> None:
    """Refuses what would be no number to the script either, before anything is installed or run."""
    try:
        known = readings.settings_of(script.read_text())
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{script} is not a Python script: {error}") from None
    for name, value in given.items():
        if type(known.get(name)) is int and not re.fullmatch(r"[+-]?\d+", value):
            raise UserError(f"--{name} {value}: must be a whole number")
    for name in ("sequence_length", "batch_sequences", "num_iterations", "val_tokens"):
        if name in given and not re.fullmatch(r"\+?\d+", given[name]):
            raise UserError(f"--{name} {given[name]}: must be a whole number, and not less than 0")
    try:
        readings.stages_of(known | given)
    except ValueError:
        columns = readings.STAGE_COLUMNS
        raise UserError(f"--stages {given['stages']}: must be a table with {columns} numbers in a row") from None


def choose_settings(script: Path, given: dict[str, str], data: Path) -> dict[str, str]:
    """The script's own defaults, few steps on made-up data, and on top what the user gave."""
    known = readings.settings_of(script.read_text())
    small = SMALL_RUN | few_steps_per_stage(str(known.get("stages") or ""))
    settings = {name: value for name, value in small.items() if name in known}
    resolved = known | settings | given
    stages = readings.stages_of(resolved)
    sequence = max((stage.length for stage in stages), default=int(resolved.get("sequence_length") or 65536))
    batch = sequence * int(resolved.get("batch_sequences") or 8)
    if "val_tokens" in known:
        settings["val_tokens"] = str(VALIDATION_SEQUENCES * int(resolved.get("val_sequence_length") or sequence))
    settings |= given
    gaps = 2 * shards.TOKENS_PER_DOCUMENT * batch // sequence  # of a loader that looks for document starts
    train_tokens = (batch + gaps) * (int(resolved.get("num_iterations") or 4) + SPARE_STEPS) + 1
    files = shards.write_shards(data, train_tokens, int(settings.get("val_tokens") or batch) + sequence + 1)
    return {name: value for name, value in files.items() if name in known} | settings


def few_steps_per_stage(table: str) -> dict[str, str]:
    """For a script with a table of stages: the same stages, each a few steps long and begun with a validation."""
    rows = readings.stage_rows(table)
    for row in rows:
        row[0] = str(STEPS_PER_STAGE if float(row[0]) else 0)
    steps = str(sum(int(row[0]) for row in rows))
    few = {"num_iterations": steps, "save_every": steps, "val_loss_every": str(STEPS_PER_STAGE)}
    return {"stages": " ".join(word for row in rows for word in row), **few} if rows else {}


def environment(folder: Path, cache: Path, script: Path, card: Card) -> dict[str, str]:
    library = home() / "lib"
    ours = {
        "PATH": f"{venv() / 'bin'}:{HERE / 'nullgpu' / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(HERE / "watch"),
        "PYTHONUNBUFFERED": "1",
        "LD_PRELOAD": str(library / "libcuda.so.1"),
        "LD_LIBRARY_PATH": str(library),
        "TRITON_LIBCUDA_PATH": str(library),
        "CUDA_MODULE_LOADING": "LAZY",
        "NULLGPU_TRACE": str(folder),
        "REHEARSAL_FOLDER": str(folder),
        "REHEARSAL_SCRIPT": str(script),
        "REHEARSAL_OLD_CACHE": str(int(any(cache.glob("*")))),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TRITON_CACHE_DIR": str(cache / "triton"),  # or Inductor keeps the same kernels once for each device
        # many ranks share few cores here; rank 0 compiles for them and takes more (see watcher.py)
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD": "1",  # ranks find graphs of autograd functions, too
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # there is no cuDNN: torch's own attention is then Flash Attention
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TORCHINDUCTOR_BENCHMARK_KERNEL": "1",  # kernels then carry the bytes that they read and write
        "TORCH_LOGS": "graph_breaks,recompiles",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    }
    inherited = {name: value for name, value in os.environ.items() if not NOT_INHERITED.fullmatch(name)}
    return inherited | ours | card.environment()


def run(
    script: Path, settings: dict[str, str], processes: int, folder: Path, cache: Path, card: Card, timeout: float
) -> Run:
    """torchrun with that many ranks in a folder of its own; checkpoints are thrown away afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    cache.mkdir(parents=True, exist_ok=True)
    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    command = [str(venv() / "bin" / "torchrun"), "--standalone", f"--nproc_per_node={processes}", str(script), *flags]
    began = time.monotonic()
    with open(folder / "torchrun.log", "w") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(folder, cache, script, card),
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
        try:
            exit_code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun passes it on to its ranks
                process.wait()
    checkpoints = list(folder.rglob("*.pt"))
    for checkpoint in checkpoints:
        checkpoint.unlink()  # gigabytes of nothing
    return Run(folder, processes, exit_code, time.monotonic() - began, len(checkpoints))


def say(text: str) -> None:
    print(f"rehearsal: {text}", file=sys.stderr, flush=True)
