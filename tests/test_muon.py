"""Muon against singular value decompositions, a plain loop, and itself on other numbers of processes."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from train_gpt import Muon, World, newton_schulz

SHAPES = [(64, 64), (96, 32), (32, 96), (1, 50), (50, 1)]


def alone() -> World:
    return World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_newton_schulz_keeps_singular_vectors_and_brings_singular_values_near_one(shape, dtype):
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    result = newton_schulz(matrix, 5, dtype).float()
    in_singular_basis = left.T @ result @ right.T
    diagonal = in_singular_basis.diagonal()
    well_conditioned = values / values.norm() > 0.01  # five steps lift these into the band
    assert result.shape == matrix.shape
    assert diagonal[well_conditioned].min() > 0.65 and diagonal.max() < 1.25
    assert (in_singular_basis - torch.diag(diagonal)).abs().max() < (1e-4 if dtype == torch.float32 else 0.1)


def test_newton_schulz_follows_the_quintic_on_every_singular_value():
    torch.manual_seed(1)
    left, _, right = torch.linalg.svd(torch.randn(40, 20, dtype=torch.float64), full_matrices=False)
    expected = torch.logspace(-3, 0, 20, dtype=torch.float64)
    matrix = left @ torch.diag(expected) @ right
    expected = expected / expected.norm()
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    actual = (left.T @ newton_schulz(matrix, 5, torch.float64) @ right.T).diagonal()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_zero_gradient_gives_zero_update(shape):
    assert newton_schulz(torch.zeros(shape), 5, torch.bfloat16).eq(0).all()
    param = torch.nn.Parameter(torch.randn(shape))
    before, param.grad = param.detach().clone(), torch.zeros(shape)
    Muon([param], lr=0.05, momentum=0.9, ns_steps=5, world=alone(), dtype=torch.bfloat16).step()
    assert torch.equal(param, before)


def parameters() -> list[torch.nn.Parameter]:
    """Numbers of each shape that neither 2 nor 3 divides, and one parameter with its own learning-rate factor."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in [(16, 16)] * 5 + [(32, 8)] * 1 + [(8, 32)] * 7]
    params[3].lr_factor = 0.25
    return params


def gradients(params, step: int):
    torch.manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn_like(param)


def five_steps(world: World, dtype=torch.float32) -> list[torch.Tensor]:
    params = parameters()
    muon = Muon(params, lr=0.05, momentum=0.9, ns_steps=5, world=world, dtype=dtype)
    for step in range(5):
        gradients(params, step)
        muon.step()
    return [param.detach() for param in params]


def in_group(rank: int, size: int, folder: str, work) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous_{size}", rank=rank, world_size=size)
    torch.save(work(World(rank, size, rank, torch.device("cpu"))), f"{folder}/result_{size}_{rank}.pt")
    dist.destroy_process_group()


def on_processes(size: int, folder, work) -> list:
    mp.spawn(in_group, args=(size, str(folder), work), nprocs=size)
    return [torch.load(f"{folder}/result_{size}_{rank}.pt") for rank in range(size)]


def test_five_steps_are_those_of_a_plain_loop():
    params, buffers = parameters(), [0] * 13
    for step in range(5):
        gradients(params, step)
        for i, param in enumerate(params):
            buffers[i] = 0.9 * buffers[i] + 0.1 * param.grad
            update = newton_schulz(0.1 * param.grad + 0.9 * buffers[i], 5, torch.float32)
            tall = max(1, param.size(0) / param.size(1)) ** 0.5
            param.data = param.data - 0.05 * tall * (0.25 if i == 3 else 1) * update
    for actual, expected in zip(five_steps(alone()), params, strict=True):
        torch.testing.assert_close(actual, expected.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_any_number_of_processes_gives_the_same_weights(size, tmp_path):
    expected = five_steps(alone())
    for weights in on_processes(size, tmp_path, five_steps):
        assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


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

    def orthogonalise(*args):
        events.append(f"orthogonalise {sum(event.startswith('orthogonalise') for event in events)}")
        return newton_schulz(*args)

    dist.all_gather_single = gather
    params = [torch.nn.Parameter(torch.randn(16, 16)) for _ in range(6)]
    gradients(params, 0)
    Muon(params, 0.05, 0.9, 5, world, torch.float32, orthogonalise).step()
    dist.all_gather_single = start_gather
    return events


def test_a_chunk_is_gathered_while_the_next_one_is_orthogonalised(tmp_path):
    expected = "orthogonalise 0, gather 0, orthogonalise 1, wait 0, gather 1, orthogonalise 2, wait 1, gather 2, wait 2"
    for events in on_processes(2, tmp_path, order_of_events):
        assert ", ".join(events) == expected


def momentum_after_a_step(world: World) -> list[torch.Tensor]:
    params = parameters()
    muon = Muon(params, 0.05, 0.9, 5, world, torch.float32)
    gradients(params, 0)
    muon.step()
    kept = sum("momentum" in state for state in muon.state.values())
    assert kept <= -(-5 // world.size) + 1 + -(-7 // world.size), "a process keeps only its share of the momentum"
    collected = muon.gathered_momentum()
    muon.load_momentum(collected)
    return muon.gathered_momentum()


def test_gathered_momentum_is_the_same_for_any_number_of_processes(tmp_path):
    expected = momentum_after_a_step(alone())
    for momentum in on_processes(3, tmp_path, momentum_after_a_step):
        assert all(torch.equal(a, b) for a, b in zip(momentum, expected, strict=True))
