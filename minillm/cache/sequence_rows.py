"""Attention for the layouts that store each request in one tensor: `contiguous`, `window`, `sinks`, `anchors`, and
those that compress a prompt (`compressed_prompt.py`).

A row is the key (or value) of one token in one layer, `[num_kv_heads, head_dim]`. Requests with the same number of new
tokens form a query group. On a CPU, each request has its own attention call on a view of its rows, so no row
is copied. On a GPU, kernel launches would dominate that loop, so the rows are padded and one call attends all requests.
On a CPU, one layer of decoding 16 requests of 200 rows took 360 µs as views and 560 µs padded, at 60 rows 180 and
260 µs (minicoder's heads, fp32, one core of an AMD EPYC).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from minillm.batch import Batch
from minillm.ops.paged_attention import pack_queries, unpack_outputs

PADDED_DEVICES = ("cuda",)
"""Device types on which one padded attention call is faster than one call per request."""


@dataclass(frozen=True)
class QueryGroup:
    """Requests with the same number of new tokens, and the rows they attend to. Built once per step for all layers."""

    requests: list[int]
    """Their indices in the batch."""
    tokens: slice | Tensor
    """The indices of their new tokens in the batch, request by request."""
    rows: list[tuple[Tensor, ...]]
    """Per request, the result of `layer_views`."""
    masks: list[Tensor | None]
    """One mask per attention call, see `additive_mask`; None: no row is hidden."""

    @property
    def is_one_call(self) -> bool:
        """Whether one padded attention call attends all requests; if not, each request has its own call."""
        return len(self.masks) < len(self.requests)

    def attend(self, layer: int, q: Tensor, sink_delta: Tensor | None = None, num_sinks: int = 0) -> Tensor:
        """Attention outputs of these requests' tokens, in the order of `tokens`: `[len(tokens), num_heads, head_dim]`.

        `q`, `sink_delta`: those of the whole batch, `[num_tokens, num_heads, head_dim]`; see `packed_attention`.
        """
        count, num_kv = len(self.requests), self.rows[0][0].shape[1]
        own = q[self.tokens]
        queries = pack_queries(own, count, num_kv)
        sink_deltas = None if sink_delta is None else pack_queries(sink_delta[self.tokens], count, num_kv)
        pairs = [rows[2 * layer : 2 * layer + 2] for rows in self.rows]
        if self.is_one_call:
            keys, values = map(_padded, zip(*pairs, strict=True))
            out = packed_attention(queries, keys, values, self.masks[0], sink_deltas, num_sinks)
        else:
            delta_of_each = [None] * count if sink_deltas is None else sink_deltas.split(1)
            each = zip(queries.split(1), pairs, self.masks, delta_of_each, strict=True)
            outs = [packed_attention(one, *pair, mask, one_delta, num_sinks) for one, pair, mask, one_delta in each]
            out = outs[0] if count == 1 else torch.cat(outs)
        return unpack_outputs(out, len(own) // count)


def layer_views(rows: Tensor) -> tuple[Tensor, ...]:
    """Views of one request's rows, as attention takes them: keys of layer 0, values of layer 0, keys of layer 1, …

    `[num_layers, 2, rows, num_kv_heads, head_dim]` → each `[1, num_kv_heads, rows, head_dim]`.
    """
    return rows.transpose(2, 3).unsqueeze(2).flatten(0, 1).unbind(0)


def _padded(rows: Sequence[Tensor]) -> Tensor:
    """Rows of several requests, each `[1, num_kv_heads, rows, head_dim]`, padded with 0 and stacked."""
    return pad_sequence([one[0].transpose(0, 1) for one in rows], batch_first=True).transpose(1, 2)


def group_by_query_len(batch: Batch, most: int) -> list[list[int]]:
    """The requests with at most `most` new tokens, grouped by their number of new tokens."""
    groups: dict[int, list[int]] = {}
    for r, count in enumerate(batch.query_lens):
        if count <= most:
            groups.setdefault(count, []).append(r)
    return list(groups.values())


def is_padded_together(batch: Batch, requests: Sequence[int]) -> bool:
    """Whether one padded attention call attends all these requests."""
    return len(requests) > 1 and batch.block_tables.device.type in PADDED_DEVICES


def query_group(batch: Batch, requests: list[int], rows: list[tuple[Tensor, ...]], mask: Tensor | None) -> QueryGroup:
    """The query group of one group of `group_by_query_len`.

    `rows`: per request, from `layer_views`. `mask`: from `additive_mask`, for all requests of the group and as many
    rows as the longest of them has; None: no row is hidden.
    """
    device, starts = batch.block_tables.device, [batch.query_start[r] for r in requests]
    count = batch.query_lens[requests[0]]
    tokens: slice | Tensor
    if requests == list(range(requests[0], requests[-1] + 1)):
        tokens = slice(starts[0], starts[-1] + count)
    else:
        tokens = torch.tensor([i for start in starts for i in range(start, start + count)], device=device)
    masks: list[Tensor | None] = [mask]
    if not is_padded_together(batch, requests):
        lengths = [each[0].shape[2] for each in rows]
        masks = [None if mask is None else mask[i : i + 1, ..., :length] for i, length in enumerate(lengths)]
    return QueryGroup(requests, tokens, rows, masks)


def query_positions(batch: Batch, requests: Sequence[int]) -> Tensor:
    """Positions of the new tokens of requests with the same number of them: `[requests, new tokens]`."""
    spans = [range(batch.seq_lens[r] - batch.query_lens[r], batch.seq_lens[r]) for r in requests]
    return torch.tensor([list(span) for span in spans], device=batch.block_tables.device)


def packed_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, sink_delta: Tensor | None = None, num_sinks: int = 0
) -> Tensor:
    """Attention of packed queries; returns the shape of `q`.

    `q`: see `pack_queries`. `keys`, `values`: `[count, num_kv_heads, rows, head_dim]`; hidden rows must be finite, too.
    `mask`: see `additive_mask`. `sink_delta`, shaped like `q`, is added to `q` only for the scores of the first
    `num_sinks` rows.
    """
    if sink_delta is not None:
        extra = sink_delta.mul(q.shape[-1] ** -0.5) @ keys[:, :, :num_sinks].transpose(2, 3)
        extra = F.pad(extra, (0, keys.shape[2] - extra.shape[3]))
        mask = extra if mask is None else extra + mask
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
