"""The ideas of the record NorMuonYarn, each against a reference that is written another way: a decomposition, a loop
over tokens or entries, a formula in float64, a table of published values."""

import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import threading
from itertools import islice, pairwise
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ROOT,
    checkpoint,
    differences,
    flags,
    load_record,
    made_up_tokens,
    only_log,
    run_script,
    train_losses,
    val_losses,
    write_shard,
)
from hypothesis import given
from hypothesis import strategies as st

script = load_record("NorMuonYarn")
SCRIPT = ROOT / "records" / script.__name__ / "train_gpt.py"
BLOCK, START = 128, 256
TINY_STAGES = "2 1 1.0 1 1  2 2 1.5 1 2  2 2 1.5 1 2  2 2 1.5 2 3  0 2 1.5 2 4"  # of the 8 steps of a tiny run
TINY = dict(
    vocab_size=257,
    document_token=START,
    num_layers=3,
    num_heads=2,
    model_dim=32,
    sequence_length=128,
    batch_sequences=4,
    max_document=200,
    stages=TINY_STAGES,
    num_iterations=8,
    embedding_lr=0.2,
    head_lr=0.008,
    adam_every=2,
    momentum_start=0.85,
    momentum_end=0.9,
    momentum_cooldown=3,
    val_sequence_length=512,
    val_tokens=1024,
    val_loss_every=0,
    dtype="float32",
    save_every=0,
)


def world(rank: int = 0, size: int = 1):
    return script.World(rank, size, torch.device("cpu"))


def settings(on_gpu: bool = False, **changes):
    return script.make_settings(changes, processes=1, on_gpu=on_gpu)


# ---- Polar Express and NorMuon ---------------------------------------------------------------------------------------

