"""What several tests need: small shards, and the script started as a user starts it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "train_gpt.py"

# A model and a run that take a second or two.
TINY = dict(vocab_size=257, document_token=256, num_layers=2, num_heads=2, model_dim=32, sequence_length=256,
            batch_sequences=4, piece_length=0, window_start=128, window_end=384, num_iterations=4, val_tokens=1024,
            embedding_lr=0.6, muon_lr=0.05, val_loss_every=0, dtype="float32", warmup_steps=0, save_every=0)


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


def flags(**settings) -> list[str]:
    return [f"--{name}={value}" for name, value in settings.items()]


def run_script(arguments: list[str], cwd: Path, processes: int = 1, script: Path = SCRIPT, timeout: int = 300, **env):
    """The script as a process, or as several under torchrun."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="") | env
    return subprocess.run([*launcher, str(script), *arguments], cwd=cwd, env=environment, timeout=timeout,
                          capture_output=True, text=True)


def only_log(folder: Path) -> Path:
    (log,) = (folder / "logs").glob("*.txt")
    return log


def train_losses(log_text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step:\d+/\d+ train_loss:(\S+)", log_text, re.MULTILINE)]


def val_losses(log_text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step:\d+/\d+ val_loss:(\S+)", log_text, re.MULTILINE)]
