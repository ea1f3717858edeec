"""The scripts of the records: what is special about each, against references written for these tests.

The records are the folders of records/ that hold a train_gpt.py, oldest first. Every test of all records takes each of
them; a test of one record's idea names it, and nothing here can be collected if its folder is missing.
"""

import ast
import difflib
import gc
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, fields, replace
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import ROOT, load_record, made_up_tokens, only_log, run_script, train_losses, val_losses, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

BLOCK = 128
FOLDERS = sorted(path.parent for path in (ROOT / "records").glob("*/train_gpt.py"))
SCRIPTS = {folder.name: load_record(folder.name.split("_", 1)[1]) for folder in FOLDERS}
BASELINE, WINDOW_WARMUP, UNET = map(load_record, ("Baseline", "WindowWarmup", "UNetValueEmbeds"))
BLOCK_WINDOW, SPARSIFY, SOFT_CAP = map(load_record, ("BlockWindow", "SparsifyEmbeds", "SoftCap"))
SHARDED, THREADS, NORMUON = map(load_record, ("ShardedLongShort", "Threads", "NorMuonYarn"))
SYSTEMS = [WINDOW_WARMUP, UNET, BLOCK_WINDOW, SPARSIFY, SOFT_CAP]
MAKE_MASK = {
    WINDOW_WARMUP: WINDOW_WARMUP.document_block_mask,
    UNET: UNET.create_sliding_window_mask,
    BLOCK_WINDOW: BLOCK_WINDOW.create_doc_swc_block_mask,
    SPARSIFY: SPARSIFY.document_block_mask,
    SOFT_CAP: SOFT_CAP.document_block_mask,
    SHARDED: SHARDED.document_block_mask,
    THREADS: THREADS.document_block_mask,
}
# A model and a run that take a moment; of these, a script gets the settings that it has.
SMALL = dict(vocab_size=257, document_token=256, num_layers=2, num_heads=2, model_dim=32, sequence_length=256)
SMALL |= dict(
    context_length=128, batch_sequences=4, window_start=128, window_end=384, num_iterations=4, lr=0.01, lr_warmup=1
)
SMALL |= dict(val_tokens=1024, val_loss_every=0, dtype="float32", compile=False, kernel_warmup_steps=2)
SMALL |= dict(
    val_sequence_length=256, fp8_head=False, adam_every=2, stages="2 1 1 1 1  1 1 1 1 2  1 1 1 2 2  0 1 1 2 3"
)


def name_of(value):
    return getattr(value, "__name__", None)


def of(scripts):
    """The test for each of these scripts."""
    return pytest.mark.parametrize("script", scripts, ids=name_of)


of_all = of(SCRIPTS.values())


def small_settings(script, **changes) -> dict:
    wanted = SMALL | changes
    return {field.name: wanted[field.name] for field in fields(script.Settings) if field.name in wanted}


def small(script, **changes):
    return script.Settings(**small_settings(script, **changes))


def alone(script):
    return script.World(rank=0, size=1, device=torch.device("cpu"))


def build(script, s):
    """The model of these settings."""
    torch.manual_seed(s.seed)
    if hasattr(script, "GPTConfig"):
        s = script.GPTConfig(**{field.name: getattr(s, field.name) for field in fields(script.GPTConfig)})
    return script.GPT(s) if script is BASELINE else script.GPT(s, use_flex=False)


def stir(model):
    """Let nothing hide behind a zero or a one: the mixing weights, biases and projections get values of their own."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for stack in model.parameters():
            for param in stack if stack.ndim == 3 else [stack]:  # matrices in one parameter
                if param.ndim < 2 or param.eq(0).all():
                    param.copy_(torch.randn(param.shape, generator=generator) * 0.5)
    return model


def random_sequences(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sequences of 256 tokens that each start a document, and their targets."""
    tokens = torch.randint(256, (count, 2, 256), generator=torch.Generator().manual_seed(4))
    tokens[:, 0, 0] = 256
    return [(inputs.to(torch.int32), targets) for inputs, targets in tokens]


def batch_of(script, sequences):
    """As the trainer takes them: as micro-batches, but in one piece where there is no accumulation."""
    return tuple(map(torch.cat, zip(*sequences, strict=True))) if script is UNET else sequences


def windows_of(trainer) -> list[torch.Tensor]:
    """What the model takes beside inputs and targets: its windows, in tokens or in blocks as the record counts."""
    return [getattr(trainer, name) for name in ("window", "window_blocks", "windows") if hasattr(trainer, name)]


# ---- All records: settings, plumbing, data ---------------------------------------------------------------------------


@of_all
def test_the_defaults_are_the_8xh100_run_and_a_cpu_changes_what_has_a_value_for_it(script):
    changes = {f.name: f.metadata["cpu"] for f in fields(script.Settings) if f.metadata["cpu"] is not None}
    assert all(type(value) is type(getattr(script.Settings(), name)) for name, value in changes.items())
    for processes in (1, 2, 3, 8):
        full = script.make_settings({}, processes, on_gpu=True)
        assert full == replace(script.Settings(), dtype="bfloat16")
    for processes in (1, 2):
        cpu = script.make_settings({}, processes, on_gpu=False)
        assert cpu == replace(full, **changes, dtype=cpu.dtype)
    tokens = {SHARDED: 393216, THREADS: 393216, NORMUON: 131072}.get(script, 524288)  # of NORMUON, in the first stage
    assert full.sequence_length * full.batch_sequences == tokens
    assert full.val_tokens == 10485760
    assert (full.val_loss_every, full.save_every, full.recompute) == (125, 0, False)
    assert full.target_loss == 3.28 and cpu.val_loss_every and cpu.save_every


def test_importing_a_script_runs_nothing_and_needs_nothing_of_the_repository(tmp_path):
    for folder in FOLDERS:
        (tmp_path / f"{folder.name}.py").write_bytes((folder / "train_gpt.py").read_bytes())
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
    assert (result.stdout, result.stderr) == (f"{len(FOLDERS)} True\n", "")
    assert len(list(tmp_path.iterdir())) == len(FOLDERS)


