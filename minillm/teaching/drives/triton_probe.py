"""Kernels of the checks themselves. Importing this imports Triton."""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def probe(x_ptr):
    """Store 0 at `x_ptr`. Its type shows whether Triton compiles or interprets."""
    tl.store(x_ptr, 0)


@triton.jit
def undefined_lane(pointer):
    """What a masked lane may hold that is loaded through `pointer`: NaN, or 1 for integers."""
    if pointer.dtype.element_ty.is_floating():  # noqa: SIM108  (only one of the two is compiled)
        value = float("nan")
    else:
        value = 1
    return value
