"""The predicted time: arithmetic on made-up counts, the reading of a trace, and the table of published records."""

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rehearsal import calibration, compare, elsewhere, launch, picture, predict, readings, report, steps
from rehearsal.__main__ import main
from rehearsal.predict import H100, PARTS, Rates

ROOT = Path(__file__).resolve().parent.parent
EXACT = Rates(products=1.0, hiding=0.0, memory=1.0, links=1.0, launch=0.0, collective=0.0, ramp=0)


def product(m: int, n: int, k: int, batches: int = 1, dtype: str = "bfloat16", part: str = "matrix products") -> dict:
    return {"kind": "product", "m": m, "n": n, "k": k, "batches": batches, "dtype": dtype, "part": part}


def kernel(moved: int, instructions: int = 0, special: int = 0, part: str = "other kernels", **more) -> dict:
    counts = {"bytes": moved, "instructions": instructions, "special": special, "launches": 1}
    return {"kind": "kernel", "name": "k", "part": part, "warps": 8, "registers": 32, "shared": 0, **counts, **more}


def attention(tokens: int = 65536, backward: bool = False, full_blocks: bool = True, **more) -> dict:
    part = "attention backward" if backward else "attention forward"
    sizes = {"tokens": tokens, "heads": 6, "head_dim": 128, "bytes": 0, "instructions": [300_000, 200_000]}
    flags = {"backward": backward, "full_blocks": full_blocks, "reads_window": False}
    return {"kind": "attention", "part": part, "warps": 8, "registers": 255, "shared": 0, **sizes, **flags, **more}


def collective(name: str, size: int, ranks: int = 8) -> dict:
    return {"kind": "collective", "name": name, "bytes": size, "ranks": ranks, "part": "collectives"}


def a_run(items: list[dict], order: list[list[int]] | None = None, **more) -> dict:
    order = order or [[i, 0] for i in range(len(items))]
    known = {"mask": "blocks", "window_tokens": [128, 1856], "steps": 28, "ranks": 8, "tokens": 8 * 65536}
    return {"items": items, "order": order, **known, **more}


# ---- One item --------------------------------------------------------------------------------------------------------


def test_a_product_that_fills_the_card_takes_its_operations_at_the_peak():
    filling = product(128 * 132, 256 * 16, 8192)  # whole tiles, sixteen for each multiprocessor
    expected = 2 * 128 * 132 * 256 * 16 * 8192 / 989.4e12
    assert predict.product_seconds(filling, H100, EXACT) == pytest.approx(expected)
    half = predict.product_seconds({**filling, "dtype": "float8"}, H100, EXACT)
    assert half == pytest.approx(expected / 2, rel=1e-3)


def test_a_small_or_skinny_product_reaches_less_of_the_peak():
    def share(m: int, n: int, k: int) -> float:
        return 2 * m * n * k / predict.product_seconds(product(m, n, k), H100, Rates()) / H100.bfloat16_flops

    assert share(65536, 3072, 768) > share(768, 768, 768) > 0
    assert share(65536, 768, 3072) > share(65536, 768, 64)
    assert share(65536, 3072, 4096) <= Rates().products


def test_a_weights_gradient_is_shared_out_along_its_long_inner_dimension():
    """768 by 768 is 18 tiles; without sharing them 114 of 132 multiprocessors would be idle."""
    taken = predict.product_seconds(product(768, 768, 65536), H100, EXACT)
    assert taken < 1.2 * 2 * 768 * 768 * 65536 / H100.bfloat16_flops


def test_a_kernel_takes_the_longest_of_bytes_instructions_and_special_functions():
    peak = 132 * 128 * 1.83e9
    assert predict.kernel_seconds(kernel(3_350_000), H100, EXACT) == pytest.approx(1e-6)
    assert predict.kernel_seconds(kernel(3_350_000, instructions=int(peak)), H100, EXACT) == pytest.approx(1)
    assert predict.kernel_seconds(kernel(0, int(peak), special=int(peak)), H100, EXACT) == pytest.approx(8)


def test_kernels_with_few_warps_at_hand_issue_fewer_instructions():
    many = predict.issue_rate(kernel(0, warps=8, registers=32), H100, Rates())
    few = predict.issue_rate(kernel(0, warps=8, registers=255), H100, Rates())  # one block of eight warps
    assert few / (132 * 128 * 1.83e9) == pytest.approx(2 / (2 + Rates().hiding))
    assert many / (132 * 128 * 1.83e9) == pytest.approx(16 / (16 + Rates().hiding))
    assert predict.issue_rate(kernel(0, warps=8, shared=200 * 1024), H100, Rates()) == few


def test_collectives_move_what_a_ring_moves():
    def taken(name: str, size: int, ranks: int) -> float:
        return predict.collective_seconds(collective(name, size), H100, EXACT, ranks)

    size = 450_000_000
    assert taken("AllReduce", size, 8) == pytest.approx(2 * 7 / 8 * 1e-3)
    assert taken("AllGather", size, 8) == pytest.approx(7e-3)  # bytes of one rank's message, seven of them arrive
    assert taken("AllReduce", size, 1) == 0
    assert taken("AllReduce", size, 16) == pytest.approx(2 * 15 / 16 * size / 50e9)  # beyond a node: the network


