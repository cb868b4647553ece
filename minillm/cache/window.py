"""The sliding window: each request keeps only its last tokens, in a ring buffer (Beltagy et al. 2020, section 3.1).

A query sees itself and the `window - 1` tokens before it, so older rows can be overwritten: token p is stored in row
p mod (window + spare). The `spare` rows are for speculation. After a round that wrote γ drafts, the ring must still
hold the whole window of the last *accepted* token, so it keeps `spare` tokens more than the window:

    window 4, spare 2, tokens 0 … 9 written:      row      0  1  2  3  4  5
                                                  token    6  7  8  9  4  5
    tokens 8 and 9 rejected: the next token is 8, its window is 5 6 7 8, and the ring still holds 5

Memory and time per token do not grow with the length of the text. The tokens before the window are lost: once a text is
longer than the window, the output differs from that of a full cache, and models trained without a window degrade
sharply (Xiao et al. 2024, figure 1); see `minillm.cache.sinks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from minillm.batch import Batch
from minillm.cache.base import SequenceKVCache
from minillm.cache.layout_options import check_at_least
from minillm.cache.sequence_rows import (
    QueryGroup,
    group_by_query_len,
    layer_views,
    packed_attention,
    query_group,
    query_positions,
)
from minillm.errors import MinillmError
from minillm.models.config import ModelConfig
from minillm.ops.paged_attention import MAX_DECODE_QUERIES, additive_mask, pack_queries, unpack_outputs

SLICE = 128
"""Queries per attention call of a long prefill. A call reads only the keys in its queries' windows, so the cost of a
query grows with the window, not with the prompt."""


@dataclass
class Ring:
    """One request's rows: the first `num_sinks` tokens, which stay, then a ring buffer of the last tokens."""

    rows: Tensor
    """`[num_layers, 2, num_sinks + ring, num_kv_heads, head_dim]`."""
    num_written: int = 0
    """One more than the largest position ever written."""


@dataclass(frozen=True)
class RingSpan:
    """Tokens that are consecutive in their request and in its ring."""

    position: int
    """Of the first token."""
    row: int
    """Of the first token."""
    count: int

    def rows(self, ring: Tensor) -> Tensor:
        """The rows of these tokens. `ring`: `[2, rows, num_kv_heads, head_dim]`, or with layers before that."""
        return ring[..., self.row : self.row + self.count, :, :]

    def tokens(self, past: int) -> slice:
        """The indices of these tokens among the new tokens, the first of which has position `past`."""
        return slice(self.position - past, self.position - past + self.count)


@dataclass(frozen=True)
class PrefillChunk:
    """Some queries of a long prefill and the keys they attend to."""

    tokens: slice
    """The queries: indices in the batch."""
    sinks: int
    """Number of sinks. They are the first of the request's available keys."""
    keys: slice
    """The other keys: indices among the request's available keys (`PrefillPlan.old`, then the new tokens)."""
    mask: Tensor
    """See `additive_mask`."""


@dataclass(frozen=True)
class PrefillPlan:
    """The attention of one request with many new tokens. They attend before they are stored, because storing the last
    ones may overwrite keys that the first ones need."""

    old: list[RingSpan]
    """The cached tokens that are needed, in order: the sinks, then those in the first query's window."""
    slices: list[PrefillChunk]


@dataclass(frozen=True)
class _StepRows:
    """The rows of one step, per request."""

    rings: list[Ring]
    stored: list[list[tuple[tuple[Tensor, ...], slice]]]
    """Per run: its rows, for each layer `[2, tokens, num_kv_heads, head_dim]`, and which new tokens they store."""


@dataclass(frozen=True)
class _Plan:
    """The attention calls of a step, shared by all layers with the same window."""

    decodes: list[QueryGroup]
    prefills: dict[int, PrefillPlan]
    """Key: index of the request in the batch."""


