"""Sharded optimizers, on 1, 2, 3 and 5 real processes, against the same optimizers on whole parameters in one."""

import gc
import math
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from train_gpt import Muon, Share, Trainer, World, lr_factor, make_settings, muon_momentum, newton_schulz

SIZES = [2, 3, 5]
STEPS = 10
SEQUENCES = 7  # of which each has a gradient of its own
ALONE = World(rank=0, size=1, device=torch.device("cpu"))
# 8 layers, as layer 7 has no attention: 28 and 16 matrices. Tables of 128 rows, which 5 does not divide, nor 3.
SETTINGS = dict(vocab_size=100, document_token=99, num_layers=8, num_heads=1, model_dim=16, sequence_length=128)
SETTINGS |= dict(batch_sequences=SEQUENCES, val_sequence_length=128, val_tokens=128, dtype="float32")
SETTINGS |= dict(num_iterations=STEPS, momentum_warmup=5, embedding_lr=0.05, scalar_eps=1e-3)


def settings_of(size: int, **changes):
    return make_settings(SETTINGS | changes, processes=size, on_gpu=False)


def gradient_of(name: str, param: torch.Tensor, sequence: int, step: int) -> torch.Tensor:
    """What a sequence adds to a parameter's gradient; the same in every process."""
    seed = 10_000 * step + 100 * sequence + sum(map(ord, name)) % 97
    gradient = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
    if "embedding." in name:
        gradient[:70] = 0  # rows of tokens that do not occur
    return gradient.to(param.dtype)


def set_gradients(model: nn.Module, world: World, step: int) -> None:
    """As after the backward pass: the sum over this process's sequences."""
    for name, param in model.named_parameters():
        mine = range(world.rank, SEQUENCES, world.size)
        param.grad = torch.stack([gradient_of(name, param, i, step) for i in mine]).sum(0)


def stir(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator) * 0.1)


def ten_steps(world: World) -> Trainer:
    trainer = Trainer(settings_of(world.size), world)
    stir(trainer.model)
    for step in range(STEPS):
        set_gradients(trainer.model, world, step)
        trainer.update(step)
    return trainer


def ten_steps_on_whole_parameters() -> dict[str, torch.Tensor]:
    """One Adam for every parameter that is no matrix, and for each matrix a loop of its own: no shares, no stacks."""
    s = settings_of(1)
    model = Trainer(s, ALONE).model
    stir(model)
    named = {name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()}
    adams = []
    for name, param in named.items():
        lr, betas, eps = s.scalar_lr, (s.adam_beta1, s.adam_beta2), s.scalar_eps
        if name.endswith("gate"):
            lr, betas, eps = s.gate_lr, (0.9, 0.99), s.adam_eps
        elif param.ndim == 2:
            lr, eps = s.head_lr if name == "head.weight" else s.embedding_lr, s.adam_eps
        if param.ndim < 3:
            adams.append((torch.optim.Adam([param], lr=lr, betas=betas, eps=eps), lr))
    momenta = {name: torch.zeros_like(param) for name, param in named.items() if param.ndim == 3}
    for step in range(STEPS):
        for name, param in named.items():
            param.grad = torch.stack([gradient_of(name, param, i, step) for i in range(SEQUENCES)]).sum(0)
        factor = lr_factor(step / STEPS, s.cooldown_frac, s.final_lr)
        momentum = muon_momentum(step, 5, s.momentum_start, s.momentum_end)
        for adam, lr in adams:
            adam.param_groups[0]["lr"] = lr * factor
            adam.step()
        for name, buffer in momenta.items():
            for i, gradient in enumerate(named[name].grad):
                buffer[i] = momentum * buffer[i] + (1 - momentum) * gradient
                update = newton_schulz(((1 - momentum) * gradient + momentum * buffer[i])[None], s.ns_steps)[0]
                rate = 2 if name.endswith("mlp.weights") and i == 0 else 1
                with torch.no_grad():
                    named[name][i] -= s.muon_lr * factor * rate * update
    return {name: param.detach() for name, param in named.items()}


# ---- What each process does ------------------------------------------------------------------------------------------


