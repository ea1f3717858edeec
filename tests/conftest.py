import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from helpers import TINY, flags, made_up_tokens, write_shard

# A shell that runs the tests in the background has them ignore Ctrl-C, which what they start would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def shards(tmp_path) -> list[str]:
    """Small training and validation shards in a folder of their own; returns the flags of a tiny run on them."""
    for i in (1, 2):
        write_shard(tmp_path / f"data/tiny_train_{i:06d}.bin", made_up_tokens(20_000, seed=i))
    write_shard(tmp_path / "data/tiny_val_000000.bin", made_up_tokens(3_000, seed=9))
    return flags(train_files="data/tiny_train_*.bin", val_files="data/tiny_val_*.bin", **TINY)
