"""A kernel that does nothing: its type shows whether Triton compiles or interprets. Importing this imports Triton."""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def probe(x_ptr):
    """Store 0 at `x_ptr`."""
    tl.store(x_ptr, 0)
