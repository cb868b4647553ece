"""The sliding window: each request keeps its last tokens only, in a ring of rows (Beltagy et al. 2020, section 3.1).

A query sees itself and the `window - 1` tokens before it, so older rows can be overwritten: token p lies in row
p mod (window + spare). The `spare` rows are what speculation needs. After a round that wrote γ drafts the ring must
still hold the whole window of the last *accepted* token, so it keeps `spare` tokens more than the window:

    window 4, spare 2, tokens 0 … 9 written:      row      0  1  2  3  4  5
                                                  token    6  7  8  9  4  5
    tokens 8 and 9 rejected: token 8 comes next, its window is 5 6 7 8, and 5 is still there

Memory and time per token no longer grow with the text. What is lost is everything before the window: this layout gives
other text than a full cache as soon as a text is longer than its window, and models trained without a window degrade
sharply then (Xiao et al. 2024, figure 1); see `minillm.cache.sinks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.cache.base import Batch, KVCache
from minillm.cache.rows import (
    FEW_QUERIES,
    Rectangle,
    check_at_least,
    new_tokens,
    product,
    query_positions,
    rectangles,
    side_by_side,
)
from minillm.errors import MinillmError
from minillm.models.config import ModelConfig

SLICE = 128
"""A long prefill attends that many queries at a time, so that its cost grows with the window, not with its length."""


@dataclass
class Ring:
    """One request's rows: the first `num_sinks` tokens for good, then a ring of the last ones."""

    rows: Tensor
    """`[num_layers, 2, num_sinks + ring, num_kv_heads, head_dim]`."""
    written: int = 0
    """One more than the last position that was ever written."""


@dataclass(frozen=True)
class Slice:
    """Some queries of a long prefill and the keys they look at."""

    tokens: slice
    """Of the step."""
    sinks: int
    """The first so many of the request's keys at hand, …"""
    keys: slice
    """… and these."""
    hidden: Tensor
    """`[1, 1, 1, queries, keys]`."""


@dataclass(frozen=True)
class Prefill:
    """One request with more new tokens than its ring has room for beside its window."""

    request: int
    old: Tensor
    """Rows of the tokens before, in order: the sinks, then what the first query's window reaches back to."""
    kept: Tensor
    """Which of the new tokens are stored, counted from the first."""
    rows: Tensor
    """Where."""
    slices: list[Slice]


@dataclass(frozen=True)
class _Step:
    """What is the same in every layer with the same window."""

    rings: list[Ring]
    rows: list[int]
    """How many rows of its ring each request has reached so far."""
    few: list[Rectangle]
    stores: list[tuple[int, Tensor]]
    """For the requests in `few`: which rows their new tokens go to."""
    long: list[Prefill]


