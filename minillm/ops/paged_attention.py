"""Attention over paged keys and values, for a ragged batch.

The maths, per query head h of group g = h // (num_heads / num_kv_heads), query at position p:

    out = Σ_j softmax_j(q · k_j / √d) v_j        over the request's positions j ≤ p (and j > p - window, if any)

where row j of the request lies in slot `block_table[j // block_size] · block_size + j % block_size`.

Numbers moved per step and layer: 2 · Σ seq_len · num_kv_heads · head_dim, each read once for all queries of the
request. So the attention of five tokens that are verified moves hardly more bytes than that of one. This version in
PyTorch first gathers the rows into a dense tensor, so it writes and reads them once more than a kernel that reads
through the block table.

Requests of similar length form a group, padded to the longest of them. A much shorter request gets a group of its
own, because gathering padding costs more than another call. On one core of an AMD EPYC with AVX-512, one layer of 8
requests with 52 to 273 rows (minicoder's heads, fp32) took 370 µs in three groups and 1640 µs as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.batch import Batch

MAX_DECODE_QUERIES = 16
"""A request with at most this many new tokens counts as decode or verification and may share a group; with more, as
prefill, which runs by itself."""
MAX_PADDING_ROWS = 64
"""A request joins a group if that gathers at most this many rows of padding: about the cost of a call."""


class Rows(Protocol):
    """Keys or values indexed by slot: a tensor, or an object that dequantises them when it is indexed."""

    @property
    def shape(self) -> tuple[int, ...]:
        """`(num_slots, num_kv_heads, head_dim)`."""

    def __getitem__(self, slots: Tensor | slice) -> Tensor:
        """`[len(slots), num_kv_heads, head_dim]`."""


def paged_attention(
    q: Tensor, keys: Tensor | Rows, values: Tensor | Rows, batch: Batch, window: int | None = None
) -> Tensor:
    """Causal attention of every new token over its request's cached tokens, including itself.

    `q`: `[num_tokens, num_heads, head_dim]`. `keys`, `values`: `[num_slots, num_kv_heads, head_dim]`, already holding
    the new tokens; a quantised cache passes `Rows`, which dequantise only the slots in use. `window`: a query attends
    to at most that many tokens, including itself. Returns a tensor like `q`.
    """
    plan = batch.once_per_step(
        AttentionPlan, lambda: make_plan(batch, window, q.shape[1] // keys.shape[1], q.dtype), window
    )
    if plan.padded_queries is not None:
        q = q.index_select(0, plan.padded_queries)
    parts = [_attend(q[g.rows], _gather(keys, g.slots), _gather(values, g.slots), g) for g in plan.groups]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out if plan.result_rows is None else out.index_select(0, plan.result_rows)


@dataclass(frozen=True)
class AttentionGroup:
    """Requests of similar length, padded to one product of matrices; or the prefill of one request."""

    rows: slice
    """Its rows among the padded queries: `count · longest` of them."""
    count: int
    longest: int
    """Most new tokens of any of its requests."""
    slots: Tensor | slice
    """`[count · longest sequence]`; or a slice if a single request's blocks are contiguous, which needs no gather."""
    mask: Tensor | None
    """Added to the scores: 0, or -inf for hidden keys. `[count, 1, query heads per KV head · longest, longest
    sequence]`, or `[count, 1, 1, longest sequence]` if `longest` is 1; for a prefill `[longest, sequence]`. None: every
    query attends to every key, or, in a prefill, the mask is plainly causal."""

    @property
    def is_prefill(self) -> bool:
        """Whether this is one request with many new tokens."""
        return self.longest > MAX_DECODE_QUERIES


@dataclass(frozen=True)
class AttentionPlan:
    """The part of attention that is the same in every layer of a step, computed once."""

    groups: list[AttentionGroup]
    padded_queries: Tensor | None
    """The query of each row of the groups; None if rows and queries are the same."""
    result_rows: Tensor | None
    """`[queries]`: the row that holds each query's result."""


def make_plan(batch: Batch, window: int | None, heads_per_kv: int, dtype: torch.dtype) -> AttentionPlan:
    """Group a step's requests. `heads_per_kv`: query heads per KV head; `dtype`: that of the scores."""
    groups: list[AttentionGroup] = []
    padded: list[int] = []
    result_rows = [0] * batch.query_start[-1]
    for members in _members(batch):
        first, longest = len(padded), max(batch.query_lens[r] for r in members)
        for r in members:
            start, end = batch.query_start[r], batch.query_start[r + 1]
            result_rows[start:end] = range(len(padded), len(padded) + end - start)
            # A padding row repeats its request's last query, so that it sees at least one key and stays finite.
            padded += [*range(start, end), *[end - 1] * (longest - (end - start))]
        mask = _mask(batch, members, window, heads_per_kv, dtype)
        slots = _slots(batch, members)
        groups.append(AttentionGroup(slice(first, len(padded)), len(members), longest, slots, mask))
    if padded == list(range(len(padded))):
        return AttentionPlan(groups, None, None)
    device = batch.block_tables.device
    return AttentionPlan(groups, torch.tensor(padded, device=device), torch.tensor(result_rows, device=device))


