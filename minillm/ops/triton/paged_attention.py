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

Stored formats. Pools hold floats in the activations' dtype; or INT8 codes with a scale per token and KV head; or INT4
codes with a scale and a zero point per group of channels. These are the formats of `cache/paged_int8.py` and
`cache/paged_int4.py`. Codes become floats in registers. An INT8 scale is a factor of a key's score, or of the weight of
a value, so it is applied to those: 2 numbers per key instead of 2 · head_dim.

Planes. Codes are read as words of 16 bits, with 2 (INT8) or 4 (INT4) neighbouring channels, because the instruction
that brings a tile from shared memory into the order of the tensor cores (ldmatrix) moves 16-bit elements; bytes it
cannot transpose. Plane p holds channels p, p + PLANES, … of all words. A product over all channels is the sum of the
products over the planes, with the queries read with the same stride; each plane of the values has an output of its own:

    word w, INT8    low byte: channel 2w (plane 0)    high byte: channel 2w + 1 (plane 1)

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

# ruff: noqa: ANN001, N803, N806, SIM300  (Triton reads annotations, so pointers have none; constants are upper-case)
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


@triton.jit
def _codes(words, plane: tl.constexpr, BITS: tl.constexpr, DOT: tl.constexpr):  # noqa: ANN202
    """Code number `plane` of each word, as a float; stored floats are only cast. INT8 codes are signed.

    To convert an integer takes a slow instruction. For bfloat16, its bits are set instead: 0x4300 is 128 and has 7 bits
    for the fraction, so 0x4300 | c is 128 + c for c < 128. An INT8 code is its low 7 bits minus 128 if the sign is set;
    0x4300 | 128 is 256. Both subtractions are exact.
    """
    if BITS == 0:
        codes = words.to(DOT)
    elif DOT == tl.bfloat16 and words.dtype == tl.int16:
        words = words >> (BITS * plane)
        if BITS == 4:
            codes = ((words & 15) | 0x4300).to(DOT, bitcast=True) - 128.0
        else:
            codes = ((words & 127) | 0x4300).to(DOT, bitcast=True) - ((words & 128) | 0x4300).to(DOT, bitcast=True)
    elif BITS == 4:
        codes = ((words >> (4 * plane)) & 15).to(DOT)
    elif words.dtype == tl.int8:
        codes = words.to(DOT)
    else:
        codes = ((words << (8 - 8 * plane)) >> 8).to(DOT)
    return codes


