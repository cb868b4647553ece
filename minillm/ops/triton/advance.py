"""Compute the cache slot of each request's next draft token on the device. See `minillm.ops.advance`.

Bytes moved: four numbers per request. The launch is what costs: one here, ten in PyTorch, between two forwards of a
draft model of some twenty-five launches each. Wins: drafting in a CUDA graph, where the host must not be involved.
Loses: only to fusing this into a kernel of the forward.
"""

# ruff: noqa: ANN001, N803  (Triton reads annotations, so pointers have none; constants are upper-case)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.ops.triton.machine import contiguous_last_dims

REQUESTS = 64
"""Requests per program."""


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
    lengths, tables = contiguous_last_dims(seq_lens), contiguous_last_dims(block_tables)
    slots, next_lengths = torch.empty_like(lengths), torch.empty_like(lengths)
    if len(lengths):
        _advance[(-(-len(lengths) // REQUESTS),)](
            *(lengths, tables, slots, next_lengths, len(lengths), tables.stride(0)),
            BLOCK_SIZE=block_size,
            REQUESTS=REQUESTS,
            num_warps=2,
        )
    return slots, next_lengths
