"""The head in FP8 against float64: its products, their gradients and the loss, as near as the formats allow."""

import math
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from helpers import load_record

TOKENS, CHANNELS, ROWS = 128, 48, 384
PUBLISHED = {  # the scales of each record
    "ShardedLongShort": dict(x=math.sqrt(CHANNELS) / 448, w=2**-9, gradient=1 / 448),
    "NorMuonYarn": dict(x=100 / 448, w=1.5 / 448, gradient=0.75 / 448),
}


@pytest.fixture(params=PUBLISHED)
def script(request):
    return load_record(request.param)


@pytest.fixture
def scales(script) -> dict[str, float]:
    return PUBLISHED[script.__name__.split("_")[1]]


def rounded(x: torch.Tensor, scale: float, digits: int, smallest: int) -> torch.Tensor:
    """To the nearest number with so many digits after the leading one, and below 2**smallest to a multiple of the last
    digit there; of two that are as near, to the even one."""
    x = x.double() / scale
    exponent = torch.floor(torch.log2(x.abs().clamp(min=2.0**smallest)))
    unit = 2.0 ** (exponent - digits)
    return (x / unit).round() * unit * scale


def e4m3(x: torch.Tensor, scale: float) -> torch.Tensor:
    return rounded(x, scale, digits=3, smallest=-6)


def e5m2(x: torch.Tensor, scale: float) -> torch.Tensor:
    return rounded(x, scale, digits=2, smallest=-14)


