"""Attention for the layouts that store each request in one tensor: `contiguous`, `window` and `sinks`.

A row is the key (or value) of one token in one layer, `[num_kv_heads, head_dim]`. Requests with the same number of new
tokens form a rectangle of queries. On a CPU, each request has its own attention call on a view of its rows, so no row
is copied. On a GPU, kernel launches would dominate that loop, so the rows are padded and one call attends all requests.
On a CPU, one layer of decoding 16 requests of 200 rows took 360 µs as views and 560 µs padded, at 60 rows 180 and
260 µs (minicoder's heads, fp32, one core of an AMD EPYC).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from minillm.batch import Batch
from minillm.errors import ConfigError

FEW_QUERIES = 16
"""A request with at most this many new tokens counts as decode or verification; with more, as prefill."""
SLOW_TO_LAUNCH = ("cuda",)
"""Device types on which one padded attention call is faster than one call per request."""


@dataclass(frozen=True)
class Rectangle:
    """Requests with the same number of new tokens, and the rows they attend to. Built once per step for all layers."""

    requests: list[int]
    """Their indices in the batch."""
    tokens: slice | Tensor
    """The indices of their new tokens in the batch, request by request."""
    rows: list[tuple[Tensor, ...]]
    """Per request, the result of `views`."""
    masks: list[Tensor | None]
    """One mask per attention call, see `mask_of`; None: no row is hidden."""

    @property
    def is_one_product(self) -> bool:
        """Whether one padded attention call attends all requests; if not, each request has its own call."""
        return len(self.masks) < len(self.requests)

    def attend(self, layer: int, q: Tensor, turn: Tensor | None = None, num_sinks: int = 0) -> Tensor:
        """Attention outputs of these requests' tokens, in the order of `tokens`: `[len(tokens), num_heads, head_dim]`.

        `q`, `turn`: those of the whole batch, `[num_tokens, num_heads, head_dim]`; see `product`.
        """
        count, num_kv = len(self.requests), self.rows[0][0].shape[1]
        own = q[self.tokens]
        queries = packed(own, count, num_kv)
        turns = None if turn is None else packed(turn[self.tokens], count, num_kv)
        pairs = [rows[2 * layer : 2 * layer + 2] for rows in self.rows]
        if self.is_one_product:
            keys, values = map(_padded, zip(*pairs, strict=True))
            out = product(queries, keys, values, self.masks[0], turns, num_sinks)
        else:
            turn_of_each = [None] * count if turns is None else turns.split(1)
            each = zip(queries.split(1), pairs, self.masks, turn_of_each, strict=True)
            outs = [product(one, *pair, mask, one_turn, num_sinks) for one, pair, mask, one_turn in each]
            out = outs[0] if count == 1 else torch.cat(outs)
        return unpacked(out, len(own) // count)


def views(rows: Tensor) -> tuple[Tensor, ...]:
    """Views of one request's rows, as attention takes them: keys of layer 0, values of layer 0, keys of layer 1, …

    `[num_layers, 2, rows, num_kv_heads, head_dim]` → each `[1, num_kv_heads, rows, head_dim]`.
    """
    return rows.transpose(2, 3).unsqueeze(2).flatten(0, 1).unbind(0)


def _padded(rows: Sequence[Tensor]) -> Tensor:
    """Rows of several requests, each `[1, num_kv_heads, rows, head_dim]`, padded with 0 and stacked."""
    return pad_sequence([one[0].transpose(0, 1) for one in rows], batch_first=True).transpose(1, 2)


def equally_many(batch: Batch, most: int) -> list[list[int]]:
    """The requests with at most `most` new tokens, grouped by their number of new tokens."""
    groups: dict[int, list[int]] = {}
    for r, count in enumerate(batch.query_lens):
        if count <= most:
            groups.setdefault(count, []).append(r)
    return list(groups.values())


def are_together(batch: Batch, requests: Sequence[int]) -> bool:
    """Whether one padded attention call attends all these requests."""
    return len(requests) > 1 and batch.block_tables.device.type in SLOW_TO_LAUNCH


def rectangle(batch: Batch, requests: list[int], rows: list[tuple[Tensor, ...]], mask: Tensor | None) -> Rectangle:
    """The rectangle of one group of `equally_many`.

    `rows`: per request, from `views`. `mask`: from `mask_of`, for all requests of the group and as many rows as the
    longest of them has; None: no row is hidden.
    """
    device, starts = batch.block_tables.device, [batch.query_start[r] for r in requests]
    count = batch.query_lens[requests[0]]
    tokens: slice | Tensor
    if requests == list(range(requests[0], requests[-1] + 1)):
        tokens = slice(starts[0], starts[-1] + count)
    else:
        tokens = torch.tensor([i for start in starts for i in range(start, start + count)], device=device)
    masks: list[Tensor | None] = [mask]
    if not are_together(batch, requests):
        lengths = [each[0].shape[2] for each in rows]
        masks = [None if mask is None else mask[i : i + 1, ..., :length] for i, length in enumerate(lengths)]
    return Rectangle(requests, tokens, rows, masks)


def query_positions(batch: Batch, requests: Sequence[int]) -> Tensor:
    """Positions of the new tokens of requests with the same number of them: `[requests, new tokens]`."""
    spans = [range(batch.seq_lens[r] - batch.query_lens[r], batch.seq_lens[r]) for r in requests]
    return torch.tensor([list(span) for span in spans], device=batch.block_tables.device)


def mask_of(hidden: Tensor, heads_per_kv: int, dtype: torch.dtype) -> Tensor:
    """The mask that `product` adds to the scores: -inf where `hidden` is True, else 0.

    `hidden`: `[count, queries, rows]`. Returns `[count, 1, heads_per_kv · queries, rows]`. For a single query the third
    dimension is 1.
    """
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
    return (mask if mask.shape[1] == 1 else mask.repeat(1, heads_per_kv, 1)).unsqueeze(1)


def packed(q: Tensor, count: int, num_kv: int) -> Tensor:
    """Stack all queries of all heads that share a KV head, so that one matrix product computes their scores.

    `[count · queries, num_heads, head_dim]` → `[count, num_kv_heads, heads per KV head · queries, head_dim]`.
    """
    return q.view(count, -1, num_kv, q.shape[1] // num_kv, q.shape[2]).permute(0, 2, 3, 1, 4).flatten(2, 3)


def unpacked(out: Tensor, num_queries: int) -> Tensor:
    """The inverse of `packed`, for `num_queries` queries per request."""
    heads = out.unflatten(2, (-1, num_queries)).permute(0, 3, 1, 2, 4)
    return heads.flatten(2, 3).flatten(0, 1)


def product(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, turn: Tensor | None = None, num_sinks: int = 0
) -> Tensor:
    """Attention of packed queries; returns the shape of `q`.

    `q`: see `packed`. `keys`, `values`: `[count, num_kv_heads, rows, head_dim]`; hidden rows must be finite, too.
    `mask`: see `mask_of`. `turn`, shaped like `q`, is added to `q` only for the scores of the first `num_sinks` rows.
    """
    if turn is not None:
        extra = turn.mul(q.shape[-1] ** -0.5) @ keys[:, :, :num_sinks].transpose(2, 3)
        extra = F.pad(extra, (0, keys.shape[2] - extra.shape[3]))
        mask = extra if mask is None else extra + mask
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def check_at_least(name: str, value: Any, limit: int) -> None:
    """Raise `ConfigError` unless the layout option `name` is an integer of at least `limit`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < limit:
        raise ConfigError(f"kv_cache_config: {name}={value!r} must be an integer of at least {limit}")
