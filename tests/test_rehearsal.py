"""The rehearsal: reads logs correctly, and reports seeded faults as what they are.

The tests marked `rehearsal` run real torch on null GPUs and take minutes; the others are plain text in, values out.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rehearsal import launch, readings, report, shards, steps  # noqa: E402
from rehearsal.__main__ import main, pair_up, parse_arguments  # noqa: E402
from rehearsal.watch import peak_memory  # noqa: E402

STAND_IN = ROOT / "rehearsal" / "stand_in.py"

# ---- Reading logs ----------------------------------------------------------------------------------------------------


def dynamo_lines(kind: str, compile_id: str, *messages: str, rank: int = 0) -> str:
    prefix = f"[rank{rank}]:V1116 02:05:40.057000 7125 torch/_dynamo/guards.py:5396] [{compile_id}] [__{kind}] "
    return "".join(prefix + message + "\n" for message in messages)


def recompile(compile_id: str, guard: str) -> str:
    return dynamo_lines(
        "recompiles",
        compile_id,
        "Recompiling function forward in train.py:69",
        "    triggered by the following guard failure(s):",
        f"    - 0/0: {guard}   # x = y",
    )


OPTIMIZERS = "[rehearsal] Optimizer 0 1 2\n[rehearsal] Optimizer 1 2 3\n"


def test_recompiles_are_told_apart_by_whether_the_clock_was_running():
    log = readings.read_log(
        OPTIMIZERS
        + recompile("0/1", "grad_mode")
        + "step:0/2 val_loss:11 train_time:0ms step_avg:nanms\n"
        + recompile("0/2", "self.temperature == 1.0")
        + OPTIMIZERS
        + "step:1/2 train_time:1ms step_avg:1ms\n"
    )
    assert [(r.after_warmup, r.reason) for r in log.recompiles] == [
        (False, "0/0: grad_mode"),
        (True, "0/0: self.temperature == 1.0"),
    ]


def test_without_a_first_validation_the_warm_up_ends_before_the_first_timed_step():
    log = readings.read_log(
        OPTIMIZERS
        + OPTIMIZERS
        + "step:1/2 train_time:1ms step_avg:1ms\n"
        + recompile("0/2", "late")
        + OPTIMIZERS
        + "step:2/2 train_time:1ms step_avg:1ms\n"
    )
    assert log.warmup_marks == 2
    assert [r.after_warmup for r in log.recompiles] == [True]
    assert (log.last_step, log.steps) == (2, 2)


def test_ranks_that_print_no_steps_are_judged_like_rank_0():
    first = readings.read_log(
        OPTIMIZERS
        + recompile("0/1", "a")
        + "step:0/1 val_loss:1 train_time:0ms step_avg:0ms\n"
        + OPTIMIZERS
        + recompile("0/2", "b")
    )
    other = readings.read_log(OPTIMIZERS + recompile("0/1", "a") + OPTIMIZERS + recompile("0/2", "b"), leader=first)
    assert [r.after_warmup for r in other.recompiles] == [False, True]
    merged = readings.merge_found({0: first.recompiles, 1: other.recompiles})
    assert [(m.reason, m.ranks) for m in merged] == [("0/0: a", [0, 1]), ("0/0: b", [0, 1])]


WAIT = "[rehearsal] Waited for the GPU\n"


def late(text: str, warmup_steps: int = 1, leader: readings.RankLog | None = None) -> list[bool]:
    return [found.after_warmup for found in readings.read_log(text, leader, warmup_steps).recompiles]


def test_each_rank_ends_its_warm_up_by_its_own_marks():
    warmup = OPTIMIZERS + recompile("0/1", "grad_mode") + WAIT  # the forward without gradients is part of it
    validation = "step:0/2 val_loss:11 train_time:0ms step_avg:nanms\n"
    first = readings.read_log(warmup + WAIT + validation + OPTIMIZERS, None, 1)
    assert late(warmup + recompile("0/2", "only here") + OPTIMIZERS, leader=first) == [False, True]
    assert late(OPTIMIZERS + WAIT + recompile("0/1", "late") + OPTIMIZERS, leader=first) == [True]
    assert late(warmup + recompile("0/2", "late") + OPTIMIZERS + "step:1/2 train_time:1ms\n") == [False, True]


def test_the_end_of_the_warm_up_is_known_for_any_number_of_its_steps():
    assert late(OPTIMIZERS + recompile("0/1", "a") + OPTIMIZERS + WAIT + recompile("0/2", "b"), 2) == [False, True]
    assert late(OPTIMIZERS + recompile("0/1", "a") + OPTIMIZERS, 1) == [True]  # it never waits for the GPU
    assert late(OPTIMIZERS + recompile("0/1", "a"), 2) == [False]  # it ended in its warm-up
    assert late(WAIT + recompile("0/1", "a") + OPTIMIZERS, 0) == [True]
    assert late(recompile("0/1", "a"), 1) == [False]
    assert [
        report.warmup_steps(settings, processes)
        for settings, processes in (
            ({"warmup_steps": "2"}, 8),
            ({"warmup_steps": 0}, 8),
            ({"warmup_steps": 0}, 1),
            ({}, 8),
        )
    ] == [2, 1, 0, None]


def test_a_space_in_the_scripts_path_hides_nothing():
    log = readings.read_log(
        dynamo_lines("graph_breaks", "0/0", "Graph break in user code at /my runs/train.py:54")
        + dynamo_lines("recompiles", "0/1", "Recompiling function forward in /my runs/train.py:69")
        + "/my runs/train.py:3: FutureWarning: `old` is deprecated.\n"
    )
    places = [found[0].place for found in (log.graph_breaks, log.recompiles, log.deprecations)]
    assert places == ["/my runs/train.py:54", "forward (/my runs/train.py:69)", "/my runs/train.py:3"]


def test_a_frame_that_falls_back_to_eager_is_a_graph_break():
    warning = "W1116 23:47:50.745000 6245 torch/_dynamo/convert_frame.py:1994] [1/2] "
    log = readings.read_log(
        dynamo_lines(
            "graph_breaks",
            "0/0",
            "Graph break: torch.compile cannot properly resume from this graph break, which results in a skip.",
            "torch.compile will skip tracing the frame forward (/my runs/train.py line 20) and fall back to eager.",
            "The graph break occurred in the following user code:",
            '  File "/my runs/train.py", line 21, in forward',
        )
        + warning
        + "torch._dynamo hit config.recompile_limit (8)\n"
        + warning
        + "   function: 'norm' (/my runs/train.py:17)\n"
        + warning
        + "   last reason: 1/1: s == 'b'\n"
    )
    assert [(b.place, b.reason) for b in log.graph_breaks] == [
        ("/my runs/train.py:20", "forward falls back to eager"),
        ("/my runs/train.py:17", "norm falls back to eager, it hit torch._dynamo.config.recompile_limit (8)"),
    ]


def test_a_graph_break_is_reported_with_its_place_and_explanation():
    log = readings.read_log(
        dynamo_lines(
            "graph_breaks",
            "0/0",
            "Graph break in user code at train.py:54",
            "Graph Break Reason: Call to `f()`",
            "  Explanation: User-inserted graph break. Message: None",
            "  Hint: Remove it.",
        )
    )
    assert [(b.place, b.reason) for b in log.graph_breaks] == [
        ("train.py:54", "User-inserted graph break. Message: None")
    ]


def test_deprecations_name_the_line_of_the_script_and_leave_out_what_nobody_sees():
    log = readings.read_log(
        "x/site-packages/torch/c10d_logger.py:83: FutureWarning: `old` is deprecated.\n  return func()\n"
        "[rehearsal] warned from train.py:260\n"
        "x/site-packages/torch/jit/_script.py:365: DeprecationWarning: `torch.jit` is deprecated.\n"
        "train.py:3: UserWarning: a remark\n"
        "[W1116 02:00:50.12 Allocator.cpp:3] Warning: PYTORCH_CUDA_ALLOC_CONF is deprecated, use another\n"
    )
    assert [d.place for d in log.deprecations] == ["train.py:260", "torch"]


def test_a_mismatch_is_told_in_one_line():
    def print_of(size: int) -> str:
        return (
            f"CollectiveFingerPrint(SequenceNumber=55, OpType=ALLREDUCE, TensorShape=[{size}], TensorDtypes=Float, "
            "TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda))"
        )

    log = readings.read_log(
        f"[rank1]: RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: "
        f"{print_of(16)}, but Rank 0 is running collective: {print_of(8)}.Collectives differ\n"
    )
    assert log.mismatch == "rank 1 runs ALLREDUCE of [16] Float, but rank 0 runs ALLREDUCE of [8] Float"


def test_the_first_error_of_a_rank_is_kept():
    log = readings.read_log(
        "[rank0]: Traceback (most recent call last):\n[rank0]: ValueError: bad shape\nx: y\n"
        "torch.distributed.DistBackendError: later\n"
    )
    assert log.error == "ValueError: bad shape"


@pytest.mark.parametrize(
    "raised",
    [
        "torch._dynamo.exc.Unsupported: Call to `f()`\n  Explanation: none\n\nfrom user code:\n   File x",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory",
        "AssertionError",
        "KeyError: 'x'\n\nDuring handling of the above exception, another exception occurred:\n\n"
        'Traceback (most recent call last):\n  File "train_gpt.py", line 1, in f\nValueError: no x',
    ],
)
def test_a_crash_is_told_by_the_last_line_of_its_traceback(raised):
    log = readings.read_log(
        "train_gpt: rank 0 failed:\nTraceback (most recent call last):\n"
        f'  File "train_gpt.py", line 9, in main\n    train()\n    ^^^^^^^\n{raised}\n\n'
    )
    assert log.error == ("ValueError: no x" if "ValueError" in raised else raised.splitlines()[0])


def test_what_the_script_tells_the_user_is_its_error():
    assert readings.read_log("train_gpt: --seed x: not a number\n").error == "--seed x: not a number"


TORCHRUN = """Failures:
[1]:
  time      : 2026-11-16_23:00:01
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 11)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-16_23:00:00
  rank      : 3 (local_rank: 3)
  exitcode  : -11 (pid: 14)