PUBLISHED = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def polar(matrix: torch.Tensor) -> torch.Tensor:
    """What Polar Express should give: its polynomials on every singular value, by a decomposition in float64."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / (1.02 * values.norm() + 1e-6)
    for a, b, c in PUBLISHED:
        values = a * values + b * values**3 + c * values**5
    return left @ torch.diag(values) @ right


def test_polar_express_follows_its_polynomials_on_every_singular_value():
    torch.manual_seed(1)
    left, _, right = torch.linalg.svd(torch.randn(20, 40, dtype=torch.float64), full_matrices=False)
    matrix = left @ torch.diag(torch.logspace(-3, 0, 20, dtype=torch.float64)) @ right
    torch.testing.assert_close(script.polar_express(matrix[None])[0], polar(matrix), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("shape", [(64, 64), (32, 96), (1, 50)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_polar_express_keeps_singular_vectors_and_brings_singular_values_near_one(shape, dtype):
    torch.manual_seed(0)
    matrices = torch.randn(3, *shape)
    matrices[1] *= 1e4  # each matrix of a batch has a size of its own
    for matrix, result in zip(matrices, script.polar_express(matrices.to(dtype)).float(), strict=True):
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        in_singular_basis = left.T @ result @ right.T
        diagonal = in_singular_basis.diagonal()
        well_conditioned = values / values.norm() > 0.01
        assert diagonal[well_conditioned].min() > 0.8 and diagonal.max() < 1.2
        assert (in_singular_basis - torch.diag(diagonal)).abs().max() < (1e-4 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("shape", [(16, 16), (12, 32)])
def test_five_steps_of_normuon_are_those_of_a_loop_over_matrices_rows_and_entries(shape):
    """Momentum, orthogonalization, rows of one size, the norm as before, and decay where it agrees with the update."""
    torch.manual_seed(0)
    s = settings(dtype="float32", muon_lr=0.1, muon_decay=3.0, muon_beta2=0.8, num_iterations=5, momentum_warmup=2)
    layers = [torch.nn.Module() for _ in range(3)]
    for layer, rates in zip(layers, ([2, 1], [1, 4], [1, 1]), strict=True):
        layer.weights, layer.rates = torch.nn.Parameter(torch.randn(2, *shape)), rates
    weights = torch.cat([layer.weights.detach() for layer in layers]).double().numpy()
    normuon = script.NorMuon("matrices", layers, world(), s)
    momentum, square = np.zeros_like(weights), np.zeros((6, max(shape)))
    for step in range(5):
        gradient = torch.randn(6, *shape)
        for layer, part in zip(layers, gradient.split(2), strict=True):
            layer.weights.grad = part.clone()
        factor, beta, lr = 1 - step / 10, script.muon_momentum(step, s), 0.1 * (1 - step / 10)
        for m, rate in enumerate([2, 1, 1, 4, 1, 1]):
            momentum[m] = beta * momentum[m] + (1 - beta) * gradient[m].numpy()
            update = polar(torch.from_numpy(beta * momentum[m] + (1 - beta) * gradient[m].numpy())).numpy()
            update = update if shape[0] >= shape[1] else update.T  # the longer side first
            normed = np.empty_like(update)
            for r, row in enumerate(update):
                square[m, r] = 0.8 * square[m, r] + 0.2 * (row**2).mean()
                normed[r] = row / math.sqrt(square[m, r])
            normed *= np.linalg.norm(update) / np.linalg.norm(normed)
            update = normed if shape[0] >= shape[1] else normed.T
            for entry in np.ndindex(shape):
                w, u = weights[m][entry], update[entry]
                weights[m][entry] = w - lr * rate * u - (lr * rate * 3.0 * lr * w if u * w >= 0 else 0)
        with torch.no_grad():
            normuon.take_gradient(due=True)
            normuon.update(step, factor)
    after = torch.cat([layer.weights.detach() for layer in layers]).double().numpy()
    np.testing.assert_allclose(after, weights, rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(normuon.state["square"].flatten(1).numpy(), square, rtol=1e-3)


def test_matrices_without_a_gradient_stay_as_they_are_so_that_padding_changes_nothing():
    torch.manual_seed(0)
    weights, zeros = torch.randn(3, 8, 24), torch.zeros(3, 8, 24)
    weights[1] = 0
    gradient, before = torch.randn(3, 8, 24), weights.clone()
    gradient[1:] = 0
    numbers = torch.tensor([0.1, 0.0, 0.9, 0.95])
    script.normuon_update(weights, gradient, zeros, torch.zeros(3, 1, 24), torch.ones(3, 1, 1), *numbers, torch.float32)
    assert torch.equal(weights[1:], before[1:]) and not torch.equal(weights[0], before[0])
    assert torch.isfinite(weights).all()


def test_an_update_of_zero_agrees_with_every_weight_in_muons_decay_and_with_none_in_adams():
    weights, zeros, rates = torch.randn(2, 8, 8), torch.zeros(2, 8, 8), torch.tensor([1.0, 4.0]).view(2, 1, 1)
    decayed, numbers = weights.clone(), torch.tensor([0.1, 1.2, 0.9, 0.95])
    script.normuon_update(decayed, zeros, zeros.clone(), torch.zeros(2, 8, 1), rates, *numbers, torch.float32)
    torch.testing.assert_close(decayed, weights * (1 - 1.2 * 0.1**2 * rates))
    kept, numbers = weights.clone(), torch.tensor([0.1, 0.005, 0.35, 0.05])
    script.adam_update(kept, zeros, zeros.clone(), zeros.clone(), *numbers, 0.65, 0.95, 1e-10)
    assert torch.equal(kept, weights)


# ---- Adam with cautious decay, every second step ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_adam_uses_the_gradients_of_both_steps_and_decays_only_where_the_update_agrees(dtype, error):
    """Against a loop over the entries. One row never has a gradient: it does not decay either. The embedding tables of
    the 8xH100 track are in bfloat16."""
    torch.manual_seed(0)
    s = settings(adam_every=2)
    param = torch.nn.Parameter(torch.randn(5, 4).to(dtype))
    weights = param.detach().double().numpy().copy()
    adam = script.Adam("table", [param], world(), s, 0.3, (0.7, 0.9), 1e-10, 0.5)
    mean, square, decayed, kept, updates = np.zeros((5, 4)), np.zeros((5, 4)), 0, 0, 0
    for step, factor in enumerate([1, 1, 0.5, 0.5, 0.2, 0.2]):
        gradient = torch.randn(5, 4).to(dtype)
        gradient[3] = 0
        kept, param.grad = kept + gradient.double().numpy(), gradient.clone()
        with torch.no_grad():
            adam.take_gradient(due=step % 2 == 1)
        if step % 2 == 0:
            continue
        updates, rate = updates + 1, 0.3 * factor
        for entry in np.ndindex(5, 4):
            mean[entry] = 0.7 * mean[entry] + 0.3 * kept[entry]
            square[entry] = 0.9 * square[entry] + 0.1 * kept[entry] ** 2
            change = rate * (mean[entry] / (1 - 0.7**updates))
            change /= math.sqrt(square[entry] / (1 - 0.9**updates)) + 1e-10
            agrees = change * weights[entry] > 0
            decayed += agrees
            weights[entry] -= change + (0.5 * rate**2 * weights[entry] if agrees else 0)
        kept = 0
        with torch.no_grad():
            adam.finish(step, factor)
    assert {param.dtype, *(value.dtype for value in adam.state.values())} == {dtype}
    np.testing.assert_allclose(param.detach().double().numpy(), weights, rtol=10 * error, atol=error)
    assert 10 < decayed < 38  # of 60: some agree, some do not


# ---- Stages and schedules --------------------------------------------------------------------------------------------


def test_the_stages_of_the_8xh100_record_are_the_published_ones_at_each_border():
    s = settings(on_gpu=True)
    stages = script.stages_of(s)
    expected = {  # step: tokens per sequence, factor of the rates before the cooldown, short and long window
        **dict.fromkeys((0, 1, 683), (16384, 1.00, 1, 3)),
        **dict.fromkeys((684, 1000, 1366), (32768, 1.51, 3, 7)),
        **dict.fromkeys((1367, 2000, 2049), (49152, 1.93, 5, 11)),
        **dict.fromkeys((2050, 2089), (49152, 1.93, 6, 13)),
        2090: (49152, 1.93, 6, 20),
    }
    assert s.num_iterations == 2090 and s.batch_sequences == 8
    assert {step: tuple(script.stage_at(step, stages))[1:] for step in expected} == expected
    thirds = [script.stage_at(step, stages).length * 8 for step in (0, 700, 1400)]
    assert thirds == [131_072, 262_144, 393_216]


def test_learning_rates_and_momentum_are_the_published_ones_at_each_border():
    """Cooldown over the last 0.55 of 2050 steps to 0.1, times 1, 1.51 and 1.93 in the thirds; 40 steps at the end."""
    s = settings(on_gpu=True)
    stages = script.stages_of(s)
    for step, top in (0, 1), (683, 1), (684, 1.51), (922, 1.51), (1366, 1.51), (1367, 1.93), (2049, 1.93):
        left = min(1, (2050 - step) / 2050 / 0.55)
        assert script.lr_factor(step, stages, s) == pytest.approx(top * left + (1 - left) * 0.1)
    assert script.lr_factor(922, stages, s) == 1.51 > script.lr_factor(923, stages, s)
    assert [script.lr_factor(step, stages, s) for step in (2050, 2070, 2089)] == pytest.approx([0.1] * 3)
    momentum = {0: 0.85, 150: 0.90, 300: 0.95, 2040: 0.95, 2065: 0.90, 2089: 0.852}
    assert {step: script.muon_momentum(step, s) for step in momentum} == pytest.approx(momentum)


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 100, 1045, 2091])
def test_a_run_of_any_length_is_divided_in_the_same_proportions(steps):
    stages = script.stages_of(settings(on_gpu=True, num_iterations=steps))
    first = [stage.first_step for stage in stages]
    assert first[0] == 0 and first[-1] == steps and first == sorted(first) and first[-2] > 0
    for part, step in zip((684, 1367, 2050), first[1:], strict=False):
        assert 0 <= step - steps * part / 2090 < 1


def test_a_run_takes_windows_positions_batch_and_rates_from_the_stage_at_each_border(folder, monkeypatch):
    monkeypatch.chdir(folder)
    s = settings(**TINY, train_files="data/tiny_train_*.bin")
    trainer = script.Trainer(s, world())
    batches = islice(script.DistributedDataLoader(s, world()).batches(0, [0, 0]), 9)
    lengths = [batch[0][0].size(-1) for _, batch in batches]
    assert lengths == [128, 128] + [256] * 7
    windows, tables = [], []
    for step in range(9):
        trainer.set_stage(step)
        windows.append(tuple(trainer.windows.tolist()))
        tables.append(trainer.model.rotary.cos_sin.clone())
    assert windows == [(1, 1)] * 2 + [(1, 2)] * 4 + [(2, 3)] * 2 + [(2, 4)]
    changed = [step for step in range(1, 9) if not torch.equal(tables[step], tables[step - 1])]
    assert changed == [2, 6]  # not where the window stays, nor for the last validation
    at_once, in_turn = script.Rotary(s), script.Rotary(s)
    at_once.fit([1, 3])
    in_turn.fit([1, 2, 3])
    torch.testing.assert_close(tables[6], in_turn.cos_sin)
    assert not torch.allclose(tables[6], at_once.cos_sin)  # the windows before count


@pytest.mark.parametrize(
    "stages",
    [
        "",
        "1 2 3",
        "1 1 1 1 1 0 1 1 1 1",  # a row too few
        TINY_STAGES + " 1",  # a word too many
        "a 1 1 1 1 1 1 1 1 1 0 1 1 1 1",
        "1 1 1 1 0 1 1 1 1 1 0 1 1 1 1",  # no window
        "1 " * 15,  # steps in the last row
        "1 1.5 1 1 1 1 1 1 1 1 0 1 1 1 1",  # a length that is not whole,
        "1 1 1 1 2.9 1 1 1 1 1 0 1 1 1 1",  # a window,
        "1.5 1 1 1 1 1 1 1 1 1 0 1 1 1 1",  # steps
    ],
)
def test_a_table_that_is_none_is_refused_in_one_line(folder, stages):
    result = run_script(flags(**TINY | dict(stages=stages)), folder, script=SCRIPT)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("train_gpt: --stages") and result.stderr.count("\n") == 1


# ---- Positions: YaRN -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [[3], [3, 7], [3, 7, 11, 13], [1, 1, 2]])
@pytest.mark.parametrize("head_dim", [128, 48])
@pytest.mark.parametrize("dtype, error", [("float32", 4e-5), ("bfloat16", 4e-3)])
def test_yarn_changes_frequencies_and_scale_by_the_formula(windows, head_dim, dtype, error):
    sizes = dict(num_heads=1, model_dim=head_dim, sequence_length=256, val_sequence_length=256)
    s = settings(**sizes, dtype=dtype, attention_scale=0.1, stages="1 1 1 1 1  0 1 1 1 1  0 1 1 1 1")
    rotary = script.Rotary(s)
    rotary.fit(windows)
    scale = 0.1
    for old, new in pairwise(windows):
        scale *= 1 + 0.2 * math.log(new / old)
    assert rotary.cos_sin.dtype == getattr(torch, dtype)  # that of the queries and keys
    cos, sin = rotary.cos_sin[:, :, 0].double()
    for i in range(head_dim // 2):
        frequency = 1024 ** (-i / (head_dim // 4 - 1)) if i < head_dim // 4 else 0.0
        for old, new in pairwise(windows):
            turns = old * 128 * frequency / (2 * math.pi)
            fast = min(max((turns - 1) / (32 - 1), 0), 1)
            frequency *= old / new * (1 - fast) + fast
        angle = torch.arange(len(cos), dtype=torch.float64) * frequency
        for channel, sign in (i, 1), (i + head_dim // 2, -1):
            within = dict(rtol=0, atol=error)  # as float32 has angles up to 256, and bfloat16 a cosine
            torch.testing.assert_close(cos[:, channel] / scale**0.5, angle.cos(), **within)
            torch.testing.assert_close(sign * sin[:, channel] / scale**0.5, angle.sin(), **within)
    assert rotary.still_D.tolist() == [i % (head_dim // 2) >= head_dim // 4 for i in range(head_dim)]


# ---- Norm ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 96), (5, 4, 56)])
@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_the_norm_and_its_gradient_are_those_of_torchs_rms_norm(shape, dtype, error):
    torch.manual_seed(0)
    x = (torch.randn(shape) * torch.logspace(-1, 3, shape[0]).view(-1, *[1] * (len(shape) - 1))).to(dtype)
    upstream, results = torch.randn(shape), []
    for function, inputs in ((script.norm, x), (lambda x: F.rms_norm(x, x.shape[-1:], eps=0.0), x.double())):
        inputs = inputs.clone().requires_grad_()
        y = function(inputs)
        y.backward(upstream.to(y.dtype))
        size = x.double().norm(dim=-1, keepdim=True)  # gradients fall as rows grow
        results.append((y.double(), inputs.grad.double() * size / shape[-1] ** 0.5))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=error, atol=5 * error)


def test_the_norm_of_nothing_is_nothing():
    x = torch.zeros(3, 8, requires_grad=True)
    script.norm(x).sum().backward()
    assert torch.equal(script.norm(x), torch.zeros(3, 8)) and x.grad.isfinite().all()


# ---- Threads that keep their memory ----------------------------------------------------------------------------------


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="heaps of threads are glibc's")
def test_a_thread_that_is_prepared_touches_its_memory_once_and_not_in_every_step():
    """50 MiB of a thread fill one heap, and 50 more come and go 13 times in the next, which is then empty each time.
    Counted are the page faults after the first time: 12,800 each for seven or more of 12. Prepared, a thread has them
    at most once, as it may settle in another of its heaps."""
    code = """if True:
        import importlib.util, resource, sys, threading, torch
        spec = importlib.util.spec_from_file_location("script", sys.argv[1])
        sys.modules["script"] = script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)

        def work(prepare, kept=[]):
            if prepare:
                script.prepare_thread(1, kept)
            stays = torch.ones(50 << 20, dtype=torch.uint8)
            for step in range(13):
                if step == 1:
                    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                comes_and_goes = torch.ones(50 << 20, dtype=torch.uint8)
                del comes_and_goes
            del stays
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

        faults = []
        for prepare in (False, True):
            thread = threading.Thread(target=work, args=(prepare,))
            thread.start()
            thread.join()
        print(*faults)
    """
    keep = dict(MALLOC_MMAP_THRESHOLD_="1073741824", MALLOC_TRIM_THRESHOLD_="4294967296", OMP_NUM_THREADS="1")
    found = subprocess.run([sys.executable, "-c", code, SCRIPT], env=os.environ | keep, capture_output=True, text=True)
    without, prepared = map(int, found.stdout.split())
    assert without > 50_000 and prepared < 14_000, found


# ---- Key offset, smear, skip, backout --------------------------------------------------------------------------------


def loop_attention(attention, x, value_embedding, documents, window, tables) -> np.ndarray:
    """One attention layer on one sequence, token by token in float64; `tables` are cosines and sines."""
    heads, head_dim = attention.s.num_heads, attention.s.model_dim // attention.s.num_heads
    q_w, k_w, v_w, o_w = (w.numpy() for w in attention.weights.detach().double())
    mix, project_mix = attention.matrix_mix.detach().double().tolist()
    gate_w, (cos, sin), half = attention.gate.detach().double().numpy(), tables, head_dim // 2

    def normed(vector):
        return vector / math.sqrt((vector**2).mean() + np.finfo(np.float32).eps)

    def turned(vector, t):
        return vector * cos[t] + np.roll(vector, half) * sin[t]

    queries, keys, values = np.empty((3, len(x), heads, head_dim))
    for t, row in enumerate(x):
        for h in range(heads):
            part = slice(h * head_dim, (h + 1) * head_dim)
            queries[t, h], keys[t, h] = (turned(normed(mix * w[part] @ row), t) for w in (q_w, k_w))
            values[t, h] = mix * v_w[part] @ row + (0 if value_embedding is None else value_embedding[t][part])
    if attention.shift_keys:
        for t in reversed(range(1, len(x))):
            for d in range(head_dim):
                if head_dim // 4 <= d < half or d >= half + head_dim // 4:
                    keys[t, :, d] = keys[t - 1, :, d]
    out = np.empty_like(x)
    for t, row in enumerate(x):
        mixed = []
        for h in range(heads):
            seen = [k for k in range(max(0, t - window * BLOCK), t + 1) if documents[k] == documents[t]]
            weight = np.exp([queries[t, h] @ keys[k, h] for k in seen])
            gate = 1 / (1 + math.exp(-gate_w[h] @ row[: gate_w.shape[1]]))
            mixed.append(gate * weight / weight.sum() @ values[seen, h])
        out[t] = project_mix * o_w @ np.concatenate(mixed)
    return out


def random_model(**changes):
    s = settings(**TINY | dict(num_layers=11, attention_scale=0.3, num_iterations=3) | changes)
    torch.manual_seed(3)
    model = script.GPT(s, use_flex=False)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "mix" in name:
                param.add_(0.3 * torch.randn_like(param))
            elif "head" in name or "gate" in name or "weights" in name or "value" in name:
                param.normal_(std=0.3)
    model.rotary.fit([1, 2])
    return model


@pytest.mark.parametrize("offset", ["long", "all"])
def test_hidden_states_are_those_of_the_layers_written_out_token_by_token(offset):
    """Smear, key offset in the right layers, windows, one skip, backout, value tables and the layer without attention.
    One sequence starts in the middle of a document."""
    model = random_model(key_offset=offset)
    tokens = torch.from_numpy(made_up_tokens(512, seed=4)).view(2, 256)
    tokens[:, 100] = START
    with torch.no_grad():
        ours = [model.hidden(sequence, torch.tensor([1, 2])).double().numpy() for sequence in tokens]
    smear, skip, backout = model.shortcut_mix.detach().double().tolist()
    tables = model.rotary.cos_sin[:, :, 0].double().numpy()
    embedding, gate = model.embedding.weight.detach().double().numpy(), model.smear_gate.detach().double().numpy()[0]
    values = [table.weight.detach().double().numpy() for table in model.value_embedding]

    def norm(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + np.finfo(np.float32).eps)

    for sequence in range(2):
        ids = tokens[sequence].tolist()
        documents = np.cumsum([token == START for token in ids]).tolist()
        rows = embedding[ids]
        x = rows.copy()
        for t in range(1, len(ids)):
            x[t] += smear / (1 + math.exp(-gate @ rows[t][:12])) * rows[t - 1]
        x, outputs = norm(x), []
        x0 = x
        for layer, block in enumerate(model.blocks):
            if layer == 6:
                assert block.attention is None
                x = x + outputs[3] / (1 + math.exp(-skip))
            own, embedded = block.embedding_mix.detach().double().tolist()
            x = own * x + embedded * x0
            if layer != 6:
                table = {1: 1, 2: 2, 8: 0, 9: 1, 10: 2}.get(layer)
                value = None if table is None else values[table][ids]
                assert block.attention.shift_keys == (offset == "all" or layer in (3, 10))
                window = 2 if layer in (3, 10) else 1
                x = x + loop_attention(block.attention, norm(x), value, documents, window, tables)
            expand, project = block.mlp.weights.detach().double().numpy()
            x = x + np.maximum(norm(x) @ expand, 0) ** 2 @ project.T
            outputs.append(x)
        theirs = norm(x - backout * outputs[7])
        np.testing.assert_allclose(ours[sequence], theirs, rtol=0, atol=2e-3)


def test_each_token_finds_what_the_one_before_it_has_and_the_first_its_own():
    x = torch.randn(12, 3, 2)
    assert torch.equal(script.previous_token(x), torch.stack([x[max(t - 1, 0)] for t in range(12)]))


def test_a_model_starts_as_published():
    """Residual weights of 1.1, half of q, k and v, no smear, a skip of sigmoid(-1.5), half of layer 7 taken back, value
    tables and head at zero."""
    s = settings(on_gpu=True, num_heads=2, model_dim=32, vocab_size=300, document_token=299, dtype="float32")
    model = script.GPT(s, use_flex=False)
    assert len(model.blocks) == 11 and [b.attention is None for b in model.blocks] == [i == 6 for i in range(11)]
    assert [b.embedding_mix.tolist() for b in model.blocks] == [pytest.approx([1.1, 0])] * 11
    assert [b.attention.matrix_mix.tolist() for b in model.blocks if b.attention] == [[0.5, 1.0]] * 10
    assert model.shortcut_mix.tolist() == [0, -1.5, 0.5] and not model.smear_gate.any()
    assert len(model.value_embedding) == 3 and not any(table.weight.any() for table in model.value_embedding)
    assert not model.head.weight.any() and model.embedding.weight.float().std().item() == pytest.approx(1, rel=0.05)
    assert (script.CausalSelfAttention.rates, script.MLP.rates) == ((1, 1, 1, 1), (2, 4))
    for layer in [block.mlp for block in model.blocks] + [block.attention for block in model.blocks if block.attention]:
        *random, last = layer.weights.detach()
        assert not last.any()
        assert [w.std().item() for w in random] == [pytest.approx(0.5 / 32**0.5, rel=0.1)] * len(random)


def test_the_settings_of_the_8xh100_track_are_those_of_the_public_record():
    """Sizes, schedules and optimizers; the table of stages is above. eps is the one of the record before."""
    model = dict(num_layers=11, num_heads=6, model_dim=768, vocab_size=50257, document_token=50256)
    model |= dict(attention_scale=0.1, key_offset="long", gate_channels=12, logit_softcap=15, fp8_head=True)
    data = dict(sequence_length=16384, batch_sequences=8, max_document=2048, val_tokens=10485760)
    data |= dict(val_sequence_length=262144, target_loss=3.28, bfloat16_embeddings=True)
    steps = dict(num_iterations=2090, cooldown_frac=0.55, final_lr=0.1)
    adam = dict(embedding_lr=0.6, head_lr=0.008, gate_lr=0.008, scalar_lr=0.04, adam_beta1=0.65, adam_beta2=0.95)
    adam |= dict(adam_decay=0.005, adam_every=2, adam_eps=1e-10, scalar_eps=1e-10)
    muon = dict(muon_lr=0.023, muon_beta2=0.95, muon_decay=1.2, momentum_start=0.85, momentum_end=0.95)
    muon |= dict(momentum_warmup=300, momentum_cooldown=50)
    expected, found = model | data | steps | adam | muon, vars(settings(on_gpu=True))
    assert {name: found[name] for name in expected} == expected
    neither = {"train_files", "val_files", "stages", "seed", "val_loss_every", "dtype", "compile", "coordinate_descent"}
    neither |= {"recompute", "kernel_warmup_steps", "collective_timeout", "log_dir", "checkpoint_dir", "save_every"}
    assert found.keys() - expected.keys() == neither | {"resume"}


def test_the_record_has_the_published_size():
    with torch.device("meta"):
        model = script.GPT(settings(on_gpu=True), use_flex=True)
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 3)
    tables = [model.embedding.weight, *model.value_embedding.parameters()]
    assert {tuple(p.shape) for p in model.blocks.parameters() if p.ndim == 3} == {(4, 768, 768), (2, 768, 3072)}
    assert matrices == (11 * 8 + 10 * 4) * 768**2 and model.head.weight.shape == (50304, 768)
    assert [(tuple(p.shape), p.dtype) for p in tables] == [((50304, 768), torch.bfloat16)] * 4
    assert {p.dtype for p in model.parameters() if all(p is not table for table in tables)} == {torch.float32}
    assert sum(p.numel() for name, p in model.named_parameters() if name.endswith("gate")) == 10 * 6 * 12 + 12


def test_a_new_model_guesses_uniformly():
    s = settings(**TINY | dict(num_layers=11))
    model, tokens = script.GPT(s, use_flex=False), torch.from_numpy(made_up_tokens(257, seed=5))
    model.rotary.fit([1])
    assert model(tokens[:-1], tokens[1:], torch.tensor([1, 1])).item() == pytest.approx(math.log(384), rel=1e-6)


@pytest.mark.parametrize("layers", [*range(2, 14), 18, 20])
def test_with_any_number_of_layers_every_parameter_gets_a_gradient(layers):
    tokens, model = torch.from_numpy(made_up_tokens(257, seed=5)), random_model(num_layers=layers)
    model(tokens[:-1], tokens[1:], torch.tensor([1, 2])).backward()
    assert [name for name, param in model.named_parameters() if param.grad is None or not param.grad.any()] == []


def test_a_new_parameter_that_no_optimizer_owns_does_not_go_unnoticed(monkeypatch):
    class WithOneMore(script.GPT):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.one_more = torch.nn.Parameter(torch.zeros(2, 2))

    monkeypatch.setattr(script, "GPT", WithOneMore)
    with pytest.raises(AssertionError, match="a parameter has no optimizer"):
        script.Trainer(settings(**TINY), world())


def test_logits_are_those_of_a_tanh_softcap_but_for_a_constant():
    model, x = random_model(), 30 * torch.randn(64, 32)
    expected = 15 * torch.tanh(x.double() @ model.head.weight.double().T / 15) + 15
    torch.testing.assert_close(model.logits(x).double(), expected, rtol=1e-5, atol=1e-4)
    assert expected.min() < 0.01 and expected.max() > 29.99


def test_training_rounds_logits_to_the_dtype_of_the_products_and_validation_does_not():
    model = random_model(dtype="bfloat16")
    x = torch.randn(5, 32).bfloat16()
    tokens, windows = torch.from_numpy(made_up_tokens(257, seed=5)), torch.tensor([1, 2])
    assert model.logits(x).dtype == torch.bfloat16
    rounded = model(tokens[:-1], tokens[1:], windows)
    with torch.no_grad():
        assert model.logits(x).dtype == torch.float32
        loss = model(tokens[:-1], tokens[1:], windows)
    assert rounded.dtype == loss.dtype == torch.float32 and rounded.item() == pytest.approx(loss.item(), rel=5e-3)


# ---- The loader ------------------------------------------------------------------------------------------------------


def sequences_by_hand(contents, steps, lengths, longest, count) -> list[list[list[int]]]:
    """By the rule, token by token: documents in order, each cut at `longest`, the last of a sequence to fit. A batch
    that a shard cannot fill starts again in the next one. No document starts with the last token of a shard."""
    batches, shard, document, failed = [], 0, 0, 0
    while len(batches) < steps and failed <= len(contents):
        tokens = contents[shard % len(contents)].tolist()
        starts = [i for i, token in enumerate(tokens[:-1]) if token == START] + [len(tokens)]
        batch, current, i = [], [], document
        while i + 1 < len(starts) and len(batch) < count:
            for token in tokens[starts[i] : starts[i + 1]][:longest]:
                if len(current) <= lengths[len(batches)]:
                    current.append(token)
            i += 1
            if len(current) == lengths[len(batches)] + 1:
                batch, current = [*batch, current], []
        if len(batch) == count:
            batches, document, failed = [*batches, batch], i, 0
        else:
            shard, document, failed = shard + 1, 0, failed + 1
    return batches


@pytest.fixture
def shards(tmp_path):
    """Documents of one to 600 tokens; the first shard starts inside one, the second has too few for a batch."""
    random, contents = np.random.default_rng(0), []
    for i, length in enumerate([30_000, 1_000, 25_000]):
        tokens = np.arange(length) % 250
        tokens[np.minimum(5 + np.cumsum(random.integers(1, 600, length // 200)), length - 1)] = START
        write_shard(tmp_path / f"s_{i}.bin", tokens)
        contents.append(tokens)
    return tmp_path, contents


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_sequences_are_documents_in_order_cut_at_the_same_place_for_every_number_of_processes(shards, size):
    folder, contents = shards
    wanted = TINY | dict(batch_sequences=9, train_files=f"{folder}/s_*.bin", num_iterations=16)
    s = script.make_settings(wanted, processes=size, on_gpu=False)
    lengths = [128] * 4 + [256] * 12
    expected = sequences_by_hand(contents, 16, lengths, 200, 9)
    ranks = [script.DistributedDataLoader(s, world(rank, size)).batches(0, [0, 0]) for rank in range(size)]
    positions = set()
    for step, batch in enumerate(expected):
        for rank, ours in enumerate(ranks):
            position, sequences = next(ours)
            positions.add((step, *position))
            for (inputs, targets), sequence in zip(sequences, batch[rank::size], strict=True):
                assert inputs.dtype == torch.int32 and targets.dtype == torch.int64 and inputs[0] == START
                assert (inputs.tolist(), targets.tolist()) == (sequence[:-1], sequence[1:])
    assert len(positions) == 16 and {number % 3 for _, number, _ in positions} == {0, 2}  # the second is never enough


def test_a_thread_reads_the_next_batch_before_anybody_asks_for_it(shards):
    s = settings(**TINY, train_files=f"{shards[0]}/s_*.bin")
    loader, readers, second = script.DistributedDataLoader(s, world()), [], threading.Event()
    read_batch = loader.read_batch

    def watched(*arguments):
        batch = read_batch(*arguments)
        readers.append(threading.current_thread())
        if len(readers) == 2:
            second.set()
        return batch

    loader.read_batch = watched
    batches = loader.batches(0, [0, 0])
    next(batches)
    assert second.wait(60) and len(readers) == 2 and threading.main_thread() not in readers


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=12), st.integers(0, 200), st.integers(1, 3), st.integers(1, 500)
)
@hypothesis.settings(max_examples=100, deadline=None)
def test_wherever_documents_start_the_sequences_are_those_found_by_hand(lengths, before_the_first, count, longest):
    tokens = np.arange(before_the_first + sum(lengths)) % 256
    tokens[before_the_first + np.cumsum([0, *lengths[:-1]])] = START
    expected = sequences_by_hand([tokens], 4, [128] * 4, longest, count)
    with tempfile.TemporaryDirectory() as folder:
        path = str(write_shard(Path(folder) / "s_0.bin", tokens))
        wanted = dict(
            train_files=path, batch_sequences=count, max_document=longest, stages="1 1 1 1 1 " * 2 + "0 1 1 1 1"
        )
        s = settings(**TINY | wanted)
        if not expected:
            with pytest.raises(script.UserError, match=f"{path}: no shard has documents for {count} x 128 tokens"):
                script.DistributedDataLoader(s, world())
            return
        ours = script.DistributedDataLoader(s, world()).batches(0, [0, 0])
        for batch in expected:
            found = [(inputs.tolist(), targets.tolist()) for inputs, targets in next(ours)[1]]
            assert found == [(sequence[:-1], sequence[1:]) for sequence in batch]
        ours.close()  # its thread reads the file


@pytest.mark.parametrize("left", [1501, 20_001])
def test_a_shard_that_changes_at_the_last_moment_is_one_line_and_kills_nobody(tmp_path, monkeypatch, left):
    path = write_shard(tmp_path / "s.bin", made_up_tokens(9_000))
    shard, pread = script.Shard(str(path), 257), os.pread

    def change_and_read(*args) -> bytes:
        os.truncate(path, left)
        return pread(*args)

    monkeypatch.setattr(script.os, "pread", change_and_read)
    with pytest.raises(script.UserError, match="its size changed while it was in use"):
        shard.read((100, 8_000))


def test_the_loader_goes_on_from_any_position_also_at_the_border_of_stages(shards):
    s = settings(**TINY | dict(train_files=f"{shards[0]}/s_*.bin"))
    loader = script.DistributedDataLoader(s, world())
    first = list(islice(loader.batches(0, [0, 0]), 8))
    for step in range(8):
        again = loader.batches(step, json.loads(json.dumps(first[step][0])))  # plain numbers, as in a checkpoint
        for position, batch in first[step:]:
            theirs, other = next(again)
            assert theirs == position and torch.equal(batch[0][0], other[0][0])


def test_shards_without_enough_documents_are_refused_in_one_line(folder):
    result = run_script(
        flags(**TINY | dict(batch_sequences=400, train_files="data/tiny_train_*.bin")), folder, script=SCRIPT
    )
    assert result.returncode == 2 and "400 x 256 tokens" in result.stderr and result.stderr.count("\n") == 1


# ---- Whole runs ------------------------------------------------------------------------------------------------------

FILES = dict(train_files="data/tiny_train_*.bin", val_files="data/tiny_val_*.bin")


def trained(folder, name: str, processes: int = 1, **changes) -> list[float]:
    places = dict(log_dir=f"{name}/logs", checkpoint_dir=f"{name}/checkpoints")
    result = run_script(flags(**TINY | FILES | places | changes), folder, processes, SCRIPT)
    assert (result.returncode, "Traceback" in result.stderr) == (0, False), result.stderr
    log = only_log(folder / name).read_text()
    return train_losses(log) + val_losses(log)


def test_resumed_between_two_adam_updates_and_at_borders_a_run_has_the_same_bits(folder, monkeypatch):
    """After every step of a run of 8 with stages of 2, 2, 2 and 2: Adam's updates are after the odd ones."""
    monkeypatch.chdir(folder)
    s = settings(**TINY | FILES)
    loader = script.DistributedDataLoader(s, world())

    straight = script.Trainer(s, world())
    batches = list(islice(loader.batches(0, [0, 0]), 8))
    saved, losses = [], []
    for step, (_, batch) in enumerate(batches):
        losses.append(straight.backward(batch, step)[0])
        state = straight.state()  # as a run saves: after the backward pass, before the update
        saved.append({part: {name: x.clone() for name, x in tensors.items()} for part, tensors in state.items()})
        assert bool(state["gradients"]) == (step % 2 == 1)
        straight.update(step)
    assert losses[-1] < losses[0] - 0.5
    for step in range(8):
        resumed = script.Trainer(s, world())
        resumed.warm_up(loader)
        resumed.load_state(saved[step])
        for later in range(step, 8):
            assert resumed.backward(batches[later][1], later)[0] == losses[later]
            resumed.update(later)
        for part, tensors in straight.state().items():
            others = resumed.state()[part]
            assert tensors.keys() == others.keys() and all(torch.equal(tensors[x], others[x]) for x in tensors)


