"""The contiguous layout: each request's keys and values in one tensor, and three ways of making it longer.

    preallocated   room for the whole context at once; attention reads a view of the rows in use
    concat         a new tensor at every append, the old rows copied: `torch.cat`, as transformers' dynamic cache does
    every          r more rows whenever it is full (BMC: Ramachandran et al. 2025, "Striking the Right Balance between
                   Compute and Copy"). Attention runs over the *whole* tensor under a mask, spare rows included, so its
                   shape changes once in r steps; the spare rows are where the drafts of speculation are verified

Over N tokens, `concat` copies N²/2 rows. `every` copies N²/(2r), makes N/r allocations, and computes N·r/2 scores in
vain. `preallocated` copies nothing and computes nothing in vain; it pays in memory, r = N rows for a request that may
end after ten. A paged cache wastes less than a block per request, copies nothing either, and gathers; its requests can
share what they have in common, which rows in one piece cannot.

Decoding minicoder on one core of an AMD EPYC, tokens per second of CPU time: 8 requests of 900 tokens, preallocated
322, every 17 rows 297, paged 292; 16 requests of 60 to 210 tokens, 949, 967 and 968, which is no difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.cache.base import Batch, KVCache
from minillm.cache.rows import (
    FEW_QUERIES,
    Rectangle,
    are_together,
    check_at_least,
    equally_many,
    mask_of,
    query_positions,
    rectangle,
    views,
)
from minillm.errors import ConfigError
from minillm.models.config import ModelConfig

GROWTHS = ("preallocated", "concat", "every")
LEAST_ROWS = 16
"""`best_rows` never says less, so that γ drafts and the token before them find room in the rows of one growth."""
COPY_COST, PADDING_COST, ALLOCATION_COST = 0.2, 0.8, 13.0
"""Microseconds of CPU time, measured once over all layers of minicoder in fp32 (a row is 8 KiB) on one core of an AMD
EPYC, tensors of 64 to 960 rows, the least of 150 runs each: what a growth costs per row copied, what a decode step
costs per row attended to, and what a growth costs besides. For 1024 tokens that makes r* = 17. minicoder-draft (a row
is 1 KiB) gave 0.027, 0.061 and 8.5: r* = 27. These tensors stay within the caches of the core. Where they do not, a
copy reads and writes the memory that attention only reads, and r should be larger."""


def best_rows(
    num_tokens: int,
    copy_cost: float = COPY_COST,
    padding_cost: float = PADDING_COST,
    allocation_cost: float = ALLOCATION_COST,
) -> int:
    """The r of `growth="every"` that costs least for a request of `num_tokens` tokens, by BMC's model.

    Total = N²/(2r) · c_copy + N·r/2 · c_gemv + N/r · c_a, so r* = √((N · c_copy + 2 c_a) / c_gemv): it grows as √N.
    The costs are times in any one unit: of copying a row, of attending to a row in vain, of one allocation.
    Never below `LEAST_ROWS` (BMC's condition r ≥ γ + 1), never above `num_tokens`. Nothing is timed here, so that the
    same options always give the same cache.
    """
    best = math.sqrt((num_tokens * copy_cost + 2 * allocation_cost) / padding_cost)
    return min(max(LEAST_ROWS, round(best)), num_tokens)


@dataclass(frozen=True)
class _Room:
    """Where the rows of a step are: per request, views of its tensor."""

    new: list[tuple[Tensor, ...]]
    """Where its new tokens go: per layer `[2, new tokens, num_kv_heads, head_dim]`."""
    seen: list[tuple[Tensor, ...]]
    """All that its queries attend to; see `views`."""


@dataclass(frozen=True)
class _Plan:
    """Who attends to what: the same in every layer with the same window."""

    few: list[Rectangle]
    long: list[tuple[int, Tensor | None]]
    """Requests with many new tokens, each with what its queries see, `[queries, rows]`; None: plain causal."""


class ContiguousKVCache(KVCache):
    """One tensor per request, allocated when the request begins and let go of when it ends.

    `growth`: see the module. `rows`: the r of "every"; None: `best_rows` of the engine's context. While a tensor grows
    the old one lives beside the new one; that passing copy is not counted in `bytes_per_block`.
    """

    whole_sequences = True
    supports_prefix_sharing = False

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        growth: str = "preallocated",
        rows: int | None = None,
    ) -> None:
        _check(growth, rows, block_size)
        self.growth = growth
        self.rows_per_growth = rows or best_rows(block_size)
        self.max_rows = block_size
        self.dtype, self.device = dtype, device
        self.windows = [config.window(layer) for layer in range(config.num_layers)]
        self.row_shape = (config.num_kv_heads, config.head_dim)
        self.heads_per_kv = config.num_heads // config.num_kv_heads
        self.buffers: dict[int, Tensor] = {}
        """By place."""
        self.num_rows_copied = 0
        """Rows that moved from an old tensor to a new one. A row here is one token's keys and values in all layers."""
        self.num_rows_padded = 0
        """Rows that were attended to in vain because the tensor ends there, summed over steps."""
        self.num_allocations = 0

    @classmethod
    def bytes_per_block(
        cls,
        config: ModelConfig,
        block_size: int,
        dtype: torch.dtype,
        *,
        growth: str = "preallocated",
        rows: int | None = None,
    ) -> int:
        """Keys and values of the whole context, which a request may come to need however its tensor grows."""
        _check(growth, rows, block_size)
        return 2 * config.num_layers * block_size * config.kv_size * dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors of the requests that are here now."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def free(self, block_ids: Sequence[int]) -> None:
        """See `KVCache.free`."""
        for place in block_ids:
            self.buffers.pop(place, None)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """See `KVCache.attend`."""
        room, plan = self._plan(batch, self.windows[layer])
        for target, source in zip(room.new, torch.stack((k, v)).split(batch.query_lens, dim=1), strict=True):
            target[layer].copy_(source)
        if len(plan.few) == 1 and not plan.long:
            return plan.few[0].attend(layer, q)
        out = torch.empty_like(q)
        for one in plan.few:
            out[one.tokens] = one.attend(layer, q)
        for r, visible in plan.long:
            tokens = slice(*batch.query_start[r : r + 2])
            out[tokens] = _prefill(q[tokens], *room.seen[r][2 * layer : 2 * layer + 2], visible)
        return out

    def _plan(self, batch: Batch, window: int | None) -> tuple[_Room, _Plan]:
        """The step as layers with this window see it; the first layer of all makes room for everyone."""
        if self not in batch.plans:
            batch.plans[self] = self._make_room(batch)
        room = batch.plans[self]
        if (self, window) not in batch.plans:
            few = [self._plan_few(batch, group, room, window) for group in equally_many(batch, FEW_QUERIES)]
            long = [r for r, count in enumerate(batch.query_lens) if count > FEW_QUERIES]
            visible = [_visible(batch, r, room.seen[r][0].shape[2], window) for r in long]
            batch.plans[self, window] = _Plan(few, list(zip(long, visible, strict=True)))
        return room, batch.plans[self, window]

    def _make_room(self, batch: Batch) -> _Room:
        """See that every request's tensor has rows for its new tokens."""
        room = _Room([], [])
        places = batch.block_tables[:, 0].tolist()
        for place, total, count in zip(places, batch.seq_lens, batch.query_lens, strict=True):
            past = total - count
            if not past:
                self.buffers.pop(place, None)  # whoever held the place is gone: let go before asking for more
            held = self.buffers[place] if past else None
            if held is None or self.growth == "concat" or held.shape[2] < total:
                held = self.buffers[place] = self._grow(held, past, total)
            seen = held.shape[2] if self.growth == "every" else total
            self.num_rows_padded += seen - total
            room.new.append(held[:, :, past:total].unbind(0))
            room.seen.append(views(held[:, :, :seen]))
        return room

    def _grow(self, held: Tensor | None, past: int, total: int) -> Tensor:
        """A tensor with room for `total` rows, the first `past` of them copied from `held`."""
        rows = self._rows_for(total)
        made = torch.empty((len(self.windows), 2, rows, *self.row_shape), dtype=self.dtype, device=self.device)
        if held is not None:
            made[:, :, :past] = held[:, :, :past]
            self.num_rows_copied += past
        if self.growth == "every":
            made[:, :, total:] = 0  # hidden from the softmax, but 0 · NaN would still be NaN
        self.num_allocations += 1
        return made

    def _rows_for(self, total: int) -> int:
        if self.growth == "preallocated":
            return self.max_rows
        if self.growth == "concat":
            return total
        return min(-(-total // self.rows_per_growth) * self.rows_per_growth, self.max_rows)

    def _plan_few(self, batch: Batch, requests: list[int], room: _Room, window: int | None) -> Rectangle:
        seen = [room.seen[r] for r in requests]
        rows = [each[0].shape[2] for each in seen]
        several = batch.query_lens[requests[0]] > 1
        spare = any(own > batch.seq_lens[r] for own, r in zip(rows, requests, strict=True))
        ragged = are_together(batch, requests) and len(set(rows)) > 1
        mask = None
        if several or spare or ragged or window is not None:
            keys = torch.arange(max(rows), device=self.device)
            hidden = _hidden(query_positions(batch, requests).unsqueeze(-1), keys, window)
            mask = mask_of(hidden, self.heads_per_kv, self.dtype)
        return rectangle(batch, requests, seen, mask)


def _check(growth: str, rows: int | None, block_size: int) -> None:
    if growth not in GROWTHS:
        raise ConfigError(f"kv_cache_config: growth={growth!r} must be one of {', '.join(GROWTHS)}")
    if rows is None:
        return
    if growth != "every":
        raise ConfigError(
            f"kv_cache_config: rows={rows!r} means nothing to growth={growth!r}; leave it out or use growth='every'"
        )
    check_at_least("rows", rows, 1)
    if rows > block_size:
        raise ConfigError(
            f"kv_cache_config: rows={rows} is over the {block_size} rows that a request can fill; lower it, or use "
            "growth='preallocated'"
        )


def _hidden(position: Tensor, key: Tensor, window: int | None) -> Tensor:
    """True where `key` lies after `position`, or before its window."""
    hidden = key > position
    return hidden if window is None else hidden | (key <= position - window)


def _visible(batch: Batch, request: int, rows: int, window: int | None) -> Tensor | None:
    """What each query of a prefill sees of its request's rows, `[queries, rows]`; None: plain causal."""
    count, total, device = batch.query_lens[request], batch.seq_lens[request], batch.block_tables.device
    if count == rows and window is None:
        return None
    positions = torch.arange(total - count, total, device=device).unsqueeze(1)
    return ~_hidden(positions, torch.arange(rows, device=device), window)


def _prefill(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> Tensor:
    """Many queries of one request: `q` `[queries, num_heads, head_dim]`, `keys`, `values` as in `product`."""
    causal = visible is None
    rows = q.transpose(0, 1).unsqueeze(0)
    out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=visible, is_causal=causal, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)
