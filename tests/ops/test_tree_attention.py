"""Draft trees in attention: the branches share the reading of the cached tokens (DeFT), and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minillm.batch import Batch, Segment
from minillm.ops.paged_attention import paged_attention
from minillm.ops.tree_attention import tree_attention
from minillm.speculative.tree_shape import TreeShape

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 4, 2, 8, 4


class CountedRows:
    """Keys or values that count how many of them are read."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.shape, self.dtype, self.num_read = rows, rows.shape, rows.dtype, 0

    def __getitem__(self, slots: Tensor | slice) -> Tensor:
        found = self.rows[slots]
        self.num_read += len(found)
        return found


def whole_tree(q: Tensor, keys: Tensor, values: Tensor, shape: TreeShape, context: int) -> tuple[Tensor, int]:
    """The results of the root and all nodes in one request, and how many keys were read."""
    counted = CountedRows(keys), CountedRows(values)
    count = shape.num_nodes + 1
    blocks = list(range(-(-(context + count) // BLOCK_SIZE)))
    segment = Segment([0] * count, context, blocks, count, list(shape.parents))
    batch = Batch.from_segments([segment], BLOCK_SIZE, torch.device("cpu"))
    return tree_attention(q, *counted, batch, batch.tree), counted[0].num_read


def branch_by_branch(q: Tensor, keys: Tensor, values: Tensor, shape: TreeShape, context: int) -> tuple[Tensor, int]:
    """The same with one causal request for each branch, whose keys are copied behind the cached tokens."""
    out, num_read = torch.empty_like(q), 0
    for leaf in shape.leaves:
        path = [0]
        node = leaf
        while node >= 0:
            path.insert(1, node + 1)
            node = shape.parents[node]
        rows = [*range(context), *(context + i for i in path)]
        counted = CountedRows(keys[rows]), CountedRows(values[rows])
        blocks = list(range(-(-len(rows) // BLOCK_SIZE)))
        batch = Batch.from_segments([Segment([0] * len(path), context, blocks)], BLOCK_SIZE, torch.device("cpu"))
        out[path] = paged_attention(q[path], *counted, batch)
        num_read += counted[0].num_read
    return out, num_read


@pytest.mark.parametrize("context", [0, 7, 40])
@pytest.mark.parametrize("branching", [(1, 1, 1), (2,), (2, 2, 2), (4, 2, 1)])
def test_a_tree_reads_the_cached_tokens_once_for_all_its_branches(branching: tuple[int, ...], context: int) -> None:
    torch.manual_seed(0)
    shape = TreeShape.from_branching(branching)
    count = shape.num_nodes + 1
    q, keys, values = (torch.randn(context + count, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    at_once, read = whole_tree(q[:count], keys, values, shape, context)
    alone, read_alone = branch_by_branch(q[:count], keys, values, shape, context)
    torch.testing.assert_close(at_once, alone, rtol=1e-5, atol=1e-6)
    assert (read, read_alone) == shape.keys_read(context)


def test_without_branches_there_is_nothing_to_share() -> None:
    at_once, branch_by_branch = TreeShape.from_branching((1, 1, 1)).keys_read(1000)
    assert at_once == branch_by_branch == 1004


def test_the_share_of_keys_that_is_not_read_approaches_that_of_the_branches() -> None:
    at_once, branch_by_branch = TreeShape.from_branching((8, 1)).keys_read(100_000)
    assert 1 - at_once / branch_by_branch == pytest.approx(7 / 8, abs=1e-4)
