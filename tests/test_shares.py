"""Sharded optimizers, on 1, 2, 3 and 5 real processes, against the same optimizers on whole parameters in one.

ShardedLongShort has torch's Adam and Muon; the record after it has its own Adam, every second step, and NorMuon.
"""

import gc
import math
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import load_record
from torch import nn

SHARDED, CURRENT = SCRIPTS = load_record("ShardedLongShort"), load_record("NorMuonYarn")
of_both = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
SIZES = [2, 3, 5]
of_each_size = pytest.mark.parametrize("size", SIZES)
STEPS = 11  # so that a gradient of the tables waits for the next step, where Adam updates them every second one
SEQUENCES = 7  # of which each has a gradient of its own
# 8 layers, in ShardedLongShort one of them without attention: 28 or 32 matrices, and 16 in MLPs.
# Tables of 128 rows, which 5 does not divide, nor 3.
SETTINGS = dict(vocab_size=100, document_token=99, num_layers=8, num_heads=1, model_dim=16, sequence_length=128)
SETTINGS |= dict(batch_sequences=SEQUENCES, val_sequence_length=128, val_tokens=128, dtype="float32")
SETTINGS |= dict(num_iterations=20, momentum_warmup=5, embedding_lr=0.05, scalar_eps=1e-3)


SETTINGS |= dict(head_lr=0.008, momentum_start=0.85, momentum_end=0.9)
STAGES = dict(stages="2 1 1 1 1  1 1 1.5 1 1  0 1 1.5 1 1", adam_every=2)


def settings_of(script, size: int, **changes):
    own = STAGES if script is CURRENT else {}
    return script.make_settings(SETTINGS | own | changes, processes=size, on_gpu=False)


def world_of(script, rank: int = 0, size: int = 1):
    return script.World(rank, size, torch.device("cpu"))


def gradient_of(name: str, param: torch.Tensor, sequence: int, step: int) -> torch.Tensor:
    """What a sequence adds to a parameter's gradient; the same in every process."""
    seed = 10_000 * step + 100 * sequence + sum(map(ord, name)) % 97
    gradient = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
    if "embedding." in name:
        gradient[:70] = 0  # rows of tokens that do not occur
    return gradient.to(param.dtype)


def whole_gradient(name: str, param: torch.Tensor, step: int) -> torch.Tensor:
    return torch.stack([gradient_of(name, param, i, step) for i in range(SEQUENCES)]).sum(0)


def update(trainer, step: int) -> None:
    """An update after a backward pass that left the sum over this process's sequences."""
    for name, param in trainer.model.named_parameters():
        mine = range(trainer.world.rank, SEQUENCES, trainer.world.size)
        param.grad = torch.stack([gradient_of(name, param, i, step) for i in mine]).sum(0)
    trainer.update(step)


def stir(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator) * 0.1)


def many_steps(script, world):
    trainer = script.Trainer(settings_of(script, world.size), world)
    stir(trainer.model)
    for step in range(STEPS):
        update(trainer, step)
    return trainer


def whole_parameters(script) -> dict[str, nn.Parameter]:
    """As the steps above begin with: no shares, no stacks."""
    model = script.Trainer(settings_of(script, 1), world_of(script)).model
    stir(model)
    return {name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()}


def rates_of(s, name: str, param: torch.Tensor) -> tuple[float, tuple[float, float], float]:
    """Learning rate, betas and eps of what Adam updates."""
    betas = s.adam_beta1, s.adam_beta2
    if name.endswith("gate"):
        return s.gate_lr, (0.9, 0.99), s.adam_eps
    if param.ndim == 2:
        return s.head_lr if name == "head.weight" else s.embedding_lr, betas, s.adam_eps
    return s.scalar_lr, betas, s.scalar_eps


