"""The contiguous layout: each request's keys and values in one tensor, which can grow in three ways.

    preallocated   rows for the whole context are allocated at once; attention reads a view of the rows in use
    concat         each append copies the old rows to a new tensor: `torch.cat`, like transformers' dynamic cache
    every          a full tensor grows by r rows (BMC: Ramachandran et al. 2025, "Striking the Right Balance between
                   Compute and Copy"). Attention reads the *whole* tensor and masks the unused rows (padding), so its
                   shape changes once in r steps. Drafts are verified in the unused rows

Over N tokens, `concat` copies N²/2 rows. `every` copies N²/(2r) rows, makes N/r allocations, and computes N·r/2 scores
of padding. `preallocated` copies no rows and computes no padding, but it costs memory: r = N rows even for a request
that ends after ten tokens. A paged cache wastes less than a block per request and copies no rows either, but it gathers
them; its requests can share a prefix, which contiguous rows cannot.

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

from minillm.batch import Batch
from minillm.cache.base import SequenceKVCache
from minillm.cache.layout_options import check_at_least
from minillm.cache.sequence_rows import (
    QueryGroup,
    group_by_query_len,
    is_padded_together,
    layer_views,
    query_group,
    query_positions,
)
from minillm.errors import ConfigError
from minillm.models.config import ModelConfig
from minillm.ops.paged_attention import MAX_DECODE_QUERIES, additive_mask

GROWTHS = ("preallocated", "concat", "every")
MIN_ROWS_PER_GROWTH = 16
"""The smallest r of `best_rows`, so that one growth has rows for γ drafts and the token before them."""
COPY_COST, PADDING_COST, ALLOCATION_COST = 0.2, 0.8, 13.0
"""Microseconds of CPU time: per row that a growth copies, per row that a decode step attends to, and per growth on top.
Measured over all layers of minicoder in fp32 (a row is 8 KiB) on one core of an AMD EPYC, with tensors of 64 to 960
rows, the minimum of 150 runs each. For 1024 tokens, r* = 17. minicoder-draft (a row is 1 KiB) gave 0.027, 0.061 and
8.5, so r* = 27. These tensors fit into the core's caches. For larger ones, a copy reads and writes memory where
attention only reads it, so r should be larger."""


def best_rows(num_tokens: int) -> int:
    """The r of `growth="every"` with the least total cost for a request of N = `num_tokens` tokens, by BMC's model.

    Total = N²/(2r) · c_copy + N·r/2 · c_gemv + N/r · c_a, so r* = √((N · c_copy + 2 c_a) / c_gemv): it grows as √N.
    c_copy is the time to copy a row, c_gemv to attend to a row of padding, c_a to allocate.
    The result is at least `MIN_ROWS_PER_GROWTH` (BMC's condition r ≥ γ + 1) and at most `num_tokens`. The costs are
    constants, not timed here, so that the same options always give the same cache.
    """
    best = math.sqrt((num_tokens * COPY_COST + 2 * ALLOCATION_COST) / PADDING_COST)
    return min(max(MIN_ROWS_PER_GROWTH, round(best)), num_tokens)


@dataclass(frozen=True)
class _StepRows:
    """Views of the requests' tensors in one step, request by request."""

    new: list[tuple[Tensor, ...]]
    """The rows to write the new tokens to: `[2, new tokens, num_kv_heads, head_dim]` for each layer."""
    seen: list[tuple[Tensor, ...]]
    """The rows that the queries attend to; see `layer_views`."""


@dataclass(frozen=True)
class _Plan:
    """The attention calls of a step, shared by all layers with the same window."""

    decodes: list[QueryGroup]
    prefills: list[tuple[int, Tensor | None]]
    """Each request with more new tokens, and its mask `[queries, rows]`, True: visible; None: plain causal."""


class ContiguousKVCache(SequenceKVCache):
    """One tensor per request, allocated when the request begins and freed when it ends.

    `growth`: see the module. `rows`: the r of "every"; None: `best_rows` of the engine's context. While a tensor grows,
    the old and the new one exist together; `bytes_per_block` does not count this temporary copy.
    """

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
        """Block id → `[num_layers, 2, rows, num_kv_heads, head_dim]`. A block holds one request."""

    @property
    def max_block_bytes(self) -> int:
        """Bytes of the keys and values of the whole context, which a request may need whatever its `growth`."""
        return 2 * len(self.windows) * self.max_rows * math.prod(self.row_shape) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors of the current requests."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def free(self, block_ids: Sequence[int]) -> None:
        """See `KVCache.free`."""
        for block_id in block_ids:
            self.buffers.pop(block_id, None)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """See `KVCache.attend`."""
        step_rows, plan = self._plan(batch, self.windows[layer])
        for target, source in zip(step_rows.new, torch.stack((k, v)).split(batch.query_lens, dim=1), strict=True):
            target[layer].copy_(source)
        if len(plan.decodes) == 1 and not plan.prefills:
            return plan.decodes[0].attend(layer, q)
        out = torch.empty_like(q)
        for one in plan.decodes:
            out[one.tokens] = one.attend(layer, q)
        for r, visible in plan.prefills:
            tokens = slice(*batch.query_start[r : r + 2])
            out[tokens] = _prefill(q[tokens], *step_rows.seen[r][2 * layer : 2 * layer + 2], visible)
        return out

    def _plan(self, batch: Batch, window: int | None) -> tuple[_StepRows, _Plan]:
        """The rows and the attention calls of this step. The first layer allocates the rows of all layers."""
        step_rows = batch.once_per_step(_StepRows, lambda: self._allocate(batch), self)

        def calls() -> _Plan:
            groups = group_by_query_len(batch, MAX_DECODE_QUERIES)
            decodes = [self._plan_decodes(batch, group, step_rows, window) for group in groups]
            prefills = [r for r, count in enumerate(batch.query_lens) if count > MAX_DECODE_QUERIES]
            visible = [_visible(batch, r, step_rows.seen[r][0].shape[2], window) for r in prefills]
            return _Plan(decodes, list(zip(prefills, visible, strict=True)))

        return step_rows, batch.once_per_step(_Plan, calls, self, window)

    def _allocate(self, batch: Batch) -> _StepRows:
        """Grow the tensors that have no rows for their request's new tokens, and return the rows of this step."""
        step_rows = _StepRows([], [])
        block_ids = batch.block_tables[:, 0].tolist()
        for block_id, total, count in zip(block_ids, batch.seq_lens, batch.query_lens, strict=True):
            past = total - count
            if not past:
                self.buffers.pop(block_id, None)  # of a previous request: free it before allocating
            buffer = self.buffers[block_id] if past else None
            if buffer is None or self.growth == "concat" or buffer.shape[2] < total:
                buffer = self.buffers[block_id] = self._grow(buffer, past, total)
            seen = buffer.shape[2] if self.growth == "every" else total
            step_rows.new.append(buffer[:, :, past:total].unbind(0))
            step_rows.seen.append(layer_views(buffer[:, :, :seen]))
        return step_rows

    def _grow(self, old: Tensor | None, past: int, total: int) -> Tensor:
        """Return a tensor with at least `total` rows, the first `past` of them copied from `old`."""
        rows = self._rows_for(total)
        grown = torch.empty((len(self.windows), 2, rows, *self.row_shape), dtype=self.dtype, device=self.device)
        if old is not None:
            grown[:, :, :past] = old[:, :, :past]
        if self.growth == "every":
            # Hidden rows must be finite: a weight of 0 times NaN would be NaN. A step that is interrupted may leave the
            # rows of its new tokens unwritten, so these too.
            grown[:, :, past:] = 0
        return grown

    def _rows_for(self, total: int) -> int:
        if self.growth == "preallocated":
            return self.max_rows
        if self.growth == "concat":
            return total
        return min(-(-total // self.rows_per_growth) * self.rows_per_growth, self.max_rows)

    def _plan_decodes(self, batch: Batch, requests: list[int], step_rows: _StepRows, window: int | None) -> QueryGroup:
        seen = [step_rows.seen[r] for r in requests]
        rows = [each[0].shape[2] for each in seen]
        several = batch.query_lens[requests[0]] > 1
        spare = any(own > batch.seq_lens[r] for own, r in zip(rows, requests, strict=True))
        ragged = is_padded_together(batch, requests) and len(set(rows)) > 1
        mask = None
        if several or spare or ragged or window is not None:
            keys = torch.arange(max(rows), device=self.device)
            hidden = _hidden(query_positions(batch, requests).unsqueeze(-1), keys, window)
            mask = additive_mask(hidden, self.heads_per_kv, self.dtype)
        return query_group(batch, requests, seen, mask)


def _check(growth: str, rows: int | None, block_size: int) -> None:
    if growth not in GROWTHS:
        raise ConfigError(f"kv_cache_config: growth={growth!r} must be one of {', '.join(GROWTHS)}")
    if rows is None:
        return
    if growth != "every":
        raise ConfigError(
            f"kv_cache_config: rows={rows!r} has no effect with growth={growth!r}; leave it out or use growth='every'"
        )
    check_at_least("rows", rows, 1)
    if rows > block_size:
        raise ConfigError(
            f"kv_cache_config: rows={rows} is over the {block_size} rows that a request can fill; lower it, or use "
            "growth='preallocated'"
        )


def _hidden(position: Tensor, key: Tensor, window: int | None) -> Tensor:
    """True where position `key` is after the query's `position`, or before its window."""
    hidden = key > position
    return hidden if window is None else hidden | (key <= position - window)


def _visible(batch: Batch, request: int, rows: int, window: int | None) -> Tensor | None:
    """The mask of a prefill, `[queries, rows]`, True where a query sees a row; None: plain causal."""
    count, total, device = batch.query_lens[request], batch.seq_lens[request], batch.block_tables.device
    if count == rows and window is None:
        return None
    positions = torch.arange(total - count, total, device=device).unsqueeze(1)
    return ~_hidden(positions, torch.arange(rows, device=device), window)


def _prefill(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> Tensor:
    """Attention of one request's prefill. `q`: `[queries, num_heads, head_dim]`; `keys`, `values`: see
    `packed_attention`."""
    causal = visible is None
    rows = q.transpose(0, 1).unsqueeze(0)
    out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=visible, is_causal=causal, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)