class WindowKVCache(SequenceKVCache):
    """The last `window` tokens of each request, and `spare` more so that tokens can be rolled back.

    A layer with its own sliding window uses the smaller of the two.
    """

    keeps_every_token = False
    num_sinks = 0
    """Number of first tokens that every query sees in addition to its window."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        window: int = 256,
        spare: int = 16,
    ) -> None:
        check_at_least("window", window, 1)
        check_at_least("spare", spare, 0)
        self.num_rows = min(self.num_sinks + window + spare, block_size)
        self.window, self.spare = window, spare
        self.windows = [min(window, config.window(layer) or window) for layer in range(config.num_layers)]
        self.ring = max(self.num_rows - self.num_sinks, 1)
        self.row_shape = (config.num_kv_heads, config.head_dim)
        self.heads_per_kv = config.num_heads // config.num_kv_heads
        self.dtype, self.device = dtype, device
        self.rings: dict[int, Ring] = {}
        """Key: block id. A block holds one request."""

    @property
    def max_block_bytes(self) -> int:
        """Bytes of the keys and values of sinks and ring, or of the whole context if that is shorter."""
        return 2 * len(self.windows) * self.num_rows * prod(self.row_shape) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the rings of the current requests."""
        return sum(ring.rows.nbytes for ring in self.rings.values())

    @property
    def max_rollback(self) -> int:
        """`spare`, counted from the last token ever written: two rollbacks in a row add up."""
        return self.spare

    def free(self, block_ids: Sequence[int]) -> None:
        """See `KVCache.free`."""
        for block_id in block_ids:
            self.rings.pop(block_id, None)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """See `KVCache.attend`. Raises `MinillmError` if a request rolls back more tokens than its ring allows."""
        step_rows, plan = self._plan(batch, self.windows[layer])
        sink_delta = self.sink_query_delta(layer, q, batch)
        out = torch.empty_like(q)
        for r, new in enumerate(torch.stack((k, v)).split(batch.query_lens, dim=1)):
            ring = step_rows.rings[r].rows[layer]
            if r in plan.prefills:
                # Before the new tokens overwrite old ones.
                self._prefill(ring, q, sink_delta, new, plan.prefills[r], out)
            for rows, tokens in step_rows.stored[r]:
                rows[layer].copy_(new[:, tokens])
        for one in plan.decodes:
            out[one.tokens] = one.attend(layer, q, sink_delta, self.num_sinks)
        return out

    def sink_query_delta(self, layer: int, q: Tensor, batch: Batch) -> Tensor | None:
        """What is added to `q` for the scores of the first `num_sinks` tokens, shaped like `q`; None: nothing."""
        return None

    def _prefill(
        self, ring: Tensor, q: Tensor, sink_delta: Tensor | None, new: Tensor, prefill: PrefillPlan, out: Tensor
    ) -> None:
        """Attend over old and new rows, and write the outputs to `out`.

        `ring`: the request's rows of one layer, `[2, rows, …]`; `new`: the rows of its new tokens.
        """
        available = torch.cat([*(run.rows(ring) for run in prefill.old), new], dim=1)
        keys, values = layer_views(available.unsqueeze(0))
        for one in prefill.slices:
            seen_k, seen_v = (torch.cat((x[:, :, : one.sinks], x[:, :, one.keys]), dim=2) for x in (keys, values))
            queries, own = (
                None if x is None else pack_queries(x[one.tokens], 1, seen_k.shape[1]) for x in (q, sink_delta)
            )
            result = packed_attention(queries, seen_k, seen_v, one.mask, own, one.sinks)
            out[one.tokens] = unpack_outputs(result, one.tokens.stop - one.tokens.start)

    def _plan(self, batch: Batch, window: int) -> tuple[_StepRows, _Plan]:
        """The rows and the attention calls of this step. The first layer allocates the rows of all layers."""
        step_rows = batch.once_per_step(_StepRows, lambda: self._allocate(batch), self)

        def calls() -> _Plan:
            # With more than spare + 1 new tokens, the last would overwrite keys in the window of the first.
            max_decode = min(MAX_DECODE_QUERIES, self.spare + 1)
            decodes = [
                self._plan_decodes(batch, group, step_rows, window) for group in group_by_query_len(batch, max_decode)
            ]
            prefills = [r for r, count in enumerate(batch.query_lens) if count > max_decode]
            return _Plan(decodes, {r: self._plan_prefill(batch, r, window) for r in prefills})

        return step_rows, batch.once_per_step(_Plan, calls, self, window)

    def _allocate(self, batch: Batch) -> _StepRows:
        """Return the rows of this step. A new request gets a new ring, even if its block id already has one."""
        step_rows = _StepRows([], [])
        block_ids = batch.block_tables[:, 0].tolist()
        for block_id, total, count in zip(block_ids, batch.seq_lens, batch.query_lens, strict=True):
            past = total - count
            if not past:
                self.rings.pop(block_id, None)
                shape = (len(self.windows), 2, self.num_rows, *self.row_shape)
                self.rings[block_id] = Ring(torch.empty(shape, dtype=self.dtype, device=self.device))
            ring = self.rings[block_id]
            self._check_reach(ring, past)
            ring.num_written = max(ring.num_written, total)
            step_rows.rings.append(ring)
            stored = [*self._sink_runs(past, total), *self._ring_runs(max(past, total - self.ring), total)]
            step_rows.stored.append([(run.rows(ring.rows).unbind(0), run.tokens(past)) for run in stored])
        return step_rows

    def _check_reach(self, ring: Ring, past: int) -> None:
        """Raise `MinillmError` unless the ring still holds the whole window of token `past`, which comes next."""
        oldest_held = ring.num_written - self.ring
        oldest_seen = max(self.num_sinks, past - self.window + 1)
        if oldest_held > oldest_seen:
            raise MinillmError(
                f"a request rolled back from {ring.num_written} tokens to {past}, by {ring.num_written - past} tokens, "
                f"but its ring allows spare={self.spare}; raise spare, or start the request again"
            )

    def _sink_runs(self, start: int, end: int) -> Iterator[RingSpan]:
        """Yield the run of sinks among the tokens `start … end - 1`, if there is one."""
        if start < min(end, self.num_sinks):
            yield RingSpan(start, start, min(end, self.num_sinks) - start)

    def _ring_runs(self, start: int, end: int) -> Iterator[RingSpan]:
        """Yield the runs of the other tokens: a run ends where the ring wraps around."""
        position = max(start, self.num_sinks)
        while position < end:
            row = self.num_sinks + (position - self.num_sinks) % self.ring
            count = min(end - position, self.num_rows - row)
            yield RingSpan(position, row, count)
            position += count

    def _plan_decodes(self, batch: Batch, requests: list[int], step_rows: _StepRows, window: int) -> QueryGroup:
        counts = [min(self.num_rows, batch.seq_lens[r]) for r in requests]
        last = torch.tensor([[batch.seq_lens[r] - 1] for r in requests], device=self.device)
        keys = self._tokens_in_rows(last, max(counts))
        hidden = self._hidden(query_positions(batch, requests).unsqueeze(-1), keys.unsqueeze(1), window)
        rows = [layer_views(step_rows.rings[r].rows[:, :, :count]) for r, count in zip(requests, counts, strict=True)]
        return query_group(batch, requests, rows, additive_mask(hidden, self.heads_per_kv, self.dtype))

    def _plan_prefill(self, batch: Batch, request: int, window: int) -> PrefillPlan:
        end, first = batch.seq_lens[request], batch.query_start[request]
        past = end - batch.query_lens[request]
        old = [*self._sink_runs(0, past), *self._ring_runs(max(0, past - self.window + 1), past)]
        available = [p for run in old for p in range(run.position, run.position + run.count)]
        available = torch.tensor([*available, *range(past, end)], device=self.device)
        sinks = min(self.num_sinks, end)
        slices = []
        for start in range(past, end, SLICE):
            stop = min(start + SLICE, end)
            # Counted from the end, because positions have a gap after the sinks.
            low, high = (len(available) - (end - p) for p in (max(sinks, start - window + 1), stop))
            seen = torch.cat((available[:sinks], available[low:high]))
            queries = torch.arange(start, stop, device=self.device).unsqueeze(1)
            mask = additive_mask(self._hidden(queries, seen, window).unsqueeze(0), self.heads_per_kv, self.dtype)
            tokens = slice(first + start - past, first + stop - past)
            slices.append(PrefillChunk(tokens, sinks, slice(low, high), mask))
        return PrefillPlan(old, slices)

    def _tokens_in_rows(self, last: Tensor, num_rows: int) -> Tensor:
        """The position of the token in each row after token `last` (`[requests, 1]`) is written:
        `[requests, num_rows]`.

        For a row that holds a rejected draft, this is the token that the draft has overwritten. That is harmless:
        `_check_reach` ensures that no query's window contains it. Where it would be a sink, the result is `last + 1`,
        which no query sees.
        """
        row = torch.arange(num_rows, device=last.device)
        in_ring = last - (last - row) % self.ring
        in_ring = torch.where(in_ring < self.num_sinks, last + 1, in_ring)
        return torch.where(row < self.num_sinks, row, in_ring)

    def _hidden(self, position: Tensor, key: Tensor, window: int) -> Tensor:
        """True where token `key` is after the query's `position`, or before its window and not a sink."""
        return (key > position) | ((key <= position - window) & (key >= self.num_sinks))
