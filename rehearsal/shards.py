"""Made-up token shards in FineWeb's format, so that a rehearsal needs no download."""

from pathlib import Path

import numpy as np

MAGIC, VERSION, HEADER_INTS = 20240520, 1, 256
DOCUMENT_TOKEN = 50256
TOKENS_PER_DOCUMENT = 1000  # on average, not far from FineWeb's


def write_shard(path: Path, token_count: int, seed: int = 0) -> Path:
    """Random tokens, with the document token first and then about every TOKENS_PER_DOCUMENT."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, DOCUMENT_TOKEN, token_count, dtype=np.uint16)
    tokens[rng.random(token_count) < 1 / TOKENS_PER_DOCUMENT] = DOCUMENT_TOKEN
    tokens[0] = DOCUMENT_TOKEN
    header = np.zeros(HEADER_INTS, dtype=np.int32)
    header[:3] = MAGIC, VERSION, token_count
    with open(path, "wb") as file:
        header.tofile(file)
        tokens.tofile(file)
    return path


def write_shards(folder: Path, train_tokens: int, val_tokens: int) -> dict[str, str]:
    """One training and one validation shard, and the settings that point a script at them."""
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(folder / "rehearsal_train_000001.bin", train_tokens, seed=1)
    write_shard(folder / "rehearsal_val_000000.bin", val_tokens, seed=2)
    return {"train_files": str(folder / "rehearsal_train_*.bin"), "val_files": str(folder / "rehearsal_val_*.bin")}
