"""ShardedLongShort's GPT against a second one, written out token by token in float64; test_normuon_yarn.py does the
same with the model of the record after it."""

import math

import pytest
import torch
from helpers import load_record

script = load_record("ShardedLongShort")
BLOCK, GPT, Rotary, Settings, make_settings = 128, script.GPT, script.Rotary, script.Settings, script.make_settings
DOCUMENT = 49


def small_settings(**changes) -> Settings:
    small = dict(vocab_size=50, document_token=DOCUMENT, num_heads=2, model_dim=16, sequence_length=512)
    small |= dict(val_sequence_length=512, val_tokens=512, dtype="float32", attention_scale=0.2)
    return make_settings(small | changes, processes=1, on_gpu=False)


def small_gpt(dtype=torch.float64, **changes) -> GPT:
    torch.manual_seed(0)
    model = GPT(small_settings(**changes), use_flex=False).to(dtype)
    model.dtype = dtype
    with torch.no_grad():  # nothing may hide behind a zero
        for param in model.parameters():
            if param.ndim < 2 or param.eq(0).all():
                param.copy_(torch.randn_like(param) * 0.5)
            if param.ndim == 3:
                param[-1].copy_(torch.randn_like(param[-1]) * 0.5)
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


def reference_attention(weights, prefix, x, value_rows, tokens, window_blocks, num_heads):
    length, head_dim = len(x), x.size(1) // num_heads
    query, key, value, project = weights[prefix + "weights"]
    q, k, v = ((x @ matrix.T).view(length, num_heads, head_dim) for matrix in (query, key, value))
    mix = weights[prefix + "value_mix"]
    v = mix[0] * v + (0 if value_rows is None else mix[1] * value_rows.view(v.shape))
    q, k = (
        torch.stack([torch.stack([rotate(rms(y[t, h]), t) for h in range(num_heads)]) for t in range(length)])
        for y in (q, k)
    )
    document, documents = 0, []
    for token in tokens.tolist():
        document += token == DOCUMENT
        documents.append(document)
    y = torch.zeros_like(q)
    for t in range(length):
        seen = [s for s in range(t + 1) if documents[s] == documents[t] and t // BLOCK - s // BLOCK < window_blocks]
        for h in range(num_heads):
            y[t, h] = (k[seen, h] @ q[t, h] * 0.2).softmax(0) @ v[seen, h]
            y[t, h] /= 1 + math.exp(-sum(weights[prefix + "gate"][h, c] * x[t, c] for c in range(12)))
    return y.flatten(1) @ project.T


def reference_loss(model, tokens, targets, window_blocks, num_heads):
    weights = model.state_dict()
    layers = len(model.blocks)
    tables = min(3, layers // 2)
    x = x0 = rms(weights["embedding.weight"][tokens])
    left_behind = {}
    for layer in range(layers):
        if layer >= layers // 2:  # layer n-1 takes from layer 0, layer n-2 from layer 1, ...
            x = x + weights["skip_weights"][layer - layers // 2] * left_behind[layers - 1 - layer]
        mix = weights[f"blocks.{layer}.embedding_mix"]
        x = mix[0] * x + mix[1] * x0
        table = layer if layer < tables else layer - (layers - tables) if layer >= layers - tables else None
        rows = None if table is None else weights[f"value_embedding.tables.{table}.weight"][tokens]
        if layer != 7:
            prefix = f"blocks.{layer}.attention."
            window = window_blocks if layer in (0, layers // 3, layers - 1) else max(1, window_blocks // 2)
            x = x + reference_attention(weights, prefix, rms(x), rows, tokens, window, num_heads)
        expand, project = weights[f"blocks.{layer}.mlp.weights"]
        x = x + torch.clamp(rms(x) @ expand, min=0) ** 2 @ project.T
        left_behind[layer] = x
    logits = 15 * torch.tanh(rms(x) @ weights["head.weight"].T / 15)
    return -logits.log_softmax(-1)[torch.arange(len(targets)), targets].mean()


@pytest.mark.parametrize("layers, heads, window", [(2, 2, 1), (4, 1, 2), (8, 1, 2)])
def test_the_loss_is_that_of_a_model_written_out_token_by_token(layers, heads, window):
    model = small_gpt(num_layers=layers, num_heads=heads)
    torch.manual_seed(1)
    tokens, targets = torch.randint(50, (256,)), torch.randint(50, (256,))
    tokens[100:230][tokens[100:230] == DOCUMENT] = 0  # a document that reaches from one block into the next
    with torch.no_grad():
        actual = model(tokens, targets, torch.tensor(window))
        expected = reference_loss(model, tokens, targets, window, heads)
    torch.testing.assert_close(actual, expected.float().to(actual.dtype), rtol=1e-5, atol=1e-5)


def test_sequences_side_by_side_do_not_see_each_other_and_have_positions_of_their_own():
    model = small_gpt(num_layers=4, sequence_length=256)
    torch.manual_seed(2)
    tokens = torch.randint(DOCUMENT, (768,))  # no document starts inside
    targets = tokens.roll(-1)
    with torch.no_grad():
        together = model(tokens, targets, torch.tensor(6))
        alone = [model(*pair, torch.tensor(6)) for pair in zip(tokens.split(256), targets.split(256), strict=True)]
        hidden = model.hidden(tokens, torch.tensor(6))
    torch.testing.assert_close(together, torch.stack(alone).mean(), rtol=1e-6, atol=1e-6)
    tokens[:256] = 1  # a change in the first sequence
    with torch.no_grad():
        changed = model.hidden(tokens, torch.tensor(6))
    assert torch.equal(hidden[256:], changed[256:]) and not torch.equal(hidden[:256], changed[:256])


@pytest.mark.parametrize("layers", [2, 4, 6, 12])
def test_value_embeddings_go_to_the_first_and_last_three_layers(layers):
    model = small_gpt(num_layers=layers)
    rows = model.value_embedding(torch.arange(4), torch.float64)
    tables = [table.weight[:4] for table in model.value_embedding.tables]
    names = [None if row is None else next(i for i, t in enumerate(tables) if torch.equal(row, t)) for row in rows]
    count = min(3, layers // 2)
    assert len(tables) == count
    assert names == [*range(count), *[None] * (layers - 2 * count), *range(count)]


@pytest.mark.parametrize(
    "layers, windows",
    [(2, "LL"), (4, "LLsL"), (6, "LsLssL"), (8, "LsLssss-"), (12, "LsssLss-sssL"), (14, "LsssLss-" + "s" * 5 + "L")],
)
def test_the_first_the_last_and_a_layer_at_a_third_see_the_whole_window_and_layer_seven_has_no_attention(
    layers, windows
):
    kinds = {None: "-", True: "L", False: "s"}
    found = [kinds[block.attention and block.attention.long] for block in small_gpt(num_layers=layers).blocks]
    assert "".join(found) == windows


def test_the_first_loss_is_that_of_a_uniform_guess():
    model = GPT(small_settings(num_layers=2), use_flex=False)
    tokens = torch.randint(50, (128,))
    assert model(tokens, tokens, torch.tensor(1)).item() == pytest.approx(math.log(128), rel=1e-6)
    weights = dict(model.named_parameters())
    assert {name for name in weights if weights[name].eq(0).all()} == {
        name for name in weights if name.endswith("gate") or name == "head.weight"
    }
    for name in (name for name in weights if name.endswith(".weights")):
        *others, last = weights[name]  # what writes to the residual stream starts at zero
        assert last.eq(0).all() and all(matrix.ne(0).any() for matrix in others)
    assert weights["blocks.0.embedding_mix"].tolist() == [1, 0] and weights["skip_weights"].tolist() == [1]
    assert weights["blocks.0.attention.value_mix"].tolist() == [0.5, 0.5]


def test_tables_are_bfloat16_on_request_and_activations_have_the_dtype_of_the_products():
    model = GPT(small_settings(dtype="bfloat16", bfloat16_embeddings=True), use_flex=False)
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    tables = {name for name in dtypes if "embedding." in name}
    assert len(tables) == 3 and {name for name in dtypes if dtypes[name] == torch.bfloat16} == tables
    assert {dtypes[name] for name in dtypes.keys() - tables} == {torch.float32}
    hidden = model.hidden(torch.zeros(128, dtype=torch.long), torch.tensor(1))
    assert hidden.dtype == torch.bfloat16 and model.logits(hidden).dtype == torch.float32
    assert not [name for name in model.state_dict() if "cos" in name or "sin" in name]


def test_the_record_has_the_published_size():
    with torch.device("meta"):
        model = GPT(make_settings({}, processes=8, on_gpu=True), use_flex=True)
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 3)
    tables = model.embedding.weight.numel() + sum(p.numel() for p in model.value_embedding.parameters())
    assert model.head.weight.shape == (50304, 768)
    assert matrices == 12 * 8 * 768**2 + 11 * 4 * 768**2 and tables == 4 * 50304 * 768
    assert {tuple(p.shape) for p in model.blocks.parameters() if p.ndim == 3} == {(4, 768, 768), (2, 768, 3072)}
    assert sum(p.numel() for name, p in model.named_parameters() if name.endswith("gate")) == 11 * 6 * 12


def test_matrices_start_uniformly_with_half_the_inverse_root_of_the_width():
    model = GPT(small_settings(num_layers=4, model_dim=128), use_flex=False)
    for name, param in model.named_parameters():
        for matrix in param[:-1] if param.ndim == 3 else []:
            bound = 0.5 * math.sqrt(3 / 128)  # of a uniform distribution with that deviation
            assert matrix.std().item() == pytest.approx(0.5 / math.sqrt(128), rel=0.03), name
            assert 0.99 * bound < matrix.abs().max() <= bound and abs(matrix.mean()) < 0.02 * bound


def test_logits_are_those_of_a_tanh_softcap_but_for_a_constant():
    model = small_gpt(num_layers=2)
    with torch.no_grad():
        model.head.weight.mul_(10)
        x = torch.randn(64, 16, dtype=torch.float64)
        expected = 15 * torch.tanh(x @ model.head.weight.T / 15) + 15
        torch.testing.assert_close(model.logits(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_logits_stay_within_the_softcap():
    model = small_gpt(num_layers=2)
    with torch.no_grad():
        model.head.weight.mul_(1e3)
        logits = model.logits(torch.randn(64, 16, dtype=torch.float64))
    assert logits.dtype == torch.float32
    assert 0 <= logits.min() < 0.01 and 29.99 < logits.max() <= 30


def test_half_of_the_head_stays_still():
    rotary = Rotary(head_dim=16, max_length=100)
    x = torch.randn(64, 2, 16)
    turned = rotary(x, 64)
    still = [4, 5, 6, 7, 12, 13, 14, 15]
    assert torch.equal(turned[..., still], x[..., still])
    assert (turned[1:, :, :4] != x[1:, :, :4]).all()
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(rotary(torch.cat([x, x]), 64), torch.cat([turned, turned]))


@pytest.mark.parametrize("shape", [(130,), (1, 128)])
def test_a_forward_pass_takes_one_row_of_whole_blocks(shape):
    tokens = torch.zeros(shape, dtype=torch.long)
    with pytest.raises(ValueError, match="one row of whole blocks of 128"):
        small_gpt()(tokens, tokens, torch.tensor(1))


def test_every_parameter_gets_a_gradient():
    model = small_gpt(torch.float32, num_layers=8)
    tokens = torch.randint(50, (256,))
    model(tokens, tokens.roll(-1), torch.tensor(2)).backward()
    assert all(param.grad is not None and param.grad.abs().sum() > 0 for param in model.parameters())