@pytest.fixture
def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A normed input, weights as they are in training, and gradients of a summed loss: from tiny up to 1."""
    torch.manual_seed(0)
    x = F.rms_norm(torch.randn(TOKENS, CHANNELS), (CHANNELS,)).requires_grad_()
    w = (torch.randn(ROWS, CHANNELS) * 0.1).requires_grad_()
    gradient = torch.randn(TOKENS, ROWS).softmax(-1) * 10 ** -torch.randint(0, 6, (TOKENS, ROWS)).float()
    gradient[torch.arange(TOKENS), torch.randint(ROWS, (TOKENS,))] -= 0.9
    return x, w, gradient


def fp8_and_gradients(script, x, w, gradient):
    logits = script.Fp8Linear.apply(x, w)
    return logits, *torch.autograd.grad(logits, (x, w), gradient)


def test_the_three_products_are_those_of_the_rounded_numbers(script, scales, tensors):
    x, w, gradient = tensors
    x8, w8, g8 = e4m3(x, scales["x"]), e4m3(w, scales["w"]), e5m2(gradient, scales["gradient"])
    for found, expected in zip(fp8_and_gradients(script, *tensors), (x8 @ w8.T, g8 @ w8, g8.T @ x8), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_the_three_products_are_as_near_to_the_exact_ones_as_the_formats_allow(script, scales, tensors):
    """Rounding changes a number by at most half a unit of its last digit: e4m3 by 1/16 of it, e5m2 by 1/8, both by half
    of the smallest number that they have."""
    x, w, gradient = (tensor.detach().double() for tensor in tensors)
    error_of_x = x.abs() / 16 + scales["x"] * 2**-10
    error_of_w = w.abs() / 16 + scales["w"] * 2**-10
    error_of_g = gradient.abs() / 8 + scales["gradient"] * 2**-17

    def largest_error(a, b, error_of_a, error_of_b):
        return (a.abs() + error_of_a) @ (b.abs() + error_of_b) - a.abs() @ b.abs()

    exact = x @ w.T, gradient @ w, gradient.T @ x
    allowed = [
        largest_error(x, w.T, error_of_x, error_of_w.T),
        largest_error(gradient, w, error_of_g, error_of_w),
        largest_error(gradient.T, x, error_of_g.T, error_of_x),
    ]
    for found, expected, bound in zip(fp8_and_gradients(script, *tensors), exact, allowed, strict=True):
        assert ((found - expected).abs() <= bound + 1e-5 * expected.abs().max()).all()
        relative = ((found - expected).norm() / expected.norm()).item()
        assert 0.001 < relative < 0.06, "errors of many numbers cancel for the most part"


def test_products_have_the_dtype_of_the_input_and_the_weights_gradient_is_float32(script, tensors):
    x, w, gradient = (tensor.detach() for tensor in tensors)
    x16, w = x.bfloat16().requires_grad_(), w.requires_grad_()
    found = fp8_and_gradients(script, x16, w, gradient.bfloat16())
    assert [y.dtype for y in found] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert [y.is_contiguous() for y in found] == [True, True, True]
    for y, y32 in zip(found, fp8_and_gradients(script, *tensors), strict=True):
        torch.testing.assert_close(y.float(), y32, rtol=0.05, atol=0.05 * y32.abs().max().item())


def test_weights_beyond_the_range_are_cut_off_and_give_no_nan(script, scales):
    x = F.rms_norm(torch.randn(TOKENS, CHANNELS), (CHANNELS,))
    w, apply = torch.full((ROWS, CHANNELS), 5.0), script.Fp8Linear.apply
    torch.testing.assert_close(apply(x, w), apply(x, w.clamp(max=448 * scales["w"])), rtol=0, atol=0)
    alone = F.rms_norm(torch.eye(CHANNELS)[:16], (CHANNELS,))  # the largest that a channel can be after the norm
    exact = e4m3(alone, scales["x"]) @ e4m3(torch.eye(CHANNELS) / 2, scales["w"])
    torch.testing.assert_close(apply(alone, torch.eye(CHANNELS) / 2).double(), exact, rtol=1e-5, atol=1e-5)
    assert exact.diagonal().min() > 0.9 * math.sqrt(CHANNELS) / 2


# ---- In the model ----------------------------------------------------------------------------------------------------


def settings_of(script, **changes):
    small = dict(vocab_size=257, document_token=256, num_layers=2, num_heads=2, model_dim=32, sequence_length=256)
    small |= dict(batch_sequences=4, val_sequence_length=256, val_tokens=1024, dtype="float32")
    return script.make_settings(small | dict(fp8_head=True) | changes, processes=1, on_gpu=False)


def window_of(script) -> torch.Tensor:
    """What the model takes beside inputs and targets: two blocks, or both windows."""
    return torch.tensor(2 if script.__name__.endswith("ShardedLongShort") else [1, 2])


def models(script) -> list[torch.nn.Module]:
    """The same model with the head in float32 and in FP8."""
    found = []
    for fp8 in (False, True):
        torch.manual_seed(0)
        found.append(script.GPT(settings_of(script, fp8_head=fp8), use_flex=False))
        with torch.no_grad():
            if hasattr(script, "stages_of"):
                found[-1].rotary.fit([2])
                found[-1].shortcut_mix[0] = 0.5  # of smear, whose gate has no gradient else
            found[-1].head.weight.normal_(std=0.1)
            for block in found[-1].blocks:
                block.attention.weights[-1].normal_(std=0.1)
                block.mlp.weights[-1].normal_(std=0.1)
    return found


def random_batch(sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(256, (2, sequences, 256), generator=torch.Generator().manual_seed(1))
    tokens[0, :, 0] = 256
    return tokens[0].to(torch.int32), tokens[1]


def test_loss_and_gradients_are_near_those_of_the_head_in_float64(script):
    exact, fp8 = models(script)
    exact.double().dtype = torch.float64
    inputs, targets = (tokens.flatten() for tokens in random_batch(1))
    losses = [model(inputs, targets, window_of(script)) * len(inputs) for model in (exact, fp8)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-3)
    for loss in losses:
        loss.backward()
    for (name, param), other in zip(exact.named_parameters(), fp8.parameters(), strict=True):
        difference = (param.grad - other.grad).norm() / param.grad.norm()
        few = param.ndim == 1  # mixing weights: the errors of two or three sums do not cancel
        assert 1e-4 < difference < (0.3 if few else 0.1), name


def test_validation_and_what_trains_without_fp8_do_not_use_it(script):
    exact, fp8 = models(script)
    x = torch.randn(TOKENS, 32)
    expected = 30 * torch.sigmoid(x @ exact.head.weight.T / 7.5)
    torch.testing.assert_close(exact.logits(x), expected)
    assert not torch.allclose(fp8.logits(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(fp8.eval().logits(x), expected)


def test_the_gradient_of_a_sequence_does_not_depend_on_how_many_others_are_with_it(script):
    """The loss is a sum, so the scale of its gradient fits any number of sequences and of processes."""
    trainer = script.Trainer(settings_of(script), script.World(0, 1, torch.device("cpu")))
    with torch.no_grad():
        trainer.model.head.weight.normal_(generator=torch.Generator().manual_seed(2)).mul_(0.1)
    sequences = list(zip(*random_batch(4), strict=True))
    found = []
    for batch in [sequences, *([sequence] for sequence in sequences)]:
        loss, _ = trainer.backward(batch, step=0)
        found.append((torch.tensor(loss), trainer.model.head.weight.grad, trainer.model.embedding.weight.grad))
        trainer.model.zero_grad()
    for together, *apart in zip(*found, strict=True):
        largest = together.abs().max().item()
        torch.testing.assert_close(together, torch.stack(apart).sum(0), rtol=1e-4, atol=1e-5 * largest)


def test_the_head_is_compiled_without_a_break_in_the_graph(script):
    _, fp8 = models(script)
    x = F.rms_norm(torch.randn(TOKENS, 32), (32,)).requires_grad_()
    compiled = torch.compile(fp8.logits, backend="aot_eager", fullgraph=True, dynamic=False)
    found = [torch.autograd.grad(logits(x).sum(), (x, fp8.head.weight)) for logits in (fp8.logits, compiled)]
    for eager, traced in zip(*found, strict=True):
        torch.testing.assert_close(eager, traced, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("capability, fp8", [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_gpus_before_sm_89_train_without_fp8(script, monkeypatch, capability, fp8):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    make_settings = script.make_settings
    saved = asdict(make_settings({}, 8, on_gpu=True))
    assert saved["fp8_head"] == fp8 and not make_settings(dict(fp8_head=False), 8, on_gpu=True).fp8_head
    assert make_settings({}, 8, on_gpu=True, saved=saved | dict(fp8_head=True)).fp8_head == fp8  # resumed elsewhere
    assert not make_settings({}, 2, on_gpu=False).fp8_head


def test_a_width_that_fp8_cannot_multiply_is_refused(script):
    with pytest.raises(script.UserError, match="--fp8_head True: this must hold: model_dim % 16 == 0 or not fp8_head"):
        settings_of(script, model_dim=40)
    settings_of(script, model_dim=40, fp8_head=False)
