"""How a case of lesson 08 launches the learner's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.teaching.drives.l08_launch import Fence, launch
from minillm.teaching.drives.lazy_kernel import LazyKernel


def run_copy(
    kernel: LazyKernel, x: Tensor, x_stride: int, out_stride: int, block: int, against_wall: bool = False
) -> dict[str, object]:
    """Launch a copy of `x` `[rows, columns]`, with row stride `x_stride`, to a tensor with row stride `out_stride`."""
    rows, columns = x.shape
    numbers = (columns, x_stride, out_stride)
    out, grid = Fence.empty((rows, columns), x.dtype, out_stride), (rows, -(-columns // block))
    return launch(
        kernel, grid, [Fence.around(x, x_stride)], out, numbers, block, columns % block == 0, against_wall, BLOCK=block
    )


def run_softmax(kernel: LazyKernel, x: Tensor, block: int, against_wall: bool = False) -> dict[str, object]:
    """Launch a softmax of each row of `x` `[rows, columns]`, one program per row."""
    rows, columns = x.shape
    out = Fence.empty((rows, columns), x.dtype)
    return launch(kernel, (rows,), [Fence.around(x)], out, (columns,), 1, columns == block, against_wall, BLOCK=block)


def run_rms_norm(
    kernel: LazyKernel, x: Tensor, weight: Tensor, eps: float, block: int, against_wall: bool = False
) -> dict[str, object]:
    """Launch RMSNorm of each row of `x` `[rows, columns]`, one program per row."""
    rows, columns = x.shape
    inputs, out = [Fence.around(x), Fence.around(weight)], Fence.empty((rows, columns), x.dtype)
    return launch(kernel, (rows,), inputs, out, (columns, eps), 1, columns == block, against_wall, BLOCK=block)


def run_dequantise(
    kernel: LazyKernel, codes: Tensor, scale: Tensor, rows_per_program: int, block: int, against_wall: bool = False
) -> dict[str, object]:
    """Launch codes `[rows, columns]` times scale `[rows]` → float32, with `rows_per_program` rows per program."""
    rows, columns = codes.shape
    inputs, out = [Fence.around(codes), Fence.around(scale)], Fence.empty((rows, columns), torch.float32)
    grid, full = (-(-rows // rows_per_program),), rows % rows_per_program == 0 and columns == block
    numbers, sizes = (rows, columns), {"ROWS": rows_per_program, "BLOCK": block}
    return launch(kernel, grid, inputs, out, numbers, rows_per_program, full, against_wall, **sizes)
