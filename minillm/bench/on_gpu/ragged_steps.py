"""Random ragged steps for checking attention. Slots that a kernel must not read hold NaN, in every format."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from minillm.batch import Batch
from minillm.cache.base import DequantizedRows
from minillm.cache.paged_int4 import DEFAULT_GROUP_SIZE, PagedInt4KVCache
from minillm.cache.paged_int8 import PagedInt8KVCache
from minillm.cache.paged_quantized import PagedQuantizedKVCache
from minillm.models.config import ModelConfig

PAST = (0, 1, 5, 37, 300)
"""Possible numbers of tokens that a request has cached before."""


class Step(NamedTuple):
    """Queries, the keys and values of one layer, and the batch that reads them."""

    q: Tensor
    """`[tokens, heads, dim]`."""
    keys: Tensor | DequantizedRows
    values: Tensor | DequantizedRows
    batch: Batch

    def exact(self) -> Step:
        """Return the same step in fp64: codes are dequantised in fp32, all that follows is computed in fp64."""
        keys, values = (_exactly(rows) for rows in (self.keys, self.values))
        return Step(self.q.double(), keys, values, replace(self.batch, plans={}))


@dataclass(frozen=True)
class Layout:
    """The properties for which a kernel is compiled."""

    dtype: torch.dtype
    bits: int
    """Bits of a stored code; 0: floats."""
    heads: tuple[int, int]
    """Query heads, KV heads."""
    dim: int
    block_size: int
    window: int | None


def step(
    rng: random.Random,
    device: torch.device,
    layout: Layout,
    query_lens: Sequence[int],
    past: Sequence[int] = PAST,
) -> Step:
    """Return requests with these numbers of new tokens, scattered over a pool of floats or codes."""
    (heads, num_kv), dim, block_size, dtype, bits = (
        *(layout.heads, layout.dim, layout.block_size, layout.dtype, layout.bits),
    )
    seq_lens = [length + rng.choice(past) for length in query_lens]
    blocks = [max(1, -(-length // block_size)) for length in seq_lens]
    order = rng.sample(range(sum(blocks) + 2), sum(blocks))
    tables = [[order.pop() for _ in range(count)] for count in blocks]
    slots = [
        table[i // block_size] * block_size + i % block_size
        for table, length in zip(tables, seq_lens, strict=True)
        for i in range(length)
    ]
    rows = []
    for _ in "kv":
        pool = torch.full(((sum(blocks) + 2) * block_size, num_kv, dim), torch.nan, device=device)
        pool[slots] = torch.randn(len(slots), num_kv, dim, device=device)
        rows.append(coded(pool.to(dtype), bits) if bits else pool.to(dtype))
    batch = Batch(
        token_ids=torch.empty(0),
        positions=torch.empty(0),
        slot_mapping=torch.empty(0),
        block_tables=torch.tensor([t + t[:1] * (max(blocks) - len(t)) for t in tables], device=device),
        query_start=[0, *accumulate(query_lens)],
        seq_lens=seq_lens,
        block_size=block_size,
    )
    return Step(torch.randn(sum(query_lens), heads, dim, device=device).to(dtype), *rows, batch)


def cache_like(
    numbers: Tensor, bits: int, dtype: torch.dtype, group_size: int = DEFAULT_GROUP_SIZE
) -> PagedQuantizedKVCache:
    """Return a cache whose `encode` and `decode` fit keys or values shaped like `numbers`."""
    num_kv, dim = numbers.shape[1:]
    config = ModelConfig(8, 8, 8, 1, num_kv, num_kv, dim, 8)
    if bits == 8:
        return PagedInt8KVCache(config, 1, 1, dtype, numbers.device)
    return PagedInt4KVCache(config, 1, 1, dtype, numbers.device, group_size=group_size)


def coded(numbers: Tensor, bits: int, group_size: int = DEFAULT_GROUP_SIZE) -> DequantizedRows:
    """Return keys or values quantised as in an INT8 or INT4 cache; where they are NaN, so are the scales."""
    cache = cache_like(numbers, bits, numbers.dtype, group_size)
    return DequantizedRows(cache.encode(numbers), cache.decode, tuple(numbers.shape))  # type: ignore[arg-type]


def _exactly(rows: Tensor | DequantizedRows) -> Tensor | DequantizedRows:
    if isinstance(rows, Tensor):
        return rows.double()
    bits = 4 if len(rows.pools) == 3 else 8
    like = torch.empty(rows.shape, device=rows.pools[0].device)
    return replace(rows, decode=cache_like(like, bits, torch.float64).decode)
