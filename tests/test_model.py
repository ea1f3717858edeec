"""The GPT against a second one, written out token by token in float64."""

import math

import pytest
import torch

from train_gpt import GPT, Hyperparameters, Rotary, build_model, gathered_mask

BLOCK = 128


def small_gpt(num_layers=4, num_heads=4, num_kv_heads=4, model_dim=32, dtype=torch.float64) -> GPT:
    torch.manual_seed(0)
    model = GPT(vocab_size=50, document_token=49, num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads,
                model_dim=model_dim, max_length=512, logit_softcap=15.0, dtype=dtype, flex=False).to(dtype)
    with torch.no_grad():  # nothing may hide behind a zero
        for param in model.parameters():
            if param.ndim < 2 or param.eq(0).all():
                param.copy_(torch.randn_like(param) * 0.5)
    return model


def rms(x):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + torch.finfo(x.dtype).eps)


def rotate(x, position):
    """Rotary by complex numbers: pair i is (x[i], x[i + half]); only the first half of the pairs turns."""
    half = len(x) // 2
    frequencies = [(1 / 1024) ** (i / (half // 2 - 1)) if i < half // 2 else 0.0 for i in range(half)]
    angles = torch.tensor([float(torch.tensor(f).float()) * position for f in frequencies], dtype=torch.float64)
    turned = torch.complex(x[:half], x[half:]) * torch.exp(-1j * angles)
    return torch.cat([turned.real, turned.imag])


def reference_attention(weights, prefix, x, value_rows, tokens, window_blocks, num_heads, num_kv_heads):
    length, head_dim = len(x), x.size(1) // num_heads
    q = (x @ weights[prefix + "query.weight"].T).view(length, num_heads, head_dim)
    k = (x @ weights[prefix + "key.weight"].T).view(length, num_kv_heads, head_dim)
    v = (x @ weights[prefix + "value.weight"].T).view(length, num_kv_heads, head_dim)
    mix = weights[prefix + "value_mix"]
    v = mix[0] * v + (0 if value_rows is None else mix[1] * value_rows.view(v.shape))
    q = torch.stack([torch.stack([rotate(rms(q[t, h]), t) for h in range(num_heads)]) for t in range(length)])
    k = torch.stack([torch.stack([rotate(rms(k[t, h]), t) for h in range(num_kv_heads)]) for t in range(length)])
    document, documents = 0, []
    for token in tokens.tolist():
        document += token == 49
        documents.append(document)
    y = torch.zeros_like(q)
    for t in range(length):
        seen = [s for s in range(t + 1)
                if documents[s] == documents[t] and t // BLOCK - s // BLOCK < window_blocks]
        for h in range(num_heads):
            kv = h * num_kv_heads // num_heads
            attention = (k[seen, kv] @ q[t, h] / math.sqrt(head_dim)).softmax(0)
            y[t, h] = attention @ v[seen, kv]
    return y.flatten(1) @ weights[prefix + "project.weight"].T


def reference_loss(model, tokens, targets, window_blocks, num_heads, num_kv_heads):
    weights = dict(model.state_dict())
    layers = len(model.blocks)
    tables = min(3, layers // 2)
    x = x0 = rms(weights["embedding.weight"][tokens])
    left_behind = {}
    for layer in range(layers):
        if layer >= layers - layers // 2:  # layer n-1 takes from layer 0, layer n-2 from layer 1, ...
            skip = layer - (layers - layers // 2)
            x = x + weights["skip_weights"][skip] * left_behind[layers - 1 - layer]
        mix = weights[f"blocks.{layer}.embedding_mix"]
        x = mix[0] * x + mix[1] * x0
        table = layer if layer < tables else layer - (layers - tables) if layer >= layers - tables else None
        rows = None if table is None else weights[f"value_embeddings.tables.{table}.weight"][tokens]
        if layer != 7:
            x = x + reference_attention(weights, f"blocks.{layer}.attention.", rms(x), rows, tokens, window_blocks,
                                        num_heads, num_kv_heads)
        hidden = torch.clamp(rms(x) @ weights[f"blocks.{layer}.mlp.expand.weight"].T, min=0) ** 2
        x = x + hidden @ weights[f"blocks.{layer}.mlp.project.weight"].T
        left_behind[layer] = x
    logits = 15 * torch.tanh(rms(x) @ weights["head.weight"].T / 15)
    return -logits.log_softmax(-1)[torch.arange(len(targets)), targets].mean()


@pytest.mark.parametrize("layers, heads, kv_heads", [(1, 2, 2), (2, 2, 1), (5, 2, 2), (8, 1, 1)])
def test_the_loss_is_that_of_a_model_written_out_token_by_token(layers, heads, kv_heads):
    model = small_gpt(layers, heads, kv_heads, model_dim=16)
    torch.manual_seed(1)
    tokens, targets = torch.randint(50, (256,)), torch.randint(50, (256,))
    with torch.no_grad():
        actual = model(tokens, targets, torch.tensor(1))
        expected = reference_loss(model, tokens, targets, 1, heads, kv_heads)
    torch.testing.assert_close(actual, expected.float().to(actual.dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 6, 12])
def test_value_embeddings_go_to_the_first_and_last_three_layers(layers):
    model = small_gpt(layers)
    rows = model.value_embeddings(torch.arange(4), torch.float64)
    tables = min(3, layers // 2)
    names = [next((i for i, t in enumerate(model.value_embeddings.tables) if row is not None and
                   torch.equal(row, t.weight[:4])), None) for row in rows]
    assert len(model.value_embeddings.tables) == tables
    assert names == [*range(tables), *[None] * (layers - 2 * tables), *range(tables)]


def test_layer_seven_has_no_attention():
    assert [layer for layer, block in enumerate(small_gpt(12).blocks) if block.attention is None] == [7]


def test_the_first_loss_is_that_of_a_uniform_guess():
    model = build_model(Hyperparameters(num_layers=2, num_heads=2, model_dim=16, vocab_size=50, document_token=49,
                                        dtype="float32"))
    tokens = torch.randint(50, (128,))
    assert model(tokens, tokens, torch.tensor(1)).item() == pytest.approx(math.log(128), rel=1e-6)
    for name, param in model.named_parameters():
        assert param.eq(0).all() == ("project" in name or "head" in name)
    mixes = dict(model.named_parameters())
    assert mixes["blocks.0.embedding_mix"].tolist() == [1, 0] and mixes["skip_weights"].tolist() == [1]
    assert mixes["blocks.0.attention.value_mix"].tolist() == [0.5, 0.5]


def test_dtypes_are_those_of_the_record():
    model = build_model(Hyperparameters(num_layers=2, num_heads=2, model_dim=16, vocab_size=50, document_token=0,
                                        dtype="bfloat16"))
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    tables = {name for name in dtypes if "embedding" in name and "mix" not in name}
    assert {name for name in dtypes if dtypes[name] == torch.bfloat16} == tables
    assert all(dtypes[name] == torch.float32 for name in dtypes.keys() - tables)
    tokens = torch.zeros(128, dtype=torch.long)
    assert model.hidden(tokens, gathered_mask(tokens, torch.tensor(1))).dtype == torch.bfloat16
    assert not [name for name in model.state_dict() if "cos" in name or "sin" in name]


def test_the_record_has_the_published_size():
    with torch.device("meta"):
        s = Hyperparameters()
        model = GPT(s.vocab_size, s.document_token, s.num_layers, s.num_heads, s.num_heads, s.model_dim, 1024,
                    s.logit_softcap, torch.bfloat16, flex=True)
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)
    tables = model.embedding.weight.numel() + sum(p.numel() for p in model.value_embeddings.parameters())
    assert model.head.weight.shape == (50304, 768)
    assert matrices == 12 * 8 * 768**2 + 11 * 4 * 768**2 and tables == 4 * 50304 * 768


def test_logits_stay_within_the_softcap():
    model = small_gpt(2)
    with torch.no_grad():
        model.head.weight.mul_(1e3)
        logits = model.logits(torch.randn(64, 32, dtype=torch.float64))
    assert logits.dtype == torch.float32
    assert 14.99 < logits.abs().max() <= 15


def test_half_of_the_head_stays_still():
    rotary = Rotary(head_dim=16, max_length=64)
    x = torch.randn(64, 2, 16)
    turned = rotary(x)
    still = [4, 5, 6, 7, 12, 13, 14, 15]
    assert torch.equal(turned[..., still], x[..., still])
    assert (turned[1:, :, :4] != x[1:, :, :4]).all()
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(rotary(x[40:], start=40), turned[40:])


@pytest.mark.parametrize("shape", [(130,), (1, 128)])
def test_a_forward_takes_one_sequence_of_whole_blocks(shape):
    with pytest.raises(ValueError, match="one sequence of whole blocks of 128"):
        small_gpt(1)(torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long), torch.tensor(1))


def test_every_parameter_gets_a_gradient():
    model = small_gpt(8, dtype=torch.float32)
    tokens = torch.randint(50, (256,))
    model(tokens, tokens.roll(-1), torch.tensor(2)).backward()
    assert all(param.grad is not None and param.grad.abs().sum() > 0 for param in model.parameters())


def test_pieces_of_a_sequence_do_not_see_each_other():
    model = small_gpt(3)
    tokens = torch.randint(49, (512,))
    with torch.no_grad():
        together = model(tokens, tokens.roll(-1), torch.tensor(4), piece_length=128)
        alone = [model(piece, targets, torch.tensor(4)) for piece, targets in
                 zip(tokens.split(128), tokens.roll(-1).split(128), strict=True)]
        as_one = model(tokens, tokens.roll(-1), torch.tensor(4))
    torch.testing.assert_close(together, torch.stack(alone).mean(), rtol=1e-5, atol=1e-6)
    assert abs(as_one - together) > 1e-4
