"""How a case of lesson 08 launches the learner's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.teaching.drives.l08_launch import launch
from minillm.teaching.drives.lazy_kernel import LazyKernel
from minillm.teaching.drives.triton_kernels import DEVICE
from minillm.teaching.fence import Fences


def run_copy(
    kernel: LazyKernel, x: Tensor, x_stride: int, out_stride: int, block: int, against_wall: bool = False
) -> dict[str, object]:
    """Launch a copy of `x` `[rows, columns]`, with row stride `x_stride`, to a tensor with row stride `out_stride`."""
    rows, columns = x.shape
    fences, grid = Fences(DEVICE), (rows, -(-columns // block))
    fences.input("x", x, x_stride)
    fences.output("out", (rows, columns), x.dtype, out_stride)
    numbers = (columns, x_stride, out_stride)
    return launch(kernel, grid, fences, numbers, block, columns % block == 0, against_wall, BLOCK=block)


def run_softmax(kernel: LazyKernel, x: Tensor, block: int, against_wall: bool = False) -> dict[str, object]:
    """Launch a softmax of each row of `x` `[rows, columns]`, one program per row."""
    rows, columns = x.shape
    fences = _fences((rows, columns), x.dtype, x=x)
    return launch(kernel, (rows,), fences, (columns,), 1, columns == block, against_wall, BLOCK=block)


def run_rms_norm(
    kernel: LazyKernel, x: Tensor, weight: Tensor, eps: float, block: int, against_wall: bool = False
) -> dict[str, object]:
    """Launch RMSNorm of each row of `x` `[rows, columns]`, one program per row."""
    rows, columns = x.shape
    fences = _fences((rows, columns), x.dtype, x=x, weight=weight)
    return launch(kernel, (rows,), fences, (columns, eps), 1, columns == block, against_wall, BLOCK=block)


def run_dequantise(
    kernel: LazyKernel, codes: Tensor, scale: Tensor, rows_per_program: int, block: int, against_wall: bool = False
) -> dict[str, object]:
    """Launch codes `[rows, columns]` times scale `[rows]` → float32, with `rows_per_program` rows per program."""
    rows, columns = codes.shape
    fences = _fences((rows, columns), torch.float32, codes=codes, scale=scale)
    grid, full = (-(-rows // rows_per_program),), rows % rows_per_program == 0 and columns == block
    numbers, sizes = (rows, columns), {"ROWS": rows_per_program, "BLOCK": block}
    return launch(kernel, grid, fences, numbers, rows_per_program, full, against_wall, **sizes)


def _fences(shape: tuple[int, int], dtype: torch.dtype, **inputs: Tensor) -> Fences:
    """The inputs and a result of this shape."""
    fences = Fences(DEVICE)
    for name, x in inputs.items():
        fences.input(name, x)
    fences.output("out", shape, dtype)
    return fences
