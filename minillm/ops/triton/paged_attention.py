"""Paged attention over the block table: one kernel for decode, verification, chunked prefill and draft trees.

The maths, for query head h of KV head g = h // group, and a query at position p of its request:

    out = Σ_j softmax_j(q · k_j / √d) v_j            over the request's positions j ≤ p (and j > p - window, if any)

Rows. The rows of one tile are the query heads that share a KV head, for a few neighbouring queries. Each key is read
once for all of them. With a group of 3, a tile of 16 rows holds 5 queries: verifying 4 drafts costs one tile, the same
as decoding one token.

    rows of a tile, KV head g     0: query 0, head 3g   1: query 0, head 3g + 1   2: …   3: query 1, head 3g   …

Columns. Keys are read `Tiling.keys` at a time, each found through `block_tables`. The softmax is online: a running
maximum m, sum l and output o are rescaled when a larger score appears (Milakov & Gimelshein 2018, FlashAttention: Dao
et al. 2022), so scores never leave the chip:
    m' = max(m, s);   l' = l·2^(m - m') + Σ 2^(s - m');   o' = o·2^(m - m') + Σ 2^(s - m') v

Splits. A single decoding request has only as many tiles as KV heads, but a GPU has a hundred SMs. So the keys of a
request are split over several programs. Each writes its own o / l and log2-sum L = m + log2 l, and a second kernel
merges them (Flash-Decoding, Dao et al. 2023):   out = Σ_i 2^(L_i - L) o_i,  L = log2 Σ_i 2^(L_i)

Stored formats. Pools hold floats in the activations' dtype; or INT8 codes with a scale per token and KV head (for keys
it is applied to the score, of which it is a factor); or INT4 codes with a scale and a zero point per group of channels.
These are the formats of `cache/paged_int8.py` and `cache/paged_int4.py`. Codes are dequantised in registers.

Bytes moved per layer: the keys and values that are attended to, as stored, once per tile of queries; the queries and
the output once. A split adds 4 · (head_dim + 1) bytes per query head, written and read. The PyTorch reference also
gathers all rows into a dense copy (and dequantises a quantised pool into it); this kernel does not. Bound by memory
bandwidth with few queries, by arithmetic in a long prefill.

Wins: decode and verification over long contexts; quantised pools, which save time here and not only memory.
Loses: contexts of a few tokens, where the launch dominates; a long prefill in one piece with nothing cached, whose keys
are contiguous, so that a dense FlashAttention needs no block table; a group of 1, which fills one row in 16 when
decoding; a step that mixes one long prefill with many decodes, because all get the prefill's tile; fp32, whose products
do not run on tensor cores.
"""

# ruff: noqa: ANN001, N803  (Triton reads annotations, so pointers have none; constants are upper-case)
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.batch import Batch
from minillm.errors import UnsupportedError
from minillm.ops.triton.machine import MIN_TILE_SIDE, contiguous_last_dims, dot_type, power_of_two
from minillm.ops.triton.stored_rows import KernelPools, QuantizedRows
from minillm.ops.triton.tiling import AttentionMetadata, Tiling, num_tiles

MAX_TREE_TOKENS = 64
"""Most nodes of a draft tree: each has one bit of a 64-bit mask."""


