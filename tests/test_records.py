"""The scripts of the records: what is special about each, against references written for these tests."""

import difflib
import importlib.util
import itertools
import math
import re
import signal
import subprocess
import sys
from dataclasses import fields, replace
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import ROOT, TINY, flags, made_up_tokens, only_log, run_script, train_losses, val_losses, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from records.logs import read_log

BLOCK = 128
NAMES = ["0_Baseline", "2024-11-24_WindowWarmup", "2024-12-08_UNetValueEmbeds", "2024-12-10_BlockWindow",
         "2024-12-17_SparsifyEmbeds", "2025-01-04_SoftCap"]


def path_of(name: str):
    return ROOT / "records" / name / "train_gpt.py"


def load(name: str):
    """A record's script as a module of that name."""
    spec = importlib.util.spec_from_file_location(name, path_of(name))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


SCRIPTS = [load(name) for name in NAMES]
BASELINE, WINDOW_WARMUP, UNET, BLOCK_WINDOW, SPARSIFY, SOFT_CAP = SCRIPTS
SYSTEMS = SCRIPTS[1:]


def of(scripts):
    """The test for each of these scripts."""
    return pytest.mark.parametrize("script", scripts, ids=name_of)


def name_of(value):
    return getattr(value, "__name__", None)


def tiny_settings(script, **changes) -> dict:
    """Settings that take a moment: of these and TINY's, the ones that the script has."""
    wanted = dict(TINY, context_length=128, compile=False) | changes
    return {field.name: wanted[field.name] for field in fields(script.Hyperparameters) if field.name in wanted}


def tiny(script, **changes):
    return script.Hyperparameters(**tiny_settings(script, **changes))


def alone(script):
    return script.World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def window_of(trainer) -> torch.Tensor:
    """In tokens or in blocks, as the record counts."""
    return trainer.window if hasattr(trainer, "window") else trainer.window_blocks


def stir(model):
    """Let nothing hide behind a zero or a one: the mixes, biases and projections get values of their own."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim < 2 or param.eq(0).all():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.5)
    return model


def random_batch(sequences: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sequences of 256 tokens that each start a document, and their targets."""
    tokens = torch.randint(256, (sequences, 2, 256), generator=torch.Generator().manual_seed(4))
    tokens[:, 0, 0] = 256
    return [(inputs.to(torch.int32), targets) for inputs, targets in tokens]


# ----------------------------------------------------------------------------------------------------
# All six: settings, rooms, data
# ----------------------------------------------------------------------------------------------------


@of(SCRIPTS)
def test_help_lists_every_setting_with_its_default(script, capsys):
    with pytest.raises(SystemExit) as end:
        script.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert not end.value.code
    for field in fields(script.Hyperparameters):
        assert f"--{field.name} " in text and f"[{field.default}" in text


@of(SCRIPTS)
def test_the_defaults_are_the_full_size_run_and_laptop_is_what_a_cpu_changes(script):
    types = {field.name: field.type for field in fields(script.Hyperparameters)}
    assert all(type(value) is types[name] for name, value in script.LAPTOP.items())
    full, laptop = (script.parse_settings([], on_cpu=on_cpu) for on_cpu in (False, True))
    assert full == script.Hyperparameters() and laptop == replace(full, **script.LAPTOP)
    for processes in (1, 2, 3, 8):
        script.check_settings(full, processes)
    for processes in (1, 2):
        script.check_settings(laptop, processes)


def test_importing_a_script_runs_nothing_and_needs_nothing_of_the_repository(tmp_path):
    for name in NAMES:
        (tmp_path / f"{name}.py").write_bytes(path_of(name).read_bytes())
    code = """if True:
        import importlib.util, os, pathlib, signal, sys, threading, torch

        def surroundings():
            return (dict(os.environ), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM),
                    threading.active_count(), torch.get_rng_state().tolist(), torch.get_num_threads(),
                    torch.distributed.is_initialized(), torch.cuda.is_initialized())

        before, paths = surroundings(), sorted(pathlib.Path().glob("*.py"))
        for path in paths:
            spec = importlib.util.spec_from_file_location(path.stem, path)
            sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        print(len(paths), surroundings() == before)
    """
    result = subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("6 True\n", "")
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(NAMES)


