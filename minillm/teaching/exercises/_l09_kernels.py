"""The reference kernels of lesson 09, which learners write. Importing this file imports Triton.

One program per request and KV head, one block per turn of the loop, and sums instead of `tl.dot`, so that small sizes
work too. Block size, head size and the number of splits are powers of two. The engine's own kernel, in
`minillm.ops.triton.paged_attention`, does more and does it faster.

`decode_kernel` calls no other kernel. `load_queries` and `add_block` repeat its lines for the kernels that follow.
"""

# ruff: noqa: ANN001, ANN202, N803  (Triton evaluates annotations, so pointers have none; constants are in capitals)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_kernel(
    q_ptr,  # [requests, heads, DIM]
    k_ptr,  # [slots, NUM_KV, DIM]
    v_ptr,
    table_ptr,  # [requests, table_stride] block ids
    length_ptr,  # [requests]
    out_ptr,  # like q
    table_stride,
    scale,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    PAD_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """Attention of one query per request over its cached keys: one program per request and KV head."""
    request, kv_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(length_ptr + request)
    head, channel, place = tl.arange(0, PAD_GROUP), tl.arange(0, DIM), tl.arange(0, BLOCK_SIZE)
    is_head = head[:, None] < GROUP
    q_at = ((request * NUM_KV + kv_head) * GROUP + head[:, None]) * DIM + channel[None, :]
    q = tl.load(q_ptr + q_at, mask=is_head, other=0.0).to(tl.float32) * scale

    m = tl.full((PAD_GROUP,), float("-inf"), tl.float32)
    total = tl.full((PAD_GROUP,), 0.0, tl.float32)
    out = tl.full((PAD_GROUP, DIM), 0.0, tl.float32)
    for first in range(0, length, BLOCK_SIZE):
        block = tl.load(table_ptr + request * table_stride + first // BLOCK_SIZE)
        exists = first + place < length
        at = ((block * BLOCK_SIZE + place) * NUM_KV + kv_head)[:, None] * DIM + channel[None, :]
        k = tl.load(k_ptr + at, mask=exists[:, None], other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=exists[:, None], other=0.0).to(tl.float32)
        score = tl.sum(q[:, None, :] * k[None, :, :], 2)
        score = tl.where(exists[None, :], score, float("-inf"))
        m_new = tl.maximum(m, tl.max(score, 1))
        weight = tl.exp(score - m_new[:, None])
        rescale = tl.exp(m - m_new)
        total = total * rescale + tl.sum(weight, 1)
        out = out * rescale[:, None] + tl.sum(weight[:, :, None] * v[None, :, :], 1)
        m = m_new
    tl.store(out_ptr + q_at, out / total[:, None], mask=is_head)


@triton.jit
def load_queries(q_ptr, scale, NUM_KV: tl.constexpr, GROUP: tl.constexpr, PAD_GROUP: tl.constexpr, DIM: tl.constexpr):
    """Row indices `[PAD_GROUP]` and scaled queries `[PAD_GROUP, DIM]` of the heads that share a KV head."""
    head, channel = tl.arange(0, PAD_GROUP), tl.arange(0, DIM)
    row = (tl.program_id(0) * NUM_KV + tl.program_id(1)) * GROUP + head
    q_at = row[:, None] * DIM + channel[None, :]
    q = tl.load(q_ptr + q_at, mask=head[:, None] < GROUP, other=0.0).to(tl.float32) * scale
    return row, q


@triton.jit
def add_block(score, v, exists, m, total, out):
    """Merge one block into m, l (total) and o (out). score: `[PAD_GROUP, BLOCK_SIZE]`; v: `[BLOCK_SIZE, DIM]`."""
    score = tl.where(exists[None, :], score, float("-inf"))
    m_new = tl.maximum(m, tl.max(score, 1))
    weight = tl.exp(score - m_new[:, None])
    rescale = tl.exp(m - m_new)
    total = total * rescale + tl.sum(weight, 1)
    out = out * rescale[:, None] + tl.sum(weight[:, :, None] * v[None, :, :], 1)
    return m_new, total, out


@triton.jit
def split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    length_ptr,
    part_ptr,  # [requests, heads, SPLITS, DIM] fp32
    lse_ptr,  # [requests, heads, SPLITS] fp32
    table_stride,
    scale,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    PAD_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Like `decode_kernel`, over one of SPLITS parts of the keys: one program per request, KV head and part."""
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(length_ptr + request)
    head, channel, place = tl.arange(0, PAD_GROUP), tl.arange(0, DIM), tl.arange(0, BLOCK_SIZE)
    row, q = load_queries(q_ptr, scale, NUM_KV, GROUP, PAD_GROUP, DIM)
    m = tl.full((PAD_GROUP,), float("-inf"), tl.float32)
    total = tl.full((PAD_GROUP,), 0.0, tl.float32)
    out = tl.full((PAD_GROUP, DIM), 0.0, tl.float32)
    keys_of_a_part = tl.cdiv(tl.cdiv(length, BLOCK_SIZE), SPLITS) * BLOCK_SIZE
    begin = split * keys_of_a_part
    end = tl.minimum(begin + keys_of_a_part, length)
    for first in range(begin, end, BLOCK_SIZE):
        block = tl.load(table_ptr + request * table_stride + first // BLOCK_SIZE)
        exists = first + place < length
        at = ((block * BLOCK_SIZE + place) * NUM_KV + kv_head)[:, None] * DIM + channel[None, :]
        k = tl.load(k_ptr + at, mask=exists[:, None], other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=exists[:, None], other=0.0).to(tl.float32)
        m, total, out = add_block(tl.sum(q[:, None, :] * k[None, :, :], 2), v, exists, m, total, out)
    divisor = tl.where(total == 0.0, 1.0, total)
    part_row = row * SPLITS + split
    part_at = part_row[:, None] * DIM + channel[None, :]
    tl.store(part_ptr + part_at, out / divisor[:, None], mask=head[:, None] < GROUP)
    tl.store(lse_ptr + part_row, m + tl.log(divisor), mask=head < GROUP)


@triton.jit
def merge_kernel(
    part_ptr,  # [rows, SPLITS, DIM] fp32
    lse_ptr,  # [rows, SPLITS] fp32
    out_ptr,  # [rows, DIM]
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Merge the parts of one query head, weighted by their share of the softmax: one program per query head."""
    row = tl.program_id(0)
    split, channel = tl.arange(0, SPLITS), tl.arange(0, DIM)
    lse = tl.load(lse_ptr + row * SPLITS + split)
    part = tl.load(part_ptr + (row * SPLITS + split)[:, None] * DIM + channel[None, :])
    weight = tl.exp(lse - tl.max(lse, 0))
    out = tl.sum(weight[:, None] * part, 0) / tl.sum(weight, 0)
    tl.store(out_ptr + row * DIM + channel, out)


@triton.jit
def int8_kernel(
    q_ptr,
    k_ptr,  # [slots, NUM_KV, DIM] int8
    k_scale_ptr,  # [slots, NUM_KV] bfloat16
    v_ptr,
    v_scale_ptr,
    table_ptr,
    length_ptr,
    out_ptr,
    table_stride,
    scale,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    PAD_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """Like `decode_kernel`, over INT8 codes that are dequantised in registers."""
    request, kv_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(length_ptr + request)
    head, channel, place = tl.arange(0, PAD_GROUP), tl.arange(0, DIM), tl.arange(0, BLOCK_SIZE)
    row, q = load_queries(q_ptr, scale, NUM_KV, GROUP, PAD_GROUP, DIM)
    m = tl.full((PAD_GROUP,), float("-inf"), tl.float32)
    total = tl.full((PAD_GROUP,), 0.0, tl.float32)
    out = tl.full((PAD_GROUP, DIM), 0.0, tl.float32)
    for first in range(0, length, BLOCK_SIZE):
        block = tl.load(table_ptr + request * table_stride + first // BLOCK_SIZE)
        exists = first + place < length
        slot = (block * BLOCK_SIZE + place) * NUM_KV + kv_head
        at = slot[:, None] * DIM + channel[None, :]
        k = tl.load(k_ptr + at, mask=exists[:, None], other=0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=exists[:, None], other=0).to(tl.float32)
        k_scale = tl.load(k_scale_ptr + slot, mask=exists, other=0.0).to(tl.float32)
        v_scale = tl.load(v_scale_ptr + slot, mask=exists, other=0.0).to(tl.float32)
        score = tl.sum(q[:, None, :] * k[None, :, :], 2) * k_scale[None, :]
        m, total, out = add_block(score, v * v_scale[:, None], exists, m, total, out)
    tl.store(out_ptr + row[:, None] * DIM + channel[None, :], out / total[:, None], mask=head[:, None] < GROUP)