# ---- Attention by visible blocks -------------------------------------------------------------------------------------


def test_the_share_of_tokens_within_one_document_is_that_of_drawn_documents():
    documents = predict.Documents()
    drawn = np.random.default_rng(0).lognormal(math.log(403), math.sqrt(2 * math.log(690 / 403)), 2_000_000)
    for tokens in (2, 128, 512, 1500):
        starts = np.maximum(drawn - (tokens - 1), 0).sum() / drawn.sum()
        assert documents.share_within(tokens) == pytest.approx(starts, abs=0.01)


def test_visible_blocks_are_those_of_drawn_documents_in_a_row():
    """By brute force: documents laid out one after the other, and every pair of blocks judged by its first and last."""
    rng, window = np.random.default_rng(1), 6
    lengths = np.ceil(rng.lognormal(math.log(403), math.sqrt(2 * math.log(690 / 403)), 100_000)).astype(int)
    documents = np.repeat(np.arange(len(lengths)), lengths)
    documents = documents[: len(documents) // 128 * 128].reshape(-1, 128)
    masked = full = 0.0
    for distance in range(window):
        queries, keys = documents[window:], documents[window - distance : len(documents) - distance]
        visited = queries[:, 0] <= keys[:, -1]
        whole = (keys[:, 0] == queries[:, -1]) & (distance > 0)
        masked, full = masked + (visited & ~whole).mean(), full + whole.mean()
    assert predict.visible_blocks(window) == pytest.approx((masked, full), rel=0.01)


def test_documents_that_a_script_cuts_are_shorter():
    cut, drawn = (
        predict.Documents(longest=1024),
        np.random.default_rng(0).lognormal(math.log(403), math.sqrt(2 * math.log(690 / 403)), 2_000_000),
    )
    drawn = np.minimum(drawn, 1024)
    for tokens in (2, 128, 512, 900):
        starts = np.maximum(drawn - (tokens - 1), 0).sum() / drawn.sum()
        assert cut.share_within(tokens) == pytest.approx(starts, abs=0.01)
    assert cut.share_within(1025) == cut.share_within(5000) == 0


def test_a_window_that_cuts_its_last_block_has_it_masked():
    assert predict.visible_blocks(1, cut=True) == predict.visible_blocks(1)
    (masked, full), (masked_before, full_before) = predict.visible_blocks(4, cut=True), predict.visible_blocks(3)
    assert full == full_before and masked > masked_before
    assert masked + full == pytest.approx(sum(predict.visible_blocks(4)))


def test_layers_with_the_short_mask_have_half_the_window_or_that_of_the_table():
    long, short = attention(), attention(short=True)
    taken = [predict.attention_seconds(long, window, H100, Rates()) for window in range(1, 8)]
    assert predict.attention_seconds(short, 7, H100, Rates()) == taken[2]
    assert predict.attention_seconds(short, 1, H100, Rates()) == taken[0]  # never less than a block
    assert [predict.attention_seconds(item, predict.Windows(6, 2), H100, Rates()) for item in (long, short)] == [
        taken[5],
        taken[1],
    ]


def test_without_a_list_of_full_blocks_every_block_is_masked():
    with_list, without = (
        predict.attention_seconds(attention(full_blocks=listed), 8, H100, Rates()) for listed in (True, False)
    )
    assert without > with_list
    assert predict.attention_seconds(attention(full_blocks=False), 1, H100, Rates()) == pytest.approx(
        predict.attention_seconds(attention(full_blocks=True), 1, H100, Rates())
    )


def test_attentions_products_and_instructions_add_up():
    queries = 6 * 65536 / 128
    forward = predict.attention_seconds(attention(), 1, H100, EXACT)  # one masked block for each block of queries
    by_hand = queries * (4 * 128**3 / 989.4e12 + 300_000 / (132 * 128 * 1.83e9))
    assert forward == pytest.approx(by_hand)
    backward = predict.attention_seconds(attention(backward=True), 1, H100, EXACT)
    assert backward - forward == pytest.approx(queries * 10 * 128**3 / 989.4e12)


@pytest.mark.parametrize(
    "mask, first, middle, last",
    [("blocks", 1, 7, 14), ("window", 1, 7, 14), ("tokens", 2, 8, 15)],
)
def test_windows_are_cut_as_the_compiled_mask_cuts_them(mask, first, middle, last):
    tokens = [128, 1856] if mask == "blocks" else [64, 1792]
    run = a_run([], mask=mask, window_tokens=tokens)
    assert [predict.window_at(progress, run) for progress in (0, 0.49, 0.999)] == [first, middle, last]


# ---- A step on its streams -------------------------------------------------------------------------------------------


def second_of_kernel(part: str = "other kernels") -> dict:
    return kernel(int(H100.memory_bytes), part=part)


def second_of_collective() -> dict:
    return collective("Broadcast", int(H100.link_bytes))


def parts_of(order: list[list[int]], items: list[dict]) -> dict[str, float]:
    parts = predict.step_seconds(a_run(items, order), 1, rates=EXACT)
    return {part: round(seconds, 6) for part, seconds in parts.items() if round(seconds, 6)}


def test_a_collective_is_hidden_as_long_as_something_is_computed():
    items = [second_of_kernel(), second_of_collective()]
    start = [[0, 0], [steps.RECORD, 0, 0], [steps.AWAIT, 1, 0], [1, 1], [steps.RECORD, 1, 1]]
    wait = [steps.AWAIT, 0, 1]
    assert parts_of([*start, [0, 0], wait, [0, 0]], items) == {"other kernels": 3}
    assert parts_of([*start, wait, [0, 0]], items) == {"other kernels": 2, "collectives": 1}
    assert parts_of([*start, [0, 0]], items) == {"other kernels": 2}
    assert parts_of(start, items) == {"other kernels": 1, "collectives": 1}  # it ends after the last kernel


def test_a_stream_waits_only_for_what_was_recorded_before():
    items = [second_of_kernel(), second_of_collective()]
    assert parts_of([[1, 1], [steps.RECORD, 5, 1], [1, 1], [steps.AWAIT, 0, 5], [0, 0]], items) == {
        "other kernels": 1,
        "collectives": 1,
    }
    assert parts_of([[steps.AWAIT, 0, 9], [0, 0]], items) == {"other kernels": 1}


def test_every_launch_costs_a_gap_and_the_parts_add_up_to_the_step():
    items = [product(4096, 4096, 4096), kernel(10**9), kernel(10**8, launches=3, part="optimizer"), attention()]
    counts = a_run(items)
    parts = predict.step_seconds(counts, 4)
    assert parts["gaps"] == pytest.approx((1 + 1 + 3 + 1) * Rates().launch)
    assert sum(parts.values()) == pytest.approx(max(span.end for span in predict.timeline(counts, 4)))


def test_the_run_is_the_mean_over_its_steps_and_says_tokens_and_utilisation():
    counts = a_run([product(65536, 3072, 768), attention(), attention(backward=True)])
    found = predict.predict(counts)
    by_hand = [sum(predict.step_seconds(counts, predict.window_at(i / 28, counts)).values()) for i in range(28)]
    assert found["run"]["ms"] == pytest.approx(1e3 * sum(by_hand) / 28)
    assert found["minutes"] == pytest.approx(sum(by_hand) / 60)
    assert found["tokens_per_second"] == pytest.approx(8 * 65536 * 28 / sum(by_hand))
    assert [found[name]["window"] for name in ("first", "middle", "last")] == [1, 7, 14]
    assert 0 < found["flop_utilisation"] < Rates().products


def test_a_run_in_stages_is_the_mean_of_its_stages():
    def stage(tokens: int, count: int, windows: list[int], **more) -> dict:
        items = [product(tokens, 3072, 768), attention(tokens), attention(tokens, backward=True, short=True)]
        return a_run(items, steps=count, tokens=8 * tokens, window_blocks=windows, **more)

    stages = [stage(16384, 3, [1, 3]), stage(49152, 1, [5, 11])]
    found = predict.predict({"stages": stages, "ranks": 8, "steps": 4, "tokens": 8 * 49152})
    alone = [
        sum(predict.step_seconds(stages[0], predict.Windows(3, 1)).values()),
        sum(predict.step_seconds(stages[1], predict.Windows(11, 5)).values()),
    ]
    assert [column["ms"] for column in found["stages"]] == pytest.approx([1e3 * seconds for seconds in alone])
    assert found["minutes"] == pytest.approx((3 * alone[0] + alone[1]) / 60)
    assert found["tokens_per_second"] == pytest.approx(8 * (3 * 16384 + 49152) / (3 * alone[0] + alone[1]))
    assert found["run"]["ms"] == pytest.approx(1e3 * (3 * alone[0] + alone[1]) / 4)
    text = "\n".join(report.prediction_lines(json.loads(json.dumps(found))))
    assert re.search(r"stage 1 +stage 2 +run\n.* 3, 1 +11, 5 +5\.0\n +steps +3 +1 +4\n", text)
    exact = stage(49152, 1, [5, 11], mask="window")  # reaches into one block more
    assert predict.windows_of(exact) == [(12, 6, True)]
    assert elsewhere.tables({"stages": stages, "ranks": 8})["numbers_ms"]["8"] == pytest.approx(found["run"]["ms"])


def test_counts_of_several_steps_are_divided_among_them():
    one, two = a_run([kernel(10**9)]), a_run([kernel(10**9)], [[0, 0]] * 2, counted_steps=2)
    assert predict.step_seconds(two, 1) == pytest.approx(predict.step_seconds(one, 1))
    assert predict.model_flops(a_run([attention()], [[0, 0]] * 2, counted_steps=2)) == pytest.approx(
        predict.model_flops(a_run([attention()]))
    )
    found = compare.of_reports(a_report(one), a_report(two))
    assert found["items"] == [] and found["figures"]["launches per step"] == {"ours": 1, "other": 1}


# ---- More work never gets cheaper ------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.sampled_from([True, False]), st.sampled_from([True, False]))
def test_a_wider_window_never_gets_cheaper(window, backward, full_blocks):
    item = attention(backward=backward, full_blocks=full_blocks)
    taken = [predict.attention_seconds(item, w, H100, Rates()) for w in (window, window + 1)]
    assert taken[0] <= taken[1]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 2000), st.integers(1, 400), st.integers(1, 400))