"""


def test_the_first_fault_is_named_and_not_what_followed_from_it():
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:544] Connection closed by peer"
    assert readings.read_failures(TORCHRUN) == {3: -11, 0: 1}
    assert readings.first_fault({0: lost}, {3: -11, 0: 1}) == "rank 3: killed by SIGSEGV"
    assert readings.first_fault({0: lost, 2: "ValueError: x"}, {0: 1, 2: 1}) == "rank 2: ValueError: x"
    assert readings.first_fault({0: "KeyError: y", 2: "ValueError: x"}, {2: 1, 0: -15}) == "rank 2: ValueError: x"
    assert readings.first_fault({0: lost}, {1: -15}) == f"rank 0: {lost}"
    assert readings.first_fault({}, readings.read_failures("")) == ""


# ---- Judging and saying ----------------------------------------------------------------------------------------------


def found_nothing(**run) -> dict:
    asked = {"num_iterations": "4", "val_loss_every": 2, "save_every": "4"}
    return {
        "run": {
            "exit_code": 0,
            "last_step": 4,
            "steps": 4,
            "validations": 3,
            "checkpoints": 1,
            "first_error": "",
            "asked": asked,
        }
        | run,
        "out_of_memory": None,
        "collectives": {"mismatch": ""},
        "compiled": {"kernels": 1},
        "graph_breaks": [],
        "recompiles": [],
        "deprecations": [],
        "spilling_kernels": [],
    }


def test_a_run_that_ends_well_without_what_it_was_asked_for_is_a_finding():
    assert report.findings(found_nothing()) == []
    asked = {"num_iterations": 4, "val_loss_every": 0, "save_every": 0}
    assert report.findings(found_nothing(validations=1, checkpoints=0, asked=asked)) == []
    for run in ({"last_step": 3}, {"validations": 0}, {"checkpoints": 0}, {"last_step": 2, "steps": 2}):
        assert [entry["kind"] for entry in report.findings(found_nothing(**run))] == ["incomplete"]
    nothing_known = dict.fromkeys(asked)
    assert report.findings(found_nothing(last_step=0, steps=0, validations=0, checkpoints=0, asked=nothing_known)) == []


def test_the_peak_of_every_rank_goes_into_one_line():
    assert report.over_ranks(dict.fromkeys(range(8), 3 * 2**30)) == "3.00 GiB on ranks 0-7"
    assert report.over_ranks({0: 2**31, 1: 2**30, 2: 2**30 + 1, 4: 2**30}) == (
        "1.00 GiB on ranks 1-2, 4 to 2.00 GiB on rank 0"
    )


def test_an_order_of_collectives_is_told_only_where_there_is_one():
    some = {"in_all": 5, "per_step": 2, "bytes_per_step": 2**30, "kinds": [], "mismatch": ""}
    told = "collectives   2 per step, 1.00 GiB per rank"
    assert report.collective_lines(some, 8) == [f"{told}, same order on all 8 ranks"]
    assert report.collective_lines(some, 1) == [told]
    assert report.collective_lines({**some, "in_all": 0, "per_step": 0}, 8) == ["collectives   none"]


# ---- Reading collectives ---------------------------------------------------------------------------------------------

START = "Broadcast 7 float32 28\n"
STEP = "AllReduce 100 float32 400\nOptimizer 0 {0} {0}\nAllGather 10 bfloat16 20\nOptimizer 1 {0} {1}\n"
VALIDATION = "AllReduce 1 float32 4\n"


def test_a_trace_is_cut_into_steps_with_their_flops():
    traffic = readings.read_traffic(
        START
        + STEP.format(60, 64)
        + STEP.format(124, 128)
        + VALIDATION
        + STEP.format(200, 204)
        + STEP.format(264, 268)
        + VALIDATION
    )
    assert [len(step.collectives) for step in traffic.steps] == [3, 2, 3, 2]
    assert len(traffic.all) == 11 and traffic.all[-1] == ("AllReduce", 1, "float32", 4)
    (typical,) = readings.typical_steps(traffic.steps)
    assert (typical.bytes, typical.model_flops, typical.optimizer_flops) == (420, 60, 4)


def test_a_line_cut_short_by_a_kill_is_left_out():
    assert len(readings.read_traffic(STEP.format(1, 2) + "AllRedu").all) == 2


def test_a_validation_before_each_step_is_left_out_where_the_clock_stops_for_it():
    traffic = readings.read_traffic(
        START
        + STEP.format(60, 64)
        + STEP.format(160, 164)
        + STEP.format(260, 264)  # a forward more in each
        + "Wait 264\n"
        + VALIDATION
        + "Wait 300\n"
        + STEP.format(360, 364)
        + "Wait 364\n"
        + VALIDATION
        + "Wait 400\n"
        + STEP.format(460, 464)
    )
    (typical,) = readings.typical_steps(traffic.steps)
    assert (typical.bytes, typical.model_flops, typical.optimizer_flops) == (420, 60, 4)
    assert traffic.all.count(("AllReduce", 1, "float32", 4)) == 2  # but the ranks are compared in these too
    for every, waits, told in (("1", True, False), ("1", False, True), ("2", False, False)):
        found = traffic if waits else readings.read_traffic(START + STEP.format(60, 64))
        of_ranks = {0: readings.typical_steps(found.steps)}
        assert report.summarise_flops(of_ranks, {"val_loss_every": every})["with_validation"] == told
    assert not report.summarise_flops({}, {"val_loss_every": "1"})["with_validation"]  # no step at all


# A step gathers after its last optimizer; the script waits before a validation, and not behind it.
GATHERING = "AllReduce 100 float32 400\nOptimizer 0 {0} {1}\nAllGather 10 bfloat16 20\n"


def test_a_validation_behind_a_wait_is_not_taken_for_a_part_of_the_step():
    traffic = readings.read_traffic(
        GATHERING.format(60, 64)
        + "Wait 64\n"
        + VALIDATION
        + GATHERING.format(224, 228)  # 100 of them in the validation
        + GATHERING.format(288, 292)
        + "Wait 292\n"
        + VALIDATION
        + GATHERING.format(452, 456)
        + GATHERING.format(516, 520)
    )
    (typical,) = readings.typical_steps(traffic.steps)
    assert typical.collectives == [("AllGather", 10, "bfloat16", 20), ("AllReduce", 100, "float32", 400)]
    resolved = {"sequence_length": 10, "batch_sequences": 2}
    flops = report.summarise_flops({rank: [typical] for rank in range(8)}, resolved)
    assert flops["model_matmul_per_token"] == 8 * 60 / 20 and flops["optimizer_matmul_per_step"] == 8 * 4
    assert report.summarise_traffic([typical]) == {
        "per_step": 2,
        "bytes_per_step": 420,
        "kinds": [
            {"kind": "AllGather bfloat16", "count": 1, "bytes": 20},
            {"kind": "AllReduce float32", "count": 1, "bytes": 400},
        ],
    }


def test_an_optimizer_that_works_in_every_second_step_counts_half():
    both, rare = GATHERING.format(60, 70), "Optimizer 0 {0} {0}\n"
    text = both + "Wait 70\n" + rare.format(170)
    for begun in (170, 300, 430):  # 60 in each model; 10 in every second optimizer
        text += GATHERING.format(begun + 60, begun + 70) + rare.format(begun + 130)
    typical = readings.typical_steps(readings.read_traffic(text).steps)
    assert [len(step.collectives) for step in typical] == [1, 1]
    flops = report.summarise_flops({0: typical}, {})
    assert (flops["model_matmul_per_step"], flops["optimizer_matmul_per_step"]) == (60, 5)
    assert report.summarise_traffic(typical)["per_step"] == 1


def test_the_steps_that_repeat_are_found_in_the_longest_undisturbed_series():
    assert readings.repeating([], []) == []
    assert readings.repeating("AB", [False, False]) == []
    assert readings.repeating("XAAA", [False, True, True, True]) == [3]
    assert readings.repeating("XABABYA", [False, True, True, True, True, False, True]) == [3, 4]
    assert readings.repeating("XAYB", [False, True, False, True]) == [3]  # one alone is all that is known


def test_the_first_differing_collective_is_named():
    same = readings.read_traffic(STEP.format(1, 2))
    other = readings.read_traffic(STEP.format(1, 2).replace("AllGather 10 bfloat16 20", "AllGather 12 bfloat16 24"))
    assert readings.first_difference({0: same, 1: same}) == ""
    assert readings.first_difference({0: same, 1: same, 2: other}) == (
        "collective 1: rank 0 runs AllGather of 10 bfloat16 (20 bytes), rank 2 runs AllGather of 12 bfloat16 (24 bytes)"
    )
    short = readings.read_traffic("AllReduce 100 float32 400\n")
    assert readings.first_difference({0: same, 1: short}) == "rank 0 runs 2 collectives, rank 1 runs 1"
    assert readings.first_difference({0: same, 1: short}, all_ended=False) == ""  # it was stopped, not wrong


# ---- Memory, kernels, settings, data ---------------------------------------------------------------------------------


def event(action: str, addr: int, size: int, time_us: int) -> dict:
    return {"action": action, "addr": addr, "size": size, "time_us": time_us, "frames": []}


def test_memory_at_the_peak_is_found_although_the_history_lost_its_beginning():
    history = [  # block 1 (100 bytes) was allocated before
        event("alloc", 2, 50, 10),
        event("alloc", 3, 500, 20),  # the peak: 1, 2, 3
        event("free_requested", 3, 500, 30),
        event("free_requested", 2, 50, 40),
        event("alloc", 3, 300, 50),
        event("free_requested", 1, 100, 60),  # another block at 3
    ]
    blocks = [{"address": 3, "size": 300, "state": "active_allocated"}, {"address": 9, "size": 9, "state": "inactive"}]
    snapshot = {"device_traces": [history], "segments": [{"device": 0, "blocks": blocks}]}
    at_peak = peak_memory.blocks_at_peak(snapshot, 0)
    assert sorted((block["addr"], block["size"]) for block in at_peak) == [(1, 100), (2, 50), (3, 500)]
    owners = [
        {"time_us": 25, "addresses": {1: "parameters", 2: "gradients"}},
        {"time_us": 55, "addresses": {3: "optimizer state"}},
    ]  # of the later block at 3
    held = peak_memory.holders_at_peak(snapshot, 0, owners)
    assert [(h["holder"], h["bytes"]) for h in held] == [("autograd", 500), ("parameters", 100), ("gradients", 50)]


def test_kernel_resources_come_from_cuobjdump_and_tritons_metadata():
    usage = "Resource usage:\n Common:\n Function triton_red_0:\n  REG:255 STACK:16 SHARED:0 LOCAL:0\n"
    kernel = readings.parse_kernel(usage, {"shared": 4096, "num_warps": 8, "num_stages": 3, "target": {"arch": 90}})
    assert kernel == readings.Kernel("triton_red_0", 255, 16, 4096, 8, 3, "sm_90")
    assert readings.parse_kernel("nothing", {}) is None


def test_settings_are_read_from_a_script_without_running_it():
    source = (
        "import missing\n@dataclass\nclass Hyperparameters:\n"
        "    a: int = 64*1024 # why\n    b: str = 'x'\n    c: int = f()\n"
    )
    assert readings.settings_of(source) == {"a": 65536, "b": "x", "c": None}
    assert readings.settings_of("x = 1") == {}


STAGES = """
    684  1  1.00  1  3
    683  2  1.51  3  7
     40  3  1.93  6 13
      0  3  1.93  6 20