def order_of_events(world: World) -> list[str]:
    """What is asked of the other processes in an update, and when the optimizers compute."""
    trainer, events = Trainer(settings_of(world.size), world), []

    def watch(owner, attribute, name):
        original = getattr(owner, attribute)

        def watched(*arguments, **options):
            events.append(name)
            assert options.get("async_op", True)
            return original(*arguments, **options)

        setattr(owner, attribute, watched)
        return lambda: setattr(owner, attribute, original)

    undo = [
        watch(dist, "reduce_scatter_single", "reduce"),
        watch(dist, "all_reduce", "reduce whole"),
        watch(dist, "all_gather_single", "gather"),
    ]
    for optimizer, _ in trainer.optimizers:
        watch(optimizer, "step", type(optimizer).__name__)
    set_gradients(trainer.model, world, 0)
    trainer.update(0)
    for restore in undo:
        restore()
    return events


def in_groups(rank: int, folder: str) -> None:
    """All that is asked of two, three and five processes, in one start of them."""
    torch.set_num_threads(1)
    for size in (size for size in SIZES if rank < size):
        options = dict(rank=rank, world_size=size, timeout=timedelta(minutes=5))
        dist.init_process_group("gloo", init_method=f"file://{folder}/group_{size}", **options)
        world = World(rank, size, torch.device("cpu"))
        trainer = ten_steps(world)
        shares = {share.name: share for share in trainer.shares}
        result = dict(
            state=trainer.state(),
            shapes={name: tuple(share.mine.shape) for name, share in shares.items()},
            kept={name: value.numel() for name, _, value in trainer.optimizer_state()},
            padding=[share.stack[share.rows :].abs().sum().item() for share in trainer.shares],
            padded_rows={name: len(share.stack) - share.rows for name, share in shares.items()},
            events=order_of_events(world),
        )
        again = Trainer(settings_of(size), world)  # loads what any number of processes has saved
        set_gradients(again.model, world, 0)
        again.update(0)
        again.load_state(torch.load(f"{folder}/alone.pt"))
        set_gradients(again.model, world, STEPS)
        again.update(STEPS)
        torch.save(result | dict(continued=again.state()), f"{folder}/{size}_{rank}.pt")
        gc.collect()
        time.sleep(0.3)  # destroying a group that a thread of gloo still holds would abort the process
        dist.destroy_process_group()
    os._exit(0)


@pytest.fixture(scope="module")
def alone() -> Trainer:
    return ten_steps(ALONE)


@pytest.fixture(scope="module")
def groups(tmp_path_factory, alone) -> dict[int, list[dict]]:
    """What each of two, three and five processes found."""
    folder = tmp_path_factory.mktemp("groups")
    torch.save(alone.state(), folder / "alone.pt")
    mp.spawn(in_groups, args=(str(folder),), nprocs=max(SIZES))
    return {size: [torch.load(folder / f"{size}_{rank}.pt") for rank in range(size)] for size in SIZES}