def test_more_tokens_never_get_cheaper(blocks, n, k):
    def taken(tokens: int) -> float:
        items = [product(tokens, 16 * n, 16 * k), attention(tokens), kernel(tokens * 768, tokens * 100)]
        return sum(predict.step_seconds(a_run(items), 4).values())

    assert taken(128 * blocks) <= taken(128 * (blocks + 1)) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 10**9), st.sampled_from(["AllReduce", "AllGather", "ReduceScatter", "Broadcast"]))
def test_more_bytes_or_more_ranks_never_make_a_collective_cheaper(size, name):
    taken = [predict.collective_seconds(collective(name, size), H100, Rates(), ranks) for ranks in (1, 2, 4, 8, 16, 64)]
    assert taken == sorted(taken)
    assert taken[3] <= predict.collective_seconds(collective(name, 2 * size), H100, Rates(), 8)


def test_faster_cards_are_never_slower():
    counts = a_run([product(65536, 3072, 768), attention(), kernel(10**9, 10**9)])
    by_card = {name: predict.predict(counts, card)["run"]["ms"] for name, card in predict.CARDS.items()}
    assert by_card["B200"] < by_card["H200"] < by_card["H100"] < by_card["A100"]
    assert by_card["H200"] == predict.predict(counts, replace(H100, memory_bytes=4.8e12))["run"]["ms"]