def many_steps_of_torchs_adam_and_muon() -> dict[str, torch.Tensor]:
    """One Adam for every parameter that is no matrix, and for each matrix a loop of its own."""
    s, named, adams = settings_of(SHARDED, 1), whole_parameters(SHARDED), []
    for name, param in named.items():
        lr, betas, eps = rates_of(s, name, param)
        if param.ndim < 3:
            adams.append((torch.optim.Adam([param], lr=lr, betas=betas, eps=eps), lr))
    momenta = {name: torch.zeros_like(param) for name, param in named.items() if param.ndim == 3}
    for step in range(STEPS):
        for name, param in named.items():
            param.grad = whole_gradient(name, param, step)
        factor = SHARDED.lr_factor(step / s.num_iterations, s.cooldown_frac, s.final_lr)
        momentum = SHARDED.muon_momentum(step, 5, s.momentum_start, s.momentum_end)
        for adam, lr in adams:
            adam.param_groups[0]["lr"] = lr * factor
            adam.step()
        for name, buffer in momenta.items():
            for i, gradient in enumerate(named[name].grad):
                buffer[i] = momentum * buffer[i] + (1 - momentum) * gradient
                update = SHARDED.newton_schulz(((1 - momentum) * gradient + momentum * buffer[i])[None], s.ns_steps)[0]
                rate = 2 if name.endswith("mlp.weights") and i == 0 else 1
                with torch.no_grad():
                    named[name][i] -= s.muon_lr * factor * rate * update
    return {name: param.detach() for name, param in named.items()}


