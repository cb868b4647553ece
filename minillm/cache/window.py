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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.cache.base import Batch, KVCache
from minillm.cache.rows import (
    FEW_QUERIES,
    Rectangle,
    check_at_least,
    equally_many,
    mask_of,
    packed,
    product,
    query_positions,
    rectangle,
    unpacked,
    views,
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
class Run:
    """Tokens that follow each other in their request and in its ring as well."""

    position: int
    row: int
    count: int

    def rows(self, held: Tensor) -> Tensor:
        """Their rows, of `[2, rows, num_kv_heads, head_dim]`, or that for all layers."""
        return held[..., self.row : self.row + self.count, :, :]

    def tokens(self, past: int) -> slice:
        """Where they are among new tokens of which the first is token `past`."""
        return slice(self.position - past, self.position - past + self.count)


@dataclass(frozen=True)
class Slice:
    """Some queries of a long prefill and the keys they look at."""

    tokens: slice
    """Of the step."""
    sinks: int
    """The first so many of the request's keys at hand, …"""
    keys: slice
    """… and these."""
    mask: Tensor
    """See `product`."""


@dataclass(frozen=True)
class Prefill:
    """One request with more new tokens than its ring has room for beside its window."""

    old: list[Run]
    """The tokens before that are needed, in order: the sinks, then what the first query's window reaches back to."""
    slices: list[Slice]


@dataclass(frozen=True)
class _Room:
    """Where the rows of a step are, per request."""

    rings: list[Ring]
    kept: list[list[tuple[tuple[Tensor, ...], slice]]]
    """Which of its new tokens are stored, run by run, and where: per layer `[2, tokens, num_kv_heads, head_dim]`."""


@dataclass(frozen=True)
class _Plan:
    """Who attends to what: the same in every layer with the same window."""

    few: list[Rectangle]
    long: dict[int, Prefill]
    """By request."""


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
        self.ring = max(self.num_rows - self.num_sinks, 1)
        self.row_shape = (config.num_kv_heads, config.head_dim)
        self.heads_per_kv = config.num_heads // config.num_kv_heads
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
        room, plan = self._plan(batch, self.windows[layer])
        turn = self.sink_turn(layer, q, batch)
        out = torch.empty_like(q)
        for r, new in enumerate(torch.stack((k, v)).split(batch.query_lens, dim=1)):
            held = room.rings[r].rows[layer]
            if r in plan.long:
                self._prefill(held, q, turn, new, plan.long[r], out)  # before its last tokens overwrite older ones
            for rows, tokens in room.kept[r]:
                rows[layer].copy_(new[:, tokens])
        for one in plan.few:
            out[one.tokens] = one.attend(layer, q, turn, self.num_sinks)
        return out

    def sink_turn(self, layer: int, q: Tensor, batch: Batch) -> Tensor | None:
        """What is added to `q` (shaped like it) for the scores of the first `num_sinks` tokens; None: nothing."""
        return None

    def _prefill(
        self, held: Tensor, q: Tensor, turn: Tensor | None, new: Tensor, prefill: Prefill, out: Tensor
    ) -> None:
        """Attend over old and new rows together. `held`: the request's ring, `[2, rows, …]`; `new`: its new rows."""
        at_hand = torch.cat([*(run.rows(held) for run in prefill.old), new], dim=1)
        keys, values = views(at_hand.unsqueeze(0))
        for one in prefill.slices:
            seen_k, seen_v = (torch.cat((x[:, :, : one.sinks], x[:, :, one.keys]), dim=2) for x in (keys, values))
            queries, own = (None if x is None else packed(x[one.tokens], 1, seen_k.shape[1]) for x in (q, turn))
            result = product(queries, seen_k, seen_v, one.mask, own, one.sinks)
            out[one.tokens] = unpacked(result, one.tokens.stop - one.tokens.start)

    def _plan(self, batch: Batch, window: int) -> tuple[_Room, _Plan]:
        """The step as layers with this window see it; the first layer of all checks and makes room."""
        if self not in batch.plans:
            batch.plans[self] = self._make_room(batch)
        room = batch.plans[self]
        if (self, window) not in batch.plans:
            # Of more than spare + 1 new tokens, the last would overwrite what the first has to see.
            most = min(FEW_QUERIES, self.spare + 1)
            few = [self._plan_few(batch, group, room, window) for group in equally_many(batch, most)]
            long = [r for r, count in enumerate(batch.query_lens) if count > most]
            batch.plans[self, window] = _Plan(few, {r: self._plan_prefill(batch, r, window) for r in long})
        return room, batch.plans[self, window]

    def _make_room(self, batch: Batch) -> _Room:
        """Each request's ring. A request that begins gets a new one, whoever held its place before."""
        room = _Room([], [])
        places = batch.block_tables[:, 0].tolist()
        for place, total, count in zip(places, batch.seq_lens, batch.query_lens, strict=True):
            past = total - count
            if not past:
                self.rings.pop(place, None)
                shape = (len(self.windows), 2, self.num_rows, *self.row_shape)
                self.rings[place] = Ring(torch.empty(shape, dtype=self.dtype, device=self.device))
            ring = self.rings[place]
            self._check_reach(ring, past)
            ring.written = max(ring.written, total)
            room.rings.append(ring)
            kept = [*self._sink_runs(past, total), *self._ring_runs(max(past, total - self.ring), total)]
            room.kept.append([(run.rows(ring.rows).unbind(0), run.tokens(past)) for run in kept])
        return room

    def _check_reach(self, ring: Ring, past: int) -> None:
        """Whether token `past` can come next: the rows of its whole window are still there."""
        oldest_held = ring.written - self.ring
        oldest_seen = max(self.num_sinks, past - self.window + 1)
        if oldest_held > oldest_seen:
            raise MinillmError(
                f"a request went back from {ring.written} tokens to {past}, which is {ring.written - past} tokens; its "
                f"ring has room to take back spare={self.spare}. Raise spare, or start the request again"
            )

    def _sink_runs(self, start: int, end: int) -> Iterator[Run]:
        """The sinks among tokens `start … end - 1`."""
        if start < min(end, self.num_sinks):
            yield Run(start, start, min(end, self.num_sinks) - start)

    def _ring_runs(self, start: int, end: int) -> Iterator[Run]:
        """The others, as the ring cuts them."""
        position = max(start, self.num_sinks)
        while position < end:
            row = self.num_sinks + (position - self.num_sinks) % self.ring
            count = min(end - position, self.num_rows - row)
            yield Run(position, row, count)
            position += count

    def _plan_few(self, batch: Batch, requests: list[int], room: _Room, window: int) -> Rectangle:
        counts = [min(self.num_rows, batch.seq_lens[r]) for r in requests]
        last = torch.tensor([[batch.seq_lens[r] - 1] for r in requests], device=self.device)
        keys = self._tokens_in_rows(last, max(counts))
        hidden = self._hidden(query_positions(batch, requests).unsqueeze(-1), keys.unsqueeze(1), window)
        rows = [views(room.rings[r].rows[:, :, :count]) for r, count in zip(requests, counts, strict=True)]
        return rectangle(batch, requests, rows, mask_of(hidden, self.heads_per_kv, self.dtype))

    def _plan_prefill(self, batch: Batch, request: int, window: int) -> Prefill:
        end, first = batch.seq_lens[request], batch.query_start[request]
        past = end - batch.query_lens[request]
        old = [*self._sink_runs(0, past), *self._ring_runs(max(0, past - self.window + 1), past)]
        at_hand = [p for run in old for p in range(run.position, run.position + run.count)]
        at_hand = torch.tensor([*at_hand, *range(past, end)], device=self.device)
        sinks = min(self.num_sinks, end)
        slices = []
        for start in range(past, end, SLICE):
            stop = min(start + SLICE, end)
            # Counted from the end, for the keys at hand have a gap behind the sinks.
            low, high = (len(at_hand) - (end - p) for p in (max(sinks, start - window + 1), stop))
            seen = torch.cat((at_hand[:sinks], at_hand[low:high]))
            queries = torch.arange(start, stop, device=self.device).unsqueeze(1)
            mask = mask_of(self._hidden(queries, seen, window).unsqueeze(0), self.heads_per_kv, self.dtype)
            tokens = slice(first + start - past, first + stop - past)
            slices.append(Slice(tokens, sinks, slice(low, high), mask))
        return Prefill(old, slices)

    def _tokens_in_rows(self, last: Tensor, num_rows: int) -> Tensor:
        """The position that each row should hold once token `last` (`[requests, 1]`) is written:
        `[requests, num_rows]`.

        A row with a rejected draft is taken for the token that it held before, one ring earlier; `_check_reach` has
        made sure that no query's window reaches there. Where that would be a sink, a position after `last` is given.
        """
        row = torch.arange(num_rows, device=last.device)
        in_ring = last - (last - row) % self.ring
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