# ---- Reading a trace -------------------------------------------------------------------------------------------------

PTX = """
.global .align 4 .b8 __cudart_i2opi_f[24] = {65};
	mov.b32 	%r1, 0;
	ld.global.b32 	%r2, [%rd1];
$L__BB0_1:                              // =>This Inner Loop Header: Depth=1
	add.f32 	%r3, %r3, %r2;
	ex2.approx.ftz.f32 	%r4, %r3;
	@%p1 bra 	$L__BB0_3;
	setp.lt.u64 	%p2, %rd60, 49280;
$L__BB0_3:                              //   in Loop: Header=BB0_1 Depth=1
	.loc	1 39 43
	fma.rn.f32 	%r5, %r4, %r4, %r4;
	@%p2 bra 	$L__BB0_1;
// %bb.2:
	shfl.sync.bfly.b32 	%r6, %r5, 16, 31, -1;
$L__BB0_4:
	mov.b64 	%rd25, __cudart_i2opi_f;
	add.s32 	%r9, %r9, 1;
$L__BB0_5:                              // %__internal_trig_reduction_kernel.exit.i.i
	st.global.b32 	[%rd2], %r5;
	ret;
"""


def test_instructions_are_counted_outside_and_inside_of_loops():
    outside, loops = steps.count_instructions(PTX)
    assert outside["all"] == 3  # a load, a store, and what follows the loop; what huge angles need is left out
    assert [(loop["all"], loop["special"]) for loop in loops] == [(5, 1)]  # the comparison of 64 bits is two


def a_kernel(name: str, number: int, **more) -> str:
    described = {"name": name, "bytes": 1000, "constants": {"XBLOCK": 1, "R0_BLOCK": 1024}, "numels": [8, 4096]}
    described |= {"warps": 4, "registers": 32, "cache_hash": "K", "template": {}, "shapes": [[[8, 4096], "float32"]]}
    return f"kernel {number} {json.dumps(described | more)}"


TRACE = f"""Optimizer 1 begins
Optimizer 1 ends
Wait
copy 5 1 0
Wait
{a_kernel("triton_red", 0)}
inductor 0
launch triton_red 8 128 0
record e1 0
await n e1
collective AllReduce 4096 8 n
record e2 n
op mm.out 10 20
product 64 50304 128 1 bfloat16 0
await 0 e2
record e3 0
Optimizer 0 begins
op lerp.Scalar 100 0
launch native 10 128 0
launch native 10 128 0
made 50
Optimizer 0 ends
Optimizer 1 begins
product 8 8 8 1 bfloat16 0
Optimizer 1 ends
"""


def test_a_trace_becomes_items_and_their_order(tmp_path):
    (tmp_path / "triton" / "K").mkdir(parents=True)
    (tmp_path / "triton" / "K" / "triton_red.ptx").write_text(PTX)
    (tmp_path / "triton" / "K" / "triton_red.json").write_text('{"shared": 64}')
    (counts,) = steps.count(TRACE, tmp_path, {50257, 50304}, [])
    kinds = [(item["kind"], item["part"]) for item in counts["items"]]
    assert set(kinds) == {
        ("kernel", "other kernels"),
        ("collective", "collectives"),
        ("product", "head and loss"),
        ("kernel", "optimizer"),
        ("product", "optimizer"),
    }
    compiled = next(item for item in counts["items"] if item.get("name") == "triton_red")
    assert compiled["instructions"] == 8 * 128 * (3 + 4 * 5) and compiled["shared"] == 64  # four turns of 1024
    native = next(item for item in counts["items"] if item.get("name") == "lerp.Scalar")
    assert (native["bytes"], native["launches"]) == (150, 2)
    waits = [entry for entry in counts["order"] if entry[0] < 0]
    assert [entry[0] for entry in waits] == [steps.RECORD, steps.AWAIT, steps.RECORD, steps.AWAIT]


