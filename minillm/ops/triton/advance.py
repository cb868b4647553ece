"""Where the next drafted token of each request goes, worked out on the device. See `minillm.ops.advance`.

Bytes moved: four numbers per request. What counts is the launch: one, where PyTorch makes ten, between two forwards of
a draft model that make some twenty-five. Wins: drafting under a CUDA graph, where the host must not be asked. Loses: to
nothing but the forward's own kernels doing it on the side.
"""

# ruff: noqa: ANN001, N803  (the compiler looks annotations up, so pointers have none; constants are in capitals)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.ops.triton.machine import dense

REQUESTS = 64
"""Requests of one program."""


@triton.jit(do_not_specialize=["num_requests", "table_stride"])
def _advance(
    length_ptr,  # [requests]
    table_ptr,  # [requests, table_stride]
    slot_ptr,  # [requests]
    next_length_ptr,  # [requests]
    num_requests: int,
    table_stride: int,
    BLOCK_SIZE: tl.constexpr,
    REQUESTS: tl.constexpr,
) -> None:
    request = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    inside = request < num_requests
    length = tl.load(length_ptr + request, mask=inside, other=0)
    live = inside & (length > 0)
    block = tl.load(table_ptr + request.to(tl.int64) * table_stride + length // BLOCK_SIZE, mask=live, other=0)
    slot = tl.where(live, block * BLOCK_SIZE + length % BLOCK_SIZE, -1)
    tl.store(slot_ptr + request, slot, mask=inside)
    tl.store(next_length_ptr + request, tl.where(live, length + 1, 0), mask=inside)


def advance(seq_lens: Tensor, block_tables: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """As `minillm.ops.advance.advance`."""
    lengths, tables = dense(seq_lens), dense(block_tables)
    slots, next_lengths = torch.empty_like(lengths), torch.empty_like(lengths)
    if len(lengths):
        _advance[(-(-len(lengths) // REQUESTS),)](
            *(lengths, tables, slots, next_lengths, len(lengths), tables.stride(0)),
            BLOCK_SIZE=block_size,
            REQUESTS=REQUESTS,
            num_warps=2,
        )
    return slots, next_lengths