def many_steps_of_adam_and_normuon() -> dict[str, torch.Tensor]:
    """The formulas, which test_normuon_yarn.py has as loops, for one parameter or matrix after the other."""
    s, finished = settings_of(CURRENT, 1), {}
    stages = CURRENT.stages_of(s)
    for name, param in whole_parameters(CURRENT).items():
        weights = finished[name] = param.detach()
        mean, square, waiting = torch.zeros_like(weights), torch.zeros_like(weights), 0
        if weights.ndim == 3:  # attention's matrices have a mean square for each row, the wide ones for each column
            square = torch.zeros_like(weights[:, :, :1] if name.endswith("attention.weights") else weights[:, :1])
        for step in range(STEPS):
            gradient, factor = whole_gradient(name, weights, step), CURRENT.lr_factor(step, stages, s)
            numbers = torch.tensor([s.muon_lr * factor, s.muon_decay, CURRENT.muon_momentum(step, s), s.muon_beta2])
            for i in range(len(weights) if weights.ndim == 3 else 0):
                rates = torch.tensor([1, 1, 1, 1] if name.endswith("attention.weights") else [2, 4])[i].view(1, 1, 1)
                parts = [x[i : i + 1] for x in (weights, gradient, mean, square)]
                CURRENT.normuon_update(*parts, rates, *numbers, torch.float32)
            waiting = waiting + gradient
            if weights.ndim < 3 and step % 2 == 1:
                lr, betas, eps = rates_of(s, name, weights)
                decay = 0 if weights.ndim == 1 else s.adam_decay * (lr * factor) ** 2
                corrections = [1 - beta ** ((step + 1) // 2) for beta in betas]
                CURRENT.adam_update(weights, waiting, mean, square, lr * factor, decay, *corrections, *betas, eps)
                waiting = 0
    return finished


# ---- What each process does ------------------------------------------------------------------------------------------


def optimizer_state(script, trainer) -> dict[str, torch.Tensor]:
    """What this process keeps, by name."""
    if script is SHARDED:
        return {name: value for name, _, value in trainer.optimizer_state()}
    return {f"{share.name}.{key}": value for share in trainer.shares for key, value in share.state.items()}


def order_of_events(script, world) -> list[str]:
    """What is asked of the other processes in two updates, and when the optimizers compute."""
    trainer, events = script.Trainer(settings_of(script, world.size), world), []

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
    if script is SHARDED:
        for optimizer, _ in trainer.optimizers:
            watch(optimizer, "step", type(optimizer).__name__)
    else:
        for share in trainer.shares:
            watch(share, "update", type(share).__name__)
    for step in range(2):
        update(trainer, step)
    for restore in undo:
        restore()
    return events


def found_by(script, rank: int, size: int, folder: str) -> dict:
    """All that is asked of a process."""
    trainer = many_steps(script, world_of(script, rank, size))
    shares = {share.name: share for share in trainer.shares}
    result = dict(
        state=trainer.state(),
        shapes={name: tuple(share.mine.shape) for name, share in shares.items()},
        kept={name: value.numel() for name, value in optimizer_state(script, trainer).items()},
        padding=[share.stack[share.rows :].abs().sum().item() for share in trainer.shares],
        padded_rows={name: len(share.stack) - share.rows for name, share in shares.items()},
        events=order_of_events(script, trainer.world),
    )
    continued = going_on(script, trainer.world, torch.load(f"{folder}/{script.__name__}.pt"))
    return result | dict(continued=continued)


def going_on(script, world, saved: dict) -> dict:
    """The state one step after one that any number of processes has saved."""
    again = script.Trainer(settings_of(script, world.size), world)
    update(again, 0)  # before its first step torch's Adam has no state to load into
    again.load_state(saved)
    update(again, STEPS)
    return again.state()


def in_groups(rank: int, folder: str) -> None:
    """All that is asked of two, three and five processes, in one start of them."""
    torch.set_num_threads(1)
    for size in (size for size in SIZES if rank < size):
        options = dict(rank=rank, world_size=size, timeout=timedelta(minutes=5))
        dist.init_process_group("gloo", init_method=f"file://{folder}/group_{size}", **options)
        results = {script.__name__: found_by(script, rank, size, folder) for script in SCRIPTS}
        torch.save(results, f"{folder}/{size}_{rank}.pt")
        gc.collect()
        time.sleep(0.3)  # destroying a group that a thread of gloo still holds would abort the process
        dist.destroy_process_group()
    os._exit(0)


@pytest.fixture(scope="module")
def alone() -> dict:
    return {script: many_steps(script, world_of(script)) for script in SCRIPTS}


@pytest.fixture(scope="module")
def groups(tmp_path_factory, alone) -> dict[int, list[dict]]:
    """What each of two, three and five processes found."""
    folder = tmp_path_factory.mktemp("groups")
    for script, trainer in alone.items():
        torch.save(trainer.state(), folder / f"{script.__name__}.pt")
    mp.spawn(in_groups, args=(str(folder),), nprocs=max(SIZES))
    found = {size: [torch.load(folder / f"{size}_{rank}.pt") for rank in range(size)] for size in SIZES}
    return {(s, size): [process[s.__name__] for process in found[size]] for s in SCRIPTS for size in SIZES}


def assert_close(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


# ---- What a user may rely on -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script, reference",
    [(SHARDED, many_steps_of_torchs_adam_and_muon), (CURRENT, many_steps_of_adam_and_normuon)],
    ids=lambda value: value.__name__,
)
def test_one_process_gives_the_weights_of_the_optimizers_on_whole_parameters(alone, script, reference):
    assert_close(dict(alone[script].model.named_parameters()), reference())


@of_both
@of_each_size
def test_more_processes_give_the_weights_and_the_optimizer_state_of_one(groups, alone, script, size):
    expected = alone[script].state()
    for process in groups[script, size]:
        for part in ("model", "optimizers"):
            assert_close(process["state"][part], expected[part])


@of_each_size
def test_gradients_that_wait_for_adam_are_saved_by_process_and_add_up_to_those_of_one(groups, alone, size):
    expected = {name: kept[0] for name, kept in alone[CURRENT].state()["gradients"].items()}
    assert len(expected) == 4 + 3  # tables; head, gates, scalars
    for process in groups[CURRENT, size]:
        kept = process["state"]["gradients"]
        assert {len(gradients) for gradients in kept.values()} == {size}
        assert_close({name: gradients.sum(0) for name, gradients in kept.items()}, expected)


@of_both
@of_each_size
def test_all_processes_have_the_same_weights_to_the_last_bit(groups, script, size):
    first, *others = (process["state"]["model"] for process in groups[script, size])
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


@of_both
@of_each_size
def test_a_process_keeps_only_its_share_of_tables_and_matrices_and_padding_stays_zero(groups, script, size):
    tables = [f"value_embedding.{'tables.' * (script is SHARDED)}{i}.weight" for i in range(3)]
    attentions = 7 if script is SHARDED else 8
    rows = dict.fromkeys(["embedding.weight", *tables, "head"], 128) | dict(attention=attentions * 4, mlp=8 * 2)
    shared = {name: math.ceil(count / size) for name, count in rows.items()}
    mixing, gates = (4, 7) if script is SHARDED else (3, 9)  # skips or shortcuts; attention's and smear's
    for process in groups[script, size]:
        shapes = process["shapes"]
        assert {name: shapes[name][0] for name in rows} == shared and process["padding"] == [0] * len(shapes)
        assert shapes["scalars"] == (mixing + 8 * 2 + attentions * 2,)  # everyone has all
        assert shapes["gates"] == (gates, 12)
        for name, kept in process["kept"].items():
            numbers = math.prod(shapes[name.rpartition(".")[0]])
            if name in ("attention.square", "mlp.square"):  # one for each row, or column, of a matrix
                numbers //= 16
            assert kept == (1 if name.endswith(".step") else numbers)
        assert any(process["padded_rows"].values()) == (size in (3, 5)), "3 and 5 leave rows over"


@of_both
@of_each_size
def test_any_number_of_processes_goes_on_from_the_state_of_another(groups, alone, script, size):
    expected = going_on(script, world_of(script), alone[script].state())
    for process in groups[script, size]:
        for part in expected:
            assert_close(process["continued"][part], expected[part])


@of_each_size
def test_gradients_are_on_their_way_before_the_first_update_and_tables_are_gathered_beside_muon(groups, size):
    all_gradients = ["reduce"] * 5 + ["reduce whole"] * 2 + ["reduce"] * 2  # tables and head, small ones, matrices
    expected = [*all_gradients, "Adam", *["gather"] * 5, *["Muon", "gather"] * 2] * 2
    assert [process["events"] for process in groups[SHARDED, size]] == [expected] * size
    expected = ["reduce"] * 2 + ["NorMuon", "gather"] * 2  # the first step is not Adam's
    expected += all_gradients + ["Adam", "gather"] * 5 + ["Adam"] * 2 + ["NorMuon", "gather"] * 2
    assert [process["events"] for process in groups[CURRENT, size]] == [expected] * size


# ---- Parameters and their stack --------------------------------------------------------------------------------------


@of_both
def test_parameters_are_views_of_their_stack_with_equal_shares_and_zeros_behind(script):
    params = [nn.Parameter(torch.randn(rows, 2, 3)) for rows in (4, 1, 2)]
    before = [param.detach().clone() for param in params]
    shares = [script.Share("some", params, world_of(script, rank, 3)) for rank in range(3)]
    for share in shares:
        assert share.stack.shape == (9, 2, 3) and torch.equal(share.stack[:7], torch.cat(before))
        assert share.stack[7:].eq(0).all() and share.mine.shape == (3, 2, 3)
    last = shares[2]
    assert torch.equal(last.mine[0], before[2][1]) and last.mine[1:].eq(0).all()
    with torch.no_grad():
        last.mine.fill_(5)
    assert params[2][1].eq(5).all() and torch.equal(params[2][0], before[2][0]) and torch.equal(params[0], before[0])


@of_both
def test_a_table_that_splits_evenly_is_not_copied(script):
    param = nn.Parameter(torch.randn(6, 4))
    address = param.data_ptr()
    share = script.Share("table", [param], world_of(script, 1, 3))
    assert share.stack.data_ptr() == param.data_ptr() == address and share.padded([param]) is param
    assert share.mine.data_ptr() == param[2:].data_ptr()


CHANGES = dict(embedding_lr=0.3, head_lr=0.02, gate_lr=0.03, scalar_lr=0.01, scalar_eps=1e-3, adam_eps=1e-6)
CHANGES |= dict(adam_beta1=0.7, adam_beta2=0.9, muon_lr=0.04)
BETAS = [(0.7, 0.9), (0.7, 0.9), (0.9, 0.99), (0.7, 0.9)]  # of tables, head, gates, scalars


def test_every_parameter_has_one_optimizer_with_the_rates_and_eps_of_the_settings():
    trainer = SHARDED.Trainer(settings_of(SHARDED, 1, **CHANGES), world_of(SHARDED))
    (adam, _), *muons = trainer.optimizers
    owned = [param for share in trainer.shares for param in share.params]
    assert sorted(map(id, owned)) == sorted(map(id, trainer.model.parameters()))
    assert [share.mine for share in trainer.shares] == [p for group in trainer.groups for p in group["params"]]
    assert [group["lr"] for group in adam.param_groups] == [0.3, 0.02, 0.03, 0.01]
    assert [group["eps"] for group in adam.param_groups] == [1e-6, 1e-6, 1e-6, 1e-3]
    assert [group["betas"] for group in adam.param_groups] == BETAS
    assert all(isinstance(muon, SHARDED.Muon) and muon.param_groups[0]["lr"] == 0.04 for muon, _ in muons)
    attention, mlp = (muon.rates.flatten().tolist() for muon, _ in muons)
    assert attention == [1] * 4 * 7 and mlp == [2, 1] * 8


def test_every_parameter_has_one_share_with_the_rates_decay_and_eps_of_the_settings():
    trainer = CURRENT.Trainer(settings_of(CURRENT, 1, **CHANGES, adam_decay=0.1), world_of(CURRENT))
    owned = [param for share in trainer.shares for param in share.params]
    assert sorted(map(id, owned)) == sorted(map(id, trainer.model.parameters()))
    *adams, attention, mlp = trainer.shares
    assert [type(share).__name__ for share in trainer.shares] == ["Adam"] * 7 + ["NorMuon"] * 2
    assert [share.lr for share in adams] == [0.3] * 4 + [0.02, 0.03, 0.01]
    assert [share.eps for share in adams] == [1e-6] * 6 + [1e-3] and {share.every for share in adams} == {2}
    assert [share.betas for share in adams] == BETAS[:1] * 3 + BETAS
    assert [share.decay for share in adams] == [0.1] * 6 + [0] and {attention.every, mlp.every} == {1}
    assert attention.rates.flatten().tolist() == [1] * 4 * 8 and mlp.rates.flatten().tolist() == [2, 4] * 8


@of_both
def test_an_update_of_the_scalars_is_adams_formula_with_its_own_eps(script):
    s = settings_of(script, 1, scalar_eps=1e-2)
    trainer = script.Trainer(s, world_of(script))
    scalars = trainer.model.skip_weights if script is SHARDED else trainer.model.shortcut_mix
    before = scalars.detach().clone()
    steps = getattr(s, "adam_every", 1)
    for step in range(steps):
        for param in trainer.model.parameters():
            param.grad = torch.full_like(param, 0.003 / steps)
        trainer.update(step)
    factor = 1 if script is SHARDED else script.lr_factor(step, trainer.stages, s)
    update = 0.003 / (0.003 + 1e-2)  # the first time: both averages are corrected to the full
    expected = before - s.scalar_lr * factor * update
    torch.testing.assert_close(scalars.detach(), expected, rtol=1e-5, atol=1e-7)
    assert all(param.grad is None for param in [*trainer.model.parameters(), *(x.mine for x in trainer.shares)])