def test_a_kernel_that_is_not_understood_costs_the_prediction_and_not_the_report(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("class Hyperparameters:\n    num_iterations: int = 3\n")
    odd = a_kernel("triton_tem_fused_flex_attention", 0, template={"BLOCK_M": 128, "BLOCK_N": 64, "QK_HEAD_DIM": 64})
    trace = re.sub(r"^kernel 0 .*$", lambda _: odd, TRACE, flags=re.M)
    (tmp_path / "rank0.steps").write_text(trace.replace("launch triton_red", "launch triton_tem_fused_flex_attention"))
    run = launch.Run(tmp_path, 1, 0, 1.0, 0)
    assert report.count_step(run, tmp_path, script, {}) is None
    assert "triton_tem_fused_flex_attention has 0 loops, not 1" in capsys.readouterr().err
    assert report.prediction_lines(None)[0].startswith("predicted     no time")


def test_steps_begin_at_the_last_wait_and_the_most_frequent_is_typical():
    step = ["launch", "Optimizer 0 begins", "Optimizer 0 ends", "Optimizer 1 begins", "Optimizer 1 ends"]
    validation = ["Wait", "launch", "launch", "Wait"]
    lines = [*step[3:], *validation, *step, *step, *validation, *step]
    waited = ["Wait", *step]
    assert steps.cut(lines) == [step[3:], waited, step, waited]
    assert steps.typical(steps.cut(lines)) == [step]
    longer = ["Wait", "launch", *step]
    assert steps.typical([["x"], longer, waited, waited]) == [waited]  # none without a wait before it
    rare = ["launch", *step]
    assert steps.typical([step, longer, step, rare, step]) == [rare, step]  # it takes two until they repeat


def test_an_optimizer_that_skips_steps_does_not_join_them():
    both = ["Optimizer 0 begins", "Optimizer 0 ends", "Optimizer 1 begins", "Optimizer 1 ends"]
    assert steps.cut([*both, *both[2:], *both]) == [both, both[2:], both]


def test_a_scripts_own_optimizer_works_from_the_last_backward_pass_on():
    step = ["product 8 8 8 1 bfloat16 0", "Backward ends", "product 9 9 9 1 bfloat16 0", "Backward ends"]
    step += ["product 7 7 7 1 bfloat16 0", "Optimizer 0 ends"]
    (counts,) = steps.count("\n".join(["Wait", *step, *step, *step]), Path("/nowhere"), set(), [])
    parts = {item["m"]: item["part"] for item in counts["items"]}
    assert parts == {8: "matrix products", 9: "matrix products", 7: "optimizer"} and counts["counted_steps"] == 1


def test_each_stage_has_its_own_counts():
    def step(tokens: int, wait: bool) -> list[str]:
        work = [f"product {tokens} 8 8 1 bfloat16 0", "Backward ends", "Optimizer 0 ends"]
        return ["Wait", "product 1 1 1 1 bfloat16 0", *work] if wait else work

    trace = [line for tokens in (16, 32) for number in range(3) for line in step(tokens, number == 0)]
    stages = [readings.Stage(0, 3, 16, 1, 3), readings.Stage(3, 3, 32, 1, 3)]
    found = steps.count("\n".join(trace), Path("/nowhere"), set(), stages)
    assert [[item["m"] for item in counts["items"]] for counts in found] == [[16], [32]]
    assert steps.count("\n".join(trace[:5]), Path("/nowhere"), set(), stages) == []  # it did not get that far


def test_the_steps_of_a_stage_are_those_of_the_whole_run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "STAGES = '684 1 1 1 3  683 2 1 3 7  40 2 1 6 13  0 2 1 6 20'\nclass Hyperparameters:\n"
        "    sequence_length: int = 128\n    batch_sequences: int = 8\n    num_iterations: int = 1407\n"
        "    max_document: int = 100\n    stages: str = STAGES\n"
    )
    known = readings.settings_of(script.read_text())
    rehearsed = launch.few_steps_per_stage(known["stages"])
    step = ["product 128 8 8 1 bfloat16 0", "Backward ends", "Optimizer 0 ends"]
    (tmp_path / "rank0.steps").write_text("\n".join(["Wait", *step * 12]))
    run = launch.Run(tmp_path, 8, 0, 1.0, 0)
    counts = report.count_step(run, tmp_path, script, known | rehearsed)
    told = [(stage["steps"], stage["tokens"], stage["window_blocks"]) for stage in counts["stages"]]
    assert told == [(684, 8 * 128, [1, 3]), (683, 8 * 256, [3, 7]), (40, 8 * 256, [6, 13])]
    assert predict.documents_of(counts["stages"][0]).longest == 100 and predict.predict(counts)["steps"] == 1407
    given = {"stages": "1 1 1 1 3  2 2 1 3 7  0 2 1 6 20", "num_iterations": "12"}  # the user's table
    counts = report.count_step(run, tmp_path, script, known | rehearsed | given)
    assert [stage["steps"] for stage in counts["stages"]] == [469, 938]