def test_two_processes_resume_between_adam_updates_with_the_same_bits_and_three_within_rounding(folder):
    """A run of two processes saves after step 5, at a border of the stages after step 6, and goes on."""
    straight = trained(folder, "straight", 2, save_every=3)
    trained(folder, "short", 2, save_every=5, val_loss_every=0)
    middle = checkpoint(folder, 5, "short/checkpoints")
    gradients = torch.load(middle, weights_only=True)["state"]["gradients"]
    assert gradients and all(len(kept) == 2 for kept in gradients.values())  # one of each process
    losses = {}
    for processes in (2, 3):
        places = dict(log_dir=f"again{processes}/logs", checkpoint_dir=f"again{processes}/checkpoints")
        result = run_script(flags(resume=middle, save_every=3, **places), folder, processes, SCRIPT)
        assert result.returncode == 0, result.stderr
        log = only_log(folder / f"again{processes}").read_text()
        losses[processes] = train_losses(log) + val_losses(log)
    assert losses[2] == straight[5:]
    assert losses[3] == pytest.approx(straight[5:], rel=1e-4)
    for step in (6, 8):
        ours, theirs = (checkpoint(folder, step, f"{name}/checkpoints") for name in ("straight", "again2"))
        assert differences(ours, theirs) == []


def test_threads_give_the_same_bits_as_one_thread_however_they_are_scheduled(folder, monkeypatch):
    """Five sequences on one core, in turn, and on three, in threads: losses, weights and validation."""
    monkeypatch.chdir(folder)
    s = settings(**TINY | FILES | dict(batch_sequences=5))
    loader, shard, cores = script.DistributedDataLoader(s, world()), script.Shard("data/tiny_val_000000.bin", 257), 3
    found, at_once, threads = [], [], torch.get_num_threads()
    for count in (1, cores, cores):
        torch.set_num_threads(count)
        trainer, going = script.Trainer(s, world()), []
        loss = trainer.loss

        def watched(*args, loss=loss, going=going):
            going.append(1)
            at_once.append(len(going))
            result = loss(*args)
            going.pop()
            return result

        trainer.loss = watched
        results = []
        for step, (_, batch) in enumerate(islice(loader.batches(0, [0, 0]), 4)):
            results += [trainer.backward(batch, step)[0], trainer.validate(shard, step)]
            trainer.update(step)
        found.append((results, trainer.model.state_dict()))
    torch.set_num_threads(threads)
    assert max(at_once) > 1, "nothing ran at the same time"
    for results, weights in found[1:]:
        assert results == found[0][0] and all(torch.equal(weights[name], found[0][1][name]) for name in weights)


