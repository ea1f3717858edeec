"""Muon against singular value decompositions, a plain loop, and itself on other numbers of processes."""

import math
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from train_gpt import Muon, Trainer, World, make_settings, newton_schulz

SHAPES = [(64, 64), (32, 96), (1, 50)]
ALONE = World(rank=0, size=1, device=torch.device("cpu"))
SETTINGS = make_settings(dict(dtype="float32", muon_lr=0.05, momentum_start=0.9), processes=1, on_gpu=False)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_newton_schulz_keeps_singular_vectors_and_brings_singular_values_near_one(shape, dtype):
    torch.manual_seed(0)
    matrices = torch.randn(3, *shape)
    matrices[1] *= 1e4  # each matrix of a batch has a size of its own
    results = newton_schulz(matrices.to(dtype), 5).float()
    assert results.shape == matrices.shape
    for matrix, result in zip(matrices, results, strict=True):
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        in_singular_basis = left.T @ result @ right.T
        diagonal = in_singular_basis.diagonal()
        well_conditioned = values / values.norm() > 0.01  # five steps lift these into the band
        assert diagonal[well_conditioned].min() > 0.65 and diagonal.max() < 1.25
        assert (in_singular_basis - torch.diag(diagonal)).abs().max() < (1e-4 if dtype == torch.float32 else 0.1)


