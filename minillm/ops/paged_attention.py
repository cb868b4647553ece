"""Attention over paged keys and values, for a ragged batch.

The maths, per query head h of group g = h // (num_heads / num_kv_heads), query at position p:

    out = Σ_j softmax_j(q · k_j / √d) v_j        over the request's positions j ≤ p (and j > p - window, if any)

where row j of the request lies in slot `block_table[j // block_size] · block_size + j % block_size`.

Bytes moved per step and layer: 2 · Σ seq_len · num_kv_heads · head_dim numbers, each read once for all the queries of
the request; that is why verifying five tokens costs hardly more than decoding one. This PyTorch version first gathers
the rows into one dense tensor, so it writes and reads them once more than a kernel that walks the table would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.cache.base import Batch

FEW_QUERIES = 16
"""Up to this many new tokens, requests are padded to one product; a longer prefill runs by itself."""


class Rows(Protocol):
    """Keys or values that are found by slot: a tensor, or something that makes them when they are asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """`(num_slots, num_kv_heads, head_dim)`."""

    def __getitem__(self, slots: Tensor | slice) -> Tensor:
        """`[len(slots), num_kv_heads, head_dim]`."""


def paged_attention(
    q: Tensor, keys: Tensor | Rows, values: Tensor | Rows, batch: Batch, window: int | None = None
) -> Tensor:
    """Causal attention of every new token over its request's cached tokens, itself included.

    `q`: `[num_tokens, num_heads, head_dim]`. `keys`, `values`: `[num_slots, num_kv_heads, head_dim]`, already holding
    the new tokens; a quantised cache passes `Rows`, of which only the slots in use become numbers. `window`: a query
    sees at most that many tokens, itself included. Returns like `q`.
    """
    if window not in batch.plans:
        batch.plans[window] = plan(batch, window)
    todo = batch.plans[window]
    if not todo.long:
        return _few_queries(q, keys, values, todo.few)
    out = torch.empty_like(q)
    if todo.few is not None:
        out[todo.few_rows] = _few_queries(q[todo.few_rows], keys, values, todo.few)
    for one in todo.long:
        out[one.rows] = _many_queries(q[one.rows], keys[one.slots], values[one.slots], one.visible)
    return out


@dataclass(frozen=True)
class FewQueries:
    """Requests with few new tokens, padded to one batched product."""

    slots: Tensor | slice
    """`[count · longest sequence]`, or a slice when one request's blocks happen to lie in a row: no gather then."""
    count: int
    longest: int
    """Most new tokens of any of them."""
    pad: Tensor | None
    """`[count · longest]`: the query behind each row; None if all have the same number."""
    unpad: Tensor | None
    """`[queries]`: the row that holds each query's result."""
    hidden: Tensor | None
    """`[count, 1, 1, longest, longest sequence]`: where not to look; None if every query sees every key."""


@dataclass(frozen=True)
class LongPrefill:
    """One request with many new tokens."""

    rows: slice
    slots: Tensor
    visible: Tensor | None
    """`[queries, keys]`; None: plain causal."""


@dataclass(frozen=True)
class AttentionPlan:
    """What is the same in every layer of a step, worked out once."""

    few: FewQueries | None
    few_rows: Tensor | None
    long: list[LongPrefill]


def plan(batch: Batch, window: int | None) -> AttentionPlan:
    """Sort the requests of a step into one padded product and single prefills."""
    few = [r for r, length in enumerate(batch.query_lens) if length <= FEW_QUERIES]
    long = [_plan_long(batch, r, window) for r, length in enumerate(batch.query_lens) if length > FEW_QUERIES]
    rows = None
    if few and long:
        device = batch.key_slots.device
        rows = torch.cat([torch.arange(*batch.query_start[r : r + 2], device=device) for r in few])
    return AttentionPlan(_plan_few(batch, few, window) if few else None, rows, long)