def test_one_and_three_processes_give_the_same_losses(folder):
    one, three = (trained(folder, f"{size}", size, val_loss_every=2) for size in (1, 3))
    assert len(one) == 8 + 5 and three == pytest.approx(one, rel=1e-4)


def test_warm_up_leaves_no_trace_and_has_every_length_of_sequence(folder, monkeypatch):
    monkeypatch.chdir(folder)
    s = settings(**TINY | FILES | dict(kernel_warmup_steps=3))  # an odd number: Adam's gradients are kept at its end
    trainers = [script.Trainer(s, world()) for _ in range(2)]
    seen, backward = set(), trainers[1].backward
    trainers[1].backward = lambda batch, step: seen.add((batch[0][0].size(-1), step % 2)) or backward(batch, step)
    loader = script.DistributedDataLoader(s, world())
    trainers[1].warm_up(loader)
    trainers[1].backward = backward
    assert seen == {(length, parity) for length in (128, 256) for parity in (0, 1)}
    for step, (_, batch) in enumerate(islice(loader.batches(0, [0, 0]), 3)):
        losses = [trainer.backward(batch, step) for trainer in trainers]
        assert losses[0] == losses[1]
        for trainer in trainers:
            trainer.update(step)
    for part, tensors in trainers[0].state().items():
        others = trainers[1].state()[part]
        assert tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)