def assert_close(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


# ---- What a user may rely on -----------------------------------------------------------------------------------------


def test_one_process_gives_the_weights_of_the_optimizers_on_whole_parameters(alone):
    assert_close(dict(alone.model.named_parameters()), ten_steps_on_whole_parameters())


@pytest.mark.parametrize("size", SIZES)
def test_more_processes_give_the_weights_and_the_optimizer_state_of_one(groups, alone, size):
    expected = alone.state()
    for process in groups[size]:
        for part in ("model", "optimizers"):
            assert_close(process["state"][part], expected[part])


@pytest.mark.parametrize("size", SIZES)
def test_all_processes_have_the_same_weights_to_the_last_bit(groups, size):
    first, *others = (process["state"]["model"] for process in groups[size])
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


@pytest.mark.parametrize("size", SIZES)
def test_a_process_keeps_only_its_share_of_tables_and_matrices_and_padding_stays_zero(groups, size):
    rows = {"embedding.weight": 128, "value_embedding.tables.0.weight": 128, "value_embedding.tables.1.weight": 128}
    rows |= {"value_embedding.tables.2.weight": 128, "head": 128, "attention": 7 * 4, "mlp": 8 * 2}
    shared = {name: math.ceil(count / size) for name, count in rows.items()}
    for process in groups[size]:
        shapes = process["shapes"]
        assert {name: shapes[name][0] for name in rows} == shared and process["padding"] == [0] * len(shapes)
        assert (shapes["scalars"], shapes["gates"]) == ((4 + 8 * 2 + 7 * 2,), (7, 12)), "small: everyone has all"
        for name, kept in process["kept"].items():
            assert kept == (1 if name.endswith(".step") else math.prod(shapes[name.rpartition(".")[0]]))
        assert any(process["padded_rows"].values()) == (size in (3, 5)), "3 and 5 leave rows over"


@pytest.mark.parametrize("size", SIZES)
def test_any_number_of_processes_goes_on_from_the_state_of_another(groups, size, tmp_path):
    again = Trainer(settings_of(1), ALONE)
    set_gradients(again.model, ALONE, 0)
    again.update(0)
    again.load_state(ten_steps(ALONE).state())
    set_gradients(again.model, ALONE, STEPS)
    again.update(STEPS)
    for process in groups[size]:
        for part, expected in again.state().items():
            assert_close(process["continued"][part], expected)


@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_on_their_way_before_the_first_update_and_tables_are_gathered_beside_muon(groups, size):
    expected = ["reduce"] * 5 + ["reduce whole"] * 2 + ["reduce"] * 2  # tables and head, small ones, stacks of matrices
    expected += ["Adam"] + ["gather"] * 5 + ["Muon", "gather"] * 2
    assert [process["events"] for process in groups[size]] == [expected] * size


# ---- Parameters and their stack --------------------------------------------------------------------------------------


def test_parameters_are_views_of_their_stack_with_equal_shares_and_zeros_behind():
    params = [nn.Parameter(torch.randn(rows, 2, 3)) for rows in (4, 1, 2)]
    before = [param.detach().clone() for param in params]
    shares = [Share("some", params, World(rank, 3, torch.device("cpu"))) for rank in range(3)]
    for share in shares:
        assert share.stack.shape == (9, 2, 3) and torch.equal(share.stack[:7], torch.cat(before))
        assert share.stack[7:].eq(0).all() and share.mine.shape == (3, 2, 3)
    last = shares[2]
    assert torch.equal(last.mine[0], before[2][1]) and last.mine[1:].eq(0).all()
    with torch.no_grad():
        last.mine.fill_(5)
    assert params[2][1].eq(5).all() and torch.equal(params[2][0], before[2][0]) and torch.equal(params[0], before[0])


def test_a_table_that_splits_evenly_is_not_copied():
    param = nn.Parameter(torch.randn(6, 4))
    address = param.data_ptr()
    share = Share("table", [param], World(1, 3, torch.device("cpu")))
    assert share.stack.data_ptr() == param.data_ptr() == address and share.padded([param]) is param
    assert share.mine.data_ptr() == param[2:].data_ptr()


def test_every_parameter_has_one_optimizer_with_the_rates_and_eps_of_the_settings():
    changes = dict(embedding_lr=0.3, head_lr=0.02, gate_lr=0.03, scalar_lr=0.01, scalar_eps=1e-3, adam_eps=1e-6)
    trainer = Trainer(settings_of(1, **changes, adam_beta1=0.7, adam_beta2=0.9, muon_lr=0.04), ALONE)
    (adam, _), *muons = trainer.optimizers
    owned = [param for share in trainer.shares for param in share.params]
    assert sorted(map(id, owned)) == sorted(map(id, trainer.model.parameters()))
    assert [share.mine for share in trainer.shares] == [p for group in trainer.groups for p in group["params"]]
    assert [group["lr"] for group in adam.param_groups] == [0.3, 0.02, 0.03, 0.01]
    assert [group["eps"] for group in adam.param_groups] == [1e-6, 1e-6, 1e-6, 1e-3]
    assert [group["betas"] for group in adam.param_groups] == [(0.7, 0.9), (0.7, 0.9), (0.9, 0.99), (0.7, 0.9)]
    assert all(isinstance(muon, Muon) and muon.param_groups[0]["lr"] == 0.04 for muon, _ in muons)
    attention, mlp = (muon.rates.flatten().tolist() for muon, _ in muons)
    assert attention == [1] * 4 * 7 and mlp == [2, 1] * 8


def test_an_update_of_the_scalars_is_adams_formula_with_its_own_eps():
    s = settings_of(1, scalar_eps=1e-2)
    trainer = Trainer(s, ALONE)
    for param in trainer.model.parameters():
        param.grad = torch.full_like(param, 0.003)
    before = trainer.model.skip_weights.detach().clone()
    trainer.update(step=0)
    expected = before - s.scalar_lr * 0.003 / (0.003 + 1e-2)  # the first step: both averages are corrected to the full
    torch.testing.assert_close(trainer.model.skip_weights.detach(), expected, rtol=1e-5, atol=1e-7)
    assert all(param.grad is None for param in [*trainer.model.parameters(), *(x.mine for x in trainer.shares)])