@triton.jit
def _of_group(  # noqa: ANN202
    ptr,  # [slots, KV heads, DIM / CHANNELS]
    at,  # [KEYS]: row of the pool
    exists,  # [KEYS]
    plane: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    PLANES: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    DOT: tl.constexpr,
):
    """The INT4 scale or zero point of channel PLANES · word + plane: [KEYS, words]."""
    # WIDTH channels lie in one group: the whole group, or a part of it if its size is not a power of two.
    SHARED: tl.constexpr = max(WIDTH // PLANES, 1)  # words
    first = tl.arange(0, PAD_DIM // PLANES // SHARED) * (SHARED * PLANES)
    known = exists[:, None] & (first < DIM)[None, :]
    if WIDTH < PLANES:
        first += plane
    group_at = at[:, None] * (DIM // CHANNELS) + (first // CHANNELS)[None, :]
    found = tl.load(ptr + group_at, mask=known, other=0.0).to(DOT)
    if SHARED > 1:
        found = tl.broadcast_to(found[:, :, None], (KEYS, PAD_DIM // PLANES // SHARED, SHARED))
        found = tl.reshape(found, (KEYS, PAD_DIM // PLANES))
    return found


@triton.jit
def _numbers(  # noqa: ANN202
    words,  # [KEYS, words]
    plane: tl.constexpr,
    scale_ptr,
    zero_ptr,
    at,  # [KEYS]
    exists,  # [KEYS]
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    PLANES: tl.constexpr,
    BITS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    DOT: tl.constexpr,
):
    """Channels `plane`, `plane` + PLANES, … of each key: [KEYS, words]. INT8 codes are left without their scale."""
    numbers = _codes(words, plane, BITS, DOT)
    if BITS == 4:  # the compiler loads once what all planes share
        scale = _of_group(scale_ptr, at, exists, plane, KEYS, DIM, PAD_DIM, PLANES, CHANNELS, WIDTH, DOT)
        zero = _of_group(zero_ptr, at, exists, plane, KEYS, DIM, PAD_DIM, PLANES, CHANNELS, WIDTH, DOT)
        numbers = numbers * scale + zero
    return numbers


@triton.jit(do_not_specialize=["num_requests", "table_stride", "splits"])
def _attend(
    q_ptr,  # [tokens, KV heads · GROUP, DIM]
    out_ptr,  # like q; if SPLIT: [tokens, heads, splits, DIM] fp32
    lse_ptr,  # [tokens, heads, splits] fp32, base 2, if SPLIT
    k_ptr,  # [slots, KV heads, DIM / PLANES]
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
    PLANES: tl.constexpr,  # codes per stored word; 1: floats
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
    WORDS: tl.constexpr = PAD_DIM // PLANES
    word = tl.arange(0, WORDS)
    in_head = word < DIM // PLANES
    q_mask = live[:, None] & in_head[None, :]
    q_at = q_ptr + (token * q_stride + head * DIM)[:, None] + (word * PLANES)[None, :]
    q_0 = tl.load(q_at, mask=q_mask, other=0.0).to(DOT)
    if PLANES >= 2:
        q_1 = tl.load(q_at + 1, mask=q_mask, other=0.0).to(DOT)
    if PLANES == 4:
        q_2 = tl.load(q_at + 2, mask=q_mask, other=0.0).to(DOT)
        q_3 = tl.load(q_at + 3, mask=q_mask, other=0.0).to(DOT)
    if TREE:
        sees = tl.load(tree_ptr + token, mask=live, other=0)

    begin, end = 0, length
    if not TREE:
        end = context + tl.minimum(first + QUERIES, count)
    if WINDOW > 0:
        begin = tl.maximum(context + first - WINDOW + 1, 0)
    if SPLIT:
        blocks = (end - begin + KEYS - 1) // KEYS  # of keys; all splits have the same number, or one more
        end = tl.minimum(end, begin + blocks * (split + 1) // splits * KEYS)
        begin += blocks * split // splits * KEYS

    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    out_0 = tl.full((ROWS, WORDS), 0.0, tl.float32)
    if PLANES >= 2:
        out_1 = tl.full((ROWS, WORDS), 0.0, tl.float32)
    if PLANES == 4:
        out_2 = tl.full((ROWS, WORDS), 0.0, tl.float32)
        out_3 = tl.full((ROWS, WORDS), 0.0, tl.float32)
    for key_0 in range(begin, end, KEYS):
        key = key_0 + tl.arange(0, KEYS)
        exists = key < end
        block = tl.load(table_ptr + request.to(tl.int64) * table_stride + key // BLOCK_SIZE, mask=exists, other=0)
        at = (block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE) * NUM_KV + kv_head
        stored = exists[:, None] & in_head[None, :]
        words_at = at[:, None] * (DIM // PLANES) + word[None, :]
        k = tl.load(k_ptr + words_at, mask=stored, other=0)
        v = tl.load(v_ptr + words_at, mask=stored, other=0)
        if BITS == 8:
            k_scale = tl.load(k_scale_ptr + at, mask=exists, other=0.0).to(tl.float32)
            v_scale = tl.load(v_scale_ptr + at, mask=exists, other=0.0).to(tl.float32)

        k_0 = _numbers(
            k, 0, k_scale_ptr, k_zero_ptr, at, exists, KEYS, DIM, PAD_DIM, PLANES, BITS, CHANNELS, WIDTH, DOT
        )
        score = tl.dot(q_0, tl.trans(k_0), input_precision="ieee")
        if PLANES >= 2:
            k_1 = _numbers(
                k, 1, k_scale_ptr, k_zero_ptr, at, exists, KEYS, DIM, PAD_DIM, PLANES, BITS, CHANNELS, WIDTH, DOT
            )
            score = tl.dot(q_1, tl.trans(k_1), acc=score, input_precision="ieee")
        if PLANES == 4:
            k_2 = _numbers(
                k, 2, k_scale_ptr, k_zero_ptr, at, exists, KEYS, DIM, PAD_DIM, PLANES, BITS, CHANNELS, WIDTH, DOT
            )
            score = tl.dot(q_2, tl.trans(k_2), acc=score, input_precision="ieee")
            k_3 = _numbers(
                k, 3, k_scale_ptr, k_zero_ptr, at, exists, KEYS, DIM, PAD_DIM, PLANES, BITS, CHANNELS, WIDTH, DOT
            )
            score = tl.dot(q_3, tl.trans(k_3), acc=score, input_precision="ieee")
        score *= scale
        if BITS == 8:
            score *= k_scale[None, :]
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
        if BITS == 8 and DOT != tl.float16:  # whose exponent is too short for a small weight times a small scale
            weight *= v_scale[None, :]
        p = weight.to(DOT)
        v_0 = _numbers(
            v, 0, v_scale_ptr, v_zero_ptr, at, exists, KEYS, DIM, PAD_DIM, PLANES, BITS, CHANNELS, WIDTH, DOT
        )
        if BITS == 8 and DOT == tl.float16:
            v_0 = (v_0.to(tl.float32) * v_scale[:, None]).to(DOT)
        out_0 = tl.dot(p, v_0, acc=out_0 * keep[:, None], input_precision="ieee")
        if PLANES >= 2:
            v_1 = _numbers(
                v, 1, v_scale_ptr, v_zero_ptr, at, exists, KEYS, DIM, PAD_DIM, PLANES, BITS, CHANNELS, WIDTH, DOT
            )
            if BITS == 8 and DOT == tl.float16:
                v_1 = (v_1.to(tl.float32) * v_scale[:, None]).to(DOT)
            out_1 = tl.dot(p, v_1, acc=out_1 * keep[:, None], input_precision="ieee")
        if PLANES == 4:
            v_2 = _numbers(
                v, 2, v_scale_ptr, v_zero_ptr, at, exists, KEYS, DIM, PAD_DIM, PLANES, BITS, CHANNELS, WIDTH, DOT
            )
            out_2 = tl.dot(p, v_2, acc=out_2 * keep[:, None], input_precision="ieee")
            v_3 = _numbers(
                v, 3, v_scale_ptr, v_zero_ptr, at, exists, KEYS, DIM, PAD_DIM, PLANES, BITS, CHANNELS, WIDTH, DOT
            )
            out_3 = tl.dot(p, v_3, acc=out_3 * keep[:, None], input_precision="ieee")
        best = new_best

    nothing = total == 0.0
    share = 1.0 / tl.where(nothing, 1.0, total)[:, None]
    out_at = token * (NUM_KV * GROUP) + head
    if SPLIT:
        out_at = out_at * splits + split
        lse = tl.where(nothing, float("-inf"), best + tl.log2(tl.where(nothing, 1.0, total)))
        tl.store(lse_ptr + out_at, lse, mask=live)
    out_at = out_ptr + out_at[:, None] * DIM + (word * PLANES)[None, :]
    tl.store(out_at, (out_0 * share).to(out_ptr.dtype.element_ty), mask=q_mask)
    if PLANES >= 2:
        tl.store(out_at + 1, (out_1 * share).to(out_ptr.dtype.element_ty), mask=q_mask)
    if PLANES == 4:
        tl.store(out_at + 2, (out_2 * share).to(out_ptr.dtype.element_ty), mask=q_mask)
        tl.store(out_at + 3, (out_3 * share).to(out_ptr.dtype.element_ty), mask=q_mask)


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
    request. A tree has at most 64 tokens; a request without one has masks of -1 and may have any number. Every token
    attends to all tokens cached before the step. A batch for a CUDA graph brings its own tiling (`Tiling`) and metadata
    (`AttentionMetadata`) as plans: then only `query_start[-1]` and the number of requests are read from its lists.
    Raises `UnsupportedError` for a tree with a window, for pools in an unknown format, and for keys and values that
    differ in format or shape.
    """
    q, (num_tokens, heads, dim) = contiguous_last_dims(q, 2), q.shape
    num_kv = keys.shape[1]
    key_pools, value_pools = KernelPools.of(keys), KernelPools.of(values)
    bits, channels, planes = key_pools.bits, key_pools.channels, key_pools.planes
    key_format = (bits, channels, *keys.shape[1:])
    value_format = (value_pools.bits, value_pools.channels, *values.shape[1:])
    if key_format != value_format:
        raise UnsupportedError(
            f"the kernel reads keys and values of one format; here keys have {key_format} and values {value_format} "
            "(bits of a code or 0, channels per group, KV heads, head_dim); use the reference of paged_attention"
        )
    if tree is not None and window is not None:
        raise UnsupportedError(f"draft trees are not supported with a sliding window ({window}); draft chains instead")
    tiling = tiling or batch.plans.get((Tiling,)) or Tiling.of(batch, q, num_kv)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    part, lse = out, out
    if tiling.splits > 1:
        part = torch.empty(num_tokens, heads, tiling.splits, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(num_tokens, heads, tiling.splits, dtype=torch.float32, device=q.device)
    group, pad_dim = heads // num_kv, power_of_two(dim, MIN_TILE_SIDE * planes)
    queries, metadata = tiling.rows // group, AttentionMetadata.of(batch)
    tables = contiguous_last_dims(batch.block_tables)
    _attend[(num_tiles(batch, queries), num_kv, tiling.splits)](
        *(q, part, lse, *key_pools.pools, *value_pools.pools, tables, metadata.query_start, metadata.seq_lens),
        *(q if tree is None else tree, batch.num_requests, tables.stride(0), q.stride(0), tiling.splits),
        math.log2(math.e) / dim**0.5,
        NUM_KV=num_kv,
        GROUP=group,
        DIM=dim,
        PAD_DIM=pad_dim,
        BLOCK_SIZE=batch.block_size,
        WINDOW=window or 0,
        TREE=tree is not None,
        BITS=bits,
        PLANES=planes,
        CHANNELS=channels,
        WIDTH=channels & -channels,
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
