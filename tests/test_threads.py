"""Threads, a record of our own, beside ShardedLongShort: the same sequences, losses, gradients, masks and weights.

ShardedLongShort has references of its own in test_loader.py, test_attention.py, test_model.py, test_muon.py and
test_shares.py. What Threads hands on to NorMuonYarn, norm and threads, is also tested in test_normuon_yarn.py.
"""

import numpy as np
import pytest
import torch
from helpers import load_record, made_up_tokens, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st

BEFORE, THREADS = SCRIPTS = load_record("ShardedLongShort"), load_record("Threads")
LENGTH, SEQUENCES = 256, 5


@pytest.fixture
def folder(tmp_path):
    """Two shards, of which the first ends inside a batch; documents of 1 to 200 tokens."""
    random = np.random.default_rng(0)
    for i, length in enumerate((9_000, 6_000)):
        tokens = made_up_tokens(length, seed=i)
        tokens[tokens == 256] = 0
        tokens[np.minimum(np.cumsum(random.integers(1, 200, length // 100)), length - 1)] = 256
        write_shard(tmp_path / f"train_{i}.bin", tokens)
    write_shard(tmp_path / "val.bin", made_up_tokens(4_100, seed=9))
    return tmp_path


def settings_of(script, folder, processes=1, **changes):
    small = dict(num_layers=4, num_heads=2, model_dim=32, sequence_length=LENGTH, batch_sequences=SEQUENCES)
    small |= dict(num_iterations=8, window_start=128, window_end=512, dtype="float32", val_sequence_length=1024)
    files = dict(train_files=f"{folder}/train_*.bin", val_files=f"{folder}/val.bin", val_tokens=4096)
    return script.make_settings(small | files | changes, processes, on_gpu=False)


def loader_of(script, folder, rank=0, size=1):
    return script.DistributedDataLoader(settings_of(script, folder, size), world_of(script, rank, size))


def world_of(script, rank=0, size=1):
    return script.World(rank, size, torch.device("cpu"))


def trainer_of(script, folder, **changes):
    """With weights that hide nothing behind a zero; the same in both scripts."""
    trainer = script.Trainer(settings_of(script, folder, **changes), world_of(script))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in trainer.model.parameters():
            param.add_(torch.randn(param.shape, generator=generator) * 0.1)
    return trainer


def weights_of(trainer) -> dict[str, torch.Tensor]:
    """By one name in both scripts: the older has a module around the value tables."""
    named = trainer.model.named_parameters()
    return {name.replace("tables.", ""): param.detach().float() for name, param in named}


def assert_same(found: dict, expected: dict, **tolerance) -> None:
    assert found.keys() == expected.keys() and len(found) > 20
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_loader_deals_out_the_same_sequences_one_by_one_instead_of_side_by_side(folder, size):
    for rank in range(size):
        old, new = (loader_of(script, folder, rank, size) for script in SCRIPTS)
        for _ in range(15):  # more than both shards hold
            (side_by_side,), one_by_one = old.next_batch(), new.next_batch()
            assert [len(x) for pair in one_by_one for x in pair] == [LENGTH] * 2 * len(range(rank, SEQUENCES, size))
            for expected, parts in zip(side_by_side, zip(*one_by_one, strict=True), strict=True):
                assert torch.equal(torch.cat(parts), expected) and parts[0].dtype == expected.dtype
            assert old.position == new.position
        assert new.position[0] > len(new.shards)
    assert [shard.fingerprint() for shard in old.shards] == [shard.fingerprint() for shard in new.shards]


def test_eight_steps_have_the_same_losses_gradients_weights_and_validation(folder):
    """In float32; the window grows from one to four blocks. Threads adds up per sequence, so the last bits differ."""
    found = []
    for script in SCRIPTS:
        trainer, loader, results = trainer_of(script, folder), loader_of(script, folder), {}
        shard = script.Shard(f"{folder}/val.bin", 257)
        for step in range(8):
            results[f"loss {step}"] = torch.tensor(trainer.backward(loader.next_batch(), step)[0])
            if step == 0:
                results |= {f"gradient of {p}": g for p, g in gradients_of(trainer).items()}
            trainer.update(step)
            results[f"validation {step}"] = torch.tensor(trainer.validate(shard, step))
        found.append(results | weights_of(trainer))
    assert_same(*found, rtol=1e-4, atol=2e-5)


def gradients_of(trainer) -> dict[str, torch.Tensor]:
    """Each divided by its largest entry: sums over tokens are large."""
    named = {name.replace("tables.", ""): param.grad.float() for name, param in trainer.model.named_parameters()}
    return {name: gradient / gradient.abs().max() for name, gradient in named.items()}


def test_every_step_of_a_full_run_has_the_same_window_learning_rate_and_momentum():
    s = THREADS.Settings()
    assert vars(s) == vars(BEFORE.Settings())
    for step in range(s.num_iterations):
        progress = step / s.num_iterations
        assert THREADS.lr_factor(step, s) == BEFORE.lr_factor(progress, s.cooldown_frac, s.final_lr)
        momentum = BEFORE.muon_momentum(step, s.momentum_warmup, s.momentum_start, s.momentum_end)
        assert THREADS.muon_momentum(step, s) == pytest.approx(momentum, abs=1e-12)
        windows = [script.window_in_blocks(progress, s.window_start, s.window_end) for script in SCRIPTS]
        assert windows[0] == windows[1]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.lists(st.integers(0, 40 * 128 - 1), max_size=12), st.integers(1, 20))
def test_the_blocks_of_a_mask_are_listed_by_counting_as_they_were_by_sorting(blocks, starts, window):
    is_start = torch.zeros(40 * 128, dtype=torch.bool)
    is_start[starts] = True
    documents = is_start[: blocks * 128].cumsum(0)
    old, new = (script.document_block_mask(documents, torch.tensor(window)) for script in SCRIPTS)
    for counts, indices in ("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices"):
        assert torch.equal(getattr(old, counts), getattr(new, counts))
        for row, count in enumerate(getattr(new, counts)[0, 0].tolist()):
            listed = (getattr(mask, indices)[0, 0, row, :count].tolist() for mask in (old, new))
            assert next(listed) == next(listed)


@pytest.mark.parametrize("dtype, error", [(torch.float32, 4e-5), (torch.bfloat16, 2e-2)])
def test_rotary_turns_as_before_in_its_own_dtype(folder, dtype, error):
    """With angles up to 255, of which float32 has seven digits."""
    name = str(dtype).removeprefix("torch.")
    old, new = (trainer_of(script, folder, dtype=name).model.blocks[0].attention.rotary for script in SCRIPTS)
    x = torch.randn(LENGTH, 2, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert new(x).dtype == dtype
    torch.testing.assert_close(new(x).double(), old(x.double().float(), LENGTH).double(), rtol=error, atol=error)


def test_threads_give_the_same_bits_as_one_thread(folder, monkeypatch):
    found, at_once, before = [], [], torch.get_num_threads()
    for cores in (1, 3, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda cores=cores: cores)
        trainer, loader, going = trainer_of(THREADS, folder), loader_of(THREADS, folder), []
        shard, loss, results = THREADS.Shard(f"{folder}/val.bin", 257), trainer.loss, []

        def watched(*args, loss=loss, going=going):
            going.append(1)
            at_once.append(len(going))
            result = loss(*args)
            going.pop()
            return result

        trainer.loss = watched
        for step in range(4):
            results += [trainer.backward(loader.next_batch(), step)[0], trainer.validate(shard, step)]
            trainer.update(step)
        found.append((results, weights_of(trainer)))
    monkeypatch.undo()
    torch.set_num_threads(before)
    assert max(at_once) > 1, "nothing ran at the same time"
    for results, weights in found[1:]:
        assert results == found[0][0] and all(torch.equal(weights[name], found[0][1][name]) for name in weights)


def test_a_shard_that_shrinks_while_it_is_read_ends_in_one_line(folder):
    """It was mapped before: a read behind the new end, after the look at the size, killed the process."""
    loader = loader_of(THREADS, folder)
    loader.next_batch()
    write_shard(folder / "train_0.bin", made_up_tokens(100))
    with pytest.raises(THREADS.UserError, match=r"train_0\.bin: its size changed while it was in use"):
        loader.next_batch()
