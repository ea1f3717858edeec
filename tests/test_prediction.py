"""The predicted time: arithmetic on made-up counts, the reading of a trace, and the table of published records."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rehearsal import predict, steps
from rehearsal.predict import H100, Rates

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


# ----------------------------------------------------------------------------------------------------
# One item
# ----------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------
# Attention by visible blocks
# ----------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------
# A step on its streams
# ----------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------
# More work never gets cheaper
# ----------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------
# Reading a trace
# ----------------------------------------------------------------------------------------------------

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
    return f"kernel {number} {steps.json.dumps(described | more)}"


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
    counts = steps.count(TRACE, tmp_path, {50257, 50304})
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


def test_steps_begin_at_the_last_wait_and_the_most_frequent_is_typical():
    step = ["launch", "Optimizer 0 begins", "Optimizer 0 ends", "Optimizer 1 begins", "Optimizer 1 ends"]
    validation = ["Wait", "launch", "launch", "Wait"]
    lines = [*step[3:], *validation, *step, *step, *validation, *step]
    assert steps.cut(lines) == [step[3:], step, step, step]
    longer = ["launch", *step]
    assert steps.typical([["x"], longer, step, step]) == step


def test_an_optimizer_that_skips_steps_does_not_join_them():
    both = ["Optimizer 0 begins", "Optimizer 0 ends", "Optimizer 1 begins", "Optimizer 1 ends"]
    assert steps.cut([*both, *both[2:], *both]) == [both, both[2:], both]


def test_random_traces_are_read_or_refused_without_a_crash():
    words = TRACE.splitlines()
    rng = random.Random(0)
    for _ in range(50):
        some = [line for line in words if line.startswith("kernel") or rng.random() < 0.7]
        counts = steps.count("\n".join(some), steps.Path("/nowhere"), {50304})
        assert counts is None or sum(predict.step_seconds(a_run(**counts), 1).values()) >= 0
