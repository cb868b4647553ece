"""RMSNorm in one pass, alone or fused with the residual addition before it.

    y = x / √(mean(x²) + ε) · w            or, with s = x + residual:  y = s / √(mean(s²) + ε) · w,  and s itself

One program handles one row and keeps it in registers between the sum and the product. Sums are in fp32. s is rounded to
the dtype of x before it is normalised, because later layers add to the rounded s.

Bytes moved: x is read and y written (with a residual: two read, two written). Separate PyTorch calls write the sum,
read it for the mean, and read it again. Wins: every norm of a decoder, which is bound by memory bandwidth and launches.
Loses: rows of 64 numbers (per-head norms of q and k), because one program could hold many of them; rows too wide for
the registers of one program (some 16 thousand numbers).
"""

# ruff: noqa: ANN001, N803  (Triton reads annotations, so pointers have none; constants are upper-case)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.errors import UnsupportedError
from minillm.ops.triton.machine import contiguous_last_dims, power_of_two


@triton.jit
def _rms_norm(
    x_ptr,  # [rows, size]
    residual_ptr,  # [rows, size], if ADD
    weight_ptr,  # [size]
    out_ptr,  # [rows, size]
    sum_ptr,  # [rows, size], if ADD
    size: int,
    eps: float,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    start = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    x = tl.load(x_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + start + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / size + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + start + column, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `minillm.ops.rms_norm.rms_norm`, but raises `UnsupportedError` for a `weight` that is not `[size]`."""
    return _launch(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `minillm.ops.rms_norm.add_rms_norm`, with the same limit as `rms_norm`."""
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalised tensor and its input: x, or the sum s."""
    x, size = x.contiguous(), x.shape[-1]
    if weight.shape != (size,):
        raise UnsupportedError(
            f"the kernel takes a weight of [{size}], not {list(weight.shape)}; pass ones and multiply by it afterwards"
        )
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    other = x if residual is None else residual.contiguous()
    rows, block = x.numel() // size, power_of_two(size)
    if rows:
        _rms_norm[(rows,)](
            *(x, other, contiguous_last_dims(weight), out, total, size, eps),
            ADD=residual is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 256)),
        )
    return out, total