def _plan_few(batch: Batch, requests: list[int], window: int | None) -> FewQueries:
    device = batch.key_slots.device
    query_lens = [batch.query_lens[r] for r in requests]
    seq_lens = [batch.seq_lens[r] for r in requests]
    longest, keys = max(query_lens), max(seq_lens)
    slots = batch.key_slots if len(requests) == batch.num_requests else batch.key_slots[requests]
    slots = slots[:, :keys].flatten()
    lengths = torch.tensor(query_lens, device=device).unsqueeze(1)
    totals = torch.tensor(seq_lens, device=device).unsqueeze(1)
    # A padding row repeats its request's last query, so that it sees at least one key and stays finite.
    offset = torch.minimum(torch.arange(longest, device=device), lengths - 1)
    pad = unpad = hidden = None
    if min(query_lens) < longest:
        pad = (lengths.cumsum(0) - lengths + offset).flatten()
        unpad = (torch.arange(longest, device=device) < lengths).flatten().nonzero().flatten()
    if longest > 1 or window is not None or min(seq_lens) < keys:
        position = (totals - lengths + offset).unsqueeze(-1)
        hidden = _hidden(position, torch.arange(keys, device=device), window)[:, None, None]
    if len(requests) == 1 and _in_a_row(batch, requests[0]):
        first = int(slots[0])
        return FewQueries(slice(first, first + keys), 1, longest, pad, unpad, hidden)
    return FewQueries(slots, len(requests), longest, pad, unpad, hidden)


def _in_a_row(batch: Batch, request: int) -> bool:
    """Whether a request's blocks follow each other in the pool. Asked on a CPU only: a GPU would have to wait."""
    if batch.block_tables.is_cuda:
        return False
    table = batch.block_tables[request, : -(-batch.seq_lens[request] // batch.block_size)].tolist()
    return table == list(range(table[0], table[0] + len(table)))


def _plan_long(batch: Batch, request: int, window: int | None) -> LongPrefill:
    start, end = batch.query_start[request : request + 2]
    keys, device = batch.seq_lens[request], batch.key_slots.device
    visible = None
    if end - start < keys or window is not None:
        position = torch.arange(keys - (end - start), keys, device=device).unsqueeze(1)
        visible = ~_hidden(position, torch.arange(keys, device=device), window)
    return LongPrefill(slice(start, end), batch.key_slots[request, :keys], visible)


def _hidden(position: Tensor, key: Tensor, window: int | None) -> Tensor:
    """True where `key` lies after `position`, or before its window."""
    hidden = key > position
    return hidden if window is None else hidden | (key <= position - window)


def _few_queries(q: Tensor, keys: Tensor | Rows, values: Tensor | Rows, todo: FewQueries) -> Tensor:
    """`q`: `[queries, num_heads, head_dim]` → the same shape."""
    num_kv, dim = keys.shape[1:]
    if todo.pad is not None:
        q = q[todo.pad]
    k = keys[todo.slots].view(todo.count, -1, num_kv, dim)
    v = values[todo.slots].view(todo.count, -1, num_kv, dim)
    # All query heads that share a KV head, for all queries of a request, are rows of one product (GQA packing).
    packed = q.view(todo.count, todo.longest, num_kv, -1, dim).permute(0, 2, 3, 1, 4)
    scores = packed.reshape(todo.count, num_kv, -1, dim).mul(dim**-0.5) @ k.permute(0, 2, 3, 1)
    if todo.hidden is not None:
        scores.unflatten(2, (-1, todo.longest)).masked_fill_(todo.hidden, float("-inf"))
    out = scores.softmax(-1) @ v.transpose(1, 2)
    out = out.view(todo.count, num_kv, -1, todo.longest, dim).permute(0, 3, 1, 2, 4)
    out = out.reshape(todo.count * todo.longest, -1, dim)
    return out if todo.unpad is None else out[todo.unpad]


def _many_queries(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """One request's prefill chunk: `q` `[queries, heads, dim]` over `k`, `v` `[keys, kv heads, dim]`."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)