"""
STAGED = f"""
STAGES = {STAGES!r}
class Settings:
    train_files: str = setting("", "shards")
    val_files: str = setting("", "shards")
    sequence_length: int = setting(16384, "tokens")
    batch_sequences: int = setting(8, "sequences")
    stages: str = setting(STAGES, "the table")
    num_iterations: int = setting(1407, "steps")
    save_every: int = setting(0, "steps")
    val_loss_every: int = setting(125, "steps")
    val_tokens: int = setting(10485760, "tokens")
"""


def test_the_stages_of_a_run_are_read_from_the_scripts_table():
    stages = readings.stages_of(readings.settings_of(STAGED))
    assert stages == [
        readings.Stage(0, 684, 16384, 1, 3),
        readings.Stage(684, 683, 32768, 3, 7),
        readings.Stage(1367, 40, 49152, 6, 13),
        readings.Stage(1407, 0, 49152, 6, 20),
    ]
    assert readings.stages_of({"num_iterations": 4, "sequence_length": 128}) == []
    assert report.warmup_steps({**readings.settings_of(STAGED), "kernel_warmup_steps": "2"}, 1) == 8


def test_a_run_in_stages_is_rehearsed_in_all_of_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(STAGED)
    settings = launch.choose_settings(script, {}, tmp_path)
    stages = readings.stages_of(readings.settings_of(STAGED) | settings)
    assert [(stage.steps, stage.length, stage.long) for stage in stages] == [
        (4, 16384, 3),
        (4, 32768, 7),
        (4, 49152, 13),
        (0, 49152, 20),
    ]
    assert [settings[name] for name in ("num_iterations", "save_every", "val_loss_every")] == ["12", "12", "4"]
    shard = next(tmp_path.glob("*train*.bin"))
    assert (shard.stat().st_size - 1024) / 2 > 12 * 8 * 49152
    with pytest.raises(launch.UserError, match="--stages 1 2 3: must be a table with 5 numbers in a row"):
        launch.check_settings(script, {"stages": "1 2 3"})


def test_flags_are_paired_up_and_odd_ones_refused():
    assert pair_up(["--a", "1", "--b=2"]) == {"a": "1", "b": "2"}
    for bad in (["a"], ["--a"]):
        with pytest.raises(launch.UserError):
            pair_up(bad)


def test_shorter_sequences_keep_the_tokens_of_a_step_and_leave_out_the_hopeless():
    def candidates(needed: int, lasting: int, times: int = 2) -> list[tuple]:
        oom = {"needed_bytes": needed, "total_bytes": 24, "holders": [{"holder": "parameters", "bytes": lasting}]}
        found = {"out_of_memory": oom, "resolved": {"sequence_length": "1024", "batch_sequences": 8}}
        return [tuple(candidate.values()) for candidate in report.shorter_sequences(found, times)]

    assert candidates(needed=31, lasting=3) == [(512, 16), (256, 32), (128, 64)]
    assert candidates(needed=70, lasting=3) == [(256, 32), (128, 64)]  # half would need 36 of 24
    assert candidates(needed=40, lasting=30) == []
    assert candidates(needed=31, lasting=3, times=1) == [(512, 8), (256, 8), (128, 8)]  # where more would not help


def test_made_up_shards_have_finewebs_format(tmp_path):
    settings = shards.write_shards(tmp_path, 5000, 3000)
    assert settings["train_files"].startswith(str(tmp_path))
    path = tmp_path / "rehearsal_val_000000.bin"
    header, tokens = np.fromfile(path, np.int32, 256), np.fromfile(path, np.uint16, offset=1024)
    assert header[:4].tolist() == [20240520, 1, 3000, 0]
    assert len(tokens) == 3000 and tokens[0] == 50256 and tokens.max() == 50256


def test_setup_without_a_compiler_says_so_in_one_line(tmp_path):
    result = subprocess.run(
        [ROOT / "rehearsal" / "setup.sh"],
        capture_output=True,
        text=True,
        env={**os.environ, "CC": "no-such-compiler", "REHEARSAL_HOME": str(tmp_path)},
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    if sys.platform == "linux":
        assert "C compiler" in result.stderr


def set_up_with(home: Path, script: str, monkeypatch) -> None:
    """launch.set_up with another setup.sh."""
    (home / "setup.sh").write_text(f"#!/bin/sh\n{script}\n")
    (home / "setup.sh").chmod(0o755)
    monkeypatch.setattr(launch, "HERE", home)
    launch.set_up()


@pytest.mark.skipif(sys.platform != "linux", reason="the rehearsal needs Linux")
def test_a_changed_pin_or_source_is_noticed(tmp_path):
    """A made-up environment with a torch, and a compiler that only leaves a trace."""
    folder, package = tmp_path / "rehearsal", tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    shutil.copytree(ROOT / "rehearsal", folder)
    for path, text in (
        (package / "nvidia/cu13/include/crt/host_defines.h", ""),
        (tmp_path / "venv/bin/python", ""),
        (package / "torch/version.py", "__version__ = '2.13.0+cu130'\ncuda: str = '13.0'\n"),
        (tmp_path / "venv/bin/pip", "#!/bin/sh\nexit 1\n"),
        (
            tmp_path / "cc",
            f'#!/bin/sh\necho >>"{tmp_path}/compiled"\nwhile [ "$1" != -o ]; do shift; done\ntouch "$2"\n',
        ),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def set_up(pinned: str) -> tuple[int, int]:
        (tmp_path / "requirements.txt").write_text(f"torch=={pinned}\n")
        env = {
            **os.environ,
            "CC": str(tmp_path / "cc"),
            "REHEARSAL_HOME": str(tmp_path / "home"),
            "REHEARSAL_VENV": str(tmp_path / "venv"),
        }
        exit_code = subprocess.run([folder / "setup.sh"], env=env, capture_output=True).returncode
        return exit_code, len((tmp_path / "compiled").read_text())

    assert [set_up("2.13.0"), set_up("2.13.0")] == [(0, 1), (0, 1)]
    (folder / "nullgpu" / "card.c").write_text("// other")
    os.utime(folder / "nullgpu" / "card.c", (0, 0))  # older than the library, as a checkout may leave it
    assert set_up("2.13.0") == (0, 2)
    assert set_up("2.1.0")[0] == set_up("2.13.00")[0] == 2  # this one would have to be installed


def test_setup_tells_the_user_while_it_works_and_why_it_cannot(tmp_path, monkeypatch, capfd):
    set_up_with(tmp_path, "echo installing", monkeypatch)
    assert capfd.readouterr() == ("", "installing\n")
    with pytest.raises(launch.UserError, match=r"^no network$") as refused:
        set_up_with(tmp_path, "echo rehearsal: no network >&2; exit 2", monkeypatch)
    assert not isinstance(refused.value, launch.DidNotCompile)
    with pytest.raises(launch.DidNotCompile, match=r"^it did not compile$"):
        set_up_with(tmp_path, "echo rehearsal: it did not compile >&2; exit 3", monkeypatch)


def test_rehearsals_of_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("REHEARSAL_HOME", str(tmp_path))
    monkeypatch.setattr(launch.time, "strftime", lambda _: "now")
    assert [launch.new_folder().name for _ in range(3)] == ["now", "now-2", "now-3"]


def test_what_the_user_set_for_other_runs_is_not_inherited(tmp_path, monkeypatch):
    unwanted = (
        "CUDA_VISIBLE_DEVICES",
        "TORCH_COMPILE_DISABLE",
        "TORCHDYNAMO_DISABLE",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_HIP_ALLOC_CONF",
        "PYTHONWARNINGS",
    )
    for name in (*unwanted, "NULLGPU_NAME"):
        monkeypatch.setenv(name, "1")
    env = launch.environment(tmp_path, tmp_path, tmp_path, launch.Card(8))
    assert env["NULLGPU_NAME"] == "1" and not set(unwanted) & set(env)


@pytest.mark.parametrize(
    "words, told",
    [
        (["--sequence_length", "64k"], "--sequence_length 64k: must be a whole number"),
        (["--num_iterations", "-1"], "--num_iterations -1: must be a whole number, and not less than 0"),
        (["--gpu_capability", "6.1"], "--gpu_capability 6.1: must be one of 7.0"),
        (["--gpu_memory", "0.5"], "--gpu_memory 0.5: must be from 1"),
        (["--gpu_memory", "much"], "argument --gpu_memory: invalid float value: 'much'"),
        (["--processes", "65"], "--processes 65: must be from 1 to 64"),
        (["no_such_record"], "no_such_record is neither a script nor a record"),
    ],
)
def test_bad_usage_ends_with_one_line(words, told, capsys):
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"rehearse: {told}") and said.count("\n") == 1


def test_the_cards_that_can_be_asked_for_are_those_of_the_null_gpu():
    source = (ROOT / "rehearsal" / "nullgpu" / "card.c").read_text()
    assert ", ".join(launch.CAPABILITIES) in source
    assert {f"{a}.{b}" for a, b in re.findall(r"^    {(\d+), (\d), ", source, re.M)} == set(launch.CAPABILITIES)
    assert f"MAX_DEVICES {launch.MOST_CARDS}\n" in (ROOT / "rehearsal" / "nullgpu" / "nullgpu.h").read_text()


def test_nvidia_smi_says_that_it_is_not_real():
    shown = subprocess.run(
        [ROOT / "rehearsal" / "nullgpu" / "bin" / "nvidia-smi"],
        capture_output=True,
        text=True,
        env={**os.environ, "NULLGPU_COUNT": "2", "NULLGPU_MEMORY_GIB": "24", "NULLGPU_NAME": "H200"},
    ).stdout
    assert shown.startswith("NOT REAL")
    assert shown.count("GPU 0") == shown.count("GPU 1") == 1 and "GPU 2" not in shown and "24576 MiB" in shown
    assert shown.count("H200 (null GPU)") == 2


# ---- The null GPU itself, and seeded faults (slow) -------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared():
    try:
        launch.set_up()
    except launch.DidNotCompile:
        raise
    except launch.UserError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("compile_cache")


@pytest.fixture
def on_null_gpu(prepared, tmp_path):
    """Runs a few lines of Python on null GPUs and returns what they print."""

    def run(code: str, **settings: str) -> str:
        env = launch.environment(tmp_path, tmp_path, Path("none"), launch.Card(8)) | settings
        result = subprocess.run([launch.venv() / "bin" / "python", "-c", code], env=env, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


@pytest.fixture
def rehearse(prepared, cache, tmp_path):
    """Rehearses the stand-in, or another script, and returns (exit code, report, text)."""

    def run(*flags: str, script: Path = STAND_IN) -> tuple[int, dict, str]:
        own_cache = cache / script.stem  # every kernel in it is reported, so no script may find another's
        command = [sys.executable, "-m", "rehearsal", script, "--output", tmp_path, "--cache", own_cache, *flags]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode in (0, 1), result.stderr
        return result.returncode, json.loads((tmp_path / "report.json").read_text()), result.stdout

    return run


def kinds(found: dict) -> set[str]:
    return {entry["kind"] for entry in found["findings"]}


SEE_CARDS = "import torch as t; print(t.cuda.device_count(), t.cuda.get_device_capability(), t.cuda.get_device_name())"
FILL_CARD = """
import torch
blocks = []
try:
    while True: blocks.append(torch.empty(2**30, dtype=torch.uint8, device="cuda"))
