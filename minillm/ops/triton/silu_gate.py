"""The gate of a SwiGLU layer, y = silu(gate) · up with silu(g) = g / (1 + e^-g), computed in fp32 and rounded once.

Bytes moved: per output two numbers are read and one is written. PyTorch also writes silu(gate) and reads it again: five
numbers instead of three, and two launches instead of one. Bound by memory bandwidth. Wins: always on a GPU. Loses: to
fusing the gate into the matrix product before it, which saves these three as well.
"""

# ruff: noqa: ANN001, N803  (Triton reads annotations, so pointers have none; constants are upper-case)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.ops.triton.machine import contiguous_last_dims, power_of_two

COLUMNS = 1024
"""Outputs per program."""


@triton.jit
def _silu_gate(
    x_ptr,  # [rows, 2 · size]
    out_ptr,  # [rows, size]
    size: int,
    x_stride: int,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + size + column, mask=inside, other=0.0).to(tl.float32)
    # e^-g may overflow to infinity; the quotient is then 0, as it should be.
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * size + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def silu_gate(gate_up: Tensor) -> Tensor:
    """As `minillm.ops.silu_gate.silu_gate`."""
    x = contiguous_last_dims(gate_up)
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows and size:
        block = min(COLUMNS, power_of_two(size))
        _silu_gate[(rows, -(-size // block))](x, out, size, x.stride(0), BLOCK=block, num_warps=4)
    return out
