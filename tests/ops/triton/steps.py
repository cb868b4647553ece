"""Ragged steps over pools whose unused slots hold NaN: attention must never read them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from minillm.bench.on_gpu import ragged_steps
from minillm.bench.on_gpu.ragged_steps import Layout, Step

WHERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def step(
    seed: int,
    query_lens: Sequence[int],
    block_size: int,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype = torch.float32,
    past: Sequence[int] = (0, 1, 5, 37),
) -> Step:
    """Return requests with `query_lens` new tokens and some cached ones, scattered over a pool of floats."""
    torch.manual_seed(seed)
    layout = Layout(dtype, 0, heads, dim, block_size, None)
    return ragged_steps.step(random.Random(seed), WHERE, layout, query_lens, past)


def node_masks(parents: list[int]) -> list[int]:
    """`Batch.tree` of a segment all of whose tokens are nodes; -1: the node follows the cached tokens. At most 63."""
    masks: list[int] = []
    for node, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
    return masks
