"""The shards and the loader against the token stream itself."""

import os
import struct
import tempfile

import numpy as np
import pytest
import torch
from helpers import write_shard
from hypothesis import given, settings
from hypothesis import strategies as st

from train_gpt import DistributedDataLoader, Shard, UserError, World, make_settings

LENGTH, SEQUENCES = 128, 9
BATCH = LENGTH * SEQUENCES
VOCABULARY = 257


def loader(folder, rank=0, size=1, **changes) -> DistributedDataLoader:
    wanted = dict(vocab_size=60000, document_token=0, sequence_length=LENGTH, batch_sequences=SEQUENCES, val_tokens=128)
    s = make_settings(wanted | dict(train_files=f"{folder}/s_*.bin") | changes, processes=size, on_gpu=False)
    return DistributedDataLoader(s, World(rank, size, torch.device("cpu")))


@pytest.fixture
def three_shards(tmp_path):
    """Tokens that say where they are: the shard in the ten thousands, the position in the rest."""
    lengths = [3 * BATCH + 5, BATCH // 2, 2 * BATCH + 1]  # the second is smaller than a batch
    for i, length in enumerate(lengths):
        write_shard(tmp_path / f"s_{i}.bin", np.arange(length) + 10_000 * i)
    return tmp_path


def stream(folder, steps) -> list[np.ndarray]:
    """The batches by the rule: the next tokens, or the next shard's if fewer than a batch and one more are left."""
    batches, index, first = [], 0, 0
    contents = [np.fromfile(path, "<u2")[512:] for path in sorted(folder.glob("s_*.bin"))]
    while len(batches) < steps:
        if first + BATCH + 1 > len(contents[index]):
            index, first = (index + 1) % len(contents), 0
            continue
        batches.append(contents[index][first : first + BATCH + 1].astype(np.int64))
        first += BATCH
    return batches


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_number_of_processes_deals_out_the_token_stream(three_shards, size):
    ranks = [loader(three_shards, rank, size) for rank in range(size)]
    for expected in stream(three_shards, steps=12):
        for rank, ours in enumerate(ranks):
            ((inputs, targets),) = ours.next_batch()  # side by side, in one forward pass
            mine = [expected[i * LENGTH : (i + 1) * LENGTH + 1] for i in range(rank, SEQUENCES, size)]
            assert inputs.dtype == torch.int32 and targets.dtype == torch.int64
            assert np.array_equal(inputs, np.concatenate([tokens[:-1] for tokens in mine]))
            assert np.array_equal(targets, np.concatenate([tokens[1:] for tokens in mine]))


def test_a_position_brings_the_same_batches_back(three_shards):
    ours, again = loader(three_shards), loader(three_shards, rank=1, size=2)
    for _ in range(7):  # into the second round
        ours.next_batch()
    again.position = list(ours.position)
    for _ in range(4):
        ((inputs, _),), ((part, _),) = ours.next_batch(), again.next_batch()
        assert torch.equal(part, torch.cat(inputs.split(LENGTH)[1::2]))
    assert again.position == ours.position


def test_shards_smaller_than_a_batch_are_refused(tmp_path):
    write_shard(tmp_path / "s_0.bin", np.zeros(BATCH))
    with pytest.raises(UserError, match=rf"no shard of .* has the {BATCH} \+ 1 tokens of a batch"):
        loader(tmp_path)


def test_every_shard_is_checked_at_the_start_not_when_it_is_reached(three_shards):
    os.truncate(three_shards / "s_2.bin", 3000)
    with pytest.raises(UserError, match=r"s_2.bin: 3000 bytes do not fit its \d+ tokens; fetch or make it again"):
        loader(three_shards)


def test_a_token_outside_the_vocabulary_is_named_when_it_is_read(tmp_path):
    shard = Shard(str(write_shard(tmp_path / "bad.bin", np.array([1, 2, 257, 3]))), VOCABULARY)
    assert shard.read(0, 1) == (torch.tensor([1]), torch.tensor([2]))
    with pytest.raises(UserError, match=r"bad\.bin: token 257 is outside the vocabulary of 257"):
        shard.read(0, 2)


@pytest.mark.parametrize("name", ["nowhere.bin", "fifo", "folder", "zero"])
def test_what_is_no_file_is_refused_at_once_with_the_way_to_get_shards(tmp_path, name):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(
        UserError, match=r"no token shard; data/cached_fineweb10B.py and data/embedded_corpus.py make them"
    ):
        Shard(str(tmp_path / name), VOCABULARY)


@pytest.mark.parametrize("size", [1100, 9000])
def test_a_shard_that_changes_its_size_while_in_use_is_noticed(tmp_path, size):
    path = write_shard(tmp_path / "s.bin", np.arange(1000))
    shard = Shard(str(path), 60000)
    os.truncate(path, size)
    with pytest.raises(UserError, match="its size changed while it was in use"):
        shard.read(0, 128)


def test_the_fingerprint_tells_shards_apart(tmp_path):
    prints = []
    for i, place in enumerate([None, 10, 1_999_990]):  # the middle of a large shard is not looked at
        tokens = np.zeros(2_000_000, dtype=np.int64)
        if place is not None:
            tokens[place] = 1
        prints.append(Shard(str(write_shard(tmp_path / f"{i}" / "s.bin", tokens)), VOCABULARY).fingerprint())
    assert len({entry["sha256"] for entry in prints}) == 3
    assert prints[0]["file"] == "s.bin" and prints[0]["tokens"] == 2_000_000


# ---- Damaged files ---------------------------------------------------------------------------------------------------

extremes = st.sampled_from([0, 1, -1, 2, 255, 256, 2**15, 2**30, 2**31 - 1, -(2**31), 20240520, 20240521])


def good_bytes(count: int) -> bytes:
    tokens = (i % VOCABULARY for i in range(count))
    return struct.pack("<iii", 20240520, 1, count) + bytes(1012) + struct.pack(f"<{count}H", *tokens)


@st.composite
def damaged_shards(draw) -> bytes:
    """Files as they come out of broken downloads, wrong programs and bad luck; some of them are still good."""
    content = bytearray(good_bytes(draw(st.integers(0, 600))))
    kind = draw(st.sampled_from(["noise", "truncated", "header", "grown", "bit", "token"]))
    if kind == "noise":
        return draw(st.binary(max_size=3000))
    if kind == "truncated":
        return bytes(content[: draw(st.integers(0, len(content)))])
    if kind == "header":
        field = draw(st.integers(0, 3))
        content[4 * field : 4 * field + 4] = struct.pack("<i", draw(extremes | st.integers(-(2**31), 2**31 - 1)))
    if kind == "grown":
        content += draw(st.binary(min_size=1, max_size=40))
    if kind == "bit":
        content[draw(st.integers(0, len(content) - 1))] ^= 1 << draw(st.integers(0, 7))
    if kind == "token" and len(content) > 1026:
        content[1024:1026] = struct.pack("<H", draw(st.sampled_from([256, 257, 258]) | st.integers(0, 65535)))
    return bytes(content)


def tokens_by_hand(content: bytes) -> list[int] | None:
    """What a shard of these bytes holds, or None if it is none: written from the format's description."""
    if len(content) < 1024 or struct.unpack("<ii", content[:8]) != (20240520, 1):
        return None
    (count,) = struct.unpack("<i", content[8:12])
    if count < 1 or len(content) != 1024 + 2 * count:
        return None
    tokens = [content[i] + 256 * content[i + 1] for i in range(1024, len(content), 2)]
    return tokens if max(tokens) < VOCABULARY else None


@settings(max_examples=200, deadline=None)
@given(damaged_shards())
def test_a_bad_shard_is_one_clear_line_and_a_good_one_is_read_right(content):
    expected = tokens_by_hand(content)
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(content)
        file.flush()
        try:
            shard = Shard(file.name, VOCABULARY)
            inputs, targets = shard.read(0, len(shard.tokens) - 1)
            assert (inputs.tolist(), targets.tolist()) == (expected[:-1], expected[1:])
        except UserError as error:
            assert expected is None and file.name in str(error) and "\n" not in str(error)
