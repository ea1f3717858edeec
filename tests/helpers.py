"""What several tests need: small shards, records' scripts, and the script started as a user starts it."""

import contextlib
import functools
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "train_gpt.py"
ONE_THREAD = os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONUNBUFFERED="")

# A model and a run that take a second or two.
TINY = dict(
    vocab_size=257,
    document_token=256,
    num_layers=2,
    num_heads=2,
    model_dim=32,
    sequence_length=128,
    batch_sequences=4,
    stages="2 1 1.0 1 1  1 2 1.5 1 2  1 2 1.5 2 3  0 2 1.5 2 4",  # of the 4 steps
    num_iterations=4,
    embedding_lr=0.6,
    muon_lr=0.05,
    adam_every=2,
    val_sequence_length=512,
    val_tokens=1024,
    val_loss_every=0,
    dtype="float32",
    save_every=0,
)


@functools.cache
def load_record(name: str):
    """The script of the record with this name, without the date, as a module with the name of its folder."""
    (path,) = ROOT.glob(f"records/*_{name}/train_gpt.py")
    spec = importlib.util.spec_from_file_location(path.parent.name, path)
    module = sys.modules[path.parent.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


# ---- Data ------------------------------------------------------------------------------------------------------------


def write_shard(path: Path, tokens, magic: int = 20240520, version: int = 1, count: int | None = None) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header.tobytes() + np.asarray(tokens).astype("<u2").tobytes())
    return path


def made_up_tokens(count: int, seed: int = 0) -> np.ndarray:
    """Bytes with some structure to learn, in documents of about 300 tokens."""
    random = np.random.default_rng(seed)
    tokens = (np.cumsum(random.integers(-2, 3, count)) % 200).astype(np.int64)
    tokens[random.random(count) < 1 / 300] = 256
    return tokens


def make_data(folder: Path) -> Path:
    """Two training shards, so small that eight of TINY's steps cross from one to the other, and one for validation."""
    for i in (1, 2):
        write_shard(folder / f"data/tiny_train_{i:06d}.bin", made_up_tokens(4_500, seed=i))
    write_shard(folder / "data/tiny_val_000000.bin", made_up_tokens(3_000, seed=9))
    return folder


# ---- Running ---------------------------------------------------------------------------------------------------------


def flags(**settings) -> list[str]:
    return [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in settings.items()]


def tiny_flags(**changes) -> list[str]:
    """A tiny run on the shards of make_data, without a target."""
    return flags(**TINY | dict(train_files="data/tiny_train_*.bin", val_files="data/tiny_val_*.bin") | changes)


def command(arguments: list[str], processes: int = 1, script: Path = SCRIPT, restarts: int = 0) -> list[str]:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        launcher += [f"--max-restarts={restarts}"]
    return [*launcher, str(script), *arguments]


def run_script(arguments: list[str], cwd: Path, processes: int = 1, script: Path = SCRIPT, timeout: int = 300, **env):
    """The script as a process, or as several under torchrun."""
    run = dict(cwd=cwd, env=ONE_THREAD | env, timeout=timeout, capture_output=True, text=True)
    return subprocess.run(command(arguments, processes, script), **run)


def wait_until(happens, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.02)


RULE = "=" * 100  # before and after the facts in a log


class Started:
    """A run in the background, under torchrun if it has several processes. Its output is in the files out and err."""

    def __init__(self, folder: Path, arguments: list[str], processes: int = 1, restarts: int = 0, **how):
        self.folder = folder
        with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
            how = dict(env=ONE_THREAD, stdout=out, stderr=err) | how
            self.process = subprocess.Popen(command(arguments, processes, restarts=restarts), cwd=folder, **how)
        self.seen = {}

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.ranks()
        self.process.kill()
        for pid in self.seen.values():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def log(self) -> str:
        """What the run has logged so far: every step, where the console shows at most one line per second."""
        return "".join(path.read_text().rpartition(f"\n{RULE}\n")[2] for path in self.folder.glob("logs/*.txt"))

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def wait_for(self, text: str) -> "Started":
        wait_until(lambda: text in self.out + self.log or self.process.poll() is not None)
        assert text in self.out + self.log, self.err
        return self

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def exit_code(self, seconds: float = 100) -> int:
        return self.process.wait(seconds)

    def ranks(self) -> dict[int, int]:
        """The process ids of torchrun's children by their rank, as the kernel knows them."""
        ranks, pid = {}, self.process.pid
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                with contextlib.suppress(OSError):
                    rank = re.search(rb"(?:^|\0)RANK=(\d+)", Path(f"/proc/{child}/environ").read_bytes())
                    if rank:
                        ranks[int(rank[1])] = int(child)
        self.seen |= ranks
        return ranks


def alive(pid: int) -> bool:
    """Does this process run? What has ended and waits for its parent to notice does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---- What a run leaves behind ----------------------------------------------------------------------------------------


def only_log(folder: Path) -> Path:
    (log,) = (folder / "logs").glob("*.txt")
    return log


def last_line(folder: Path) -> str:
    return only_log(folder).read_text().splitlines()[-1]


def train_losses(log_text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step:\d+/\d+ train_loss:(\S+)", log_text, re.MULTILINE)]


def val_losses(log_text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step:\d+/\d+ val_loss:(\S+)", log_text, re.MULTILINE)]


def checkpoint(folder: Path, step: int, within: str = "checkpoints") -> Path:
    (path,) = folder.glob(f"{within}/*/step_{step:06d}.pt")
    return path


def parts_of(value, name: str = ""):
    """Every tensor and number in a checkpoint, with its name."""
    if isinstance(value, dict | list | tuple):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from parts_of(part, f"{name}/{key}")
    else:
        yield name, value


def differences(first: Path, second: Path) -> list[str]:
    """The names of all that is not the same, to the last bit, in what two checkpoints would continue with."""
    a, b = (torch.load(path, weights_only=True) for path in (first, second))
    a, b = (dict(parts_of({name: saved[name] for name in ("state", "step", "position")})) for saved in (a, b))
    assert a.keys() == b.keys() and sum(isinstance(value, torch.Tensor) for value in a.values()) > 25
    return [name for name in a if not torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name]))]