def quintic(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """What Newton-Schulz should give: the polynomial on every singular value, by a decomposition in float64."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / (values.norm() + 1e-7)
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


def test_newton_schulz_follows_the_quintic_on_every_singular_value():
    torch.manual_seed(1)
    left, _, right = torch.linalg.svd(torch.randn(20, 40, dtype=torch.float64), full_matrices=False)
    matrix = left @ torch.diag(torch.logspace(-3, 0, 20, dtype=torch.float64)) @ right
    torch.testing.assert_close(newton_schulz(matrix[None], 5)[0], quintic(matrix), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_zero_gradient_gives_no_update(shape):
    param = torch.nn.Parameter(torch.randn(shape))
    before, param.grad = param.detach().clone(), torch.zeros(shape)
    Muon([param], SETTINGS, ALONE).step()
    assert torch.equal(param, before)


# ---- Steps, on one and on several processes --------------------------------------------------------------------------


def parameters() -> list[torch.nn.Parameter]:
    """Numbers of each shape that neither 2 nor 3 divides; two shapes have the same size, as in the MLPs."""
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in [(16, 16), (32, 12), (12, 32)] * 5 + [(16, 16)] * 2]


def set_gradients(params, step: int) -> None:
    torch.manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn_like(param)


def five_steps(world: World) -> list[torch.Tensor]:
    """The weights after five steps, and the momentum, saved and loaded in the middle."""
    params = parameters()
    muon = Muon(params, SETTINGS, world)
    for step in range(5):
        set_gradients(params, step)
        muon.step()
        if step == 2:
            saved = [muon.whole_momentum(group) for group in muon.param_groups]
            for group, momentum in zip(muon.param_groups, saved, strict=True):
                group["buffer"].fill_(math.nan)
                muon.load_momentum(group, momentum)
    kept = sum(group["buffer"].size(0) * group["buffer"].size(1) for group in muon.param_groups)
    assert kept == math.ceil(7 / world.size) + math.ceil(10 / world.size), "a process keeps only its part"
    return [param.detach() for param in params] + [muon.whole_momentum(group) for group in muon.param_groups]


def test_five_steps_are_those_of_a_plain_loop():
    params = parameters()
    buffers = [0] * len(params)
    for step in range(5):
        set_gradients(params, step)
        for i, param in enumerate(params):
            buffers[i] = 0.9 * buffers[i] + 0.1 * param.grad
            update = quintic(0.1 * param.grad + 0.9 * buffers[i]).float()
            rows, columns = param.shape
            param.data = param.data - 0.05 * max(1, rows / columns) ** 0.5 * update
    *weights, squares, others = five_steps(ALONE)
    for actual, expected in zip(weights, params, strict=True):
        torch.testing.assert_close(actual, expected.detach(), rtol=1e-4, atol=1e-4)
    of_squares = [buffer for buffer in buffers if buffer.shape == (16, 16)]
    of_others = [buffer if buffer.size(0) == 12 else buffer.T for buffer in buffers if buffer.shape != (16, 16)]
    torch.testing.assert_close(squares, torch.stack(of_squares))
    torch.testing.assert_close(others, torch.stack(of_others))


def in_group(rank: int, size: int, folder: str) -> None:
    """Here "cuda" only means the way in which GPUs share the work: one matrix per process and chunk."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    cpu, gpu = (World(rank, size, torch.device(name)) for name in ("cpu", "cuda"))
    results = dict(cpu=five_steps(cpu), gpu=five_steps(gpu), events=order_of_events(gpu))
    torch.save(results, f"{folder}/{rank}.pt")
    os._exit(0)  # destroying a group that a thread of gloo still holds would abort the process


@pytest.fixture(scope="module", params=[2, 3])
def on_processes(request, tmp_path_factory) -> list[dict]:
    """What each of two or three processes found."""
    folder = str(tmp_path_factory.mktemp("group"))
    mp.spawn(in_group, args=(request.param, folder), nprocs=request.param)
    return [torch.load(f"{folder}/{rank}.pt") for rank in range(request.param)]


def order_of_events(world: World) -> list[str]:
    events, start_gather = [], dist.all_gather_single

    class Watched:
        def __init__(self, work, name):
            self.work, self.name = work, name

        def wait(self):
            events.append(f"wait {self.name}")
            self.work.wait()

    def gather(*args, **kwargs):
        name = sum(event.startswith("gather") for event in events)
        events.append(f"gather {name}")
        return Watched(start_gather(*args, **kwargs), name)

    def orthogonalize(*args):
        events.append(f"orthogonalize {sum(event.startswith('orthogonalize') for event in events)}")
        return newton_schulz(*args)

    dist.all_gather_single = gather
    params = [torch.nn.Parameter(torch.randn(16, 16)) for _ in range(3 * world.size)]
    set_gradients(params, 0)
    Muon(params, SETTINGS, world, orthogonalize).step()
    dist.all_gather_single = start_gather
    return events


@pytest.mark.parametrize("layout", ["cpu", "gpu"])
def test_any_number_of_processes_gives_the_same_weights_and_momentum(on_processes, layout):
    expected = five_steps(ALONE)
    for results in on_processes:
        for actual, alone in zip(results[layout], expected, strict=True):
            torch.testing.assert_close(actual, alone, rtol=1e-6, atol=1e-6)


def test_on_gpus_a_chunk_is_gathered_while_the_next_one_is_orthogonalized(on_processes):
    expected = "orthogonalize 0, gather 0, orthogonalize 1, wait 0, gather 1, orthogonalize 2, wait 1, gather 2, wait 2"
    for results in on_processes:
        assert ", ".join(results["events"]) == expected


# ---- Adam's part -----------------------------------------------------------------------------------------------------


def test_every_parameter_has_one_optimizer_and_adam_has_the_rates_and_eps_of_the_settings():
    changes = dict(embedding_lr=0.3, head_lr=0.02, scalar_lr=0.01, scalar_eps=1e-3, adam_beta1=0.7, adam_beta2=0.9)
    trainer = Trainer(make_settings(dict(dtype="float32", **changes), processes=1, on_gpu=False), ALONE)
    names = {param: name for name, param in trainer.model.named_parameters()}
    owned = [names[param] for group in trainer.groups for param in group["params"]]
    assert sorted(owned) == sorted(names.values())
    tables, head, scalars = trainer.adam.param_groups
    assert [group["lr"] for group in trainer.adam.param_groups] == [0.3, 0.02, 0.01]
    assert [group["eps"] for group in trainer.adam.param_groups] == [1e-8, 1e-8, 1e-3]
    assert {group["betas"] for group in trainer.adam.param_groups} == {(0.7, 0.9)}
    assert {names[param] for param in head["params"]} == {"head.weight"}
    assert all("embedding" in names[param] and param.ndim == 2 for param in tables["params"])
    assert all(param.ndim == 1 for param in scalars["params"])


def test_an_update_of_the_scalars_is_adams_formula_with_its_own_eps():
    s = make_settings(dict(dtype="float32", scalar_eps=1e-2), processes=1, on_gpu=False)
    trainer = Trainer(s, ALONE)
    for param in trainer.model.parameters():
        param.grad = torch.full_like(param, 0.003)
    before = trainer.model.skip_weights.detach().clone()
    trainer.update(step=0)
    expected = before - s.scalar_lr * 0.003 / (0.003 + 1e-2)  # the first step: both averages are corrected to the full
    torch.testing.assert_close(trainer.model.skip_weights.detach(), expected, rtol=1e-5, atol=1e-7)
