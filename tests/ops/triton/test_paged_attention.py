"""The paged attention kernel against the PyTorch reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm.batch import Segment, tree_masks
from minillm.errors import UnsupportedError
from minillm.ops.paged_attention import paged_attention as reference
from minillm.ops.tree_attention import tree_attention
from minillm.ops.triton.paged_attention import paged_attention
from minillm.ops.triton.tiling import AttentionMetadata, Tiling, num_splits
from tests.ops.triton.close import FP32, HALF, assert_close, examples
from tests.ops.triton.steps import WHERE, node_masks, quantized, step

SMALL = Tiling(rows=16, keys=16, splits=1)


@examples(15)
@given(
    query_lens=st.lists(st.sampled_from((1, 1, 2, 5, 21)), min_size=1, max_size=2),
    block_size=st.sampled_from((1, 3, 8, 16, 64)),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 8),
    dim=st.sampled_from((32, 64, 80, 128)),
    window=st.sampled_from((None, None, 1, 7)),
    splits=st.sampled_from((1, 3)),
    seed=st.integers(0, 999),
)
def test_ragged_steps_equal_the_reference(
    query_lens: list[int],
    block_size: int,
    kv_heads: int,
    group: int,
    dim: int,
    window: int | None,
    splits: int,
    seed: int,
) -> None:
    s = step(seed, query_lens, block_size, (kv_heads * group, kv_heads), dim)
    out = paged_attention(s.q, s.keys, s.values, s.batch, window, tiling=replace(SMALL, splits=splits))
    assert_close(out, reference(s.q, s.keys, s.values, s.batch, window))


@pytest.mark.parametrize(("dim", "splits"), [(32, 1), (48, 3), (64, 1)])
@pytest.mark.parametrize(("bits", "group_size"), [(8, 0), (4, 32), (4, 8), (4, 128)])
def test_codes_become_numbers_inside(bits: int, group_size: int, dim: int, splits: int) -> None:
    if bits == 4 and dim % min(group_size, dim):
        group_size = 24
    s = step(dim, [1, 4, 8], 4, (6, 2), dim, past=(0, 5, 21))
    keys, values = (quantized(x, bits, group_size) for x in (s.keys, s.values))
    out = paged_attention(s.q, keys, values, s.batch, tiling=replace(SMALL, splits=splits))
    assert_close(out, reference(s.q, keys, values, s.batch))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_16_bits(dtype: torch.dtype, bits: int) -> None:
    s = step(5, [1, 6], 16, (6, 2), 64, dtype)
    keys, values = (quantized(x, bits) if bits else x for x in (s.keys, s.values))
    out = paged_attention(s.q, keys, values, s.batch, tiling=SMALL)
    assert out.dtype == dtype
    exact = [quantized(x.float(), bits) if bits else x.float() for x in (s.keys, s.values)]
    assert_close(out, reference(s.q.float(), *exact, s.batch), HALF)


def test_own_choice_of_tiles_and_a_projection_with_gaps() -> None:
    s = step(1, [3, 40, 1], 8, (6, 2), 32)
    wide = torch.zeros(s.q.shape[0], 10, 32, device=WHERE)
    wide[:, 2:8] = s.q
    out = paged_attention(wide[:, 2:8], s.keys, s.values, s.batch)
    assert_close(out, reference(s.q, s.keys, s.values, s.batch))


def test_a_request_without_new_tokens_and_a_step_without_any() -> None:
    s = step(2, [2, 0, 1, 0], 4, (4, 2), 32, past=(3, 9))
    out = paged_attention(s.q, s.keys, s.values, s.batch, tiling=SMALL)
    only = [0, 2]
    batch = replace(
        s.batch,
        block_tables=s.batch.block_tables[only],
        query_start=[0, 2, 3],
        seq_lens=[s.batch.seq_lens[r] for r in only],
        plans={},
    )
    assert_close(out, reference(s.q, s.keys, s.values, batch))
    empty = step(2, [0], 4, (4, 2), 32, past=(3,))
    assert paged_attention(empty.q, empty.keys, empty.values, empty.batch).shape == (0, 4, 32)


def test_scores_far_apart_neither_overflow_nor_lose_the_largest() -> None:
    s = step(7, [1, 3], 4, (4, 1), 32, past=(40,))
    q = s.q * 300
    for splits in (1, 5):
        out = paged_attention(q, s.keys, s.values, s.batch, tiling=replace(SMALL, splits=splits))
        assert_close(out, reference(q.double(), s.keys.double(), s.values.double(), s.batch), 1e-4)


TREES = {"chain": [-1, 0, 1, 2], "star": [-1, -1, -1, -1], "binary": [-1, 0, 0, 1, 1, 2, 2], "one": [-1]}


@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("splits", [1, 3])
def test_trees_see_their_ancestors(bits: int, splits: int) -> None:
    parents = list(TREES.values())
    s = step(11, [len(p) for p in parents], 4, (6, 2), 32, past=(0, 9))
    keys, values = (quantized(x, bits) if bits else x for x in (s.keys, s.values))
    tree = torch.tensor([mask for p in parents for mask in node_masks(p)], device=WHERE)
    out = paged_attention(s.q, keys, values, s.batch, tree=tree, tiling=replace(SMALL, splits=splits))
    assert_close(out, tree_attention(s.q, keys, values, s.batch, tree))


def test_a_tree_that_is_a_chain_is_plain_attention_and_64_nodes_fit() -> None:
    s = step(12, [64, 3], 16, (2, 1), 32, past=(5,))
    chains = [Segment([0] * n, 0, [0], parents=range(-1, n - 2)) for n in (64, 3)]
    tree = torch.tensor(tree_masks(chains), device=WHERE)
    out = paged_attention(s.q, s.keys, s.values, s.batch, tree=tree, tiling=SMALL)
    assert_close(out, reference(s.q, s.keys, s.values, s.batch))


def test_what_it_cannot_do_it_refuses() -> None:
    s = step(3, [65], 16, (2, 1), 32)
    tree = torch.ones(65, dtype=torch.int64, device=WHERE)
    with pytest.raises(UnsupportedError, match="65 nodes is too large, at most 64"):
        paged_attention(s.q, s.keys, s.values, s.batch, tree=tree)
    with pytest.raises(UnsupportedError, match="sliding window"):
        paged_attention(s.q, s.keys, s.values, s.batch, 8, tree=tree)
    with pytest.raises(UnsupportedError, match="no cache has pools"):
        paged_attention(s.q, s.keys.to(torch.int32), s.values, s.batch)
    with pytest.raises(UnsupportedError, match="float64"):
        paged_attention(s.q.double(), s.keys.double(), s.values.double(), s.batch)


@pytest.mark.parametrize(
    ("programs", "longest", "num_sms", "splits"),
    [
        (2, 4096, 100, 16),
        (2, 300, 100, 1),
        (200, 4096, 100, 1),
        (2, 100_000, 100, 64),
        (0, 0, 1, 1),
        (50, 8192, 100, 4),
    ],
)
def test_few_programs_are_split_and_short_contexts_are_not(
    programs: int, longest: int, num_sms: int, splits: int
) -> None:
    assert num_splits(programs, longest, num_sms) == splits


def test_lists_reach_the_device_once_per_step() -> None:
    s = step(4, [1, 2], 8, (4, 2), 32)
    paged_attention(s.q, s.keys, s.values, s.batch, tiling=SMALL)
    metadata = AttentionMetadata.of(s.batch)
    paged_attention(s.q, s.keys, s.values, s.batch, tiling=SMALL)
    assert AttentionMetadata.of(s.batch) is metadata
    assert FP32 < HALF


def test_a_chain_beside_a_tree_is_causal() -> None:
    s = step(13, [7, 5], 4, (6, 2), 32, past=(3,))
    tree = torch.tensor([*node_masks(TREES["binary"]), *[-1] * 5], device=WHERE)
    out = paged_attention(s.q, s.keys, s.values, s.batch, tree=tree, tiling=SMALL)
    assert_close(out, tree_attention(s.q, s.keys, s.values, s.batch, tree))
    assert_close(out[7:], reference(s.q, s.keys, s.values, s.batch)[7:])