def _members(batch: Batch) -> list[list[int]]:
    """Return the requests of each group. On a GPU all with few new tokens share one, because calls dominate there."""
    groups = [[r] for r, length in enumerate(batch.query_lens) if length > MAX_DECODE_QUERIES]
    few = [r for r, length in enumerate(batch.query_lens) if length <= MAX_DECODE_QUERIES]
    few.sort(key=lambda r: -batch.seq_lens[r])
    longest = None
    for r in few:
        if longest is None or (longest - batch.seq_lens[r] > MAX_PADDING_ROWS and not batch.block_tables.is_cuda):
            longest = batch.seq_lens[r]
            groups.append([])
        groups[-1].append(r)
    return [sorted(group) for group in groups]


def _slots(batch: Batch, members: list[int]) -> Tensor | slice:
    """Return the slots of these requests' keys, padded to the longest sequence."""
    keys = max(batch.seq_lens[r] for r in members)
    if len(members) == 1 and (first := _first_contiguous_slot(batch, members[0])) is not None:
        return slice(first, first + keys)
    if len(members) == 1:
        return batch.key_slots[members[0], :keys]
    slots = batch.key_slots if len(members) == batch.num_requests else batch.key_slots[members]
    return slots[:, :keys].flatten()


def _first_contiguous_slot(batch: Batch, request: int) -> int | None:
    """Return a request's first slot if its blocks are contiguous in the pool, else None. On a GPU always None: reading
    the table would synchronise."""
    if batch.block_tables.is_cuda:
        return None
    table = batch.block_tables[request, : -(-batch.seq_lens[request] // batch.block_size)].tolist()
    return table[0] * batch.block_size if table == list(range(table[0], table[0] + len(table))) else None


def _mask(batch: Batch, members: list[int], window: int | None, heads_per_kv: int, dtype: torch.dtype) -> Tensor | None:
    """Return the mask that `AttentionGroup.mask` describes."""
    query_lens, seq_lens = [batch.query_lens[r] for r in members], [batch.seq_lens[r] for r in members]
    longest, keys, device = max(query_lens), max(seq_lens), batch.block_tables.device
    is_prefill = longest > MAX_DECODE_QUERIES
    if window is None and (longest == keys if is_prefill else longest == 1 and min(seq_lens) == keys):
        return None
    positions = [  # of the queries; a padding row is its request's last one
        [min(total - count + i, total - 1) for i in range(longest)]
        for count, total in zip(query_lens, seq_lens, strict=True)
    ]
    position = torch.tensor(positions, device=device).unsqueeze(-1)
    key = torch.arange(keys, device=device)
    hidden = key > position  # [count, longest, keys]
    if window is not None:
        hidden |= key <= position - window
    return additive_mask(hidden, 1, dtype)[0, 0] if is_prefill else additive_mask(hidden, heads_per_kv, dtype)


def _gather(source: Tensor | Rows, slots: Tensor | slice) -> Tensor:
    """Return `[len(slots), num_kv_heads, head_dim]`. On a CPU `index_select` takes a third of the time of `[]`."""
    if isinstance(source, Tensor) and isinstance(slots, Tensor):
        return source.index_select(0, slots)
    return source[slots]


def _attend(q: Tensor, k: Tensor, v: Tensor, group: AttentionGroup) -> Tensor:
    """`q`: `[count · longest, num_heads, head_dim]` → the same shape; `k`, `v`: the rows in `group.slots`."""
    num_kv, dim = k.shape[1:]
    k, v = (x.view(group.count, -1, num_kv, dim).transpose(1, 2) for x in (k, v))
    if group.is_prefill:
        rows = q.transpose(0, 1).unsqueeze(0)
        causal = group.mask is None
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=group.mask, is_causal=causal, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)
    out = F.scaled_dot_product_attention(pack_queries(q, group.count, num_kv), k, v, attn_mask=group.mask)
    return unpack_outputs(out, group.longest)


def additive_mask(hidden: Tensor, heads_per_kv: int, dtype: torch.dtype) -> Tensor:
    """The mask to add to the scores of packed queries: -inf where `hidden` is True, else 0.

    `hidden`: `[count, queries, rows]`. Returns `[count, 1, heads_per_kv · queries, rows]`. For a single query the third
    dimension is 1.
    """
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
    return (mask if 1 in (mask.shape[1], heads_per_kv) else mask.repeat(1, heads_per_kv, 1)).unsqueeze(1)


def pack_queries(q: Tensor, count: int, num_kv: int) -> Tensor:
    """Stack all queries of all heads that share a KV head, so that one matrix product computes their scores
    (GQA packing).

    `[count · queries, num_heads, head_dim]` → `[count, num_kv_heads, heads per KV head · queries, head_dim]`.
    """
    return q.view(count, -1, num_kv, q.shape[1] // num_kv, q.shape[2]).permute(0, 2, 3, 1, 4).flatten(2, 3)


def unpack_outputs(out: Tensor, num_queries: int) -> Tensor:
    """The inverse of `pack_queries`, for `num_queries` queries per request."""
    heads = out.unflatten(2, (-1, num_queries)).permute(0, 3, 1, 2, 4)
    return heads.reshape(len(out) * num_queries, -1, out.shape[-1])