except torch.cuda.OutOfMemoryError: print(len(blocks))
"""


@pytest.mark.rehearsal
def test_torch_sees_the_cards_of_the_settings(on_null_gpu):
    assert on_null_gpu(SEE_CARDS).strip() == "8 (9, 0) NVIDIA H100 80GB HBM3 (null GPU)"
    seen = on_null_gpu(SEE_CARDS, NULLGPU_COUNT="2", NULLGPU_CAPABILITY="7.5")
    assert seen.strip() == "2 (7, 5) Tesla T4 (null GPU)"


@pytest.mark.rehearsal
@pytest.mark.parametrize("allocator", ["", "expandable_segments:True"])
def test_a_card_holds_no_more_than_its_memory(on_null_gpu, allocator):
    held = on_null_gpu(FILL_CARD, NULLGPU_MEMORY_GIB="24", PYTORCH_ALLOC_CONF=allocator)
    assert int(held) == 23  # the context takes the rest


COPY_BACK = """
import torch
for count in (1000, 2**22 + 3):
    host = torch.full((count,), float("nan"))
    host[1:-1].copy_(torch.zeros(count, device="cuda")[1:-1])
    print(int(host.isfinite().sum()) - count, torch.zeros(count, device="cuda").cpu().isfinite().all().item())