def test_the_newest_record_is_the_current_script():
    assert (FOLDERS[-1] / "train_gpt.py").read_bytes() == (ROOT / "train_gpt.py").read_bytes()


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_every_script_passes_the_checks_of_the_repository(folder):
    options = ["--config", ROOT / "pyproject.toml", "--no-force-exclude", folder / "train_gpt.py"]
    for command in (["check"], ["format", "--check"]):
        result = subprocess.run([sys.executable, "-m", "ruff", *command, *options], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


@of_all
def test_a_bad_setting_gives_one_line_exit_code_2_and_no_log(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, value in ("num_iterations", 0), ("model_dim", 129), ("sequence_length", 130):
        assert run_here(script, [f"--{name}={value}"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and re.fullmatch(rf"train_gpt: --{name} {value}: this must hold: .*{name}.*\n", err)
    assert list(tmp_path.iterdir()) == []


def sections(script) -> dict[str, str]:
    """A script's text by the headings that it stands under, without the class of settings."""
    text = re.sub(r"(?s)@dataclass\(frozen=True\)\nclass Settings:.*?\n\n\n", "", script.SOURCE)
    _, *parts = re.split(r"^# ---- (.*?): .*-{5,}$", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def definitions(text: str) -> dict[str, str]:
    """The source of every function, method and constant; of a class's docstring and other statements, too."""
    found = {}
    for node in ast.parse(text).body:
        name = getattr(node, "name", ast.unparse(node).split(" = ")[0])
        methods = node.body if isinstance(node, ast.ClassDef) else []
        for part in methods or [node]:
            inner = f"{name}.{getattr(part, 'name', '')}" if methods else name
            found[inner] = found.get(inner, "") + ast.get_source_segment(text, part)
    return found


PLUMBING = ["Settings", "The process's place", "Data", "The record of the run", "The run"]
ANYTHING = object()
# In which of its functions the plumbing of a record differs from the one before, and in which lines (without comments).
HALVE = 'ending, code = "out of memory: halve --sequence_length and double --batch_sequences, or --recompute true", 2'
SHARE = 'ending, code = "out of memory: more processes, fewer --batch_sequences, or --recompute true", 2'
HINT = '"halve --sequence_length and double --batch_sequences, halve --val_sequence_length, or --recompute true"'
STARTS = "self.world, self.stop, self.stop_time, self.stepping{} = world, None, math.inf, False{}"
TOO_SHORT = 'raise UserError(f"--val_tokens {s.val_tokens}: {self.val_shard.path} has {LENGTH - 1}")'
PLUMBING_CHANGES = {
    WINDOW_WARMUP: {
        "BLOCK": ANYTHING,
        "WINDOW_STEP": ANYTHING,
        "Run.loop": [
            "-val_loss = trainer.validate(self.val_shard)",
            "+val_loss = trainer.validate(self.val_shard, step)",
        ],
    },
    UNET: {
        "load_data_shard": ANYTHING,
        "DistributedDataLoader.": ANYTHING,  # its docstring
        "DistributedDataLoader.__init__": ["+self.loaded = self.tokens = None"],
        "DistributedDataLoader.next_batch": ANYTHING,
        "main": [f"-{HALVE}", f"+{SHARE}"],
    },
    BLOCK_WINDOW: {
        "WINDOW_STEP": ANYTHING,
        "join_world": ["+dist.barrier()"],
        "DistributedDataLoader.": ANYTHING,  # its docstring
        "DistributedDataLoader.next_batch": ANYTHING,
        "main": [f"-{SHARE}", f"+{HALVE}"],
    },
    SPARSIFY: {
        "join_world": [
            '+old_name = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")',
            '+os.environ.setdefault("PYTORCH_ALLOC_CONF", old_name or "expandable_segments:True")',
        ]
    },
    SOFT_CAP: {
        "join_world": ["+torch.empty(1, device=world.device, requires_grad=True).backward()"],
        "load_data_shard": ANYTHING,
        "DistributedDataLoader.__init__": ["-self.loaded = self.tokens = None"],
        "DistributedDataLoader.next_batch": ANYTHING,
    },
    SHARDED: {
        "make_settings": [
            "+if on_gpu and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):",
            "+s = replace(s, fp8_head=False)",
        ],
        "Shard.find": ANYTHING,
        "DistributedDataLoader.": ANYTHING,  # its docstring
        "DistributedDataLoader.__init__": ANYTHING,
        "DistributedDataLoader.find_batch": ANYTHING,
        "DistributedDataLoader.next_batch": ANYTHING,
        "Run.train": ["""+log.note(f"head     trained in {'FP8' if s.fp8_head else s.dtype}")"""],
        "main": [f"-{HALVE}", f"+hint = {HINT}", '+ending, code = f"out of memory: {hint}", 2'],
    },
    THREADS: {
        "Shard.": ANYTHING,  # its docstring: a file that is read, and not mapped
        **dict.fromkeys([f"Shard.{x}" for x in ("__init__", "bytes", "read", "find", "fingerprint")], ANYTHING),
        "DistributedDataLoader.": ANYTHING,  # its docstring
        "DistributedDataLoader.find_batch": ANYTHING,
        "DistributedDataLoader.next_batch": ANYTHING,
        "Run.__init__": [
            "-" + STARTS.format(", self.launcher", ", os.getppid()"),
            "+" + STARTS.format("", ""),
            "-if len(self.val_shard.tokens) <= s.val_tokens:",
            "+if self.val_shard.length <= s.val_tokens:",
            "-" + TOO_SHORT.replace("LENGTH", "len(self.val_shard.tokens)"),
            "+" + TOO_SHORT.replace("LENGTH", "self.val_shard.length"),
        ],
        "Run.loop": [
            '-if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self.launcher:',
            '+if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != LAUNCHER:',
            '-self.stop = self.stop or UserError("torchrun is gone", 1)',
            '+self.stop = self.stop or UserError("its launcher is gone", 1)',
        ],
    },
    NORMUON: {
        **dict.fromkeys(["STAGES", "CPU_STAGES", "Stage", "stages_of", "stage_at"], ANYTHING),
        "make_settings": ["+stages_of(s)"],
        **dict.fromkeys([f"Shard.{name}" for name in ("read", "find", "documents")], ANYTHING),
        "DistributedDataLoader.": ANYTHING,  # its docstring
        "DistributedDataLoader.__init__": ANYTHING,
        **dict.fromkeys([f"DistributedDataLoader.{name}" for name in ("find_batch", "next_batch")], ANYTHING),
        **dict.fromkeys([f"DistributedDataLoader.{name}" for name in ("read_batch", "batches")], ANYTHING),
        "Run.__init__": [
            "-self.loader = DistributedDataLoader(s, world)",
            '+self.loader, self.position = DistributedDataLoader(s, world), self.saved.get("position", [0, 0])',
        ],
        "Run.train": [
            '+lengths = ", ".join(str(length) for length in sorted({stage.length for stage in self.trainer.stages}))',
            '-log.note(f"steps    {s.num_iterations} of {s.batch_sequences} x {s.sequence_length} tokens")',
            '+log.note(f"steps    {s.num_iterations} of {s.batch_sequences} x {lengths} tokens")',
            "-self.trainer.warm_up(DistributedDataLoader(s, self.world).next_batch())",
            "+self.trainer.warm_up(self.loader)",
            '-first_step, self.loader.position, log.seconds = saved["step"], saved["position"], saved["seconds"]',
            '+first_step, log.seconds = saved["step"], saved["seconds"]',
        ],
        "Run.loop": [
            "-position, batch, self.stepping = self.loader.position, self.loader.next_batch(), True",
            "+batches, self.stepping = self.loader.batches(first_step, self.position), True",
            "+position, batch = next(batches)",
            "-next_position, next_batch = self.loader.position, self.loader.next_batch()",
            "+next_position, next_batch = next(batches)",
        ],
    },
}


@pytest.mark.parametrize("before, after", list(itertools.pairwise(SCRIPTS.values())), ids=name_of)
def test_the_plumbing_of_neighbours_differs_in_nothing_but_what_is_listed(before, after):
    old, new = ({name: sections(script)[name] for name in PLUMBING} for script in (before, after))
    old, new = (definitions("\n".join(found.values())) for found in (old, new))
    changed = {}
    for name in old.keys() | new.keys():
        lines = difflib.ndiff(old.get(name, "").splitlines(), new.get(name, "").splitlines())
        if lines := [line[0] + line[2:].split("  # ")[0].strip() for line in lines if line[0] in "-+"]:
            changed[name] = lines
    expected = PLUMBING_CHANGES.get(after, {})
    assert changed == {name: changed.get(name) if lines is ANYTHING else lines for name, lines in expected.items()}
    order = [name for name in sections(after) if name in sections(before)]
    assert order == [name for name in sections(before) if name in sections(after)]


@of([BASELINE, *SYSTEMS])
def test_a_step_takes_the_next_sequences_of_the_stream_whatever_the_number_of_processes(script, tmp_path):
    tokens = [made_up_tokens(3000, seed) for seed in (1, 2)]
    for i, shard in enumerate(tokens):
        write_shard(tmp_path / f"{i}.bin", shard)
    batches = [(0, 0), (0, 1024), (1, 0), (1, 1024), (0, 0)]  # on when the rest of a shard is smaller than a batch
    s = small(script, train_files=f"{tmp_path}/*.bin")
    for size in (1, 2):
        worlds = [script.World(rank, size, torch.device("cpu")) for rank in range(size)]
        loaders = [script.DistributedDataLoader(s, world) for world in worlds]
        for shard, first in batches:
            for rank, loader in enumerate(loaders):
                batch = loader.next_batch()
                ((inputs, targets),) = [batch] if script is UNET else batch
                starts = [first + number * 256 for number in range(rank, 4, size)]
                assert inputs.dtype == torch.int32 and targets.dtype == torch.int64
                assert inputs.tolist() == [int(t) for start in starts for t in tokens[shard][start : start + 256]]
                assert targets.tolist() == [int(t) for start in starts for t in tokens[shard][start + 1 : start + 257]]


@of([UNET, BLOCK_WINDOW, SPARSIFY])
def test_the_loader_has_one_shard_in_memory_as_16_bit_tokens(script, tmp_path):
    for name in ("0.bin", "1.bin"):
        write_shard(tmp_path / name, made_up_tokens(3000))
    loader = script.DistributedDataLoader(small(script, train_files=f"{tmp_path}/*.bin"), alone(script))
    first = loader.next_batch()
    assert loader.tokens.dtype == torch.uint16 and loader.tokens.tolist() == made_up_tokens(3000).tolist()
    (tmp_path / "0.bin").unlink()
    second, third = loader.next_batch(), loader.next_batch()  # from memory; from the other shard
    assert str(first) == str(third) != str(second)
    write_shard(tmp_path / "0.bin", [1, 2, 300])
    with pytest.raises(script.UserError, match="token 300 is outside the vocabulary of 257"):
        script.load_data_shard(script.Shard(str(tmp_path / "0.bin"), 257), pinned=False)
    shrunk = script.Shard(str(write_shard(tmp_path / "0.bin", made_up_tokens(3000))), 257)
    write_shard(tmp_path / "0.bin", made_up_tokens(2000))
    with pytest.raises(script.UserError, match="its size changed while it was in use"):
        script.load_data_shard(shrunk, pinned=False)


@of_all
def test_validation_is_the_mean_loss_of_the_first_tokens_with_the_window_of_that_step(script, tmp_path):
    shard = script.Shard(str(write_shard(tmp_path / "val.bin", made_up_tokens(2000))), 257)
    trainer = script.Trainer(small(script), alone(script))
    stir(trainer.model)
    for step, blocks in (0, 1), (4, 3):  # the window grows from 128 to 384 tokens
        windows = {
            BASELINE: [],
            WINDOW_WARMUP: [128 * blocks],
            UNET: [128 * blocks],
            NORMUON: [[(blocks + 1) // 2, blocks]],
        }
        found, losses = trainer.validate(shard) if script is BASELINE else trainer.validate(shard, step), []
        for start in (0, 256, 512, 768):
            span = {NORMUON: [(start, start + 257)], THREADS: [start, start + 257]}.get(script, [start, 256])
            pair = shard.read(*span)
            losses.append(trainer.model(*pair, *map(torch.tensor, windows.get(script, [blocks]))).item())
        assert found == pytest.approx(sum(losses) / 4, rel=1e-5)


# ---- Schedules and sizes at full size, as published ------------------------------------------------------------------


def schedule_of(script, **changes) -> list[tuple]:
    """Window, learning-rate factor and Muon's momentum in the update of each step of a full-size run."""
    full = script.Settings()
    keep = {
        name: getattr(full, name) for name in ("num_iterations", "window_start", "window_end") if hasattr(full, name)
    }
    trainer = script.Trainer(small(script, **keep | changes), alone(script))
    if script is SHARDED:
        _, *muon = (optimizer for optimizer, _ in trainer.optimizers)
        trainer.optimizers, trainer.shares = [], []
    else:
        muon = [trainer.muon] if hasattr(trainer, "muon") else []
        for optimizer in muon + (trainer.adams if hasattr(trainer, "adams") else [trainer.adam]):
            optimizer.step = lambda: None  # only the schedules are of interest
    schedule = []
    for step in range(full.num_iterations):
        if script is not BASELINE:
            trainer.set_window(step)
        trainer.update(step)
        (factor,) = {round(g["lr"] / rate, 12) for g, rate in zip(trainer.groups, trainer.full_rates, strict=True)}
        momenta = {group["momentum"] for optimizer in muon for group in optimizer.param_groups}
        schedule.append((*(window.item() for window in windows_of(trainer)), factor, *momenta))
    return schedule


@pytest.mark.parametrize(
    "script, steps, windows, changes, cools_from, last_rate",
    [
        (WINDOW_WARMUP, 1750, [64, 128, 320, 896, 1728], {65: 128, 130: 192, 195: 256}, 1111, 0.0015625),
        (UNET, 1480, [64, 128, 384, 896, 1728], {55: 128, 110: 192, 165: 256}, 881, 0.00166667),
        (BLOCK_WINDOW, 1480, [1, 1, 3, 7, 14], {110: 2, 220: 3, 329: 4}, 881, 0.00166667),
        (SPARSIFY, 1490, [1, 1, 3, 7, 14], {111: 2, 221: 3, 332: 4}, 891, 0.00166667),
        (SOFT_CAP, 1390, [1, 1, 3, 7, 14], {103: 2, 206: 3, 309: 4}, 835, 0.00179856),
        (SHARDED, 1695, [1, 1, 3, 7, 14], {126: 2, 252: 3, 377: 4}, 933, 0.10117994),
    ],
    ids=name_of,
)
def test_schedules_at_full_size(script, steps, windows, changes, cools_from, last_rate):
    assert script.Settings().num_iterations == steps
    frac = script.Settings().cooldown_frac
    schedule = schedule_of(script, cooldown_frac=frac, cooldown_shape="linear")
    window, rate, momentum = zip(*schedule, strict=True)
    assert [window[step] for step in (0, 100, 300, steps // 2, steps - 1)] == windows
    changed = [step for step in range(1, steps) if window[step] != window[step - 1]]
    assert {step: window[step] for step in changed[:3]} == changes
    stride = 64 if windows[0] == 64 else 1
    assert [window[step] for step in changed] == [*range(windows[0] + stride, windows[-1] + 1, stride)]
    assert next(step for step in range(steps) if rate[step] < 1 - 1e-9) == cools_from
    assert set(rate[:cools_from]) == {1} and rate[-1] == pytest.approx(last_rate, rel=1e-5)
    assert np.allclose(np.diff(rate[cools_from:]), -(0.9 if script is SHARDED else 1) / (frac * steps))
    assert momentum[0] == 0.85 and momentum[100] == pytest.approx(0.883333, abs=1e-6)
    assert set(np.round(momentum[300:], 12)) == {0.95} and list(momentum) == sorted(momentum)


def test_the_window_of_blocks_is_the_published_one_of_64_to_1792_tokens_and_half_a_block():
    for script in (BLOCK_WINDOW, SPARSIFY):
        steps = script.Settings().num_iterations
        published = [int((1 - s / steps) * 64 + s / steps * 1792 + 64) // 128 for s in range(steps)]
        assert [window for window, *_ in schedule_of(script)] == published


def test_window_warmups_learning_rate_may_rise_over_the_first_steps():
    assert WINDOW_WARMUP.Settings().lr_warmup == 0
    rate = [rate for _, rate, _ in schedule_of(WINDOW_WARMUP, lr_warmup=4, cooldown_frac=0.5)]
    assert rate[:6] == [0.25, 0.5, 0.75, 1, 1, 1] and rate[875] == 1 and rate[876] < 1


def test_blockwindow_cools_down_along_a_cosine_or_a_line():
    frac = BLOCK_WINDOW.Settings().cooldown_frac
    left = np.minimum(1, (1480 - np.arange(1480)) / 600)
    linear, cosine = (
        [rate for _, rate, _ in schedule_of(BLOCK_WINDOW, cooldown_frac=frac, cooldown_shape=shape)]
        for shape in ("linear", "cosine")
    )
    assert BLOCK_WINDOW.Settings().cooldown_shape == "cosine"
    assert np.allclose(linear, left) and np.allclose(cosine, np.sin(left * np.pi / 2) ** 2)
    with pytest.raises(BLOCK_WINDOW.UserError, match="--cooldown_shape round: this must hold"):
        BLOCK_WINDOW.make_settings(dict(cooldown_shape="round"), 1, on_gpu=False)


@pytest.mark.parametrize(
    "script, tables, table_rows, attentions, scalar_dtype",
    [
        (WINDOW_WARMUP, 1, 50304, 12, torch.bfloat16),
        (UNET, 7, 50304, 12, torch.bfloat16),
        (BLOCK_WINDOW, 7, 50304, 12, torch.bfloat16),
        (SPARSIFY, 4, 50257, 11, torch.bfloat16),
        (SOFT_CAP, 4, 50304, 11, torch.float32),
    ],
    ids=name_of,
)
def test_the_model_has_the_published_size_and_types(script, tables, table_rows, attentions, scalar_dtype):
    with torch.device("meta"):
        model = build(script, script.make_settings({}, 8, on_gpu=True))
    params = dict(model.named_parameters())
    table_names = {name for name in params if "embedding" in name and params[name].ndim == 2}
    matrix_names = {name for name in params if params[name].ndim == 2} - table_names - {"head.weight"}
    scalar_names = params.keys() - table_names - matrix_names - {"head.weight"}
    assert len(model.blocks) == 12 and model.head.weight.shape == (50304, 768)
    with_attention = [block.attention for block in model.blocks if block.attention is not None]
    assert len(with_attention) == attentions and {attention.head_dim for attention in with_attention} == {128}
    assert [params[name].shape for name in table_names] == [(table_rows, 768)] * tables
    assert sum(params[name].numel() for name in matrix_names) == (12 * 8 + attentions * 4) * 768**2
    assert {params[name].dtype for name in table_names} == {torch.bfloat16}
    assert {params[name].dtype for name in scalar_names} == {scalar_dtype}
    assert {params[name].dtype for name in matrix_names | {"head.weight"}} == {torch.float32}


@of(SYSTEMS)
def test_the_optimizers_are_the_published_ones(script):
    full = script.make_settings({}, 8, on_gpu=True)
    trainer = script.Trainer(small(script), alone(script))
    adam_groups = [group for group in trainer.groups if "betas" in group]
    assert [group["lr"] for group in trainer.groups] == [0.6, 0.008, 0.04] + [0.05] * len(trainer.muon.param_groups)
    assert all(group["betas"] == (0.8, 0.95) and group["fused"] and group["eps"] == 1e-8 for group in adam_groups)
    names = {param: name for name, param in trainer.model.named_parameters()}
    tables, head, scalars = ([names[param] for param in group["params"]] for group in adam_groups)
    matrices = [names[param] for group in trainer.muon.param_groups for param in group["params"]]
    assert sorted(names.values()) == sorted(tables + head + scalars + matrices)
    assert all("embedding" in name for name in tables) and head == ["head.weight"]
    assert all(name.startswith("blocks.") for name in matrices) and not [n for n in scalars if n.endswith("weight")]
    assert (full.momentum_start, full.momentum_end, full.momentum_warmup, full.ns_steps) == (0.85, 0.95, 300, 5)
    assert (full.scalar_eps, script.make_settings({}, 1, on_gpu=False).scalar_eps) == (1e-8, 1e-5)
    other = script.Trainer(small(script, scalar_eps=1e-5), alone(script))
    assert [group["eps"] for group in other.groups if "betas" in group] == [1e-8, 1e-8, 1e-5]
    assert isinstance(getattr(trainer, "adam", None), torch.optim.Adam) == (script is SOFT_CAP)  # one for all groups


@of(SYSTEMS)
def test_a_new_model_guesses_uniformly_and_its_mixing_weights_start_as_published(script):
    model = build(script, small(script, num_layers=4))
    ((inputs, targets),) = random_sequences(1)
    assert model(inputs, targets, torch.tensor(128)).item() == pytest.approx(math.log(384), rel=1e-6)
    value_mix = 0.5 if script is WINDOW_WARMUP else [0.5, 0.5]
    starts = dict(embedding_mix=[1, 0], skip_weights=[1, 1], value_mix=value_mix)
    for name, param in model.named_parameters():
        if (start := starts.get(name.split(".")[-1])) is not None:
            assert param.tolist() == start
        else:
            assert bool(param.eq(0).all()) == (name.endswith("project.weight") or name == "head.weight")


# ---- Masks, against dense ones made with plain loops -----------------------------------------------------------------


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


def within_tokens_cut_at_blocks(window):
    """The list of blocks cuts the window at the blocks' edges."""
    return lambda query, key: query - key < window and query // BLOCK - key // BLOCK < math.ceil(window / BLOCK)


def within_blocks(window):
    return lambda query, key: query // BLOCK - key // BLOCK < window


def flex_mask(script, documents, window: int):
    return MAKE_MASK[script](documents, torch.tensor(window, dtype=torch.int32))


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


def seen_in_gathered(script, documents, window: int) -> torch.Tensor:
    """The mask over gathered blocks, laid out densely."""
    mask = script.gathered_bias(documents, window, 1, torch.float32) == 0
    blocks, _, width = mask.shape
    seen = torch.zeros(blocks * BLOCK, blocks * BLOCK + width, dtype=torch.bool)  # with room before the first token
    for block in range(blocks):
        seen[block * BLOCK : (block + 1) * BLOCK, (block + 1) * BLOCK : (block + 1) * BLOCK + width] = mask[block]
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


@pytest.mark.parametrize(
    "script, in_window", [(WINDOW_WARMUP, within_tokens), (UNET, within_tokens_cut_at_blocks)], ids=name_of
)
@window_cases([64, 128, 192, 256, 320, 1792])
@settings(max_examples=10, deadline=None)
def test_a_window_of_tokens_is_that_of_the_dense_mask(script, in_window, documents, window):
    expected = dense_mask(documents.tolist(), in_window(window))
    seen, full = seen_in_flex(flex_mask(script, documents, window))
    assert torch.equal(seen, expected) and expected[full].all()
    assert torch.equal(seen_in_gathered(script, documents, window), expected)


@of([BLOCK_WINDOW, SPARSIFY, SOFT_CAP, SHARDED, THREADS])
@window_cases([1, 2, 3, 14])
@settings(max_examples=10, deadline=None)
def test_a_window_of_blocks_is_that_of_the_dense_mask_and_whole_blocks_are_listed_apart(script, documents, window):
    expected = dense_mask(documents.tolist(), within_blocks(window))
    seen, full = seen_in_flex(flex_mask(script, documents, window))
    assert torch.equal(seen, expected)
    assert torch.equal(seen_in_gathered(script, documents, window), expected)
    by_block = expected.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).all(3).all(1)
    assert torch.equal(full, by_block.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1))


@of([UNET, BLOCK_WINDOW, SPARSIFY, SOFT_CAP, SHARDED, THREADS])
def test_the_blocks_of_a_long_sequence_are_listed_in_order(script):
    torch.manual_seed(0)
    documents = (torch.rand(64 * BLOCK) < 1 / 500).cumsum(0)
    mask = flex_mask(script, documents, 1792 if script is UNET else 14)
    lists = [(mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)]
    assert (mask.full_kv_indices is None) == (script is UNET)
    for counts, indices in lists[:1] if script is UNET else lists:
        listed = [row[:count] for row, count in zip(indices[0, 0].tolist(), counts[0, 0].tolist(), strict=True)]
        assert max(map(len, listed)) > 2 and all(row == sorted(row) for row in listed)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@of([BLOCK_WINDOW, SPARSIFY])
@pytest.mark.parametrize("use_flex", [False, True])
def test_grouped_queries_are_attention_over_repeated_keys_and_values(script, use_flex):
    torch.manual_seed(0)
    q, k, v = (torch.randn(384, heads, 16) for heads in (6, 2, 2))
    documents = torch.arange(384) // 100
    # the window is the whole sequence: uncompiled, FlexAttention looks at mask_mod only, not at the lists of blocks
    mask = flex_mask(script, documents, 3) if use_flex else script.gathered_bias(documents, 3, 6, torch.float32)
    packing = script.Packing(documents, mask)
    repeated = (x.repeat_interleave(3, dim=1) for x in (k, v))
    torch.testing.assert_close(script.attend(q, k, v, packing), script.attend(q, *repeated, packing))
    with pytest.raises(script.UserError, match="--num_kv_heads 4: this must hold"):
        script.make_settings(dict(num_kv_heads=4), 1, on_gpu=True)


# ---- Models, against one written out in float64 ----------------------------------------------------------------------


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
    names = [name for name in weights if re.fullmatch(rf"value_embedding\D*\.{table}\.weight", name)]
    rows = 0 if table is None else weights[names[0]][tokens]
    return mix[0] * values[layer] + mix[1] * rows


def mirrored_tables(weights, layer, layers, values, tokens):
    return mixed_with(min(layer, layers - 1 - layer), weights, layer, values, tokens)


def outer_tables(weights, layer, layers, values, tokens):
    table = layer if layer < 3 else layer - layers + 3 if layer >= layers - 3 else None
    return mixed_with(table, weights, layer, values, tokens)


def reference_loss(weights, tokens, targets, mask, head_dim, turning, value_of, softcap):
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    half, outputs, values = layers // 2, [], []
    x = x0 = rms(weights["embedding.weight"][tokens])
    for layer in range(layers):

        def linear(name, x, block=f"blocks.{layer}."):
            return x @ weights[f"{block}{name}.weight"].T

        if layer >= half:  # layer n-1 takes from layer 0, layer n-2 from layer 1, ...
            x = x + weights["skip_weights"][layer - half] * outputs[layers - 1 - layer]
        mix = weights[f"blocks.{layer}.embedding_mix"]
        x = mix[0] * x + mix[1] * x0
        if f"blocks.{layer}.attention.query.weight" in weights:
            q, k = (
                rotate(rms(linear(f"attention.{name}", rms(x)).unflatten(1, (-1, head_dim))), turning(head_dim))
                for name in ("query", "key")
            )
            values.append(linear("attention.value", rms(x)))
            v = value_of(weights, layer, layers, values, tokens).unflatten(1, (-1, head_dim))
            y, heads_per_key = [], q.size(1) // k.size(1)
            for head in range(q.size(1)):
                scores = q[:, head] @ k[:, head // heads_per_key].T / math.sqrt(head_dim)
                y.append(scores.masked_fill(~mask, -math.inf).softmax(-1) @ v[:, head // heads_per_key])
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
    gradients = torch.autograd.grad(expected, list(weights.values()))
    for name, actual, gradient in zip(weights, actual_gradients, gradients, strict=True):
        # the value residual of the first layer is its own values, whatever the weight
        assert gradient.abs().max() > 0 or name == "blocks.0.attention.value_mix", f"the test does not reach {name}"
        torch.testing.assert_close(actual.double(), gradient, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "script, layers, kv_heads, window, in_window, turning, value_of, softcap",
    [
        (WINDOW_WARMUP, 4, 0, 192, within_tokens, all_pairs_turn, value_residual, 30),
        (WINDOW_WARMUP, 2, 0, 64, within_tokens, all_pairs_turn, value_residual, 30),
        (UNET, 4, 0, 192, within_tokens_cut_at_blocks, all_pairs_turn, mirrored_tables, 30),
        (UNET, 6, 0, 64, within_tokens_cut_at_blocks, all_pairs_turn, mirrored_tables, 30),
        (BLOCK_WINDOW, 6, 0, 2, within_blocks, all_pairs_turn, mirrored_tables, 30),
        (BLOCK_WINDOW, 4, 1, 1, within_blocks, all_pairs_turn, mirrored_tables, 30),
        (SPARSIFY, 10, 1, 2, within_blocks, half_of_the_pairs_turn, outer_tables, 30),
        (SOFT_CAP, 10, 0, 2, within_blocks, half_of_the_pairs_turn, outer_tables, 15),
    ],
    ids=name_of,
)
def test_loss_and_gradients_are_those_of_a_model_written_out(
    script, layers, kv_heads, window, in_window, turning, value_of, softcap
):
    s = small(
        script, num_layers=layers, num_heads=2, num_kv_heads=kv_heads, model_dim=32, vocab_size=50, document_token=49,
        sequence_length=384, dtype="float64",
    )  # fmt: skip
    model = stir(build(script, s).double())
    torch.manual_seed(1)
    tokens, targets = torch.randint(49, (384,)), torch.randint(50, (384,))
    tokens[[150, 330]] = 49
    documents = [(t >= 150) + (t >= 330) for t in range(384)]
    mask = dense_mask(documents, in_window(window))
    loss = model(tokens, targets, torch.tensor(window))
    assert_same_loss_and_gradients(model, loss, reference_loss, tokens, targets, mask, 16, turning, value_of, softcap)


# ---- Muon, against plain loops and on several processes; how gradients are summed ------------------------------------

MOMENTA = [0.5, 0.7, 0.8, 0.9, 0.95]  # it changes: with one momentum for all steps, both kinds give the same updates


def matrices(script) -> list[torch.nn.Parameter]:
    """Of two sizes and three shapes; where Muon can cope, in numbers that neither 2 nor 3 divides."""
    torch.manual_seed(0)
    counts = (6, 3, 3) if script in (UNET, BLOCK_WINDOW) else (5, 1, 6)
    shapes = [shape for shape, count in zip([(16, 16), (32, 16), (16, 32)], counts, strict=True) for _ in range(count)]
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    if script is SPARSIFY:
        params[3].param_lr = 0.25
    return params


def gradient_of(param, number: int, step: int) -> torch.Tensor:
    return torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + number))


def as_on_gpu(world):
    """Muon's chunks are those of a GPU, whatever computes."""
    return type("OnGPU", (type(world),), dict(on_gpu=True))(*world)


def five_steps(script, world) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The weights and the momentum after five steps of Muon; in between, the momentum is saved and loaded."""
    params = matrices(script)
    muon = script.Muon(params, small(script), world)
    for step, momentum in enumerate(MOMENTA):
        for number, param in enumerate(params):
            param.grad = gradient_of(param, number, step)
        if step == 3:
            saved = [muon.whole_momentum(group).clone() for group in muon.param_groups]
            muon = script.Muon(params, small(script), world)
            for group, whole in zip(muon.param_groups, saved, strict=True):
                muon.load_momentum(group, whole)
        for group in muon.param_groups:
            group["momentum"] = momentum
        muon.step()
    buffers = {}
    for group in muon.param_groups:
        parts = muon.whole_momentum(group).flatten().split([param.numel() for param in group["params"]])
        for param, part in zip(group["params"], parts, strict=True):
            transposed = script is not WINDOW_WARMUP and param.size(0) > param.size(1)
            buffers[param] = part.view_as(param.mT).mT if transposed else part.view_as(param)
    return [param.detach() for param in params], [buffers[param] for param in params]


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
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
            weight = weight - 0.05 * getattr(param, "param_lr", 1) * tall * orthogonalized(nesterov)
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

    def orthogonalize(*arguments):
        events.append("orthogonalize")
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
    script.Muon(params, small(script), as_on_gpu(world), orthogonalize).step()
    dist.all_gather_single, dist.all_reduce = all_gather, all_reduce
    return ", ".join(events)


def gradients_of_a_batch(script, world, sequences: int) -> dict:
    """The loss and the gradients of a batch that the processes share, and how they came to them."""
    trainer = script.Trainer(small(script, batch_sequences=sequences, window_start=256, window_end=256), world)
    stir(trainer.model)
    forwards, sums = [], []
    trainer.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    if world.size > 1 and script not in (SHARDED, THREADS, NORMUON):

        def hook(_, bucket):
            sums.append(bucket.is_last())
            return allreduce_hook(None, bucket)

        trainer.ddp_loss.register_comm_hook(None, hook)
    mine = random_sequences(sequences)[world.rank :: world.size]
    loss, stopping = trainer.backward(batch_of(script, mine), step=0, stop=world.rank == 1)
    if script in (SHARDED, THREADS, NORMUON):
        gather_gradients(trainer)
    return dict(
        loss=loss,
        stopping=stopping,
        gradients={name: param.grad.clone() for name, param in trainer.model.named_parameters()},
        forwards=len(forwards),
        sums=sum(sums),
        views=getattr(getattr(trainer, "ddp_loss", None), "gradient_as_bucket_view", None),
    )


def gather_gradients(trainer) -> None:
    """Where each process gets the gradient of its share, and a sum over tokens: let all have all, and the mean."""
    for share in trainer.shares:
        if hasattr(share, "take_gradient"):
            share.take_gradient(*[True] * hasattr(share, "kept"))  # an update is due
        else:
            share.start_reduce()
        share.wait()
        if hasattr(share, "whole"):
            whole = share.whole(share.mine.grad)
        else:
            whole = share.gather(share.gradient, *[share.parts] * hasattr(share, "kept"))[: share.rows]
        whole = whole / (trainer.s.batch_sequences * trainer.s.sequence_length)
        parts = whole.split([len(param) for param in share.params])
        for param, part in zip(share.params, parts, strict=True):
            param.grad = part.clone()


def work_of_a_process(rank: int, folder: str) -> None:
    """All that is asked of two and of three processes, in one start of them."""
    torch.set_num_threads(1)
    for size in range(max(2, rank + 1), 4):
        options = dict(rank=rank, world_size=size, timeout=timedelta(minutes=10))
        dist.init_process_group("gloo", init_method=f"file://{folder}/group_{size}", **options)
        results = {}
        for name, script in SCRIPTS.items():
            world = script.World(rank, size, torch.device("cpu"))
            found = results[name] = {}
            if script in SYSTEMS:
                found["muon"] = [five_steps(script, world), five_steps(script, as_on_gpu(world))]
            if script in SYSTEMS and size == 2:
                found["events"] = order_of_events(script, world)
            if size == 2:
                found["even"] = gradients_of_a_batch(script, world, sequences=4)
            if size == 3:
                found["uneven"] = gradients_of_a_batch(script, world, sequences=5)
        torch.save(results, f"{folder}/{size}_{rank}.pt")
        gc.collect()
        time.sleep(0.3)  # destroying a group that a thread of gloo still holds would abort the process
        dist.destroy_process_group()
    os._exit(0)


@pytest.fixture(scope="module")
def processes(tmp_path_factory) -> dict[int, list[dict]]:
    """What each process of two and of three found."""
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(work_of_a_process, args=(str(folder),), nprocs=3)
    return {size: [torch.load(folder / f"{size}_{rank}.pt") for rank in range(size)] for size in (2, 3)}


@of(SYSTEMS)
def test_five_steps_of_muon_are_those_of_a_plain_loop(script):
    for world in (alone(script), as_on_gpu(alone(script))):
        for actual, expected in zip(five_steps(script, world), five_steps_by_hand(script), strict=True):
            for a, b in zip(actual, expected, strict=True):
                torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@of(SYSTEMS)
def test_muon_gives_the_same_weights_on_one_two_and_three_processes(script, processes):
    expected = five_steps(script, alone(script))
    for process in processes[2] + processes[3]:
        for found in process[script.__name__]["muon"]:
            for a, b in zip(found, expected, strict=True):
                for x, y in zip(a, b, strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@of(SYSTEMS)
def test_when_muon_talks_to_the_other_processes(script, processes):
    one_sum_at_the_end = "orthogonalize, orthogonalize, orthogonalize, sum"
    gather_beside_work = "orthogonalize, gather, orthogonalize, wait, gather, orthogonalize, wait, gather, wait"
    expected = one_sum_at_the_end if script is WINDOW_WARMUP else gather_beside_work
    assert [process[script.__name__]["events"] for process in processes[2]] == [expected] * 2


@pytest.mark.parametrize(
    "script, forwards, views",
    [
        (BASELINE, 2, False),
        (WINDOW_WARMUP, 2, False),
        (UNET, 1, False),  # both sequences in one forward pass
        (BLOCK_WINDOW, 2, True),
        (SPARSIFY, 2, True),
        (SOFT_CAP, 2, True),
    ],
    ids=name_of,
)
def test_a_process_sums_the_gradients_of_its_sequences_once(script, forwards, views, processes):
    for process in processes[2]:
        found = process[script.__name__]["even"]
        assert (found["forwards"], found["sums"], found["views"]) == (forwards, 1, views)


def assert_same_gradients(found: dict, expected: dict) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["stopping"] and not expected["stopping"]
    for name, gradient in expected["gradients"].items():
        tolerance = dict(rtol=3e-2, atol=3e-4) if gradient.dtype == torch.bfloat16 else dict(rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(found["gradients"][name], gradient, **tolerance, msg=lambda m, n=name: f"{n}: {m}")


@of_all
def test_two_and_three_processes_give_the_gradients_of_one(script, processes):
    for size, kind, sequences in (2, "even", 4), (3, "uneven", 5):
        expected = gradients_of_a_batch(script, alone(script), sequences)
        for process in processes[size]:
            assert_same_gradients(process[script.__name__][kind], expected)


@of_all
def test_the_loss_of_a_batch_is_the_mean_of_its_sequences_losses_side_by_side_or_one_by_one(script):
    sequences = [(inputs % 256, targets) for inputs, targets in random_sequences(4)]  # in the middle of their documents
    trainer = script.Trainer(small(script, window_start=256, window_end=256), alone(script))
    stir(trainer.model)
    loss, _ = trainer.backward(batch_of(script, sequences), step=0)
    apart = [trainer.model(*sequence, *windows_of(trainer)).item() for sequence in sequences]
    assert loss == pytest.approx(sum(apart) / 4, rel=1e-6)
    if script not in (UNET, THREADS, NORMUON):
        side_by_side = tuple(map(torch.cat, zip(*sequences, strict=True)))
        assert trainer.backward([side_by_side], step=0)[0] == pytest.approx(loss, rel=1e-6)


# ---- What only some of them have -------------------------------------------------------------------------------------


@of([WINDOW_WARMUP, UNET])
def test_the_svd_backend_makes_all_singular_values_one(script):
    trainer = script.Trainer(small(script, backend="svd"), alone(script))
    stir(trainer.model)
    before = {name: param.detach().clone() for name, param in trainer.model.blocks.named_parameters()}
    trainer.backward(batch_of(script, random_sequences(4)), step=0)
    trainer.update(0)
    for name, param in trainer.model.blocks.named_parameters():
        if param.ndim == 2:
            singular_values = torch.linalg.svdvals((param - before[name]).detach())
            scale = 0.05 * math.sqrt(max(1, param.size(0) / param.size(1)))
            torch.testing.assert_close(singular_values, torch.full_like(singular_values, scale), rtol=1e-3, atol=1e-5)
    with pytest.raises(script.UserError, match="--backend qr: this must hold"):
        script.make_settings(dict(backend="qr"), 1, on_gpu=False)


@of([BASELINE, WINDOW_WARMUP])
@pytest.mark.parametrize("share", [0.25, 4, 0])
def test_gradients_are_clipped_to_a_norm(script, share, monkeypatch):
    """To a share of their own norm; more than all of it, or no limit at all, leaves them as they are."""
    assert script.Settings().gradient_clip == 1
    gradients = gradients_of_a_batch(script, alone(script), sequences=4)["gradients"]
    whole = torch.cat([gradient.flatten().double() for gradient in gradients.values()])
    limit = share * whole.norm().item()
    trainer = script.Trainer(small(script, gradient_clip=limit, window_start=256, window_end=256), alone(script))
    stir(trainer.model)
    trainer.backward(batch_of(script, random_sequences(4)), step=0)
    monkeypatch.setattr(trainer.model, "zero_grad", lambda set_to_none: None)
    trainer.update(0)
    clipped = torch.cat([param.grad.flatten().double() for param in trainer.model.parameters()])
    torch.testing.assert_close(clipped, whole * (share if 0 < share < 1 else 1), rtol=2e-2, atol=1e-6)


def test_unets_window_is_written_to_its_tensor_only_when_it_changes(monkeypatch):
    trainer = UNET.Trainer(small(UNET, window_start=64, window_end=192, num_iterations=10), alone(UNET))
    written = []
    fill = trainer.window.fill_

    class Watched:
        def fill_(self, value):
            written.append(value)
            fill(value)

    monkeypatch.setattr(trainer, "window", Watched())
    for step in range(10):
        trainer.set_window(step)
    assert written == [64, 128]


@of([UNET, BLOCK_WINDOW])
def test_processes_that_do_not_divide_the_matrices_are_refused(script):
    for processes in (1, 2, 3, 4, 6, 8):
        script.make_settings({}, processes, on_gpu=True)
    for processes in (5, 7):
        with pytest.raises(script.UserError, match="--num_layers 12: this must hold"):
            script.make_settings({}, processes, on_gpu=True)


@of([SPARSIFY, SOFT_CAP, SHARDED])
def test_three_tables_serve_the_first_and_last_three_of_twelve_layers_and_layer_seven_has_no_attention(script):
    model = build(script, small(script, num_layers=12))
    rows = model.value_embedding(torch.arange(4), torch.float32)
    tables = [table.weight[:4].float() for table in model.value_embedding.tables]
    used = [None if row is None else [torch.equal(row, table) for table in tables].index(True) for row in rows]
    assert len(tables) == 3 and used == [0, 1, 2, None, None, None, None, None, None, 0, 1, 2]
    assert [layer for layer, block in enumerate(model.blocks) if block.attention is None] == [7]


@pytest.mark.parametrize(
    "script, turning",
    [
        (WINDOW_WARMUP, all_pairs_turn),
        (UNET, all_pairs_turn),
        (BLOCK_WINDOW, all_pairs_turn),
        (SPARSIFY, half_of_the_pairs_turn),
        (SOFT_CAP, half_of_the_pairs_turn),
    ],
    ids=name_of,
)
def test_the_pairs_of_a_head_turn_in_float32_as_published(script, turning):
    rotary, x = script.Rotary(head_dim=128, max_length=64), torch.randn(64, 2, 128)
    turned = rotary(x)
    torch.testing.assert_close(turned.double(), rotate(x.double(), turning(128)), rtol=1e-4, atol=1e-4)
    assert torch.equal(rotary(torch.cat([x, x])), torch.cat([turned, turned]))  # two sequences side by side
    assert torch.equal(rotary(x.bfloat16()), rotary(x.bfloat16().float()).bfloat16())
    still = [i for i, frequency in enumerate(turning(128) * 2) if frequency == 0]
    assert torch.equal(turned[..., still], x[..., still])
    assert {buffer.dtype for buffer in rotary.buffers()} == {torch.float32} and not rotary.state_dict()


def test_softcap_holds_its_tables_in_bfloat16_unless_told_otherwise():
    for choice, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        model = build(SOFT_CAP, small(SOFT_CAP, bfloat16_embeddings=choice))
        assert {param.dtype for param in [model.embedding.weight, *model.value_embedding.parameters()]} == {dtype}
    assert SOFT_CAP.Settings().bfloat16_embeddings and not SOFT_CAP.Settings().coordinate_descent


@pytest.mark.parametrize("shape", [(130,), (1, 128)])
def test_softcap_takes_one_row_of_whole_blocks(shape):
    tokens = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(ValueError, match="one row of whole blocks of 128"):
        build(SOFT_CAP, small(SOFT_CAP))(tokens, tokens, torch.tensor(1))


@pytest.mark.parametrize(
    "script, setting, option",
    [(s, "max_autotune", "max_autotune") for s in (WINDOW_WARMUP, UNET, BLOCK_WINDOW, SPARSIFY)]
    + [(SOFT_CAP, "coordinate_descent", "coordinate_descent_tuning")],
    ids=name_of,
)
def test_the_tuning_of_inductor_is_a_setting(script, setting, option):
    assert getattr(script.Settings(), setting) is False
    with torch._inductor.config.patch():
        for tuning in (True, False):
            script.Trainer(small(script, **{setting: tuning}), alone(script))
            assert getattr(torch._inductor.config, option) is tuning


# ---- The baseline: GPT-2 ---------------------------------------------------------------------------------------------


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
    model = stir(build(BASELINE, small(BASELINE, vocab_size=50, context_length=64)))
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(20 if param.ndim == 2 else 1)  # where GELU bends
    torch.manual_seed(1)
    tokens, targets = torch.randint(50, (192,)), torch.randint(50, (192,))
    assert_same_loss_and_gradients(model, model(tokens, targets), gpt2_loss, tokens, targets, 64, 2)


def test_the_baseline_has_the_size_and_the_schedule_of_gpt2():
    s = BASELINE.make_settings({}, 8, on_gpu=True)
    with torch.device("meta"):
        model = build(BASELINE, s)
    per_layer = 12 * 768**2 + (4 + 4 + 1 + 4) * 768  # matrices; biases of attention and MLP, and two norms
    assert sum(param.numel() for param in model.parameters()) == (50304 + 1024) * 768 + 12 * per_layer + 2 * 768
    assert {block.attention.head_dim for block in model.blocks} == {64} and s.context_length == 1024
    steps, warmup = 19073, 256
    assert (s.num_iterations, s.lr_warmup, s.lr) == (steps, warmup, 0.0018)
    rate = [BASELINE.lr_factor(step, steps, warmup) for step in range(steps)]
    assert np.allclose(rate[:warmup], (np.arange(warmup) + 1) / warmup)
    assert np.allclose(rate[warmup:], np.cos(np.pi / 2 * np.arange(steps - warmup) / (steps - warmup)) ** 2)
    assert schedule_of(BASELINE, num_iterations=40, lr_warmup=8)[4:6] == [(5 / 8,), (6 / 8,)]


def test_the_baselines_weights_start_as_gpt2s():
    model = build(BASELINE, small(BASELINE, num_layers=8, model_dim=128))
    for name, param in model.named_parameters():
        if param.ndim == 2:
            std = 0.02 / math.sqrt(2 * 8) if "project" in name else 0.02
            assert param.std().item() == pytest.approx(std, rel=0.03) and abs(param.mean()) < 0.05 * std, name
        else:
            assert set(param.tolist()) == ({0} if name.endswith("bias") else {1}), name
        assert param.dtype == torch.float32


def test_the_baselines_adamw_decays_matrices_and_tables_only():
    trainer = BASELINE.Trainer(small(BASELINE), alone(BASELINE))
    names = {param: name for name, param in trainer.model.named_parameters()}
    decay = {names[param]: group["weight_decay"] for group in trainer.adam.param_groups for param in group["params"]}
    assert isinstance(trainer.adam, torch.optim.AdamW) and len(decay) == len(names)
    assert {name for name in decay if decay[name] == 0.1} == {n for p, n in names.items() if p.ndim == 2}
    assert {name for name in decay if decay[name] == 0} == {n for p, n in names.items() if p.ndim == 1}
    assert {group["betas"] for group in trainer.adam.param_groups} == {(0.9, 0.95)}


# ---- Whole runs ------------------------------------------------------------------------------------------------------


def run_here(script, arguments) -> int:
    """A run in this process; afterwards signals are handled as before, and the run and its log are closed."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    try:
        return script.main(arguments)
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        gc.collect()


@of_all
def test_a_run_learns_and_resumes_bit_for_bit_and_on_two_processes_alike(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_shard(tmp_path / "data/train.bin", made_up_tokens(20_000, seed=1))
    write_shard(tmp_path / "data/val.bin", made_up_tokens(3_000, seed=9))
    files = dict(train_files="data/train.bin", val_files="data/val.bin")
    s = small_settings(script, **files, num_iterations=8, val_loss_every=4, save_every=5, resume="latest")
    arguments = [f"--{name}={value}" for name, value in s.items() if not isinstance(value, bool)]
    assert run_here(script, arguments) == 0
    first, last = sorted(tmp_path.glob("checkpoints/*/step_*.pt"))
    state = torch.load(last, weights_only=True)["state"]
    last.unlink()  # as if the run had ended after step 5
    assert run_here(script, arguments) == 0
    resumed = torch.load(last, weights_only=True)["state"]
    for part in state:
        assert all(torch.equal(state[part][name], resumed[part][name]) for name in state[part])
    last.unlink()
    result = run_script(arguments, tmp_path, processes=2, script=ROOT / "records" / script.__name__ / "train_gpt.py")
    assert result.returncode == 0, result.stderr
    on_two = torch.load(last, weights_only=True)["state"]["model"]
    for name, weight in state["model"].items():
        close = torch.isclose(on_two[name].float(), weight.float(), rtol=0.02, atol=0.02)
        assert close.float().mean() > 0.99, name
    log = only_log(tmp_path).read_text()
    losses = train_losses(log)
    assert len(losses) == 8 + 3 + 3 and losses[5:8] == losses[8:11] and losses[7] < losses[0] - 0.1
    assert losses[11:] == pytest.approx(losses[8:11], rel=2e-3)
    assert len(val_losses(log)) == 5 and val_losses(log)[2] == val_losses(log)[3] < val_losses(log)[0]
    assert log.startswith(script.SOURCE) and log.count("resumed at step 5") == 2 and log.endswith("ended: finished")
    assert asdict(small(script, **files)).keys() <= torch.load(first, weights_only=True)["settings"].keys()
