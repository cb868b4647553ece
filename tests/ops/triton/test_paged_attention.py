"""The paged attention kernel against the PyTorch reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minillm.batch import Segment, tree_masks
from minillm.bench.on_gpu.ragged_steps import coded
from minillm.errors import UnsupportedError
from minillm.ops.paged_attention import paged_attention as reference
from minillm.ops.tree_attention import tree_attention
from minillm.ops.triton import machine
from minillm.ops.triton.paged_attention import paged_attention
from minillm.ops.triton.tiling import AttentionMetadata, HeadShape, Tiling, num_splits, num_stages
from tests.ops.triton.close import HALF, assert_close, examples
from tests.ops.triton.steps import WHERE, node_masks, step

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
    keys, values = (coded(x, bits, group_size) for x in (s.keys, s.values))
    out = paged_attention(s.q, keys, values, s.batch, tiling=replace(SMALL, splits=splits))
    assert_close(out, reference(s.q, keys, values, s.batch))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_16_bits(dtype: torch.dtype, bits: int) -> None:
    s = step(5, [1, 6], 16, (6, 2), 64, dtype)
    keys, values = (coded(x, bits) if bits else x for x in (s.keys, s.values))
    out = paged_attention(s.q, keys, values, s.batch, tiling=SMALL)
    assert out.dtype == dtype
    exact = [coded(x.float(), bits) if bits else x.float() for x in (s.keys, s.values)]
    assert_close(out, reference(s.q.float(), *exact, s.batch), HALF)


def test_small_values_in_int8_keep_their_digits_in_float16() -> None:
    """A weight times a scale near 10⁻⁵ would lie below the normal numbers of float16."""
    s = step(16, [1], 4, (4, 2), 32, past=(600,))
    keys, values = s.keys.half(), (1e-3 * s.values).half()
    stored = [coded(x.float(), 8, 0) for x in (keys, values)]
    expected = reference(s.q, *stored, s.batch)
    out = paged_attention(s.q.half(), *stored, s.batch, tiling=SMALL).float()
    assert (out - expected).norm() < 5e-3 * expected.norm()


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
    keys, values = (coded(x, bits) if bits else x for x in (s.keys, s.values))
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
    s = step(3, [5], 16, (2, 1), 32)
    tree = torch.ones(5, dtype=torch.int64, device=WHERE)
    with pytest.raises(UnsupportedError, match="sliding window"):
        paged_attention(s.q, s.keys, s.values, s.batch, 8, tree=tree)
    with pytest.raises(UnsupportedError, match="no cache has pools"):
        paged_attention(s.q, s.keys.to(torch.int32), s.values, s.batch)
    with pytest.raises(UnsupportedError, match="float64"):
        paged_attention(s.q.double(), s.keys.double(), s.values.double(), s.batch)


class Restored:
    """Rows that a layout computes when they are read: it has no pools of them."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


def test_rows_without_pools_are_refused() -> None:
    s = step(3, [5], 16, (2, 1), 32)
    rows = Restored(tuple(s.keys.shape))
    with pytest.raises(UnsupportedError, match="Restored has none; use the reference"):
        paged_attention(s.q, rows, rows, s.batch)


def test_keys_and_values_of_two_formats_are_refused() -> None:
    """Those of the values would be read with the strides of the keys."""
    s = step(3, [5], 16, (4, 2), 32)
    int8 = coded(s.values, 8)
    groups_of_32, groups_of_16 = (coded(s.values, 4, size) for size in (32, 16))
    for keys, values, words in (
        (s.keys, int8, r"keys have \(0, 1, 2, 32\) and values \(8, 1, 2, 32\)"),
        (int8, groups_of_32, r"keys have \(8, 1, 2, 32\) and values \(4, 32, 2, 32\)"),
        (groups_of_16, groups_of_32, r"keys have \(4, 16, 2, 32\) and values \(4, 32, 2, 32\)"),
        (s.keys, s.values[:, :1].contiguous(), r"keys have \(0, 1, 2, 32\) and values \(0, 1, 1, 32\)"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            paged_attention(s.q, keys, values, s.batch)


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


@pytest.mark.parametrize(
    ("capability", "dim", "dtype", "stages"),
    [
        ((9, 0), 128, torch.bfloat16, 5),
        ((9, 0), 256, torch.bfloat16, 2),
        ((8, 0), 128, torch.float16, 5),
        ((8, 6), 128, torch.float16, 2),
        ((8, 9), 64, torch.float16, 5),
        ((9, 0), 64, torch.float32, 2),
        ((7, 5), 64, torch.float16, 2),
    ],
)
def test_loads_run_ahead_where_the_tiles_fit(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dim: int, dtype: torch.dtype, stages: int
) -> None:
    monkeypatch.setattr(machine, "capability", lambda: capability)
    assert num_stages(64, HeadShape(32, 8, dim, dtype)) == stages


def test_splits_share_the_keys_evenly_and_some_may_have_none() -> None:
    s = step(14, [1, 2], 8, (4, 2), 32, past=(70, 7))
    for splits in (2, 4, 7):
        out = paged_attention(s.q, s.keys, s.values, s.batch, tiling=replace(SMALL, splits=splits))
        assert_close(out, reference(s.q, s.keys, s.values, s.batch))


@pytest.mark.parametrize(("bits", "dim", "group_size"), [(8, 33, 0), (4, 34, 17), (4, 36, 6), (4, 36, 3)])
def test_heads_and_groups_that_do_not_fill_a_word(bits: int, dim: int, group_size: int) -> None:
    s = step(15, [1, 3], 4, (4, 2), dim, past=(0, 19))
    keys, values = (coded(x, bits, group_size) for x in (s.keys, s.values))
    out = paged_attention(s.q, keys, values, s.batch, tiling=replace(SMALL, splits=2))
    assert_close(out, reference(s.q, keys, values, s.batch))


EVERY_WORD = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)


def test_bits_of_bfloat16_are_the_codes() -> None:
    """The arithmetic of the kernel's `_codes`, whose bfloat16 the interpreter cannot run, on every word."""

    def number(bits: Tensor) -> Tensor:
        return (bits | 0x4300).view(torch.bfloat16)

    for plane in (0, 1):
        low = EVERY_WORD >> (8 * plane)
        found = number(low & 127) - number(low & 128)
        assert torch.equal(found, EVERY_WORD.view(torch.int8).view(-1, 2)[:, plane].to(torch.bfloat16))
    for plane in range(4):
        low = EVERY_WORD >> (4 * plane)
        assert torch.equal(number(low & 15) - 128.0, ((EVERY_WORD.int() >> (4 * plane)) & 15).to(torch.bfloat16))


def test_lists_reach_the_device_once_per_step() -> None:
    s = step(4, [1, 2], 8, (4, 2), 32)
    paged_attention(s.q, s.keys, s.values, s.batch, tiling=SMALL)
    metadata = AttentionMetadata.of(s.batch)
    paged_attention(s.q, s.keys, s.values, s.batch, tiling=SMALL)
    assert AttentionMetadata.of(s.batch) is metadata


def test_a_chain_of_any_length_beside_a_tree_is_causal() -> None:
    s = step(13, [7, 70], 16, (6, 2), 32, past=(3,))
    tree = torch.tensor([*node_masks(TREES["binary"]), *[-1] * 70], device=WHERE)
    out = paged_attention(s.q, s.keys, s.values, s.batch, tree=tree, tiling=SMALL)
    assert_close(out, tree_attention(s.q, s.keys, s.values, s.batch, tree))
    assert_close(out[7:], reference(s.q, s.keys, s.values, s.batch)[7:])
