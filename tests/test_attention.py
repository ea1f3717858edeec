"""The block mask and both ways of computing attention against dense masks written with plain loops.

ShardedLongShort's windows are whole blocks; the record after it has windows that are exact in tokens.
"""

import math
import re

import pytest
import torch
from helpers import load_record
from hypothesis import given, settings
from hypothesis import strategies as st

BLOCK = 128
SHARDED, CURRENT = load_record("ShardedLongShort"), load_record("NorMuonYarn")
of_both = pytest.mark.parametrize("script", [SHARDED, CURRENT], ids=lambda script: script.__name__)


@st.composite
def documents_and_windows(draw):
    """Packed documents over one to four blocks, some edges on the edge of a block, and a window of one to six."""
    blocks = draw(st.integers(1, 4))
    near_edges = st.integers(0, blocks).map(lambda block: block * BLOCK)
    starts = draw(st.lists(st.one_of(near_edges, st.integers(0, blocks * BLOCK - 1)), max_size=6))
    is_start = torch.zeros(blocks * BLOCK, dtype=torch.bool)
    is_start[[start for start in starts if start < len(is_start)]] = True
    return is_start.cumsum(0), draw(st.integers(1, 6))


def in_window(script, query: int, key: int, window_blocks: int) -> bool:
    if script is SHARDED:
        return query // BLOCK - key // BLOCK < window_blocks
    return query - key <= window_blocks * BLOCK


def dense_mask(script, documents: list[int], window_blocks: int) -> torch.Tensor:
    """By the definition: not later, same document, in the window."""
    length = len(documents)
    mask = [[False] * length for _ in range(length)]
    for query in range(length):
        for key in range(query + 1):
            mask[query][key] = documents[query] == documents[key] and in_window(script, query, key, window_blocks)
    return torch.tensor(mask)


def dense_attention(q, k, v, mask, scale):
    """Softmax attention of one head after the other, in the precision of the arguments."""
    outputs = []
    for head in range(q.size(1)):
        scores = q[:, head] @ k[:, head].T * scale
        outputs.append(scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v[:, head])
    return torch.stack(outputs, 1)


def kinds_of_blocks(mask) -> str:
    """A block mask as a picture: # full, / partial, . not computed."""
    rows = []
    for row in range(mask.kv_num_blocks.size(-1)):
        full = mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]].tolist()
        partial = mask.kv_indices[0, 0, row, : mask.kv_num_blocks[0, 0, row]].tolist()
        assert full == sorted(full) and partial == sorted(partial) and not set(full) & set(partial)
        columns = range(mask.kv_num_blocks.size(-1))
        rows.append("".join("#" if i in full else "/" if i in partial else "." for i in columns))
    return "\n".join(rows)


@of_both
@given(documents_and_windows())
@settings(max_examples=30, deadline=None)
def test_the_block_mask_is_the_dense_mask(script, case):
    documents, window = case
    mask = script.document_block_mask(documents, torch.tensor(window, dtype=torch.int32))
    expected = dense_mask(script, documents.tolist(), window)
    for row, kinds in enumerate(kinds_of_blocks(mask).split("\n")):
        for column, kind in enumerate(kinds):
            query, key = (torch.arange(block * BLOCK, (block + 1) * BLOCK) for block in (row, column))
            visible = expected[query[:, None], key]
            if kind == "/":
                assert torch.equal(mask.mask_mod(0, 0, query[:, None], key), visible)
            assert (kind == "#") == visible.all().item(), "full is what is wholly visible, and nothing else"
            assert kind != "." or not visible.any(), "what is not computed is not visible"


@pytest.mark.parametrize("script, window", [(SHARDED, 3), (CURRENT, 2)], ids=str)
def test_the_block_mask_is_the_picture_in_the_script(script, window):
    documents = (torch.arange(7 * BLOCK) >= 3 * BLOCK + 50).long()  # two documents that meet inside block 3
    picture = kinds_of_blocks(script.document_block_mask(documents, torch.tensor(window, dtype=torch.int32)))
    comment = re.findall(r"^#     \d  ((?: [#/.])+)", script.SOURCE, re.MULTILINE)
    assert picture.split() == [row.replace(" ", "").ljust(7, ".") for row in comment] and len(comment) == 7
    assert f"a window of {window} blocks" in script.SOURCE