def test_no_graph_is_compiled_after_the_warm_up_in_any_stage(folder, monkeypatch):
    """Dynamo traces as it does for a GPU; what it finds is not compiled further, to save time. On a CPU, unlike on a
    GPU, every window is a graph of its own, also that of the last validation."""
    monkeypatch.chdir(folder)
    compiler, graphs = torch.compile, torch._dynamo.utils.counters["stats"]
    monkeypatch.setattr(torch, "compile", lambda work, **options: compiler(work, backend="eager", **options))
    torch._dynamo.reset()
    s = settings(**TINY | FILES | dict(compile=True))
    loader, shard = script.DistributedDataLoader(s, world()), script.Shard("data/tiny_val_000000.bin", s.vocab_size)
    trainer = script.Trainer(s, world())
    with torch._dynamo.config.patch(recompile_limit=100):
        before = graphs["unique_graphs"]
        trainer.warm_up(loader)
        warm = graphs["unique_graphs"]
        for step, (_, batch) in enumerate(islice(loader.batches(0, [0, 0]), 8)):
            trainer.validate(shard, step)
            trainer.backward(batch, step)
            trainer.update(step)
        trainer.validate(shard, 8)
    assert graphs["unique_graphs"] == warm > before + 8  # two lengths, a validation, and each kind of update
