"""Ragged steps over pools whose unused slots hold NaN, in every format: attention must never read them."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from minillm.batch import Batch
from minillm.cache.base import DequantizedRows
from minillm.cache.paged_int4 import PagedInt4KVCache
from minillm.cache.paged_int8 import PagedInt8KVCache
from minillm.models.config import ModelConfig

WHERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Step(NamedTuple):
    """Queries, the pools of one layer, and the batch that reads them."""

    q: Tensor
    keys: Tensor
    values: Tensor
    batch: Batch


def step(
    seed: int,
    query_lens: list[int],
    block_size: int,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype = torch.float32,
    past: tuple[int, ...] = (0, 1, 5, 37),
) -> Step:
    """Return requests with `query_lens` new tokens and some cached ones, their blocks scattered over the pool."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    seq_lens = [length + rng.choice(past) for length in query_lens]
    blocks = [max(1, -(-n // block_size)) for n in seq_lens]
    num_blocks = sum(blocks) + 2
    order = rng.sample(range(num_blocks), sum(blocks))
    tables = [[order.pop() for _ in range(count)] for count in blocks]
    keys, values = (torch.full((num_blocks * block_size, heads[1], dim), torch.nan) for _ in "kv")
    slots = [t[i // block_size] * block_size + i % block_size for t, n in zip(tables, seq_lens) for i in range(n)]  # noqa: B905
    keys[slots], values[slots] = torch.randn(len(slots), heads[1], dim), torch.randn(len(slots), heads[1], dim)
    query_start = [0]
    for length in query_lens:
        query_start.append(query_start[-1] + length)
    batch = Batch(
        token_ids=torch.empty(0),
        positions=torch.empty(0),
        slot_mapping=torch.empty(0),
        block_tables=torch.tensor([t + t[:1] * (max(blocks) - len(t)) for t in tables], device=WHERE),
        query_start=query_start,
        seq_lens=seq_lens,
        block_size=block_size,
    )
    q = torch.randn(query_start[-1], heads[0], dim)
    return Step(*(x.to(WHERE, dtype) for x in (q, keys, values)), batch)


def quantized(numbers: Tensor, bits: int, group_size: int = 32) -> DequantizedRows:
    """Return keys or values quantised as in an INT8 or INT4 cache; where they are NaN, so are the scales."""
    config = ModelConfig(8, 8, 8, 1, numbers.shape[1], numbers.shape[1], numbers.shape[2], 8)
    layout, options = (PagedInt8KVCache, {}) if bits == 8 else (PagedInt4KVCache, {"group_size": group_size})
    cache = layout(config, 1, 1, numbers.dtype, numbers.device, **options)
    return DequantizedRows(cache.encode(numbers), cache.decode, tuple(numbers.shape))


def node_masks(parents: list[int]) -> list[int]:
    """`Batch.tree` of a segment all of whose tokens are nodes; -1: the node follows the cached tokens. At most 63."""
    masks: list[int] = []
    for node, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
    return masks
