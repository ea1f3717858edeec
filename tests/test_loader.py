"""The shards, and ShardedLongShort's loader against the token stream itself, searched for document starts in one go.

The loader of the record after it, which fills sequences with documents, is in test_normuon_yarn.py.
"""

import os
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import load_record, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st

SCRIPTS = load_record("ShardedLongShort"), load_record("NorMuonYarn")
SHARDED, _ = SCRIPTS
of_both = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)

LENGTH, SEQUENCES = 128, 9
BATCH = LENGTH * SEQUENCES
VOCABULARY = 257
START = 59_999  # the document token


def read(shard, first: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """So many inputs and their targets, from the first on."""
    return shard.read(first, length) if isinstance(shard, SHARDED.Shard) else shard.read((first, first + length + 1))


def loader(folder, rank=0, size=1, **changes):
    wanted = dict(vocab_size=60000, document_token=START, sequence_length=LENGTH, batch_sequences=SEQUENCES)
    s = SHARDED.make_settings(wanted | dict(train_files=f"{folder}/s_*.bin") | changes, processes=size, on_gpu=False)
    return SHARDED.DistributedDataLoader(s, SHARDED.World(rank, size, torch.device("cpu")))


@pytest.fixture
def three_shards(tmp_path):
    """Tokens that say where they are: the shard in the ten thousands, the position in the rest. Documents have one to
    300 tokens, but for a long one; the first shard starts inside a document."""
    random = np.random.default_rng(0)
    for i, length in enumerate([9_900, BATCH // 2, 7_000]):  # the second is smaller than a batch
        tokens = np.arange(length) + 10_000 * i
        tokens[np.minimum(np.cumsum(random.integers(1, 300, length // 100)), length - 1)] = START
        if i == 2:
            tokens[0] = START
            tokens[1_000:5_500][tokens[1_000:5_500] == START] = 0  # longer than what is searched at once
        write_shard(tmp_path / f"s_{i}.bin", tokens)
    return tmp_path


def batches_by_hand(folder, steps, length=LENGTH, sequences=SEQUENCES, document=START) -> list[list[np.ndarray]] | None:
    """By the rule: a sequence starts at the first document that starts after the sequence before it and its last
    target; a batch that does not fit into the rest of a shard starts again in the next. None if no shard has one."""
    contents = [np.fromfile(path, "<u2")[512:].astype(np.int64) for path in sorted(folder.glob("s_*.bin"))]
    batches, index, first, full = [], 0, 0, 0
    while len(batches) < steps:
        tokens, batch, end = contents[index % len(contents)], [], first
        for start in np.flatnonzero(tokens == document):
            if start >= end and start + length < len(tokens) and len(batch) < sequences:
                batch.append(tokens[start : start + length + 1])
                end = start + length + 1
        if len(batch) == sequences:
            batches.append(batch)
            first, full = end, index
        elif index > full + len(contents):
            return None
        else:
            index, first = index + 1, 0
    return batches


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_number_of_processes_deals_out_the_same_sequences_which_start_at_documents(three_shards, size):
    ranks = [loader(three_shards, rank, size) for rank in range(size)]
    shards = set()
    for batch in batches_by_hand(three_shards, steps=12):
        for rank, ours in enumerate(ranks):
            ((inputs, targets),) = ours.next_batch()  # side by side, in one forward pass
            mine = batch[rank::size]
            assert inputs.dtype == torch.int32 and targets.dtype == torch.int64
            assert np.array_equal(inputs, np.concatenate([tokens[:-1] for tokens in mine]))
            assert np.array_equal(targets, np.concatenate([tokens[1:] for tokens in mine]))
            assert set(inputs[::LENGTH].tolist()) == {START}
        shards.add(batch[0][1] // 10_000)
    assert shards == {0, 2}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=12), st.integers(0, 200), st.integers(1, 3))
def test_wherever_documents_start_the_sequences_are_those_found_by_hand(lengths, before_the_first, sequences):
    tokens = np.arange(before_the_first + sum(lengths)) % 256
    tokens[before_the_first + np.cumsum([0, *lengths[:-1]])] = 256
    wanted = dict(vocab_size=257, document_token=256, batch_sequences=sequences)
    with tempfile.TemporaryDirectory() as folder:
        write_shard(Path(folder) / "s_0.bin", tokens)
        expected = batches_by_hand(Path(folder), 4, sequences=sequences, document=256)
        if expected is None:
            with pytest.raises(SHARDED.UserError, match="no shard of"):
                loader(folder, **wanted)
            return
        ours = loader(folder, **wanted)
        for batch in expected:
            ((inputs, targets),) = ours.next_batch()
            assert inputs.tolist() == [token for tokens in batch for token in tokens[:-1]]
            assert targets.tolist() == [token for tokens in batch for token in tokens[1:]]


def test_a_position_brings_the_same_batches_back(three_shards):
    ours, again = loader(three_shards), loader(three_shards, rank=1, size=2)
    for _ in range(7):  # into the second round
        ours.next_batch()
    again.position = list(ours.position)
    for _ in range(4):
        ((inputs, _),), ((part, _),) = ours.next_batch(), again.next_batch()
        assert torch.equal(part, torch.cat(inputs.split(LENGTH)[1::2]))
    assert again.position == ours.position


def test_shards_without_a_batch_of_sequences_that_start_at_documents_are_refused(tmp_path):
    tokens = np.zeros(3 * BATCH)
    tokens[: SEQUENCES * 200 : 200] = START
    write_shard(tmp_path / "s_0.bin", tokens)
    loader(tmp_path)
    tokens[200] = 0  # now a start is missing
    write_shard(tmp_path / "s_0.bin", tokens)
    with pytest.raises(SHARDED.UserError, match=r"no shard of .* has 9 x 128 tokens that start at a document"):
        loader(tmp_path)


@of_both
def test_every_shard_is_checked_at_the_start_not_when_it_is_reached(script, three_shards):
    os.truncate(three_shards / "s_2.bin", 3000)
    s = script.make_settings(dict(train_files=f"{three_shards}/s_*.bin"), processes=1, on_gpu=False)
    with pytest.raises(
        script.UserError, match=r"s_2.bin: 3000 bytes do not fit its \d+ tokens; fetch or make it again"
    ):
        script.DistributedDataLoader(s, script.World(0, 1, torch.device("cpu")))


# ---- Shards ----------------------------------------------------------------------------------------------------------


@of_both
def test_a_token_outside_the_vocabulary_is_named_when_it_is_read(script, tmp_path):
    shard = script.Shard(str(write_shard(tmp_path / "bad.bin", np.array([1, 2, 257, 3]))), VOCABULARY)
    assert read(shard, 0, 1) == (torch.tensor([1]), torch.tensor([2]))
    with pytest.raises(script.UserError, match=r"bad\.bin: token 257 is outside the vocabulary of 257"):
        read(shard, 0, 2)


@of_both
@pytest.mark.parametrize("name", ["nowhere.bin", "fifo", "folder", "zero"])
def test_what_is_no_file_is_refused_at_once_with_the_way_to_get_shards(script, tmp_path, name):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "zero").symlink_to("/dev/zero")
    how = "no token shard; data/cached_fineweb10B.py and data/embedded_corpus.py make them"
    with pytest.raises(script.UserError, match=how):
        script.Shard(str(tmp_path / name), VOCABULARY)


@of_both
@pytest.mark.parametrize("size", [1100, 9000])
def test_a_shard_that_changes_its_size_while_in_use_is_noticed(script, tmp_path, size):
    path = write_shard(tmp_path / "s.bin", np.arange(1000))
    shard = script.Shard(str(path), 60000)
    os.truncate(path, size)
    with pytest.raises(script.UserError, match="its size changed while it was in use"):
        read(shard, 0, 128)


@of_both
def test_the_fingerprint_tells_shards_apart(script, tmp_path):
    prints = []
    for i, place in enumerate([None, 10, 1_999_990]):  # the middle of a large shard is not looked at
        tokens = np.zeros(2_000_000, dtype=np.int64)
        if place is not None:
            tokens[place] = 1
        prints.append(script.Shard(str(write_shard(tmp_path / f"{i}" / "s.bin", tokens)), VOCABULARY).fingerprint())
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


@of_both
@settings(max_examples=200, deadline=None)
@given(damaged_shards())
def test_a_bad_shard_is_one_clear_line_and_a_good_one_is_read_right(script, content):
    expected = tokens_by_hand(content)
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(content)
        file.flush()
        try:
            shard = script.Shard(file.name, VOCABULARY)
            inputs, targets = read(shard, 0, (len(content) - 1024) // 2 - 1)
            assert (inputs.tolist(), targets.tolist()) == (expected[:-1], expected[1:])
        except script.UserError as error:
            assert expected is None and file.name in str(error) and "\n" not in str(error)
