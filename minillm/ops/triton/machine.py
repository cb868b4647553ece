"""What the launchers need to know about the machine: interpreter or GPU, its dtypes, its number of SMs.

A kernel is either compiled for the current GPU or executed in Python by Triton's interpreter. This is decided when
Triton is imported: `TRITON_INTERPRET=1` must be set before the import, and must stay set while kernels run.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from minillm.errors import UnsupportedError
from minillm.ops.dispatch import interpreted

MIN_TILE_SIDE = 16
"""Smallest side of a tile. `tl.dot` (Triton 3.6 to 3.9) accepts any number of rows and columns, but must sum over at
least 16 products of 16-bit numbers or of fp32 (Triton 3.9: 8) or 32 of int8. Tensor cores work on 16 rows: fewer are
padded to 16."""
FLOATS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def capability() -> tuple[int, int]:
    """Return the compute capability of the current GPU. The interpreter counts as sm_75: it lacks only bfloat16."""
    return (7, 5) if interpreted() else _capability_of(torch.cuda.current_device())


def num_sms() -> int:
    """Return the number of streaming multiprocessors (SMs) of the current GPU; 1 in the interpreter (it is serial)."""
    return 1 if interpreted() else _num_sms_of(torch.cuda.current_device())


def shared_memory() -> int:
    """Return the bytes of shared memory that one program can have on the current GPU."""
    return shared_memory_of(*capability())


def shared_memory_of(major: int, minor: int) -> int:
    """Return the bytes of shared memory that one program can have on a GPU of this compute capability (CUDA C++
    Programming Guide, technical specifications per compute capability)."""
    if major < 8:
        return 64 * 1024
    if major in (9, 10):
        return 227 * 1024
    return (163 if (major, minor) in ((8, 0), (8, 7)) else 99) * 1024


@lru_cache
def _capability_of(gpu: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(gpu)


@lru_cache
def _num_sms_of(gpu: int) -> int:
    return torch.cuda.get_device_properties(gpu).multi_processor_count


@lru_cache
def _name_of(gpu: int) -> str:
    return torch.cuda.get_device_name(gpu)


def gpu_name() -> str:
    """Return the name of the current GPU."""
    return "interpreter" if interpreted() else _name_of(torch.cuda.current_device())


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype to which activations of `dtype` are cast before `tl.dot`; sums are always fp32.

    bfloat16 stays bfloat16 from sm_80 on. Below sm_80 it is cast to fp32, and so it is in the interpreter, whose
    bfloat16 products are wrong (it stores the bits as integers and multiplies those). Raises `UnsupportedError` for
    other dtypes.
    """
    if dtype not in FLOATS:
        raise UnsupportedError(f"kernels support float32, float16 and bfloat16, not {dtype}; choose one with dtype=")
    return tl.float32 if dtype == torch.bfloat16 and capability() < (8, 0) else FLOATS[dtype]


def uses_tensor_cores(dtype: torch.dtype) -> bool:
    """Whether `tl.dot` runs on tensor cores for activations of `dtype`. It does not in fp32 or before sm_80: there
    Triton (3.9) multiplies in registers and needs smaller tiles."""
    return dtype != torch.float32 and capability() >= (8, 0)


def power_of_two(count: int, at_least: int = 1) -> int:
    """Return the smallest power of two that is at least `count` and `at_least`: what the side of a tile must be."""
    return max(at_least, 1 << max(count - 1, 0).bit_length())


def contiguous_last_dims(x: Tensor, last_dims: int = 1) -> Tensor:
    """Return `x` itself if its last `last_dims` dimensions are contiguous, else a contiguous copy."""
    expected = 1
    for size, stride in zip(reversed(x.shape[-last_dims:]), reversed(x.stride()[-last_dims:]), strict=True):
        if stride != expected and size > 1:
            return x.contiguous()
        expected *= size
    return x
