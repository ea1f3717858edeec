"""The loader against the token stream itself."""

import itertools
import os
import time

import numpy as np
import pytest
import torch
from helpers import write_shard

from train_gpt import Hyperparameters, Loader, Shard, UserError, World, find_shards, fingerprint

LENGTH, SEQUENCES = 128, 3
BATCH = LENGTH * SEQUENCES


def world(rank=0, size=1) -> World:
    return World(rank, size, rank, torch.device("cpu"))


def loader(paths, rank=0, size=1, piece_length=0) -> Loader:
    settings = Hyperparameters(vocab_size=60000, document_token=0, sequence_length=LENGTH, batch_sequences=SEQUENCES,
                               piece_length=piece_length)
    return Loader([str(path) for path in paths], settings, world(rank, size))


def no_notice(text):
    raise AssertionError(text)


@pytest.fixture
def three_shards(tmp_path):
    """Tokens that say where they are: the shard in the ten thousands, the position in the rest."""
    lengths = [3 * BATCH + 5, BATCH // 2, 2 * BATCH + 1]  # the second is smaller than a batch
    return [write_shard(tmp_path / f"s_{i}.bin", np.arange(n) + 10_000 * i) for i, n in enumerate(lengths)]


def stream(paths, steps) -> list[np.ndarray]:
    """The batches by the rule: the next tokens, or the next shard's if fewer than a batch and one more are left."""
    batches, index, first = [], 0, 0
    contents = [np.fromfile(path, "<u2")[512:] for path in paths]
    while len(batches) < steps:
        if first + BATCH + 1 > len(contents[index]):
            index, first = (index + 1) % len(contents), 0
            continue
        batches.append(contents[index][first:first + BATCH + 1].astype(np.int64))
        first += BATCH
    return batches


def test_batches_are_the_token_stream_and_targets_are_one_token_later(three_shards):
    notices, ours = [], loader(three_shards)
    for expected in stream(three_shards, steps=12):
        for i, (inputs, targets) in enumerate(ours.next_batch(notices.append)):
            assert inputs.dtype == torch.int32 and targets.dtype == torch.int64
            assert np.array_equal(inputs, expected[i * LENGTH:(i + 1) * LENGTH])
            assert np.array_equal(targets, expected[i * LENGTH + 1:(i + 1) * LENGTH + 1])
    assert len(notices) == 2 and "starting again" in notices[0]  # 5 batches a round


@pytest.mark.parametrize("size", [2, 3])
def test_every_number_of_processes_sees_the_same_sequences(three_shards, size):
    alone, ranks = loader(three_shards), [loader(three_shards, rank, size) for rank in range(size)]
    for _ in range(8):
        expected = alone.next_batch(lambda text: None)
        shares = [rank.next_batch(lambda text: None) for rank in ranks]
        for i, (inputs, targets) in enumerate(expected):
            ours = shares[i % size][i // size]
            assert torch.equal(ours[0], inputs) and torch.equal(ours[1], targets)
        assert sum(map(len, shares)) == len(expected)


@pytest.mark.parametrize("piece", [LENGTH, LENGTH // 4])
@pytest.mark.parametrize("sequences", [3, 7, 12, 30])
@pytest.mark.parametrize("size", [1, 2])
def test_scattered_pieces_are_those_of_the_shard_each_once(tmp_path, piece, sequences, size):
    path = write_shard(tmp_path / "s.bin", np.arange(sequences * LENGTH + 1))
    ranks = [loader([path], rank, size, piece_length=piece) for rank in range(size)]
    starts = []
    for _ in range(sequences // SEQUENCES):
        shares = [rank.next_batch(no_notice) for rank in ranks]
        for i in range(SEQUENCES):
            inputs, targets = shares[i % size][i // size]
            for first in range(0, LENGTH, piece):
                start = inputs[first].item()
                assert inputs[first:first + piece].tolist() == list(range(start, start + piece))
                assert targets[first:first + piece].tolist() == list(range(start + 1, start + piece + 1))
                starts.append(start)
    assert len(set(starts)) == len(starts) and all(start % piece == 0 for start in starts)
    if len(starts) >= 12:  # neighbours in the stream are no neighbours in the shard
        assert all(abs(a - b) > piece for a, b in itertools.pairwise(starts))


def test_the_next_batch_is_read_while_the_current_one_trains(three_shards):
    ours = loader(three_shards)
    ours.next_batch(no_notice)
    time.sleep(0.5)
    assert ours.ahead.done()


def test_a_position_brings_the_same_batches_back(three_shards):
    ours = loader(three_shards)
    for _ in range(4):
        ours.next_batch(lambda text: None)
    position = list(ours.position)
    expected = [ours.next_batch(lambda text: None) for _ in range(3)]
    again = loader(three_shards)
    again.seek(position)
    for batch in expected:
        for (a, b), (c, d) in zip(batch, again.next_batch(lambda text: None), strict=True):
            assert torch.equal(a, c) and torch.equal(b, d)


def test_shards_smaller_than_a_batch_are_refused(tmp_path):
    with pytest.raises(UserError, match="holds a batch of 384 tokens"):
        loader([write_shard(tmp_path / "small.bin", np.zeros(BATCH))])


@pytest.mark.parametrize("change, message", [
    (dict(magic=1), "magic number 1, not 20240520"),
    (dict(version=2), "version 2"),
    (dict(count=1000), "truncated or damaged"),
    (dict(count=99), "truncated or damaged"),
    (dict(count=-1), "truncated or damaged"),
    (dict(count=2**31 - 1), "truncated or damaged"),
])
def test_a_wrong_header_is_named(tmp_path, change, message):
    path = write_shard(tmp_path / "bad.bin", np.zeros(100), **change)
    with pytest.raises(UserError, match=f"{path}.*{message}"):
        Shard(str(path), 257)


@pytest.mark.parametrize("size", [0, 1, 1023])
def test_a_file_without_a_whole_header_is_named(tmp_path, size):
    path = tmp_path / "bad.bin"
    path.write_bytes(b"\0" * size)
    with pytest.raises(UserError, match="too few for a shard's header"):
        Shard(str(path), 257)


def test_a_token_outside_the_vocabulary_is_named(tmp_path):
    path = write_shard(tmp_path / "bad.bin", np.array([1, 2, 257, 3]))
    with pytest.raises(UserError, match="token 257 is outside the vocabulary of 257"):
        Shard(str(path), 257)
    assert len(Shard(str(path), 258)) == 4


def test_missing_shards_come_with_the_way_to_get_them(tmp_path):
    with pytest.raises(UserError, match=r"no shards match .*data/cached_fineweb10B.py.*data/embedded_corpus.py"):
        find_shards(str(tmp_path / "nothing_*.bin"))


def test_a_change_of_the_shard_in_use_is_noticed(tmp_path):
    path = write_shard(tmp_path / "s.bin", np.arange(1000))
    shard = Shard(str(path), 60000)
    with open(path, "r+b") as file:
        file.truncate(1100)
    with pytest.raises(UserError, match="changed while it was in use"):
        shard.sequence(0, 128)


def test_a_replaced_shard_is_read_as_it_was(tmp_path):
    path = write_shard(tmp_path / "s.bin", np.arange(1000))
    shard = Shard(str(path), 60000)
    os.replace(write_shard(tmp_path / "other.bin", np.zeros(10)), path)
    assert shard.sequence(0, 128)[0].tolist() == list(range(128))


def test_the_fingerprint_tells_shards_apart(tmp_path):
    big = np.zeros(2_000_000, dtype=np.int64)
    prints = []
    for i, place in enumerate([None, 10, 1_999_990]):  # the middle of a large shard is not looked at
        tokens = big.copy()
        if place is not None:
            tokens[place] = 1
        prints.append(fingerprint([str(write_shard(tmp_path / f"{i}" / "s.bin", tokens))])[0])
    assert len({entry["sha256"] for entry in prints}) == 3
    assert prints[0]["file"] == "s.bin" and prints[0]["tokens"] == 2_000_000