class WindowKVCache(KVCache):
    """The last `window` tokens of each request, and `spare` more that can be taken back.

    In a layer with a sliding window of its own, the tighter of the two counts.
    """

    whole_sequences = True
    supports_prefix_sharing = False
    num_sinks = 0
    """First tokens that every query sees besides."""

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
        self.num_rows = _num_rows(self.num_sinks, window, spare, block_size)
        self.window, self.spare = window, spare
        self.windows = [min(window, config.window(layer) or window) for layer in range(config.num_layers)]
        self.row_shape = (config.num_kv_heads, config.head_dim)
        self.dtype, self.device = dtype, device
        self.rings: dict[int, Ring] = {}
        """By place."""

    @classmethod
    def bytes_per_block(
        cls, config: ModelConfig, block_size: int, dtype: torch.dtype, *, window: int = 256, spare: int = 16
    ) -> int:
        """Keys and values of the ring, or of the whole context where that is shorter."""
        return ring_bytes(config, block_size, dtype, 0, window, spare)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rings of the requests that are here now."""
        return sum(ring.rows.nbytes for ring in self.rings.values())

    @property
    def max_rollback(self) -> int:
        """`spare`. Counted from the last token ever written: taking back twice in a row adds up."""
        return self.spare

    def free(self, block_ids: Sequence[int]) -> None:
        """See `KVCache.free`."""
        for place in block_ids:
            self.rings.pop(place, None)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """See `KVCache.attend`. Raises `MinillmError` if a request goes back further than its ring reaches."""
        step = self._step(batch, self.windows[layer])
        q_sinks = self.sink_queries(layer, q, batch)
        new = list(new_tokens(k, v, batch))
        for r, rows in step.stores:
            for part in (0, 1):
                step.rings[r].rows[layer, part].index_copy_(0, rows, new[r][part])
        out = torch.empty_like(q)
        for one in step.few:
            keys, values = (
                side_by_side([step.rings[r].rows[layer, part, : step.rows[r]] for r in one.requests]) for part in (0, 1)
            )
            sinks = None if q_sinks is None else q_sinks[one.tokens]
            out[one.tokens] = product(q[one.tokens], keys, values, one.hidden, sinks, self.num_sinks)
        for prefill in step.long:
            self._prefill(step.rings[prefill.request].rows[layer], q, q_sinks, *new[prefill.request], prefill, out)
        return out

    def sink_queries(self, layer: int, q: Tensor, batch: Batch) -> Tensor | None:
        """What the rows of the first tokens are scored with; None: `q`."""
        return None

    def _prefill(
        self,
        held: Tensor,
        q: Tensor,
        q_sinks: Tensor | None,
        k: Tensor,
        v: Tensor,
        prefill: Prefill,
        out: Tensor,
    ) -> None:
        """Attend over old and new rows together, then store the new ones that stay. `held`: `[2, rows, …]`."""
        keys, values = (torch.cat((held[part][prefill.old], new)) for part, new in ((0, k), (1, v)))
        for part, new in ((0, k), (1, v)):
            held[part].index_copy_(0, prefill.rows, new[prefill.kept])
        for one in prefill.slices:
            seen_k, seen_v = (torch.cat((x[: one.sinks], x[one.keys])).unsqueeze(0) for x in (keys, values))
            sinks = None if q_sinks is None else q_sinks[one.tokens]
            out[one.tokens] = product(q[one.tokens], seen_k, seen_v, one.hidden, sinks, one.sinks)

    def _step(self, batch: Batch, window: int) -> _Step:
        """The step as layers with this window see it; the first layer of all checks and makes room."""
        key = (self, window)
        if key not in batch.plans:
            if (self, "rings") not in batch.plans:
                batch.plans[self, "rings"] = self._make_room(batch)
            batch.plans[key] = self._plan(batch, window, batch.plans[self, "rings"])
        return batch.plans[key]

    def _make_room(self, batch: Batch) -> list[Ring]:
        """Each request's ring. A request that begins gets a new one, whoever held its place before."""
        rings = []
        for place, total, count in zip(
            batch.block_tables[:, 0].tolist(), batch.seq_lens, batch.query_lens, strict=True
        ):
            past = total - count
            if not past:
                self.rings.pop(place, None)
                # Zeros, because rows not yet written are hidden from the softmax, but 0 · NaN would still be NaN.
                shape = (len(self.windows), 2, self.num_rows, *self.row_shape)
                self.rings[place] = Ring(torch.zeros(shape, dtype=self.dtype, device=self.device))
            ring = self.rings[place]
            self._check_reach(ring, past)
            ring.written = max(ring.written, total)
            rings.append(ring)
        return rings

    def _check_reach(self, ring: Ring, past: int) -> None:
        """Whether token `past` can come next: the rows of its whole window are still there."""
        oldest_held = ring.written - (self.num_rows - self.num_sinks)
        oldest_seen = max(self.num_sinks, past - self.window + 1)
        if oldest_held > oldest_seen:
            raise MinillmError(
                f"a request went back from {ring.written} tokens to {past}, which is {ring.written - past} tokens; its "
                f"ring has room to take back spare={self.spare}. Raise spare, or start the request again"
            )

    def _plan(self, batch: Batch, window: int, rings: list[Ring]) -> _Step:
        # Of more than spare + 1 new tokens, the last would overwrite what the first has to see.
        most = min(FEW_QUERIES, self.spare + 1)
        few = [r for r, count in enumerate(batch.query_lens) if count <= most]
        long = [self._plan_prefill(batch, r, window) for r, count in enumerate(batch.query_lens) if count > most]
        rows = [min(self.num_rows, total) for total in batch.seq_lens]
        if not few:
            return _Step(rings, rows, [], [], long)
        last = torch.tensor([[batch.seq_lens[r] - 1] for r in few], device=batch.block_tables.device)
        keys = self._tokens_in_rows(last, max(rows[r] for r in few))
        hidden = self._hidden(query_positions(batch, few).unsqueeze(-1), keys.unsqueeze(1), window)
        stores = [(r, self._rows_of(batch.positions[slice(*batch.query_start[r : r + 2])])) for r in few]
        return _Step(rings, rows, rectangles(batch, few, hidden, [rows[r] for r in few]), stores, long)

    def _plan_prefill(self, batch: Batch, request: int, window: int) -> Prefill:
        device, end = batch.block_tables.device, batch.seq_lens[request]
        past = end - batch.query_lens[request]
        oldest = min(past, max(self.num_sinks, past - self.window + 1))
        sinks = torch.arange(min(self.num_sinks, past), device=device)
        old = torch.cat((sinks, torch.arange(oldest, past, device=device)))
        new = torch.arange(past, end, device=device)
        kept = new[(new < self.num_sinks) | (new >= end - (self.num_rows - self.num_sinks))]
        at_hand = torch.cat((old, new))
        slices = []
        for start in range(past, end, SLICE):
            stop = min(start + SLICE, end)
            sinks = min(self.num_sinks, end)
            # Where the keys of this slice lie among those at hand, which have a gap behind the sinks.
            low = len(at_hand) - (end - max(sinks, start - window + 1))
            keys = slice(low, len(at_hand) - (end - stop))
            seen = torch.cat((at_hand[:sinks], at_hand[keys]))
            queries = torch.arange(start, stop, device=device).unsqueeze(1)
            tokens = slice(*(batch.query_start[request] + position - past for position in (start, stop)))
            slices.append(Slice(tokens, sinks, keys, self._hidden(queries, seen, window)[None, None, None]))
        return Prefill(request, self._rows_of(old), kept - past, self._rows_of(kept), slices)

    def _rows_of(self, positions: Tensor) -> Tensor:
        """The row in which each token is kept."""
        ring = max(self.num_rows - self.num_sinks, 1)
        in_ring = self.num_sinks + (positions - self.num_sinks) % ring
        return torch.where(positions < self.num_sinks, positions, in_ring)

    def _tokens_in_rows(self, last: Tensor, num_rows: int) -> Tensor:
        """The position that each row should hold once token `last` (`[requests, 1]`) is written:
        `[requests, num_rows]`.

        A row that was never written is given a position after `last`. A row with a rejected draft is taken for the
        token that it held before, one ring earlier; `_check_reach` has made sure that no query's window reaches there.
        """
        row = torch.arange(num_rows, device=last.device)
        ring = max(self.num_rows - self.num_sinks, 1)
        in_ring = last - (last - row) % ring
        in_ring = torch.where(in_ring < self.num_sinks, last + 1, in_ring)
        return torch.where(row < self.num_sinks, row, in_ring)

    def _hidden(self, position: Tensor, key: Tensor, window: int) -> Tensor:
        """True where token `key` lies after `position`, or before its window and is no sink."""
        return (key > position) | ((key <= position - window) & (key >= self.num_sinks))


def ring_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype, sinks: int, window: int, spare: int) -> int:
    """Bytes of one request's rows over all layers. Raises `ConfigError` for a window or spare that cannot be."""
    rows = _num_rows(sinks, window, spare, block_size)
    return 2 * config.num_layers * rows * config.kv_size * dtype.itemsize


def _num_rows(sinks: int, window: int, spare: int, block_size: int) -> int:
    check_at_least("window", window, 1)
    check_at_least("spare", spare, 0)
    return min(sinks + window + spare, block_size)