def test_the_mask_of_most_layers_is_the_short_one():
    kernels = {0: {"template": {"BLOCK_M": 128}}, 1: {"template": {"BLOCK_M1": 64}}, 2: {"template": {}}}
    lines = ["inductor 0 11", "inductor 0 22", "inductor 2 0", "inductor 0 22", "inductor 1 22", "inductor 1 11"]
    lines += ["inductor 1 22", "inductor 0 22", "inductor 0 11", "inductor 0 11", "inductor 1 33"]
    told = [line.split()[2] for line in steps.short_masks(lines, kernels)]
    assert told == ["long", "short", "0", "short", "short", "long", "short", "long", "short", "short", "33"]


def test_a_heads_kernel_is_no_mask_of_all_pairs_of_tokens():
    head = kernel(1, elements=49152 * 50304)
    assert steps.mask_of([attention(49152), head]) == "blocks"
    assert steps.mask_of([attention(49152), head, kernel(1, elements=49152**2)]) == "tokens"


def test_random_traces_are_read_or_refused_without_a_crash():
    words = TRACE.splitlines()
    rng = random.Random(0)
    for _ in range(50):
        some = [line for line in words if line.startswith("kernel") or rng.random() < 0.7]
        for counts in steps.count("\n".join(some), Path("/nowhere"), {50304}, []):
            assert sum(predict.step_seconds(a_run(**counts), 1).values()) >= 0


def test_counts_do_not_depend_on_the_handles_of_streams_and_events(tmp_path):
    renamed = TRACE.replace("e1", "x").replace("e2", "y").replace("e3", "e1").replace(" n\n", " m\n")
    renamed = renamed.replace("await n", "await m")
    assert steps.count(renamed, tmp_path, set(), []) == steps.count(TRACE, tmp_path, set(), [])


# ---- What is published -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def softcap() -> dict:
    return calibration.counts_of(calibration.FITTED_ON)


def test_the_two_rates_are_those_that_fit_softcap(softcap):
    fitted = calibration.fit(softcap, calibration.PUBLISHED[calibration.FITTED_ON])
    assert fitted.products == pytest.approx(Rates().products, abs=1e-4)
    assert fitted.hiding == pytest.approx(Rates().hiding, abs=1e-3)
    assert replace(fitted, products=Rates().products, hiding=Rates().hiding) == Rates()  # and no other was touched


def test_the_table_in_the_readme_is_the_one_that_the_kept_counts_give():
    assert "\n".join(calibration.table()) in (ROOT / "rehearsal" / "README.md").read_text()


def test_the_records_that_were_held_out_are_predicted_within_five_percent_but_for_the_one_with_another_attention():
    found = calibration.errors()
    assert len(found) == len(calibration.PUBLISHED) - 1 >= 6 and max(map(abs, found)) < 0.1
    assert list(calibration.PUBLISHED)[-1] == "2025-12-18_NorMuonYarn" and max(map(abs, found[:-1])) < 0.05


def test_kept_counts_are_small_and_of_the_records_at_full_size():
    for record in calibration.PUBLISHED:
        path = calibration.FOLDER / f"{record}.json"
        counts = json.loads(path.read_text())
        assert path.stat().st_size < 60_000 * len(predict.stages_in(counts))
        script = readings.settings_of((ROOT / "records" / record / "train_gpt.py").read_text())
        length = max([script["sequence_length"], *(stage.length for stage in readings.stages_of(script))])
        assert (counts["tokens"], counts["ranks"]) == (length * script["batch_sequences"], 8)
        assert counts["steps"] == script["num_iterations"]


def test_counts_are_kept_from_a_report_that_has_a_step(tmp_path, monkeypatch, capsys, softcap):
    monkeypatch.setattr(calibration, "FOLDER", tmp_path)
    (tmp_path / "report.json").write_text(json.dumps({"step": softcap}))
    assert calibration.main(["--keep", "new", str(tmp_path / "report.json")]) == 0
    assert calibration.counts_of("new") == softcap
    (tmp_path / "report.json").write_text('{"step": null}')
    for words in (["--keep", "new", str(tmp_path / "report.json")], ["--keep", "new", "nowhere.json"], ["--other"]):
        assert calibration.main(words) == 2
        said = capsys.readouterr().err
        assert said.startswith("calibration: ") and said.count("\n") == 1


def test_the_fit_finds_rates_that_were_put_in(softcap):
    """Times that the model itself makes with other rates are a table for which the answer is known."""
    other = replace(Rates(), products=0.6, hiding=2.0)
    found = calibration.fit(softcap, calibration.milliseconds(softcap, other))
    assert (found.products, found.hiding) == (pytest.approx(0.6, abs=1e-5), pytest.approx(2.0, abs=1e-4))


def test_a_records_step_grows_with_its_window_and_shrinks_with_more_cards(softcap):
    by_window = [sum(predict.step_seconds(softcap, window).values()) for window in range(1, 15)]
    assert by_window == sorted(by_window)
    by_number = list(elsewhere.on_other_numbers(softcap).values())
    assert by_number == sorted(by_number, reverse=True)
    assert elsewhere.on_other_numbers(softcap)[8] == pytest.approx(predict.predict(softcap)["run"]["ms"])


def test_other_numbers_of_cards_are_told_only_from_ranks_with_one_sequence_each(softcap):
    assert list(elsewhere.tables(softcap)["numbers_ms"]) == ["1", "2", "4", "8", "16", "64"]
    assert elsewhere.tables(softcap | {"ranks": 1})["numbers_ms"] == {}  # its collectives are not known
    assert elsewhere.tables(softcap | {"ranks": 4})["numbers_ms"] == {}  # it takes two sequences one after the other


