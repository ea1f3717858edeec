"""ShardedLongShort's Muon against singular value decompositions and a plain loop; test_shares.py has it on several
processes, test_normuon_yarn.py has NorMuon."""

import pytest
import torch
from helpers import load_record

script = load_record("ShardedLongShort")
Muon, make_settings, newton_schulz = script.Muon, script.make_settings, script.newton_schulz

SHAPES = [(64, 64), (32, 96), (1, 50)]
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


def test_matrices_of_a_batch_are_orthogonalized_as_one_by_one():
    torch.manual_seed(2)
    matrices = torch.randn(7, 24, 96) * torch.logspace(-4, 4, 7)[:, None, None]
    for dtype, tolerance in (torch.float32, 1e-5), (torch.bfloat16, 2e-2):
        together = newton_schulz(matrices.to(dtype), 5)
        one_by_one = [newton_schulz(matrix[None].to(dtype), 5)[0] for matrix in matrices]
        torch.testing.assert_close(together, torch.stack(one_by_one), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_zero_gradient_gives_no_update(shape):
    stack = torch.nn.Parameter(torch.randn(3, *shape))
    before, stack.grad = stack.detach().clone(), torch.zeros(3, *shape)
    Muon(stack, torch.ones(3), SETTINGS).step()
    assert torch.equal(stack, before)


def test_five_steps_are_those_of_a_plain_loop_with_a_rate_for_each_matrix():
    torch.manual_seed(0)
    stack, rates = torch.nn.Parameter(torch.randn(4, 12, 32)), [2, 1, 0.5, 1]
    weights, buffers = [matrix.detach().double() for matrix in stack], [0] * 4
    muon = Muon(stack, torch.tensor(rates), SETTINGS)
    for momentum in (0.5, 0.7, 0.8, 0.9, 0.95):  # it changes, as in the schedule
        stack.grad = torch.randn(4, 12, 32)
        for i, gradient in enumerate(stack.grad.double()):
            buffers[i] = momentum * buffers[i] + (1 - momentum) * gradient
            weights[i] = weights[i] - 0.05 * rates[i] * quintic((1 - momentum) * gradient + momentum * buffers[i])
        muon.param_groups[0]["momentum"] = momentum
        muon.step()
    torch.testing.assert_close(stack.detach().double(), torch.stack(weights), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(muon.state[stack]["momentum"].double(), torch.stack(buffers), rtol=1e-5, atol=1e-6)
