"""The cases of `bench kernels` that use the KV cache: attention over it, and writing to it.

Minimum bytes: the stored keys and values of one request, once for all queries; queries in, results out. The request's
blocks are scattered over the pool, as in an engine that has run for a while. With few queries the KV cache dominates.
Then there are several such requests, together twice as large as the last-level cache, which are read in turn.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm.batch import Batch
from minillm.bench import kernels_cpu
from minillm.bench.kernel_cases import (
    COMPILED,
    PREFILL,
    VERIFY,
    Case,
    Implementation,
    Maker,
    Setting,
    chain,
    from_dispatch,
)
from minillm.cache.base import DequantizedRows
from minillm.cache.paged import PagedKVCache
from minillm.cache.paged_int4 import PagedInt4KVCache
from minillm.cache.paged_int8 import PagedInt8KVCache
from minillm.cache.paged_quantized import PagedQuantizedKVCache
from minillm.models.config import ModelConfig
from minillm.ops.cpu.attention import NO_TREE, scratch_size
from minillm.ops.cpu.team import Team, new_sync
from minillm.ops.paged_attention import AttentionPlan, make_plan

LAYOUTS = {"": PagedKVCache, "int8": PagedInt8KVCache, "int4": PagedInt4KVCache}
BLOCK_SIZE = 16
CHUNK = 4096
"""Number of slots filled with different random numbers; the rest of a pool repeats them."""


def attention_cases(s: Setting) -> list[Maker]:
    """Every KV cache format at every number of tokens and context. The pools of a format are built once."""
    made: list[Pools] = []  # holds at most one element, for the format used last
    makers: list[Maker] = []
    for kind in LAYOUTS:
        for tokens in s.tokens:
            makers += [
                Maker("paged_attention", partial(_attention, s, kind, tokens, past, made)) for past in s.contexts
            ]
        if VERIFY in s.tokens:
            makers += [Maker("tree_attention", partial(_tree, s, kind, past, made)) for past in s.contexts]
        makers += [Maker("store_kv", partial(_store, s, kind, tokens, made)) for tokens in s.tokens]
    return makers


class Pools:
    """One layer's key and value pools, large enough for every case of one format."""

    def __init__(self, s: Setting, kind: str) -> None:
        self.setting, self.kind, layout = s, kind, LAYOUTS[kind]
        c = s.config
        one = ModelConfig(8, 8, 8, 1, c.num_heads, c.num_kv_heads, c.head_dim, 8)
        self.row_bytes = layout.bytes_per_block(one, 1, s.dtype) // (2 * c.num_kv_heads)
        """Bytes of one key of one KV head, with its scales."""
        sizes = [self.blocks(context + n) * self.copies(n, context) for n in s.tokens for context in s.contexts]
        self.num_blocks = max(sizes)
        cache = layout(one, self.num_blocks, BLOCK_SIZE, s.dtype, torch.device(s.device))
        self.pools = [[pool[0] for pool in pools] if kind else [pools[0]] for pools in (cache.keys, cache.values)]
        for pools in self.pools:
            _fill(pools, cache, s.random(CHUNK, c.num_kv_heads, c.head_dim))
        shape = (self.num_blocks * BLOCK_SIZE, c.num_kv_heads, c.head_dim)
        self.keys, self.values = (
            DequantizedRows(pools, cache.decode, shape) if isinstance(cache, PagedQuantizedKVCache) else pools[0]
            for pools in self.pools
        )
        order = torch.Generator().manual_seed(0)
        self.order = torch.randperm(self.num_blocks, generator=order)
        self.arrays = [_arrays(pools) for pools in self.pools] if s.on_cpu else []

    def copies(self, tokens: int, context: int) -> int:
        """Number of requests that are together twice the last-level cache; 1 for prefill, which is compute-bound."""
        c = self.setting.config
        num_bytes = 2 * (context + tokens) * c.num_kv_heads * self.row_bytes
        return self.setting.copies(num_bytes) if tokens < PREFILL else 1

    def blocks(self, length: int) -> int:
        """Number of blocks for `length` tokens."""
        return -(-length // BLOCK_SIZE)

    def tables(self, length: int, copies: int) -> Tensor:
        """The block tables of `copies` requests that share no block: `[copies, blocks]`."""
        blocks = self.blocks(length)
        return self.order[: copies * blocks].view(copies, blocks)

    def batches(self, tokens: int, context: int, copies: int) -> list[Batch]:
        """One step for each request, with its attention plan, as layers after the first find it."""
        length, s = context + tokens, self.setting
        heads_per_kv = s.config.num_heads // s.config.num_kv_heads
        none, found = torch.empty(0), []
        for table in self.tables(length, copies).to(s.device):
            batch = Batch(none, none, none, table[None], [0, tokens], [length], BLOCK_SIZE)
            batch.plans[(AttentionPlan, None)] = make_plan(batch, None, heads_per_kv, s.dtype)
            found.append(batch)
        return found


def _fill(pools: list[Tensor], cache: Any, numbers: Tensor) -> None:
    """Fill the pools with encoded `numbers`, repeated as often as needed."""
    parts = cache.encode(numbers) if isinstance(cache, PagedQuantizedKVCache) else (numbers,)
    for pool, part in zip(pools, parts, strict=True):
        for first in range(0, len(pool), CHUNK):
            rows = pool[first : first + CHUNK]
            rows.copy_(part[: len(rows)])


def _arrays(pools: list[Tensor]) -> tuple[Any, ...]:
    """The pools as numpy arrays for `ops.cpu.kv_rows`: 16-bit floats are reinterpreted as integers."""
    found: list[Any] = []
    for pool in pools:
        bits = {torch.float16: torch.int16, torch.bfloat16: torch.uint16}.get(pool.dtype)
        found.append((pool if bits is None else pool.view(bits)).numpy().reshape(-1))
    return (*found, pools[1].shape[-1]) if len(found) == 3 else tuple(found)


def _case(
    s: Setting, name: str, kind: str, tokens: int, context: int, p: Pools, implementations: dict[str, Implementation]
) -> Case:
    c, length = s.config, context + tokens
    kv = 2 * length * c.num_kv_heads * p.row_bytes
    q = torch.empty(tokens, c.num_heads, c.head_dim, dtype=s.dtype, device=s.device)
    seen = tokens * context + tokens * (tokens + 1) // 2
    return Case(
        op=name,
        kind=kind,
        shape=s.shape,
        tokens=tokens,
        context=context,
        num_bytes=kv + 2 * q.nbytes,
        operations=4 * c.num_heads * c.head_dim * seen,
        copies=p.copies(tokens, context),
        implementations=implementations,
        touched=(*(pool[:length] for pools in p.pools for pool in pools), q, q),
    )


def _attention(s: Setting, kind: str, tokens: int, context: int, made: list[Pools]) -> Case:
    p = _pools(s, kind, made)
    q = s.random(tokens, s.config.num_heads, s.config.head_dim)
    batches = p.batches(tokens, context, p.copies(tokens, context))
    implementations = from_dispatch("paged_attention", s.device, lambda f, copy: f(q, p.keys, p.values, batches[copy]))
    if s.on_cpu:
        implementations[COMPILED] = _compiled(p, q, context, len(batches))
    return _case(s, "paged_attention", kind, tokens, context, p, implementations)


def _tree(s: Setting, kind: str, context: int, made: list[Pools]) -> Case:
    p, tree = _pools(s, kind, made), chain(VERIFY, s.device)
    q = s.random(VERIFY, s.config.num_heads, s.config.head_dim)
    batches = p.batches(VERIFY, context, p.copies(VERIFY, context))
    implementations = from_dispatch(
        "tree_attention", s.device, lambda f, copy: f(q, p.keys, p.values, batches[copy], tree=tree)
    )
    return _case(s, "tree_attention", kind, VERIFY, context, p, implementations)


def _compiled(p: Pools, q: Tensor, context: int, copies: int) -> Implementation:
    (tokens, heads, dim), num_kv = q.shape, p.setting.config.num_kv_heads
    length = context + tokens
    tables = p.tables(length, copies)
    requests = np.array([(0, tokens, length, copy * tables.shape[1]) for copy in range(copies)], np.int64)
    out, scratch = np.empty(q.numel(), np.float32), np.zeros(scratch_size(dim), np.float32)
    arguments = (
        Team(0, 1, new_sync()),
        q.numpy().reshape(-1), np.array([heads, num_kv, dim, BLOCK_SIZE], np.int64), requests,
        tables.reshape(-1).numpy(), NO_TREE, *p.arrays, out, scratch,
    )  # fmt: skip
    return Implementation(
        loop=lambda count, first, some: kernels_cpu.attend_loop(count, first, some, *arguments),
        result=lambda: torch.from_numpy(out).view(tokens, heads, dim),
    )


def _store(s: Setting, kind: str, tokens: int, made: list[Pools]) -> Case:
    """Reads k, v and the slots, writes the stored rows."""
    p, c = _pools(s, kind, made), s.config
    k, v = (s.random(tokens, c.num_kv_heads, c.head_dim) for _ in range(2))
    slots = torch.randperm(p.num_blocks * BLOCK_SIZE)[:tokens].to(s.device)

    def written() -> Tensor:
        """The stored keys, which are then reset to 0."""
        found = p.pools[0][0][slots].float()
        p.pools[0][0][slots] = 0
        return found

    implementations = from_dispatch("store_kv", s.device, lambda f, copy: f(k, v, *p.pools, slots), result=written)
    if s.on_cpu:
        arguments = (
            k.numpy().reshape(-1), v.numpy().reshape(-1), slots.numpy(), c.num_kv_heads, c.head_dim, *p.arrays
        )  # fmt: skip
        implementations[COMPILED] = Implementation(
            loop=lambda count, first, copies: kernels_cpu.store_loop(count, *arguments), result=written
        )
    stored = [pool[slots] for pools in p.pools for pool in pools]
    num_bytes = 2 * k.nbytes + 2 * tokens * c.num_kv_heads * p.row_bytes + slots.nbytes
    return Case("store_kv", kind, s.shape, tokens, None, num_bytes, None, 1, implementations, (k, v, slots, *stored))


def _pools(s: Setting, kind: str, made: list[Pools]) -> Pools:
    if not made or made[0].kind != kind:
        made.clear()  # free the previous pools first
        made.append(Pools(s, kind))
    return made[0]