@triton.jit(do_not_specialize=["num_requests", "table_stride", "splits"])
def _attend(
    q_ptr,  # [tokens, KV heads · GROUP, DIM]
    out_ptr,  # like q; if SPLIT: [tokens, heads, splits, DIM] fp32
    lse_ptr,  # [tokens, heads, splits] fp32, base 2, if SPLIT
    k_ptr,  # [slots, KV heads, DIM]; INT4: DIM / 2 bytes
    k_scale_ptr,  # INT8: [slots, KV heads]; INT4: [slots, KV heads, DIM / CHANNELS]
    k_zero_ptr,  # INT4
    v_ptr,
    v_scale_ptr,
    v_zero_ptr,
    table_ptr,  # [requests, table_stride] block ids
    start_ptr,  # [requests + 1] int32: query_start
    length_ptr,  # [requests] int32: seq_lens
    tree_ptr,  # [tokens] int64, if TREE: bit i is set if this token attends to new token i
    num_requests: int,
    table_stride: int,
    q_stride: int,
    splits: int,
    scale: float,  # log2(e) / √DIM
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    TREE: tl.constexpr,
    BITS: tl.constexpr,  # per stored code; 0: floats
    CHANNELS: tl.constexpr,  # per INT4 group
    WIDTH: tl.constexpr,  # the largest power of two that divides CHANNELS
    REQUESTS: tl.constexpr,  # num_requests, padded to a power of two
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,  # ROWS // GROUP
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,  # whether splits > 1
    DOT: tl.constexpr,
) -> None:
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)

    # Request r owns the tiles from start[r] // QUERIES + r on. These are enough for any query lengths, so the grid size
    # depends only on the numbers of tokens and requests.
    r = tl.arange(0, REQUESTS)
    starts = tl.load(start_ptr + r, mask=r < num_requests, other=0)
    request = tl.sum(((starts // QUERIES + r <= tile) & (r < num_requests)).to(tl.int32), 0) - 1
    start = tl.load(start_ptr + request)
    count = tl.load(start_ptr + request + 1) - start
    first = (tile - start // QUERIES - request) * QUERIES
    if first >= count:
        return
    length = tl.load(length_ptr + request)
    context = length - count

    row = tl.arange(0, ROWS)
    query = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    live = (row < QUERIES * GROUP) & (query < count)
    token = (start + query).to(tl.int64)
    position = context + query
    channel = tl.arange(0, PAD_DIM)
    in_head = channel < DIM
    q_mask = live[:, None] & in_head[None, :]
    q_at = token * q_stride + head * DIM
    q = tl.load(q_ptr + q_at[:, None] + channel[None, :], mask=q_mask, other=0.0).to(DOT)
    if TREE:
        sees = tl.load(tree_ptr + token, mask=live, other=0)

    begin, end = 0, length
    if not TREE:
        end = context + tl.minimum(first + QUERIES, count)
    if WINDOW > 0:
        begin = tl.maximum(context + first - WINDOW + 1, 0)
    if SPLIT:
        part = ((end - begin + KEYS - 1) // KEYS + splits - 1) // splits * KEYS
        begin += split * part
        end = tl.minimum(end, begin + part)

    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    out = tl.full((ROWS, PAD_DIM), 0.0, tl.float32)
    for key_0 in range(begin, end, KEYS):
        key = key_0 + tl.arange(0, KEYS)
        exists = key < end
        block = tl.load(table_ptr + request.to(tl.int64) * table_stride + key // BLOCK_SIZE, mask=exists, other=0)
        at = (block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE) * NUM_KV + kv_head
        stored = exists[:, None] & in_head[None, :]
        if BITS == 4:
            pair = tl.arange(0, PAD_DIM // 2)
            pairs = exists[:, None] & (pair < DIM // 2)[None, :]
            pairs_at = at[:, None] * (DIM // 2) + pair[None, :]
            both = tl.load(k_ptr + pairs_at, mask=pairs, other=0)
            k = tl.reshape(tl.interleave(both & 15, both >> 4).to(tl.float32), (KEYS, PAD_DIM // WIDTH, WIDTH))
            both = tl.load(v_ptr + pairs_at, mask=pairs, other=0)
            v = tl.reshape(tl.interleave(both & 15, both >> 4).to(tl.float32), (KEYS, PAD_DIM // WIDTH, WIDTH))
            # WIDTH channels lie in one group: the whole group, or a part of it if its size is not a power of two.
            first_channel = tl.arange(0, PAD_DIM // WIDTH) * WIDTH
            known = exists[:, None] & (first_channel < DIM)[None, :]
            group_at = at[:, None] * (DIM // CHANNELS) + (first_channel // CHANNELS)[None, :]
            k_scale = tl.load(k_scale_ptr + group_at, mask=known, other=0.0).to(tl.float32)
            k_zero = tl.load(k_zero_ptr + group_at, mask=known, other=0.0).to(tl.float32)
            v_scale = tl.load(v_scale_ptr + group_at, mask=known, other=0.0).to(tl.float32)
            v_zero = tl.load(v_zero_ptr + group_at, mask=known, other=0.0).to(tl.float32)
            k = tl.reshape(k * k_scale[:, :, None] + k_zero[:, :, None], (KEYS, PAD_DIM))
            v = tl.reshape(v * v_scale[:, :, None] + v_zero[:, :, None], (KEYS, PAD_DIM))
        else:
            k = tl.load(k_ptr + at[:, None] * DIM + channel[None, :], mask=stored, other=0)
            v = tl.load(v_ptr + at[:, None] * DIM + channel[None, :], mask=stored, other=0)
            if BITS == 8:
                v_scale = tl.load(v_scale_ptr + at, mask=exists, other=0.0).to(tl.float32)
                v = v.to(tl.float32) * v_scale[:, None]

        score = tl.dot(q, tl.trans(k.to(DOT)), input_precision="ieee") * scale
        if BITS == 8:
            score *= tl.load(k_scale_ptr + at, mask=exists, other=0.0).to(tl.float32)[None, :]
        if TREE:
            node = key - context
            seen = (sees[:, None] >> tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)[None, :]) & 1
            # A chain beside a tree has all bits set, so it needs the causal mask as well; parents are before children.
            visible = (node < 0)[None, :] | ((seen != 0) & (node[None, :] <= query[:, None]))
        else:
            visible = key[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        score = tl.where(visible & exists[None, :], score, float("-inf"))

        new_best = tl.maximum(best, tl.max(score, 1))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)  # no visible key in this row yet
        weight = tl.exp2(score - base[:, None])
        keep = tl.exp2(best - base)
        total = total * keep + tl.sum(weight, 1)
        out = tl.dot(weight.to(DOT), v.to(DOT), acc=out * keep[:, None], input_precision="ieee")
        best = new_best

    nothing = total == 0.0
    out = out / tl.where(nothing, 1.0, total)[:, None]
    out_at = token * (NUM_KV * GROUP) + head
    if SPLIT:
        out_at = out_at * splits + split
        lse = tl.where(nothing, float("-inf"), best + tl.log2(tl.where(nothing, 1.0, total)))
        tl.store(lse_ptr + out_at, lse, mask=live)
    tl.store(out_ptr + out_at[:, None] * DIM + channel[None, :], out.to(out_ptr.dtype.element_ty), mask=q_mask)


@triton.jit(do_not_specialize=["splits"])
def _merge(
    part_ptr,  # [tokens · heads, splits, DIM] fp32
    lse_ptr,  # [tokens · heads, splits] fp32
    out_ptr,  # [tokens · heads, DIM]
    splits: int,
    DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    PAD_SPLITS: tl.constexpr,  # splits, padded to a power of two
) -> None:
    row = tl.program_id(0).to(tl.int64)
    split, channel = tl.arange(0, PAD_SPLITS), tl.arange(0, PAD_DIM)
    lse = tl.load(lse_ptr + row * splits + split, mask=split < splits, other=float("-inf"))
    best = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(best == float("-inf"), 0.0, best))
    part_at = (row * splits + split)[:, None] * DIM + channel[None, :]
    part = tl.load(part_ptr + part_at, mask=(split < splits)[:, None] & (channel < DIM)[None, :], other=0.0)
    total = tl.sum(weight, 0)
    out = tl.sum(weight[:, None] * part, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * DIM + channel, out.to(out_ptr.dtype.element_ty), mask=channel < DIM)


def paged_attention(
    q: Tensor,
    keys: Tensor | QuantizedRows,
    values: Tensor | QuantizedRows,
    batch: Batch,
    window: int | None = None,
    tree: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """As `minillm.ops.paged_attention.paged_attention`; with a `tree`, as `minillm.ops.tree_attention.tree_attention`.

    `tree`: `[num_tokens]` int64 masks; bit i of a token's mask is set if the token attends to the i-th new token of its
    request. Every token attends to all tokens cached before the step. A batch for a CUDA graph brings its own tiling
    (`Tiling`) and metadata (`AttentionMetadata`) as plans: then only `query_start[-1]` and the number
    of requests are read from its lists. Raises `UnsupportedError` for a tree if a request has more than 64 new tokens
    or there is a window, and for pools in an unknown format.
    """
    q, (num_tokens, heads, dim) = contiguous_last_dims(q, 2), q.shape
    num_kv = keys.shape[1]
    stored = KernelPools.of(keys), KernelPools.of(values)
    _check_tree(tree, window, batch)
    tiling = tiling or batch.plans.get((Tiling,)) or Tiling.of(batch, q, num_kv)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    part, lse = out, out
    if tiling.splits > 1:
        part = torch.empty(num_tokens, heads, tiling.splits, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(num_tokens, heads, tiling.splits, dtype=torch.float32, device=q.device)
    group, pad_dim = heads // num_kv, power_of_two(dim, MIN_TILE_SIDE)
    queries, metadata, tables = (
        tiling.rows // group,
        AttentionMetadata.of(batch),
        contiguous_last_dims(batch.block_tables),
    )
    _attend[(num_tiles(batch, queries), num_kv, tiling.splits)](
        *(q, part, lse, *stored[0].pools, *stored[1].pools, tables, metadata.query_start, metadata.seq_lens),
        *(q if tree is None else tree, batch.num_requests, tables.stride(0), q.stride(0), tiling.splits),
        math.log2(math.e) / dim**0.5,
        NUM_KV=num_kv,
        GROUP=group,
        DIM=dim,
        PAD_DIM=pad_dim,
        BLOCK_SIZE=batch.block_size,
        WINDOW=window or 0,
        TREE=tree is not None,
        BITS=stored[0].bits,
        CHANNELS=stored[0].channels,
        WIDTH=stored[0].channels & -stored[0].channels,
        REQUESTS=power_of_two(batch.num_requests),
        ROWS=tiling.rows,
        QUERIES=queries,
        KEYS=tiling.keys,
        SPLIT=tiling.splits > 1,
        DOT=dot_type(q.dtype),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    if tiling.splits > 1:
        pads = {"PAD_DIM": pad_dim, "PAD_SPLITS": power_of_two(tiling.splits)}
        _merge[(num_tokens * heads,)](part, lse, out, tiling.splits, DIM=dim, **pads)
    return out


def tree_attention(
    q: Tensor, keys: Tensor | QuantizedRows, values: Tensor | QuantizedRows, batch: Batch, tree: Tensor
) -> Tensor:
    """As `minillm.ops.tree_attention.tree_attention`."""
    return paged_attention(q, keys, values, batch, tree=tree)


def _check_tree(tree: Tensor | None, window: int | None, batch: Batch) -> None:
    if tree is None:
        return
    if window is not None:
        raise UnsupportedError(f"draft trees are not supported with a sliding window ({window}); draft chains instead")
    if max(batch.query_lens, default=0) > MAX_TREE_TOKENS:
        raise UnsupportedError(
            f"a draft tree of {max(batch.query_lens)} nodes is too large, at most {MAX_TREE_TOKENS} are supported; "
            "draft fewer"
        )