"""


@pytest.mark.rehearsal
def test_what_is_copied_from_a_card_is_finite_and_nothing_beside_it_is_touched(on_null_gpu):
    assert on_null_gpu(COPY_BACK).split() == ["-2", "True"] * 2


CHECK_WEIGHTS = """
import torch
from recorder import Operations
class Recorder:
    torch, note = torch, print
weights = torch.ones(2**20, device="cuda")
with Operations(Recorder):
    for _ in range(3):
        assert weights.isfinite().all() and not weights.isnan().any() and not weights.isfinite().logical_not().any()
"""


@pytest.mark.rehearsal
def test_a_script_that_asks_whether_its_weights_are_finite_hears_that_they_are(on_null_gpu):
    assert on_null_gpu(CHECK_WEIGHTS).count("op any.default 1048576 0\n") == 6


START_GPU = """
import torch, train_gpt
world = train_gpt.join_world(600)
block = torch.empty(2**20, device=world.device)
print({segment["is_expandable"] for segment in torch.cuda.memory_snapshot()})
"""


@pytest.mark.rehearsal
def test_the_script_asks_for_expandable_segments_before_the_allocator_has_made_up_its_mind(on_null_gpu):
    assert on_null_gpu(START_GPU, PYTHONPATH=str(ROOT)).strip() == "{True}"


@pytest.mark.rehearsal
def test_a_clean_script_passes_with_memory_collectives_and_flops(rehearse):
    exit_code, found, text = rehearse("--processes", "2")
    assert exit_code == 0 and found["findings"] == [] and "Nothing wrong" in text
    assert found["run"]["last_step"] == 4 and found["run"]["validations"] == 3
    assert set(found["memory"]["per_rank"]) == {"0", "1"}
    held = sum(holder["bytes"] for holder in found["memory"]["holders"])
    assert held == pytest.approx(found["memory"]["per_rank"]["0"]["peak_allocated_bytes"], rel=0.01)
    matrices = 12 * 128**2 * 2 + 128 * 50304
    assert found["flops"]["model_matmul_per_token"] == pytest.approx(6 * matrices)
    gathered = [kind for kind in found["collectives"]["kinds"] if kind["kind"] == "AllGather bfloat16"]
    assert gathered == [{"kind": "AllGather bfloat16", "count": 8, "bytes": 12 * 128**2 * 2 * 2}]
    assert found["compiled"]["architectures"] == ["sm_90"]


@pytest.mark.rehearsal
def test_a_script_without_an_optimizer_of_torchs_has_steps_all_the_same(rehearse):
    exit_code, found, text = rehearse("--processes", "2", "--own_optimizer", "1")
    assert exit_code == 0, text
    assert found["flops"]["model_matmul_per_token"] == pytest.approx(6 * (12 * 128**2 * 2 + 128 * 50304))
    assert found["flops"]["optimizer_matmul_per_step"] == 0
    parts = found["prediction"]["run"]["parts_ms"]
    assert parts["attention backward"] > 0 and parts["optimizer"] > 0  # until the gradients are cleared
    subtracted = [item for item in found["step"]["items"] if item.get("name") == "sub_.Tensor"]
    assert subtracted and {item["part"] for item in subtracted} == {"optimizer"}


@pytest.mark.rehearsal
@pytest.mark.parametrize(
    "fault, kind, told",
    [
        ("graph_break", "graph_break", "stand_in.py"),
        ("recompile", "recompile", "self.temperature"),
        ("deprecated", "deprecation", "stand_in.py"),
        ("crash", "failed", "seeded crash"),
    ],
)
def test_a_seeded_fault_is_reported_as_such(rehearse, fault, kind, told):
    exit_code, found, text = rehearse("--processes", "1", "--fault", fault)
    assert exit_code == 1 and kinds(found) == {kind}
    assert told in found["findings"][0]["text"] and found["findings"][0]["text"] in text


@pytest.mark.rehearsal
def test_a_collective_of_the_wrong_size_on_one_rank_is_reported(rehearse):
    exit_code, found, text = rehearse("--processes", "2", "--fault", "wrong_size")
    assert exit_code == 1 and kinds(found) == {"collective_mismatch"}
    assert "[16] Float" in text and "[8] Float" in text and "DIFFERENT between ranks" in text


@pytest.mark.rehearsal
def test_a_script_that_takes_the_wrong_card_is_caught_although_ranks_share_compiled_code(rehearse):
    exit_code, found, _ = rehearse("--processes", "2", "--fault", "wrong_card")
    assert exit_code == 1 and kinds(found) == {"failed"}
    assert "rank 1" in found["findings"][0]["text"] and "located on device with index" in found["findings"][0]["text"]


@pytest.mark.rehearsal
def test_a_steps_counts_agree_with_what_was_counted_in_other_ways(rehearse, tmp_path):
    _, found, _ = rehearse("--processes", "2")
    items, order = found["step"]["items"], Counter(entry[0] for entry in found["step"]["order"])
    flops = {True: 0, False: 0}  # in the optimizer or not
    for index, item in enumerate(items):
        if item["kind"] == "product":
            product = 2 * item["m"] * item["n"] * item["k"] * item["batches"]
            flops[item["part"] == "optimizer"] += order[index] * product
    assert 2 * flops[False] == found["flops"]["model_matmul_per_step"]  # two ranks with half of the batch each
    sent = [(order[index], item["bytes"]) for index, item in enumerate(items) if item["kind"] == "collective"]
    assert sum(times for times, _ in sent) == found["collectives"]["per_step"]
    assert sum(times * size for times, size in sent) == found["collectives"]["bytes_per_step"]
    attention = [item for item in items if item["kind"] == "attention"]
    assert {item["backward"] for item in attention} == {True, False} and {item["heads"] for item in attention} == {2}
    assert found["prediction"]["run"]["ms"] > 0 and (tmp_path / "timeline.html").exists()


@pytest.mark.rehearsal
def test_the_null_gpu_knows_registers_and_spills_as_cuobjdump_does(rehearse, cache, tmp_path):
    rehearse("--processes", "1")
    told = steps.kernels_in((tmp_path / "rehearsal" / "rank0.steps").read_text()).values()
    compiled = readings.read_kernels(cache / STAND_IN.stem, launch.cuobjdump())
    known = {kernel.cache_hash: kernel for kernel in compiled}
    assert len(told) > 10
    for kernel in told:
        found = known[kernel["cache_hash"]]
        assert (kernel["registers"], 4 * kernel["spilled_words"]) == (found.registers, found.stack_bytes)


@pytest.mark.rehearsal
def test_two_rehearsals_from_nothing_choose_the_same_kernels(prepared, tmp_path):
    counts = []
    for name in ("first", "second"):
        command = [
            sys.executable,
            "-m",
            "rehearsal",
            STAND_IN,
            "--processes",
            "1",
            "--fresh",
            "--output",
            tmp_path / name,
        ]
        assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
        counts.append(json.loads((tmp_path / name / "report.json").read_text())["step"])
    assert counts[0] == counts[1]


@pytest.mark.rehearsal
def test_all_ranks_but_the_first_and_the_last_find_their_graphs_and_compile_none(prepared, tmp_path):
    small = dict(num_layers=2, model_dim=128, num_heads=1, sequence_length=2048, val_sequence_length=2048)
    small |= dict(val_tokens=16384, stages="4 1 1 1 2  4 1 1 1 2  0 1 1 1 2")
    command = [sys.executable, "-m", "rehearsal", "--processes", "4", "--fresh", "--output", tmp_path]
    command += [f"--{name}={value}" for name, value in small.items()]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode in (0, 1)  # 1: a small kernel spills
    looked, found = ((tmp_path / "rehearsal" / name).stat().st_size for name in ("looked", "found"))
    assert found == 2 * looked > 0


@pytest.mark.rehearsal
def test_a_sequence_too_long_for_memory_is_explained_with_settings_that_fit(rehearse):
    exit_code, found, text = rehearse("--processes", "1", "--gpu_memory", "3", "--sequence_length", "32768")
    assert exit_code == 1 and kinds(found) == {"out_of_memory"}
    assert found["out_of_memory"]["needed_bytes"] > 3 * 2**30
    fits = found["out_of_memory"]["fits"]  # a run with them has ended well
    assert fits["sequence_length"] * fits["batch_sequences"] == 32768 * 8
    assert fits["peak_allocated_bytes"] < 3 * 2**30 and not fits["smaller_batch"]
    assert f"--sequence_length {fits['sequence_length']}" in text


@pytest.mark.rehearsal
def test_a_batch_in_a_row_too_long_for_memory_is_told_of_a_smaller_one(rehearse):
    exit_code, found, text = rehearse(
        "--processes",
        "2",
        "--gpu_memory",
        "3",
        "--in_a_row",
        "1",
        "--sequence_length",
        "256",
        "--batch_sequences",
        "256",
    )
    assert exit_code == 1 and kinds(found) == {"out_of_memory"}
    logits = 128 * 256 * 50304 * 2  # of one rank's sequences, in bfloat16: most of what it needs
    assert logits < found["out_of_memory"]["needed_bytes"] < 1.5 * logits
    fits = found["out_of_memory"]["fits"]
    assert (fits["sequence_length"], fits["batch_sequences"], fits["smaller_batch"]) == (128, 256, True)
    assert "--sequence_length 128 --batch_sequences 256 fits, with a smaller batch and a peak of" in text


@pytest.mark.rehearsal
def test_computing_again_takes_less_memory_and_no_more_matrix_products(rehearse):
    small = ("--processes", "1", "--num_layers", "2", "--sequence_length", "16384")
    small += ("--val_sequence_length", "16384", "--val_tokens", "16384")
    small += ("--stages", "4 1 1 1 2  4 1 1 1 2  0 1 1 1 2")  # all of one length
    peaks, flops = [], []
    for recompute in ("false", "true"):
        exit_code, found, text = rehearse(*small, "--recompute", recompute, script=ROOT / "train_gpt.py")
        assert exit_code == 0, text
        peaks.append(found["memory"]["per_rank"]["0"]["peak_allocated_bytes"])
        flops.append(found["flops"]["model_matmul_per_token"])
    relu_squared = 2 * 16384 * 4 * 768 * 2  # of two layers, in bfloat16
    assert peaks[0] - peaks[1] > 0.9 * relu_squared, peaks
    assert flops[0] == flops[1]


@pytest.mark.parametrize(
    "words, script, settings",
    [
        (["--processes", "2", "--num_layers", "4"], "train_gpt.py", {"num_layers": "4"}),
        (["SoftCap", "--num_layers=4", "--seed", "7"], "SoftCap", {"num_layers": "4", "seed": "7"}),
        ([], "train_gpt.py", {}),
    ],
)
def test_settings_of_the_script_go_with_or_without_its_name(words, script, settings):
    ours, given = parse_arguments(words)
    assert ours.script.endswith(script) and given == settings