def test_fewer_cards_take_the_batch_in_turns_and_share_out_the_optimizer():
    muon, adam = product(8192, 8192, 8192, part="optimizer"), kernel(10**9, part="optimizer")
    counts = a_run([product(65536, 768, 768), attention(), muon, adam], steps=1)
    both = [elsewhere.shared_by(counts, number)["items"] for number in (4, 16)]
    assert [items[0]["m"] for items in both] == [65536, 32768]
    assert [items[1]["tokens"] for items in both] == [65536, 32768]
    assert [items[2]["batches"] for items in both] == [2, 0.5]
    assert [items[3]["bytes"] for items in both] == [10**9, 10**9]
    eight, four = (elsewhere.milliseconds(counts, number) for number in (8, 4))
    assert 1.5 * eight < four < 2.1 * eight


# ---- Two rehearsals side by side, the picture, and reports that are used again ---------------------------------------


def a_report(counts: dict, **more) -> dict:
    known = {
        "script": "train_gpt.py",
        "given": {},
        "when": "2025-01-01 00:00",
        "step": counts,
        "card": "H100",
        "processes": 8,
        "prediction": predict.predict(counts),
        "memory": {"per_rank": {"0": {"peak_allocated_bytes": 2**30}}},
        "collectives": {"per_step": 3, "bytes_per_step": 2**30},
        "spilling_kernels": [],
        "findings": [],
        "folder": "",
    }
    return known | more


def test_a_comparison_says_what_changed_and_its_parts_add_up():
    before = a_run([product(65536, 768, 768), kernel(10**9, name="triton_poi_fused_add_3"), attention()])
    after = a_run(
        [product(65536, 768, 768), kernel(10**9, name="triton_poi_fused_add_7"), kernel(2 * 10**9, name="new")]
    )
    found = compare.of_reports(a_report(before), a_report(after, given={"num_layers": "4"}))
    assert found["figures"]["launches per step"] == {"ours": 3, "other": 3}
    assert found["figures"]["GiB read and written by kernels"]["other"] == pytest.approx(3e9 / 2**30)
    assert {entry["item"] for entry in found["items"]} == {"attention forward, 65536 tokens, 6 heads", "new"}
    steps_ms, parts = found["predicted_ms"]["step"], [found["predicted_ms"][part] for part in PARTS]
    for side in ("ours", "other"):
        assert steps_ms[side] == pytest.approx(sum(part[side] for part in parts))
    text = compare.as_text(found, "error: 3 %")
    assert "B: train_gpt.py --num_layers 4" in text and text.endswith("error: 3 %")
    assert re.search(r"launches per step +3\.00 +3\.00 +same", text)


def test_a_script_against_itself_changes_nothing(softcap):
    found = compare.of_reports(a_report(softcap), a_report(softcap))
    assert found["items"] == []
    assert all(pair["ours"] == pair["other"] for pair in [*found["figures"].values(), *found["predicted_ms"].values()])


def test_the_trace_for_perfetto_holds_every_span_where_it_belongs(softcap):
    spans = predict.timeline(softcap, 7)
    events = picture.as_trace(spans)["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(picture.shown(spans))
    assert max(event["ts"] + event["dur"] for event in complete) == pytest.approx(1e6 * max(s.end for s in spans))
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"predicted: computation", "predicted: communication"} <= names
    for thread in {event["tid"] for event in complete}:
        ends = 0.0
        for event in sorted((e for e in complete if e["tid"] == thread), key=lambda e: e["ts"]):
            assert event["ts"] >= ends - 0.01  # nothing overlaps on a stream
            ends = event["ts"] + event["dur"]


def test_the_page_is_one_file_that_says_predicted_and_the_error(softcap):
    page = picture.as_page(predict.timeline(softcap, 7), "Predicted: a <step>", "error 3 %")
    assert "Predicted: a &lt;step>" not in page and "Predicted: a &lt;step&gt;" in page and "error 3 %" in page
    assert not re.search(r"""(?:src|href)=|url\(|https?://(?!www\.w3\.org/2000/svg)""", page)
    data = json.loads(re.search(r"const data = (.*);\n", page)[1])
    assert len(data["spans"]) == len(picture.shown(predict.timeline(softcap, 7)))


@pytest.fixture
def unchanged(tmp_path, monkeypatch, softcap):
    """A script of which an earlier rehearsal has left its report; to run it again would fail."""
    script = tmp_path / "script.py"
    script.write_text("class Hyperparameters:\n    num_iterations: int = 3\n    train_files: str = ''\n")
    monkeypatch.setenv("REHEARSAL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(launch, "set_up", lambda: None)

    def refuse(*args):
        raise launch.UserError("it would be run")

    monkeypatch.setattr(launch, "run", refuse)

    def leave(given: dict, counts: dict = softcap, folder: Path = tmp_path) -> None:
        path = launch.stored_report(launch.fingerprint(script, given, 8, launch.Card(8)))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(a_report(counts, script=str(script), given=given, folder=str(folder))))

    return script, leave