@of_both
@given(documents_and_windows(), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_the_gathered_bias_is_the_dense_mask_for_every_head(script, case, heads):
    documents, window = case
    bias = script.gathered_bias(documents, window, heads, torch.bfloat16)
    assert bias.dtype == torch.bfloat16 and set(bias.unique().tolist()) <= {0.0, -math.inf}
    seen, expected = bias.unflatten(0, (-1, heads)) == 0, dense_mask(script, documents.tolist(), window)
    width, one_more = bias.size(-1), script is CURRENT  # a window that is exact in tokens ends inside a block
    assert width == BLOCK * (min(window, len(documents) // BLOCK) + one_more), "no wider than the sequence"
    for block in range(len(documents) // BLOCK):
        first_key = (block + 1) * BLOCK - width  # before the sequence for the first blocks
        rows = expected[block * BLOCK : (block + 1) * BLOCK]
        for head in range(heads):
            inside = seen[block, head][:, max(0, -first_key) :]
            assert torch.equal(inside, rows[:, max(0, first_key) : (block + 1) * BLOCK])
            assert seen[block, head].sum() == rows.sum(), "the padding before the start is never seen"


@pytest.mark.parametrize("use_flex", [False, True])
@pytest.mark.parametrize(
    "script, long, short",
    [(SHARDED, 1, 1), (SHARDED, 2, 1), (SHARDED, 5, 2), (CURRENT, 1, 1), (CURRENT, 3, 1)],
    ids=str,
)
def test_a_forward_pass_has_a_dense_mask_for_the_long_window_and_one_for_the_short(script, use_flex, long, short):
    """For the older record two sequences side by side; the second starts in the middle of a document."""
    small = dict(vocab_size=50, document_token=49, num_heads=1, model_dim=16, sequence_length=3 * BLOCK)
    s = script.make_settings(small | dict(num_layers=2, dtype="float32"), processes=1, on_gpu=False)
    tokens = torch.zeros(6 * BLOCK, dtype=torch.int32)
    starts = [0, 100, 300, 3 * BLOCK, 3 * BLOCK + 200, 5 * BLOCK]
    tokens[[start for start in starts if script is not SHARDED or start != 3 * BLOCK]] = 49
    documents = [sum(start <= token for start in starts) for token in range(len(tokens))]
    windows = torch.tensor(long if script is SHARDED else [short, long], dtype=torch.int32)  # half of the long one
    packing = script.GPT(s, use_flex=use_flex).pack(tokens, windows)
    for mask, blocks in (packing.long, long), (packing.short, short):
        expected = dense_mask(script, documents, blocks)
        if use_flex:
            of_blocks = expected.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(1, 2).flatten(2)
            kinds = {(True, True): "#", (True, False): "/", (False, False): "."}
            picture = [[kinds[x.any().item(), x.all().item()] for x in row] for row in of_blocks]
            assert kinds_of_blocks(mask).split() == ["".join(row) for row in picture]
            token = torch.arange(len(tokens))
            by_token = dense_mask(script, documents, len(tokens) if script is SHARDED else blocks)
            assert torch.equal(mask.mask_mod(0, 0, token[:, None], token), by_token)
        else:
            assert torch.equal(mask, script.gathered_bias(torch.tensor(documents), blocks, 1, torch.float32))
            assert (mask == 0).sum() == expected.sum()


@of_both
def test_a_window_gathers_the_blocks_before_and_zeros_before_the_start(script):
    x = torch.arange(1, 4).view(3, 1, 1, 1).expand(3, 2, 5, 4)  # every entry is the number of its block, from 1
    window = script.gather_window(x, 3 if script is SHARDED else 2)
    assert window.shape == (3, 2, 15, 4)
    assert [block[0, ::5, 0].tolist() for block in window] == [[0, 0, 1], [0, 1, 2], [1, 2, 3]]


def attend(script, q, k, v, mask, scale: float) -> torch.Tensor:
    """The later script's queries and keys come scaled."""
    return script.attend(q, k, v, mask, scale) if script is SHARDED else script.attend(q * scale, k, v, mask)


def random_heads(length, heads, dim, dtype):
    torch.manual_seed(0)
    return [torch.randn(length, heads, dim, dtype=dtype, requires_grad=True) for _ in range(3)]


@of_both
@given(documents_and_windows(), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_attention_over_gathered_blocks_and_its_gradients_are_dense_attention(script, case, heads):
    documents, window = case
    qkv = random_heads(len(documents), heads, 8, torch.float64)
    weights = torch.randn(qkv[0].shape, dtype=torch.float64)
    actual = attend(script, *qkv, script.gathered_bias(documents, window, heads, torch.float64), 0.2)
    expected = dense_attention(*qkv, dense_mask(script, documents.tolist(), window), 0.2)
    torch.testing.assert_close(actual, expected)
    of_actual, of_expected = (torch.autograd.grad((y * weights).sum(), qkv) for y in (actual, expected))
    for actual_gradient, expected_gradient in zip(of_actual, of_expected, strict=True):
        torch.testing.assert_close(actual_gradient, expected_gradient)


@of_both
def test_flex_attention_under_the_block_mask_is_dense_attention(script, monkeypatch):
    """FlexAttention is meant to be compiled; on a CPU it has a forward pass only."""
    torch._dynamo.reset()
    monkeypatch.setattr(script, "flex_attention", torch.compile(script.flex_attention, dynamic=False))
    for window in (1, 2, 4):
        torch.manual_seed(window)
        documents = (torch.rand(4 * BLOCK) < 1 / 100).cumsum(0)
        q, k, v = (x.detach() for x in random_heads(len(documents), 2, 16, torch.float32))
        mask = script.document_block_mask(documents, torch.tensor(window, dtype=torch.int32))
        with torch.no_grad():
            actual = attend(script, q, k, v, mask, 0.12)
        expected = dense_attention(q, k, v, dense_mask(script, documents.tolist(), window), 0.12)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
