"""The block mask and both ways of computing attention against dense masks written with plain loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import train_gpt
from train_gpt import BLOCK, attend, flex_mask, gathered_mask


@st.composite
def documents_and_windows(draw):
    """Packed documents over one to four blocks, some edges on the edge of a block, and a window of one to six."""
    blocks = draw(st.integers(1, 4))
    near_edges = st.integers(0, blocks).map(lambda block: block * BLOCK)
    starts = draw(st.lists(st.one_of(near_edges, st.integers(0, blocks * BLOCK - 1)), max_size=6))
    is_start = torch.zeros(blocks * BLOCK, dtype=torch.bool)
    is_start[[start for start in starts if start < len(is_start)]] = True
    return is_start.cumsum(0), draw(st.integers(1, 6))


def dense_mask(documents: list[int], window_blocks: int) -> torch.Tensor:
    """By the definition: not later, same document, at most window_blocks - 1 blocks back."""
    length = len(documents)
    mask = [[False] * length for _ in range(length)]
    for query in range(length):
        for key in range(query + 1):
            near = query // BLOCK - key // BLOCK < window_blocks
            mask[query][key] = near and documents[query] == documents[key]
    return torch.tensor(mask)


def dense_attention(q, k, v, mask):
    """Softmax attention of one head after the other, in the precision of the arguments."""
    outputs = []
    for head in range(q.size(1)):
        kv_head = head * k.size(1) // q.size(1)
        scores = q[:, head] @ k[:, kv_head].T / math.sqrt(q.size(-1))
        outputs.append(scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v[:, kv_head])
    return torch.stack(outputs, 1)


@given(documents_and_windows())
@settings(max_examples=40, deadline=None)
def test_the_block_mask_is_the_dense_mask(case):
    documents, window = case
    mask = flex_mask(documents, torch.tensor(window, dtype=torch.int32))
    expected = dense_mask(documents.tolist(), window)
    seen = torch.zeros_like(expected)
    blocks = len(documents) // BLOCK
    for query_block in range(blocks):
        full = mask.full_kv_indices[0, 0, query_block, :mask.full_kv_num_blocks[0, 0, query_block]].tolist()
        partial = mask.kv_indices[0, 0, query_block, :mask.kv_num_blocks[0, 0, query_block]].tolist()
        assert full == sorted(full) and partial == sorted(partial) and not set(full) & set(partial)
        for key_block in full + partial:
            rows = slice(query_block * BLOCK, (query_block + 1) * BLOCK)
            columns = slice(key_block * BLOCK, (key_block + 1) * BLOCK)
            query = torch.arange(rows.start, rows.stop)[:, None]
            key = torch.arange(columns.start, columns.stop)
            seen[rows, columns] = True if key_block in full else mask.mask_mod(0, 0, query, key)
            assert expected[rows, columns].all() or key_block not in full
            assert not expected[rows, columns].all() or key_block in full, "a wholly visible block is listed as full"
    assert torch.equal(seen, expected)


@given(documents_and_windows())
@settings(max_examples=40, deadline=None)
def test_the_gathered_mask_is_the_dense_mask(case):
    documents, window = case
    mask = gathered_mask(documents, torch.tensor(window))
    expected = dense_mask(documents.tolist(), window)
    width = mask.size(-1)
    for block in range(len(documents) // BLOCK):
        first_key = (block + 1) * BLOCK - width  # before the sequence for the first blocks
        rows = expected[block * BLOCK:(block + 1) * BLOCK]
        assert torch.equal(mask[block][:, max(0, -first_key):], rows[:, max(0, first_key):(block + 1) * BLOCK])
        assert not mask[block][:, :max(0, -first_key)].any()
        assert not rows[:, :max(0, first_key)].any() and not rows[:, (block + 1) * BLOCK:].any()


def random_heads(length, heads, kv_heads, dim, dtype):
    torch.manual_seed(0)
    return (torch.randn(length, n, dim, dtype=dtype, requires_grad=True) for n in (heads, kv_heads, kv_heads))


@given(documents_and_windows(), st.sampled_from([(2, 2), (4, 2), (3, 1)]))
@settings(max_examples=25, deadline=None)
def test_cpu_attention_and_its_gradients_are_dense_attention(case, heads):
    documents, window = case
    q, k, v = random_heads(len(documents), *heads, 8, torch.float64)
    weights = torch.randn(q.shape, dtype=torch.float64)
    actual = attend(q, k, v, gathered_mask(documents, torch.tensor(window)))
    actual_gradients = torch.autograd.grad((actual * weights).sum(), (q, k, v))
    expected = dense_attention(q, k, v, dense_mask(documents.tolist(), window))
    expected_gradients = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    torch.testing.assert_close(actual, expected)
    for actual_gradient, expected_gradient in zip(actual_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(actual_gradient, expected_gradient)


@pytest.fixture(scope="module")
def compiled_flex():
    """FlexAttention is meant to be compiled; on a CPU it has a forward only."""
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "flex_attention", torch.compile(train_gpt.flex_attention, dynamic=False))
        yield


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_flex_attention_under_the_block_mask_is_dense_attention(compiled_flex, heads, window):
    for seed in range(4):
        torch.manual_seed(seed)
        documents = (torch.rand(4 * BLOCK) < 1 / 100).cumsum(0)
        q, k, v = (x.detach() for x in random_heads(len(documents), *heads, 16, torch.float32))
        with torch.no_grad():
            actual = attend(q, k, v, flex_mask(documents, torch.tensor(window, dtype=torch.int32)))
        expected = dense_attention(q, k, v, dense_mask(documents.tolist(), window))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