def test_a_changed_script_setting_or_card_is_rehearsed_again(unchanged, tmp_path, capsys):
    script, leave = unchanged
    leave({"num_layers": "4"})
    for words in (
        ["--num_layers", "5"],
        ["--num_layers", "4", "--processes", "2"],
        ["--num_layers", "4", "--fresh"],
        ["--num_layers", "4", "--gpu_memory", "24"],
    ):
        assert main([str(script), *words]) == 2 and "it would be run" in capsys.readouterr().err
    script.write_text(script.read_text() + "\n")
    assert main([str(script), "--num_layers", "4"]) == 2 and "it would be run" in capsys.readouterr().err


def test_against_compares_two_settings_and_keeps_the_comparison(unchanged, tmp_path, capsys):
    script, leave = unchanged
    leave({})
    leave({"num_layers": "4"}, calibration.counts_of("2024-12-10_BlockWindow"))
    assert main([str(script), "--against", "--num_layers", "4"]) == 0
    said = capsys.readouterr()
    assert said.err.count("nothing has changed since the rehearsal of 2025-01-01 00:00") == 2
    assert re.search(r"step +148\.10 +159\.\d+ +\+11\.\d+", said.out)
    assert json.loads((tmp_path / "comparison.json").read_text())["predicted_ms"]["step"]["ours"] == pytest.approx(
        148.1, abs=0.01
    )


def test_a_stored_report_whose_folder_was_removed_gets_a_new_one(unchanged, tmp_path, capsys):
    script, leave = unchanged
    leave({}, folder=tmp_path / "removed")
    leave({"num_layers": "4"})
    assert main([str(script), "--against", "--num_layers", "4"]) == 0
    (made,) = (tmp_path / "home" / "runs").iterdir()
    assert f"in {made}" in capsys.readouterr().out
    assert {"report.json", "comparison.json"} <= {path.name for path in made.iterdir()}


@pytest.mark.parametrize(
    "words, told",
    [
        (["--against"], "--against: name another script or other settings after it"),
        (["--against", "no_such_record"], "no_such_record is neither a script nor a record"),
        (["--against", "--num_iterations", "many"], "--num_iterations many: must be a whole number"),
        (["--against", "--num_layers"], "--num_layers: settings are given as --name value"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_refused_in_one_line(unchanged, words, told, capsys):
    script, leave = unchanged
    leave({})
    assert main([str(script), *words]) == 2
    assert capsys.readouterr().err == f"rehearse: {told}\n"


# ---- Kernels that spill ----------------------------------------------------------------------------------------------


def test_spills_are_those_of_kernels_that_run_and_name_their_alternatives():
    def compiled(name: str, stack: int, cache_hash: str, source: str) -> readings.Kernel:
        return readings.Kernel(name, 255, stack, 0, 8, 1, "sm_90", source, cache_hash)

    kernels = [compiled("a", 5016, "A1", "a.py"), compiled("a", 0, "A2", "a.py"), compiled("b", 48, "B1", "b.py")]
    found = readings.spills_of(kernels, {"A2", "B1"})
    assert [(kernel["name"], kernel["runs"], kernel["spill_free_alternatives"]) for kernel in found] == [
        ("b", True, 0),
        ("a", False, 1),
    ]
    assert all(kernel["runs"] for kernel in readings.spills_of(kernels, set()))  # no step to know from


def test_attention_that_spills_is_told_by_its_pass_and_not_by_what_was_fused_into_it():
    names = {
        "triton_tem_fused__fused_rms_norm__to_copy_add_flex_attention_backward_mul_roll_38": "attention backward",
        "triton_tem_fused_add_flex_attention_select_backward_7": "attention forward",
        "triton_red_fused_flex_attention_backward_mul_10": "",
    }
    assert {name: report.attention_pass(name) for name in names} == names
    known = {"runs": True, "stack_bytes": 48, "registers": 255, "warps": 8, "spill_free_alternatives": 0}
    lines = report.kernel_lines([{"name": name, **known} for name in [*names, next(iter(names))]])
    assert lines[0].endswith("4 kernels that run")
    assert lines[1].endswith("attention backward (255 registers, 8 warps), no configurations without, 2 kernels")
    assert "attention forward" in lines[2] and "triton_red_fused" in lines[3]


def test_what_the_code_itself_keeps_in_local_memory_is_no_spill():
    usage = " Function triton_per_0:\n  REG:32 STACK:32 SHARED:0 LOCAL:0"
    assert readings.parse_kernel(usage, {}).stack_bytes == 32
    ptx = '.local .align 4 .b8 \t__local_depot0[28];\n.file\t1 "/cache/cabc.py"'
    kernel = readings.parse_kernel(usage, {}, ptx, "K")
    assert (kernel.stack_bytes, kernel.source, kernel.cache_hash) == (0, "/cache/cabc.py", "K")


def test_settings_are_read_from_any_class_that_holds_a_runs_settings():
    source = "class Settings:\n    train_files: str = setting('a/*.bin', 'shards')\n"
    source += "    num_iterations: int = setting(default=64 * 2)\n"
    assert readings.settings_of(source) == {"train_files": "a/*.bin", "num_iterations": 128}
    assert readings.settings_of("class Other:\n    x: int = 1\n") == {}