@of(SCRIPTS)
def test_a_bad_setting_gives_one_line_exit_code_2_and_no_log(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert script.main(["--num_iterations=0"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == f"train_gpt: --num_iterations 0: must be from 1 to {2**40}\n"
    assert script.main(["--model_dim=129"]) == 2
    assert re.fullmatch(r"train_gpt: --model_dim 129: must be a multiple of .*num_heads\n", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def rooms(name: str) -> dict[str, list[str]]:
    """The lines of a script by the boxed headings that they stand under."""
    box = re.compile(r"^# -{100}\n# ([\w ]+).*\n# -{100}\n", re.MULTILINE)
    _, *parts = box.split(path_of(name).read_text())
    return dict(zip(parts[::2], (text.splitlines() for text in parts[1::2]), strict=True))


# What a record changes beside its settings, its model, and what a training step does with them.
IDEAS = {
    "2024-11-24_WindowWarmup": {"Muon", "Attention", "Schedules"},
    "2024-12-08_UNetValueEmbeds": {"Muon", "Attention", "Schedules", "Data"},
    "2024-12-10_BlockWindow": {"Muon", "Attention", "Schedules"},
    "2024-12-17_SparsifyEmbeds": {"Muon", "Schedules"},
    "2025-01-04_SoftCap": {"Data", "Checkpoints"},
}


@pytest.mark.parametrize("before, after", [*itertools.pairwise(NAMES)])
def test_a_record_differs_from_the_one_before_only_in_the_rooms_that_its_ideas_concern(before, after):
    old, new = rooms(before), rooms(after)
    changed = {room for room in old | new if old.get(room) != new.get(room)}
    assert changed - {"Settings", "Model", "Training", "Processes"} == IDEAS[after]
    assert list(new) == ["Settings", "Muon", "Attention", "Model", "Data", "Schedules", "Run log", "Processes",
                         "Training", "Checkpoints", "The run"]


def changed_lines(old: list[str], new: list[str]) -> list[str]:
    """Without comments."""
    return [line[0] + line[2:].split("  # ")[0].strip() for line in difflib.ndiff(old, new)
            if line[0] in "-+" and not line[2:].strip().startswith("#")]


@pytest.mark.parametrize("before, after, expected", [
    ("0_Baseline", "2024-11-24_WindowWarmup", []),
    ("2024-11-24_WindowWarmup", "2024-12-08_UNetValueEmbeds", []),
    ("2024-12-08_UNetValueEmbeds", "2024-12-10_BlockWindow", ["+dist.barrier()"]),
    ("2024-12-10_BlockWindow", "2024-12-17_SparsifyEmbeds",
     ['+os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")']),
    ("2024-12-17_SparsifyEmbeds", "2025-01-04_SoftCap",
     ["+torch.empty(1, device=world.device, requires_grad=True).backward()"]),
])
def test_processes_start_and_end_alike_but_for_a_line_on_purpose(before, after, expected):
    def without_advice(name):
        return re.sub(r"(?s)def memory_advice.*?(?=\ndef )", "", "\n".join(rooms(name)["Processes"])).splitlines()

    assert changed_lines(without_advice(before), without_advice(after)) == expected


def test_checkpoints_of_the_last_record_differ_in_the_name_of_a_setting():
    old, new = (rooms(name)["Checkpoints"] for name in NAMES[-2:])
    (removed,), (added,) = (set(a) - set(b) for a, b in ((old, new), (new, old)))
    assert removed.replace("max_autotune", "coordinate_descent") == added


@of(SCRIPTS)
def test_validation_is_the_mean_loss_of_the_first_tokens_with_the_window_of_that_step(script, tmp_path):
    shard = script.Shard(str(write_shard(tmp_path / "val.bin", made_up_tokens(2000))), 257)
    trainer = script.Trainer(tiny(script), alone(script))
    stir(trainer.model)
    for step, blocks in (0, 1), (4, 3):  # TINY's window grows from 128 to 384 tokens
        window = {BASELINE: [], WINDOW_WARMUP: [128 * blocks], UNET: [128 * blocks]}.get(script, [blocks])
        losses = [trainer.model(*shard.sequence(start, 256), *map(torch.tensor, window))
                  for start in (0, 256, 512, 768)]
        assert trainer.validate(shard, step) == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


@of(SYSTEMS[1:])
def test_logits_are_squashed_by_the_softcap_that_is_set(script):
    plain, capped = (stir(script.build_model(tiny(script, logit_softcap=cap))) for cap in (1e6, 2.0))
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = plain.head(x)
        assert logits.abs().max() > 4
        torch.testing.assert_close(capped.logits(x), 2 * torch.tanh(logits / 2))


def test_the_tuning_of_the_last_record_is_inductors_coordinate_descent():
    with torch._inductor.config.patch():
        for tuning in (True, False):
            SOFT_CAP.Trainer(tiny(SOFT_CAP, coordinate_descent=tuning), alone(SOFT_CAP))
            assert torch._inductor.config.coordinate_descent_tuning is tuning


@of(SCRIPTS)
def test_the_records_with_six_tables_compute_again_to_save_memory_and_the_others_may(script):
    assert script.Hyperparameters().recompute == (script in (UNET, BLOCK_WINDOW))
    with script.functorch_config.patch():
        for recompute in (True, False):
            script.Trainer(tiny(script, recompute=recompute), alone(script))
            assert script.functorch_config.ban_recompute_materialized_backward is not recompute


@of(SCRIPTS)
def test_a_step_takes_the_next_sequences_of_the_stream_whatever_the_number_of_processes(script, tmp_path):
    tokens = [made_up_tokens(3000, seed) for seed in (1, 2)]
    paths = [str(write_shard(tmp_path / f"{i}.bin", shard)) for i, shard in enumerate(tokens)]
    batches = [(0, 0), (0, 1024), (1, 0), (1, 1024), (0, 0)]  # on when the rest of a shard is smaller than a batch
    for size in (1, 2, 3):
        loaders = [script.Loader(paths, tiny(script), script.World(rank, size, rank, torch.device("cpu")))
                   for rank in range(size)]
        for shard, first in batches:
            shares = [loader.next_batch(lambda notice: None) for loader in loaders]
            for number in range(4):
                inputs, targets = shares[number % size][number // size]
                start = first + number * 256
                assert inputs.dtype == torch.int32 and inputs.tolist() == tokens[shard][start:start + 256].tolist()
                assert targets.dtype == torch.int64
                assert targets.tolist() == tokens[shard][start + 1:start + 257].tolist()


@of(SCRIPTS[:-1])
def test_a_shard_is_read_into_memory_as_16_bit_tokens(script, tmp_path):
    path = write_shard(tmp_path / "shard.bin", np.arange(300))
    shard = script.Shard(str(path), 300)
    path.write_bytes(b"")
    assert isinstance(shard.tokens, torch.Tensor) and shard.tokens.dtype == torch.uint16 and len(shard) == 300
    assert [x.tolist() for x in shard.sequence(256, 3)] == [[256, 257, 258], [257, 258, 259]]


def test_the_last_record_maps_its_shards(tmp_path):
    path = write_shard(tmp_path / "shard.bin", np.arange(300))
    shard = SOFT_CAP.Shard(str(path), 300)
    assert isinstance(shard.tokens, np.memmap)
    path.write_bytes(b"")
    with pytest.raises(SOFT_CAP.UserError, match="was changed while it was in use"):
        shard.sequence(0, 3)


# ----------------------------------------------------------------------------------------------------
# Schedules and sizes at full size, as published
# ----------------------------------------------------------------------------------------------------


def schedule_of(script, **changes) -> list[tuple[int, float, float]]:
    """Window, learning-rate factor and Muon's momentum before the update of each step of a full-size run."""
    full = script.Hyperparameters()
    windows = {name: getattr(full, name) for name in ("window_start", "window_end")}
    trainer = script.Trainer(tiny(script, num_iterations=full.num_iterations, **windows | changes), alone(script))
    schedule = []
    for step in range(full.num_iterations):
        trainer.set_schedules(step)
        (factor,) = {round(group["lr"] / rate, 12)
                     for group, rate in zip(trainer.groups(), trainer.full_rates, strict=True)}
        (momentum,) = {group["momentum"] for group in trainer.muon.param_groups}
        schedule.append((window_of(trainer).item(), factor, momentum))
    return schedule


@pytest.mark.parametrize("script, steps, windows, changes, cools_from, last_rate", [
    (WINDOW_WARMUP, 1750, [64, 128, 320, 896, 1728], {65: 128, 130: 192, 195: 256}, 1111, 0.0015625),
    (UNET, 1480, [64, 128, 384, 896, 1728], {55: 128, 110: 192, 165: 256}, 881, 0.00166667),
    (BLOCK_WINDOW, 1480, [1, 1, 3, 7, 14], {110: 2, 220: 3, 329: 4}, 881, 0.00166667),
    (SPARSIFY, 1490, [1, 1, 3, 7, 14], {111: 2, 221: 3, 332: 4}, 891, 0.00166667),
    (SOFT_CAP, 1390, [1, 1, 3, 7, 14], {103: 2, 206: 3, 309: 4}, 835, 0.00179856),
], ids=name_of)
def test_schedules_at_full_size(script, steps, windows, changes, cools_from, last_rate):
    assert script.Hyperparameters().num_iterations == steps
    window, rate, momentum = zip(*schedule_of(script, cooldown_shape="linear"), strict=True)
    assert [window[step] for step in (0, 100, 300, steps // 2, steps - 1)] == windows
    changed = [step for step in range(1, steps) if window[step] != window[step - 1]]
    assert {step: window[step] for step in changed[:3]} == changes
    stride = 64 if windows[0] == 64 else 1
    assert [window[step] for step in changed] == [*range(windows[0] + stride, windows[-1] + 1, stride)]
    assert next(step for step in range(steps) if rate[step] < 1 - 1e-9) == cools_from
    assert set(rate[:cools_from]) == {1} and rate[-1] == pytest.approx(last_rate, rel=1e-5)
    falls = np.diff(rate[cools_from:])
    assert np.allclose(falls, -last_rate, rtol=1e-4)  # in a straight line, to zero after the last step
    assert [momentum[0], momentum[100]] == [pytest.approx(0.85), pytest.approx(0.883333, abs=1e-6)]
    assert set(np.round(momentum[300:], 12)) == {0.95} and list(momentum) == sorted(momentum)


@pytest.mark.parametrize("script, tables, table_rows, attentions, scalar_dtype", [
    (WINDOW_WARMUP, 1, 50304, 12, torch.bfloat16),
    (UNET, 7, 50304, 12, torch.bfloat16),
    (BLOCK_WINDOW, 7, 50304, 12, torch.bfloat16),
    (SPARSIFY, 4, 50257, 11, torch.bfloat16),
    (SOFT_CAP, 4, 50304, 11, torch.float32),
], ids=name_of)
def test_the_model_has_the_published_size_and_types(script, tables, table_rows, attentions, scalar_dtype):
    full = replace(script.Hyperparameters(), dtype="bfloat16")
    with torch.device("meta"):
        model = script.build_model(full)
    params = dict(model.named_parameters())
    table_names = {name for name in params if "embedding" in name and params[name].ndim == 2}
    matrix_names = {name for name in params if params[name].ndim == 2} - table_names - {"head.weight"}
    scalar_names = params.keys() - table_names - matrix_names - {"head.weight"}
    assert full.sequence_length == 65536 and full.batch_sequences == 8 and full.val_tokens == 10485760
    assert full.val_loss_every == 125 and full.save_every == 0
    assert len(model.blocks) == 12 and model.head.weight.shape == (50304, 768)
    with_attention = [block.attention for block in model.blocks if block.attention is not None]
    assert len(with_attention) == attentions and {attention.head_dim for attention in with_attention} == {128}
    assert [params[name].shape for name in table_names] == [(table_rows, 768)] * tables
    assert sum(params[name].numel() for name in matrix_names) == (12 * 8 + attentions * 4) * 768**2
    assert {params[name].dtype for name in table_names} == {torch.bfloat16}
    assert {params[name].dtype for name in scalar_names} == {scalar_dtype}
    assert {params[name].dtype for name in matrix_names | {"head.weight"}} == {torch.float32}


@of(SYSTEMS)
def test_logits_stay_within_the_softcap(script):
    softcap = 15 if script is SOFT_CAP else 30
    logits = stir(script.build_model(tiny(script))).logits(1e3 * torch.randn(64, 32))
    assert logits.dtype == torch.float32 and 0.99 * softcap < logits.abs().max() <= softcap


@of(SYSTEMS)
def test_the_optimizers_are_the_published_ones(script):
    s = script.Hyperparameters()
    trainer = script.Trainer(tiny(script), alone(script))
    adam_groups = [group for group in trainer.groups() if "betas" in group]
    assert [group["lr"] for group in trainer.groups()] == [0.6, 0.008, 0.04] + [0.05] * len(trainer.muon.param_groups)
    assert all(group["betas"] == (0.8, 0.95) and group["fused"] for group in adam_groups)
    names = {param: name for name, param in trainer.model.named_parameters()}
    tables, head, scalars = ([names[param] for param in group["params"]] for group in adam_groups)
    matrices = [names[param] for group in trainer.muon.param_groups for param in group["params"]]
    assert sorted(names.values()) == sorted(tables + head + scalars + matrices)
    assert all("embedding" in name for name in tables) and head == ["head.weight"]
    assert all(name.startswith("blocks.") for name in matrices) and not [n for n in scalars if n.endswith("weight")]
    assert (s.momentum_start, s.momentum_end, s.momentum_warmup, s.ns_steps) == (0.85, 0.95, 300, 5)
    assert isinstance(getattr(trainer, "adam", None), torch.optim.Adam) == (script is SOFT_CAP)  # one for all groups


@of(SYSTEMS)
def test_a_new_model_guesses_uniformly_and_its_mixes_start_as_published(script):
    model = script.build_model(tiny(script, num_layers=4))
    (inputs, targets), = random_batch(1)
    assert model(inputs, targets, torch.tensor(128)).item() == pytest.approx(math.log(384), rel=1e-6)
    for name, param in model.named_parameters():
        start = {"embedding_mix": [1, 0], "skip_weights": [1, 1],
                 "value_mix": 0.5 if script is WINDOW_WARMUP else [0.5, 0.5]}.get(name.split(".")[-1])
        assert param.tolist() == start if start is not None else bool(param.eq(0).all()) == (
            name.endswith("project.weight") or name == "head.weight")


def test_the_last_record_is_the_current_script():
    assert path_of(NAMES[-1]).read_bytes() == (ROOT / "train_gpt.py").read_bytes()


# ----------------------------------------------------------------------------------------------------
# Masks, against dense ones made with plain loops
# ----------------------------------------------------------------------------------------------------


def dense_mask(documents: list[int], in_window) -> torch.Tensor:
    """By the definition: not later, same document, in the window."""
    length = len(documents)
    mask = [[False] * length for _ in range(length)]
    for query in range(length):
        for key in range(query + 1):
            mask[query][key] = documents[query] == documents[key] and in_window(query, key)
    return torch.tensor(mask)


def within_tokens(window):
    return lambda query, key: query - key < window


def within_tokens_and_listed_blocks(window):
    """The list of blocks cuts the window at the blocks' edges."""
    return lambda query, key: query - key < window and query // BLOCK - key // BLOCK < math.ceil(window / BLOCK)


def within_blocks(window):
    return lambda query, key: query // BLOCK - key // BLOCK < window


def seen_in_flex(mask) -> tuple[torch.Tensor, torch.Tensor]:
    """What a query sees, and which of it lies in full blocks: by the mask's lists and, within the others, mask_mod."""
    length = mask.seq_lengths[0]
    seen, full = torch.zeros(length, length, dtype=torch.bool), torch.zeros(length, length, dtype=torch.bool)
    lists = [(mask.kv_num_blocks, mask.kv_indices, False)]
    if mask.full_kv_indices is not None:
        lists.append((mask.full_kv_num_blocks, mask.full_kv_indices, True))
    for counts, indices, is_full in lists:
        for query_block, count in enumerate(counts[0, 0].tolist()):
            listed = indices[0, 0, query_block, :count].tolist()
            assert listed == sorted(listed)
            rows = slice(query_block * BLOCK, (query_block + 1) * BLOCK)
            for key_block in listed:
                columns = slice(key_block * BLOCK, (key_block + 1) * BLOCK)
                assert not seen[rows, columns].any(), "listed once"
                query, key = torch.arange(rows.start, rows.stop)[:, None], torch.arange(columns.start, columns.stop)
                seen[rows, columns] = True if is_full else mask.mask_mod(0, 0, query, key)
                full[rows, columns] = is_full
    return seen, full


def seen_in_gathered(mask: torch.Tensor) -> torch.Tensor:
    """The mask over gathered blocks, laid out densely."""
    blocks, _, width = mask.shape
    seen = torch.zeros(blocks * BLOCK, blocks * BLOCK + width, dtype=torch.bool)  # with room before the first token
    for block in range(blocks):
        seen[block * BLOCK:(block + 1) * BLOCK, (block + 1) * BLOCK:(block + 1) * BLOCK + width] = mask[block]
    assert not seen[:, :width].any(), "nobody sees what is before the first token"
    return seen[:, width:]


@st.composite
def packed_documents(draw) -> torch.Tensor:
    """One to three blocks, some documents starting on the edge of a block."""
    blocks = draw(st.integers(1, 3))
    starts = draw(st.lists(st.one_of(st.sampled_from([0, 128, 256]), st.integers(0, 383)), max_size=5))
    is_start = torch.zeros(blocks * BLOCK, dtype=torch.bool)
    is_start[[start for start in starts if start < len(is_start)]] = True
    return is_start.cumsum(0)


def window_cases(windows):
    return given(packed_documents(), st.sampled_from(windows))


@pytest.mark.parametrize("script, in_window", [
    (WINDOW_WARMUP, within_tokens), (UNET, within_tokens_and_listed_blocks)], ids=name_of)
@window_cases([64, 128, 192, 256, 320, 1792])
@settings(max_examples=15, deadline=None)
def test_a_window_of_tokens_is_that_of_the_dense_mask(script, in_window, documents, window):
    expected = dense_mask(documents.tolist(), in_window(window))
    seen, full = seen_in_flex(script.flex_mask(documents, torch.tensor(window, dtype=torch.int32)))
    assert torch.equal(seen, expected) and expected[full].all()
    assert torch.equal(seen_in_gathered(script.gathered_mask(documents, torch.tensor(window))), expected)


@of([BLOCK_WINDOW, SPARSIFY, SOFT_CAP])
@window_cases([1, 2, 3, 14])
@settings(max_examples=15, deadline=None)
def test_a_window_of_blocks_is_that_of_the_dense_mask_and_whole_blocks_are_listed_apart(script, documents, window):
    expected = dense_mask(documents.tolist(), within_blocks(window))
    seen, full = seen_in_flex(script.flex_mask(documents, torch.tensor(window, dtype=torch.int32)))
    assert torch.equal(seen, expected)
    assert torch.equal(seen_in_gathered(script.gathered_mask(documents, torch.tensor(window))), expected)
    by_block = expected.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).all(3).all(1)
    assert torch.equal(full, by_block.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1))


@of([UNET, BLOCK_WINDOW, SPARSIFY, SOFT_CAP])
def test_the_blocks_of_a_long_sequence_are_listed_in_order(script):
    torch.manual_seed(0)
    documents = (torch.rand(64 * BLOCK) < 1 / 500).cumsum(0)
    mask = script.flex_mask(documents, torch.tensor(1792 if script is UNET else 14, dtype=torch.int32))
    for counts, indices in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)):
        if indices is not None:
            listed = [row[:count] for row, count in zip(indices[0, 0].tolist(), counts[0, 0].tolist(), strict=True)]
            assert max(map(len, listed)) > 2 and all(row == sorted(row) for row in listed)
    assert (mask.full_kv_indices is None) == (script is UNET)


@pytest.mark.parametrize("script, reach", [(WINDOW_WARMUP, 63), (UNET, 0)], ids=name_of)
def test_what_the_first_query_of_a_block_sees_of_the_block_before_in_a_window_of_64(script, reach):
    documents = torch.ones(384, dtype=torch.int64)
    seen, _ = seen_in_flex(script.flex_mask(documents, torch.tensor(64, dtype=torch.int32)))
    for mask in (seen, seen_in_gathered(script.gathered_mask(documents, torch.tensor(64)))):
        assert mask[256, :256].sum() == reach and mask[256, 256] and mask[383].sum() == 64


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@of([BLOCK_WINDOW, SPARSIFY, SOFT_CAP])
@pytest.mark.parametrize("make_mask", ["gathered_mask", "flex_mask"])
def test_grouped_queries_are_attention_over_repeated_keys_and_values(script, make_mask):
    torch.manual_seed(0)
    q, k, v = (torch.randn(384, heads, 16) for heads in (6, 2, 2))
    # the window is the whole sequence: uncompiled, FlexAttention looks at mask_mod only, not at the lists of blocks
    mask = getattr(script, make_mask)(torch.arange(384) // 100, torch.tensor(3, dtype=torch.int32))
    repeated = (x.repeat_interleave(3, dim=1) for x in (k, v))
    torch.testing.assert_close(script.attend(q, k, v, mask), script.attend(q, *repeated, mask))


# ----------------------------------------------------------------------------------------------------
# Models, against one written out in float64
# ----------------------------------------------------------------------------------------------------


def rms(x):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + torch.finfo(x.dtype).eps)


def rotate(x_THD, frequencies):
    """Rotary by complex numbers: pair i is (x[i], x[i + half])."""
    half = x_THD.size(-1) // 2
    angles = torch.arange(len(x_THD), dtype=torch.float64)[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    turned = torch.complex(x_THD[..., :half], x_THD[..., half:]) * torch.exp(-1j * angles)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def all_pairs_turn(head_dim):
    return [10000 ** (-i / head_dim) for i in range(0, head_dim, 2)]


def half_of_the_pairs_turn(head_dim):
    quarter = head_dim // 4
    return [1024 ** (-i / (quarter - 1)) for i in range(quarter)] + [0.0] * quarter


def value_residual(weights, layer, layers, values, tokens):
    """The first layer's values go to all later layers."""
    mix = weights[f"blocks.{layer}.attention.value_mix"]
    return (1 - mix) * values[layer] + mix * values[0]


def mixed_with(table, weights, layer, values, tokens):
    mix = weights[f"blocks.{layer}.attention.value_mix"]
    rows = 0 if table is None else next(
        weights[name][tokens] for name in weights if re.fullmatch(rf"value_embeddings\D*\.{table}\.weight", name))
    return mix[0] * values[layer] + mix[1] * rows


def a_table_for_each_layer_and_its_mirror_image(weights, layer, layers, values, tokens):
    return mixed_with(min(layer, layers - 1 - layer), weights, layer, values, tokens)


def three_tables_for_the_outer_layers(weights, layer, layers, values, tokens):
    table = layer if layer < 3 else layer - layers + 3 if layer >= layers - 3 else None
    return mixed_with(table, weights, layer, values, tokens)


def reference_loss(weights, tokens, targets, mask, head_dim, turning, value_of, softcap):
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    half, outputs, values = layers - layers // 2, [], []
    x = x0 = rms(weights["embedding.weight"][tokens])
    for layer in range(layers):
        def linear(name, x, block=f"blocks.{layer}."):
            return x @ weights[f"{block}{name}.weight"].T

        if layer >= half:  # layer n-1 takes from layer 0, layer n-2 from layer 1, ...
            x = x + weights["skip_weights"][layer - half] * outputs[layers - 1 - layer]
        mix = weights[f"blocks.{layer}.embedding_mix"]
        x = mix[0] * x + mix[1] * x0
        if f"blocks.{layer}.attention.query.weight" in weights:
            q, k = (rotate(rms(linear(name, rms(x)).unflatten(1, (-1, head_dim))), turning(head_dim))
                    for name in ("attention.query", "attention.key"))
            values.append(linear("attention.value", rms(x)))
            v = value_of(weights, layer, layers, values, tokens).unflatten(1, (-1, head_dim))
            y, heads_a_key = [], q.size(1) // k.size(1)
            for head in range(q.size(1)):
                scores = q[:, head] @ k[:, head // heads_a_key].T / math.sqrt(head_dim)
                y.append(scores.masked_fill(~mask, -math.inf).softmax(-1) @ v[:, head // heads_a_key])
            x = x + linear("attention.project", torch.cat(y, dim=1))
        else:
            values.append(None)
        x = x + linear("mlp.project", linear("mlp.expand", rms(x)).clamp(min=0) ** 2)
        outputs.append(x)
    logits = softcap * torch.tanh(rms(x) @ weights["head.weight"].T / softcap)
    return -logits.log_softmax(-1)[torch.arange(len(targets)), targets].mean()


def assert_same_loss_and_gradients(model, loss, reference, *arguments):
    """The reference gets the model's parameters by name, in float64."""
    weights = {name: param.detach().double().requires_grad_() for name, param in model.named_parameters()}
    expected = reference(weights, *arguments)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    actual_gradients = torch.autograd.grad(loss, list(model.parameters()))
    for name, actual, gradient in zip(weights, actual_gradients, torch.autograd.grad(expected, list(weights.values())),
                                      strict=True):
        # the value residual of the first layer is its own values, whatever the mix
        assert gradient.abs().max() > 0 or name == "blocks.0.attention.value_mix", f"the test does not reach {name}"
        torch.testing.assert_close(actual.double(), gradient, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("script, layers, kv_heads, window, in_window, turning, value_of, softcap", [
    (WINDOW_WARMUP, 4, 2, 192, within_tokens, all_pairs_turn, value_residual, 30),
    (WINDOW_WARMUP, 3, 2, 64, within_tokens, all_pairs_turn, value_residual, 30),
    (UNET, 4, 2, 192, within_tokens_and_listed_blocks, all_pairs_turn,
     a_table_for_each_layer_and_its_mirror_image, 30),
    (UNET, 5, 2, 64, within_tokens_and_listed_blocks, all_pairs_turn, a_table_for_each_layer_and_its_mirror_image, 30),
    (BLOCK_WINDOW, 5, 2, 2, within_blocks, all_pairs_turn, a_table_for_each_layer_and_its_mirror_image, 30),
    (BLOCK_WINDOW, 4, 1, 1, within_blocks, all_pairs_turn, a_table_for_each_layer_and_its_mirror_image, 30),
    (SPARSIFY, 9, 2, 2, within_blocks, half_of_the_pairs_turn, three_tables_for_the_outer_layers, 30),
    (SOFT_CAP, 9, 1, 2, within_blocks, half_of_the_pairs_turn, three_tables_for_the_outer_layers, 15),
], ids=name_of)
def test_loss_and_gradients_are_those_of_a_model_written_out(
        script, layers, kv_heads, window, in_window, turning, value_of, softcap):
    model = stir(script.build_model(tiny(
        script, num_layers=layers, num_heads=2, num_kv_heads=kv_heads, model_dim=32, vocab_size=50, document_token=49,
        sequence_length=384, dtype="float64")).double())
    torch.manual_seed(1)
    tokens, targets = torch.randint(49, (384,)), torch.randint(50, (384,))
    tokens[[150, 330]] = 49
    documents = [(t >= 150) + (t >= 330) for t in range(384)]
    loss = model(tokens, targets, torch.tensor(window))
    assert_same_loss_and_gradients(model, loss, reference_loss, tokens, targets,
                                   dense_mask(documents, in_window(window)), 16, turning, value_of, softcap)


# ----------------------------------------------------------------------------------------------------
# Muon, against plain loops and on several processes; how gradients are summed
# ----------------------------------------------------------------------------------------------------

MOMENTA = [0.5, 0.7, 0.8, 0.9, 0.95]  # it changes: with one momentum for all steps, both kinds give the same updates


def matrices(script) -> list[torch.nn.Parameter]:
    """Of three shapes and one size; where Muon can cope, in numbers that neither 2 nor 3 divides."""
    torch.manual_seed(0)
    counts = (6, 3, 3) if script in (UNET, BLOCK_WINDOW) else (5, 1, 7)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape, count in
              zip([(16, 16), (32, 8), (8, 32)], counts, strict=True) for _ in range(count)]
    if script in (SPARSIFY, SOFT_CAP):
        params[3].lr_factor = 0.25
    return params


def gradient_of(param, number: int, step: int) -> torch.Tensor:
    return torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + number))


def five_steps(script, world) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The weights and the momentum after five steps of Muon."""
    params = matrices(script)
    muon = script.Muon(params, lr=0.05, momentum=0.9, ns_steps=5, world=world, dtype=torch.float32)
    for step, momentum in enumerate(MOMENTA):
        for number, param in enumerate(params):
            param.grad = gradient_of(param, number, step)
        for group in muon.param_groups:
            group["momentum"] = momentum
        muon.step()
    in_groups = [id(param) for group in muon.param_groups for param in group["params"]]
    gathered = muon.gathered_momentum()
    return [param.detach() for param in params], [gathered[in_groups.index(id(param))] for param in params]


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz by what it does to the singular values."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


def five_steps_by_hand(script) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    weights, buffers = [], []
    for number, param in enumerate(matrices(script)):
        weight, buffer = param.detach().double(), torch.zeros(param.shape, dtype=torch.float64)
        for step, momentum in enumerate(MOMENTA):
            gradient = gradient_of(param, number, step).double()
            if script is WINDOW_WARMUP:  # the classical momentum
                buffer = momentum * buffer + gradient
                nesterov = gradient + momentum * buffer
            else:
                buffer = momentum * buffer + (1 - momentum) * gradient
                nesterov = (1 - momentum) * gradient + momentum * buffer
            tall = math.sqrt(max(1, param.size(0) / param.size(1)))
            weight = weight - 0.05 * getattr(param, "lr_factor", 1) * tall * orthogonalised(nesterov)
        weights.append(weight)
        buffers.append(buffer)
    return weights, buffers


def order_of_events(script, world) -> str:
    """What Muon does in a step on six matrices, and when it talks to the other process."""
    events = []

    class Watched:
        def __init__(self, work):
            self.work = work

        def wait(self):
            events.append("wait")
            self.work.wait()

    def orthogonalise(*arguments):
        events.append("orthogonalise")
        return script.newton_schulz(*arguments)

    def gather(*arguments, **options):
        events.append("gather" if options["async_op"] else "gather and wait")
        return Watched(all_gather(*arguments, **options))

    def add_up(*arguments, **options):
        events.append("sum")
        return all_reduce(*arguments, **options)

    all_gather, all_reduce = dist.all_gather_single, dist.all_reduce
    dist.all_gather_single, dist.all_reduce = gather, add_up
    params = [torch.nn.Parameter(torch.randn(16, 16)) for _ in range(6)]
    for param in params:
        param.grad = torch.randn(16, 16)
    script.Muon(params, 0.05, 0.9, 5, world, torch.float32, orthogonalise).step()
    dist.all_gather_single, dist.all_reduce = all_gather, all_reduce
    return ", ".join(events)


def gradients_of_a_batch(script, world, sequences: int) -> dict:
    """The loss and the gradients of a batch that the processes share, and how they came to them."""
    trainer = script.Trainer(tiny(script, batch_sequences=sequences, window_start=256, window_end=256), world)
    stir(trainer.model)
    forwards, sums = [], []
    trainer.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    if world.size > 1:
        def hook(_, bucket):
            sums.append(bucket.is_last())
            return allreduce_hook(None, bucket)

        trainer.forward.register_comm_hook(None, hook)
    loss, code = trainer.backward(random_batch(sequences)[world.rank::world.size], step=0)
    assert code == 0
    return dict(loss=loss, gradients={name: param.grad.clone() for name, param in trainer.model.named_parameters()},
                forwards=len(forwards), sums=sum(sums),
                views=getattr(trainer.forward, "gradient_as_bucket_view", None))


def work_of_a_process(rank: int, folder: str) -> None:
    """All that is asked of two and of three processes, in one start of them."""
    for size in range(max(2, rank + 1), 4):
        dist.init_process_group("gloo", init_method=f"file://{folder}/group_{size}", rank=rank, world_size=size,
                                timeout=timedelta(minutes=10))
        results = {}
        for script in SCRIPTS:
            world = script.World(rank, size, rank, torch.device("cpu"))
            found = results[script.__name__] = {}
            if script is not BASELINE:
                found["muon"] = five_steps(script, world)
            if script is not BASELINE and size == 2:
                found["events"] = order_of_events(script, world)
            if size == 2:
                found["even"] = gradients_of_a_batch(script, world, sequences=4)
            found["uneven"] = gradients_of_a_batch(script, world, sequences=2 * size - 1)
        torch.save(results, f"{folder}/{size}_{rank}.pt")
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def processes(tmp_path_factory) -> dict[int, list[dict]]:
    """What each process of two and of three found."""
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(work_of_a_process, args=(str(folder),), nprocs=3)
    return {size: [torch.load(folder / f"{size}_{rank}.pt") for rank in range(size)] for size in (2, 3)}


@of(SYSTEMS)
def test_five_steps_of_muon_are_those_of_a_plain_loop(script):
    for actual, expected in zip(five_steps(script, alone(script)), five_steps_by_hand(script), strict=True):
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@of(SYSTEMS)
def test_muon_gives_the_same_weights_on_one_two_and_three_processes(script, processes):
    expected = five_steps(script, alone(script))
    for process in processes[2] + processes[3]:
        for a, b in zip(process[script.__name__]["muon"], expected, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@of(SYSTEMS)
def test_when_muon_talks_to_the_other_processes(script, processes):
    one_sum_at_the_end = "orthogonalise, orthogonalise, orthogonalise, sum"
    gather_beside_work = "orthogonalise, gather, orthogonalise, wait, gather, orthogonalise, wait, gather, wait"
    for process in processes[2]:
        assert process[script.__name__]["events"] == (
            one_sum_at_the_end if script is WINDOW_WARMUP else gather_beside_work)


@pytest.mark.parametrize("script, forwards, sums, views", [
    (BASELINE, 2, 2, False),
    (WINDOW_WARMUP, 2, 2, False),
    (UNET, 1, 1, False),  # both sequences in one forward
    (BLOCK_WINDOW, 2, 1, True),  # no_sync on all but the last
    (SPARSIFY, 2, 1, True),
    (SOFT_CAP, 2, 1, True),
], ids=name_of)
def test_how_often_a_process_with_two_sequences_runs_forward_and_sums_gradients(
        script, forwards, sums, views, processes):
    for process in processes[2]:
        found = process[script.__name__]["even"]
        assert (found["forwards"], found["sums"], found["views"]) == (forwards, sums, views)


def assert_same_gradients(found: dict, expected: dict) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    for name, gradient in expected["gradients"].items():
        tolerance = dict(rtol=3e-2, atol=3e-4) if gradient.dtype == torch.bfloat16 else dict(rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(found["gradients"][name], gradient, **tolerance, msg=lambda m, n=name: f"{n}: {m}")


@of(SCRIPTS)
def test_two_processes_give_the_gradients_of_one(script, processes):
    expected = gradients_of_a_batch(script, alone(script), sequences=4)
    for process in processes[2]:
        assert_same_gradients(process[script.__name__]["even"], expected)


@pytest.mark.parametrize("size", [2, 3])
@of(SCRIPTS)
def test_a_process_may_have_fewer_sequences_than_another(script, size, processes):
    expected = gradients_of_a_batch(script, alone(script), sequences=2 * size - 1)
    for process in processes[size]:
        assert_same_gradients(process[script.__name__]["uneven"], expected)


@of([BASELINE, WINDOW_WARMUP])
def test_where_every_sequence_is_summed_all_processes_take_as_many(script, processes):
    for process in processes[3]:
        found = process[script.__name__]["uneven"]
        assert (found["forwards"], found["sums"]) == (2, 2)


@of(SCRIPTS)
def test_the_loss_of_a_batch_is_the_mean_of_its_sequences_losses(script):
    batch = [(inputs % 256, targets) for inputs, targets in random_batch(4)]  # in the middle of their documents
    trainer = script.Trainer(tiny(script, window_start=256, window_end=256), alone(script))
    stir(trainer.model)
    loss, _ = trainer.backward(batch, step=0)
    window = [] if script is BASELINE else [window_of(trainer)]
    apart = [trainer.model(inputs, targets, *window).item() for inputs, targets in batch]
    assert loss == pytest.approx(sum(apart) / 4, rel=1e-6)


# ----------------------------------------------------------------------------------------------------
# What only one or two of them have
# ----------------------------------------------------------------------------------------------------


@of([WINDOW_WARMUP, UNET])
@pytest.mark.parametrize("shape", [(32, 32), (96, 32), (32, 96)])
def test_the_svd_backend_makes_all_singular_values_one(script, shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(script.svd(matrix, 5, torch.float32), left @ right, rtol=1e-4, atol=1e-4)


@of([WINDOW_WARMUP, UNET])
def test_the_backend_is_a_setting(script):
    trainer = script.Trainer(tiny(script, backend="svd"), alone(script))
    stir(trainer.model)
    before = {name: param.detach().clone() for name, param in trainer.model.blocks.named_parameters()}
    trainer.backward(random_batch(4), step=0)
    trainer.update()
    for name, param in trainer.model.blocks.named_parameters():
        if param.ndim == 2:
            singular_values = torch.linalg.svdvals((param - before[name]).detach())
            scale = math.sqrt(max(1, param.size(0) / param.size(1)))
            torch.testing.assert_close(singular_values, torch.full_like(singular_values, 0.05 * scale),
                                       rtol=1e-3, atol=1e-5)
    with pytest.raises(script.UserError, match="--backend qr: must be newton_schulz or svd"):
        script.check_settings(tiny(script, backend="qr"), 1)


@of(SCRIPTS)
def test_only_the_first_two_clip_gradients(script):
    assert getattr(script.Hyperparameters(), "gradient_clip", None) == (
        1.0 if script in (BASELINE, WINDOW_WARMUP) else None)


@of([BASELINE, WINDOW_WARMUP])
@pytest.mark.parametrize("share", [0.25, 4, 0])
def test_gradients_are_clipped_to_a_norm(script, share):
    """To a share of their own norm; more than all of it, or no limit at all, leaves them as they are."""
    gradients = gradients_of_a_batch(script, alone(script), sequences=4)["gradients"]
    whole = torch.cat([gradient.flatten().double() for gradient in gradients.values()])
    trainer = script.Trainer(
        tiny(script, gradient_clip=share * whole.norm().item(), window_start=256, window_end=256), alone(script))
    stir(trainer.model)
    trainer.model.zero_grad = lambda set_to_none: None  # what the optimizers were given remains to be seen
    trainer.backward(random_batch(4), step=0)
    trainer.update()
    clipped = torch.cat([param.grad.flatten().double() for param in trainer.model.parameters()])
    assert clipped.norm().item() == pytest.approx(whole.norm().item() * (share if share == 0.25 else 1), rel=1e-3)
    assert torch.cosine_similarity(clipped, whole, dim=0) > 0.9999


def test_the_learning_rate_may_warm_up():
    _, rate, _ = zip(*schedule_of(WINDOW_WARMUP, warmup_frac=0.2), strict=True)
    assert np.allclose(rate[:350], np.arange(350) / 350)  # up,
    assert set(rate[350:1111]) == {1}  # constant,
    assert np.allclose(rate[1110:], np.arange(640, 0, -1) / 640)  # down
    assert WINDOW_WARMUP.Hyperparameters().warmup_frac == 0


def test_the_window_is_written_only_when_it_changes():
    full = UNET.Hyperparameters()
    trainer = UNET.Trainer(tiny(UNET, num_iterations=1480, window_start=full.window_start,
                                window_end=full.window_end), alone(UNET))
    writes = trainer.window._version
    for step in range(1480):
        trainer.set_schedules(step)
    assert trainer.window._version - writes == 1 + (1728 - 64) // 64


@of([UNET, BLOCK_WINDOW])
def test_a_number_of_processes_that_does_not_divide_the_matrices_is_refused(script):
    settings = tiny(script, num_layers=2, batch_sequences=6)
    script.check_settings(settings, world_size=4)
    with pytest.raises(script.UserError, match="cannot be shared out evenly among 3 processes"):
        script.check_settings(settings, world_size=3)


def test_the_cooldown_follows_a_cosine_or_a_line():
    assert BLOCK_WINDOW.Hyperparameters().cooldown_shape == "cosine"
    left = np.minimum(1, np.arange(1480, 0, -1) / 600)
    cosine, linear = ([rate for _, rate, _ in schedule_of(BLOCK_WINDOW, cooldown_shape=shape)]
                      for shape in ("cosine", "linear"))
    assert np.allclose(linear, left) and np.allclose(cosine, np.sin(left * np.pi / 2) ** 2)
    assert [cosine[step] for step in (880, 1030, 1180, 1330)] == pytest.approx([1, 0.853553, 0.5, 0.146447], abs=1e-6)
    with pytest.raises(BLOCK_WINDOW.UserError, match="--cooldown_shape round: must be linear or cosine"):
        BLOCK_WINDOW.check_settings(tiny(BLOCK_WINDOW, cooldown_shape="round"), 1)


@of([SPARSIFY, SOFT_CAP])
def test_three_tables_serve_the_first_and_last_three_of_twelve_layers_and_layer_seven_has_no_attention(script):
    model = script.build_model(tiny(script, num_layers=12))
    rows = model.value_embeddings(torch.arange(4), torch.float32)
    tables = [table.weight[:4].float() for table in model.value_embeddings.tables]
    used = [None if row is None else [torch.equal(row, table) for table in tables].index(True) for row in rows]
    assert len(tables) == 3 and used == [0, 1, 2, None, None, None, None, None, None, 0, 1, 2]
    assert [layer for layer, block in enumerate(model.blocks) if block.attention is None] == [7]


@of([SPARSIFY, SOFT_CAP])
def test_half_of_the_pairs_of_a_head_stay_still_and_the_others_turn_in_float32(script):
    rotary, x = script.Rotary(head_dim=128, max_length=64), torch.randn(64, 2, 128)
    turned = rotary(x)
    still = [*range(32, 64), *range(96, 128)]
    assert torch.equal(turned[..., still], x[..., still])
    assert (turned[1:, :, :32] != x[1:, :, :32]).all()
    torch.testing.assert_close(torch.atan2(rotary.sin, rotary.cos)[1, 0, :32], (1 / 1024) ** torch.linspace(0, 1, 32))
    torch.testing.assert_close(turned.double(), rotate(x.double(), half_of_the_pairs_turn(128)), rtol=1e-4, atol=1e-4)
    coarse = x.bfloat16()
    assert torch.equal(rotary(coarse), rotary(coarse.float()).bfloat16())
    assert {rotary.cos.dtype, rotary.sin.dtype} == {torch.float32} and not rotary.state_dict()


@of([WINDOW_WARMUP, UNET, BLOCK_WINDOW])
def test_all_pairs_of_a_head_turn(script):
    x = torch.randn(64, 2, 128)
    turned = script.Rotary(head_dim=128)(x)
    torch.testing.assert_close(turned.double(), rotate(x.double(), all_pairs_turn(128)), rtol=1e-4, atol=1e-4)


def test_the_last_record_holds_its_tables_in_bfloat16_unless_told_otherwise():
    for choice, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        model = SOFT_CAP.build_model(tiny(SOFT_CAP, bfloat16_embeddings=choice))
        assert {param.dtype for param in [model.embedding.weight, *model.value_embeddings.parameters()]} == {dtype}
    assert SOFT_CAP.Hyperparameters().bfloat16_embeddings and not SOFT_CAP.Hyperparameters().coordinate_descent


@pytest.mark.parametrize("shape", [(130,), (1, 128)])
def test_the_last_record_takes_one_sequence_of_whole_blocks(shape):
    tokens = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(ValueError, match="one sequence of whole blocks of 128"):
        SOFT_CAP.build_model(tiny(SOFT_CAP))(tokens, tokens, torch.tensor(1))
    with pytest.raises(SOFT_CAP.UserError, match="--sequence_length 130: must be a multiple of the attention block"):
        SOFT_CAP.check_settings(tiny(SOFT_CAP, sequence_length=130), 1)


# ----------------------------------------------------------------------------------------------------
# The baseline: GPT-2
# ----------------------------------------------------------------------------------------------------


def layer_norm(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return weight * centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-5) + bias


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gpt2_loss(weights, tokens, targets, context_length, heads):
    """One window after the other, one head after the other."""
    layers, losses = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks.")), []
    for start in range(0, len(tokens), context_length):
        window = slice(start, start + context_length)
        x = weights["embedding.weight"][tokens[window]] + weights["positions.weight"]
        later = torch.ones(context_length, context_length).triu(1).bool()
        for layer in range(layers):
            def of_layer(name, layer=layer):
                return weights[f"blocks.{layer}.{name}.weight"], weights[f"blocks.{layer}.{name}.bias"]

            def linear(name, x, of_layer=of_layer):
                weight, bias = of_layer(name)
                return x @ weight.T + bias

            normed, y = layer_norm(x, *of_layer("attention_norm")), []
            q, k, v = (linear(f"attention.{name}", normed).chunk(heads, dim=1) for name in ("query", "key", "value"))
            for head in range(heads):
                scores = q[head] @ k[head].T / math.sqrt(q[head].size(1))
                y.append(scores.masked_fill(later, -math.inf).softmax(-1) @ v[head])
            x = x + linear("attention.project", torch.cat(y, dim=1))
            x = x + linear("mlp.project", gelu(linear("mlp.expand", layer_norm(x, *of_layer("mlp_norm")))))
        logits = layer_norm(x, weights["last_norm.weight"], weights["last_norm.bias"]) @ weights["embedding.weight"].T
        losses.append(-logits.log_softmax(-1)[torch.arange(context_length), targets[window]])
    return torch.cat(losses).mean()


def test_the_baselines_loss_and_gradients_are_those_of_gpt2_written_out():
    model = stir(BASELINE.build_model(tiny(BASELINE, vocab_size=50, context_length=64)))
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(20 if param.ndim == 2 else 1)  # where GELU bends
    torch.manual_seed(1)
    tokens, targets = torch.randint(50, (192,)), torch.randint(50, (192,))
    assert_same_loss_and_gradients(model, model(tokens, targets), gpt2_loss, tokens, targets, 64, 2)


def test_a_token_of_the_baseline_sees_its_own_window_up_to_itself_and_nothing_else():
    model = stir(BASELINE.build_model(tiny(BASELINE)))
    (tokens, targets), = random_batch(1)
    only = torch.full_like(targets, -100)  # not counted
    only[200] = targets[200]

    def changes_with(position: int) -> bool:
        changed = tokens.clone()
        changed[position] = (tokens[position] + 1) % 256
        with torch.no_grad():
            return model(changed, only).item() != model(tokens, only).item()

    assert [changes_with(position) for position in (0, 127, 128, 199, 200, 201, 255)] == [
        False, False, True, True, True, False, False]


def test_the_baseline_has_the_size_and_the_schedule_of_gpt2():
    s = replace(BASELINE.Hyperparameters(), dtype="bfloat16")
    with torch.device("meta"):
        model = BASELINE.build_model(s)
    a_layer = 12 * 768**2 + (4 + 4 + 1 + 4) * 768  # matrices; biases of attention and MLP, and two norms
    assert sum(param.numel() for param in model.parameters()) == (50304 + 1024) * 768 + 12 * a_layer + 2 * 768
    assert {attention.head_dim for attention in (block.attention for block in model.blocks)} == {64}
    assert s.context_length == 1024 and s.sequence_length * s.batch_sequences == 524288
    trainer = BASELINE.Trainer(tiny(BASELINE, num_iterations=s.num_iterations), alone(BASELINE))
    rate = []
    for step in range(s.num_iterations):
        trainer.set_schedules(step)
        (lr,) = {group["lr"] for group in trainer.groups()}
        rate.append(lr / 0.0018)
    steps, warmup = 19073, 256
    assert len(rate) == steps
    assert np.allclose(rate[:warmup], np.arange(warmup) / warmup)
    assert np.allclose(rate[warmup:], np.cos(np.pi / 2 * np.arange(steps - warmup) / (steps - warmup)) ** 2)


def test_the_baselines_weights_start_as_gpt2s():
    model = BASELINE.build_model(tiny(BASELINE, num_layers=8, model_dim=128))
    for name, param in model.named_parameters():
        if param.ndim == 2:
            std = 0.02 / math.sqrt(2 * 8) if "project" in name else 0.02
            assert param.std().item() == pytest.approx(std, rel=0.03) and abs(param.mean()) < 0.05 * std, name
        else:
            assert set(param.tolist()) == ({0} if name.endswith("bias") else {1}), name
        assert param.dtype == torch.float32


def test_the_baselines_adamw_decays_matrices_and_tables_only():
    trainer = BASELINE.Trainer(tiny(BASELINE), alone(BASELINE))
    names = {param: name for name, param in trainer.model.named_parameters()}
    decay = {names[param]: group["weight_decay"] for group in trainer.adam.param_groups for param in group["params"]}
    assert isinstance(trainer.adam, torch.optim.AdamW) and len(decay) == len(names)
    assert {name for name in decay if decay[name] == 0.1} == {n for p, n in names.items() if p.ndim == 2}
    assert {name for name in decay if decay[name] == 0} == {n for p, n in names.items() if p.ndim == 1}
    assert {group["betas"] for group in trainer.adam.param_groups} == {(0.9, 0.95)}


# ----------------------------------------------------------------------------------------------------
# Whole runs
# ----------------------------------------------------------------------------------------------------


FILES = dict(train_files="data/tiny_train_*.bin", val_files="data/tiny_val_*.bin")


@of(SCRIPTS)
def test_a_run_on_two_processes_lowers_the_loss_and_leaves_a_log_that_the_records_tool_reads(script, shards, tmp_path):
    arguments = flags(**tiny_settings(
        script, **FILES, num_iterations=12, val_loss_every=6, target_loss=5.5, lr=0.01))
    result = run_script(arguments, tmp_path, processes=2, script=path_of(script.__name__))
    assert result.returncode == 0, result.stderr
    log = read_log(only_log(tmp_path))
    assert log.complaints == [] and log.source == path_of(script.__name__).read_bytes()
    assert log.settings["model_dim"] == 32 and log.target == 5.5 and log.seed == "1"
    assert log.hardware.endswith("world size 2") and log.data_files[-1] == "tiny_val_000000.bin"
    (run,) = log.runs
    assert run.complete and [validation.step for validation in run.validations] == [0, 6, 12]
    assert [v.loss for v in run.validations] == sorted((v.loss for v in run.validations), reverse=True)
    text = log.path.read_text()
    losses = train_losses(text)
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.1
    assert re.search(r"\npeak memory: \d+ MiB resident\n\Z", text)


@pytest.fixture
def signals_as_they_were():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@of(SCRIPTS)
def test_a_resumed_run_goes_on_bit_for_bit(script, shards, tmp_path, monkeypatch, signals_as_they_were):
    monkeypatch.chdir(tmp_path)
    arguments = flags(**tiny_settings(
        script, **FILES, num_iterations=8, val_loss_every=2, save_every=5, warmup_steps=1, resume="latest"))
    assert script.main(arguments) == 0
    last = max(tmp_path.glob("checkpoints/*/step_*.pt"))
    uninterrupted = torch.load(last, weights_only=True)["state"]
    last.unlink()  # as if the run had ended after step 5
    assert script.main(arguments) == 0
    resumed = torch.load(last, weights_only=True)["state"]
    log = only_log(tmp_path).read_text()
    assert len(train_losses(log)) == 8 + 3 and train_losses(log)[5:8] == train_losses(log)[8:]
    assert val_losses(log)[3:5] == val_losses(log)[5:] and "resumed at step 5" in log
    assert all(torch.equal(uninterrupted["model"][name], resumed["model"][name]) for name in resumed["model"])
    assert len(read_log(only_log(tmp_path)).runs) == 1
