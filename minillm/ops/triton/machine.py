"""What the launchers ask of the machine: interpreter or GPU, its number types, its number of processors.

A kernel is compiled for the GPU it runs on, or walked through in Python by Triton's interpreter. Which of the two is
decided when Triton is imported: `TRITON_INTERPRET=1` must be set before that, and stay set while kernels run.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from minillm.errors import UnsupportedError
from minillm.ops.dispatch import interpreted

SMALLEST_DOT = 16
"""Sides of our smallest tiles. `tl.dot` (Triton 3.6 to 3.9) takes any number of rows and columns, and sums over at
least 16 products of 16-bit numbers, 8 of fp32 or 32 of int8. Tensor cores work on 16 rows: fewer are padded to them."""
FLOATS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@lru_cache(maxsize=1)
def capability() -> tuple[int, int]:
    """Compute capability of the current GPU; in the interpreter that of a GPU that can do everything but bfloat16."""
    return (7, 5) if interpreted() else torch.cuda.get_device_capability()


@lru_cache(maxsize=1)
def num_processors() -> int:
    """Streaming multiprocessors of the current GPU; 1 in the interpreter, which runs one program after the other."""
    return 1 if interpreted() else torch.cuda.get_device_properties("cuda").multi_processor_count


@lru_cache(maxsize=1)
def gpu_name() -> str:
    """What the current GPU calls itself."""
    return "interpreter" if interpreted() else torch.cuda.get_device_name()


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """The number type that `tl.dot` multiplies for activations of `dtype`; sums are always fp32.

    bfloat16 stands for itself from sm_80 on and is fp32 below, and in the interpreter, whose bfloat16 products are
    wrong (it keeps the bits in integers, and multiplies those). Raises `UnsupportedError` for other types.
    """
    if dtype not in FLOATS:
        raise UnsupportedError(f"kernels take float32, float16 and bfloat16, not {dtype}; choose one with dtype=")
    return tl.float32 if dtype == torch.bfloat16 and capability() < (8, 0) else FLOATS[dtype]


def has_fast_dots(dtype: torch.dtype) -> bool:
    """Whether `tl.dot` runs on tensor cores for activations of `dtype`: not in fp32, and not before sm_80, where Triton
    (3.9) multiplies in registers and wants smaller tiles."""
    return dtype != torch.float32 and capability() >= (8, 0)


def power_of_two(count: int, at_least: int = 1) -> int:
    """The smallest power of two that is no less than either number: the sides of a tile must be one."""
    return max(at_least, 1 << max(count - 1, 0).bit_length())


def dense(x: Tensor, last_dims: int = 1) -> Tensor:
    """`x` itself if its last dimensions lie side by side in memory, else a copy."""
    expected = 1
    for size, stride in zip(reversed(x.shape[-last_dims:]), reversed(x.stride()[-last_dims:]), strict=True):
        if stride != expected and size > 1:
            return x.contiguous()
        expected *= size
    return x
