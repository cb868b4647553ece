"""INT8 weights and INT8 activations: the matrix product is an integer product, and exact.

The weights are those of `int8`. Activations are quantised dynamically, each token with its own scale max|x| / 127, so
the result for a token does not depend on the rest of the batch. y = (Σ qx·qw) · sx · sw, with Σ in int32.
Wins only where a processor multiplies INT8 faster than floats. Loses where activations have outlier channels: one large
value makes the steps coarse for the whole token.
"""

from __future__ import annotations

import timeit
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.ops.quantized_linear import MAX_CODE, quantize_rows
from minillm.quantization.base import QuantizedLinear
from minillm.quantization.int8 import Int8

EXACT_COLUMNS = 2**24 // MAX_CODE**2
"""fp32 represents every integer up to 2^24, so a sum of this many products (1040) is exact in fp32, in any order."""
CUDA_ROWS, CUDA_MULTIPLE = 17, 8
"""The minimum number of rows for `torch._int_mm` on a GPU, and the number that columns must be a multiple of."""


def integer_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return the exact x Wᵀ. `x`: `[rows, in]`, `weight`: `[out, in]`, int8 without -128 → `[rows, out]` int32.

    `torch._int_mm` is fast but not exact everywhere. On a processor without VNNI its library shifts x to 0 … 255 and
    adds pairs of products in 16 bits, which silently saturates (oneDNN's guide, "nuances of int8 computations"). Where
    it is exact, it may run a plain loop, many times slower than a product of floats. `int_mm_pays` tests this processor
    once.
    """
    if x.is_cuda:
        return padded_product(x, weight)
    return torch._int_mm(x, weight.T) if int_mm_pays() else float_product(x, weight)


def float_product(x: Tensor, weight: Tensor) -> Tensor:
    """As `integer_product`, in fp32, with `EXACT_COLUMNS` columns at a time so that every sum is exact."""
    parts = zip(x.split(EXACT_COLUMNS, dim=1), weight.split(EXACT_COLUMNS, dim=1), strict=True)
    return sum((a.float() @ b.float().T).to(torch.int32) for a, b in parts)  # type: ignore[return-value]


def padded_product(x: Tensor, weight: Tensor) -> Tensor:
    """As `integer_product` on a GPU, with zero padding to the shapes that `torch._int_mm` supports."""
    (rows, columns), out_features = x.shape, weight.shape[0]
    more_columns, more_features = -columns % CUDA_MULTIPLE, -out_features % CUDA_MULTIPLE
    if more_columns or rows < CUDA_ROWS:
        x = F.pad(x, (0, more_columns, 0, max(0, CUDA_ROWS - rows)))
    if more_columns or more_features:  # padding by nothing would copy the weight
        weight = F.pad(weight, (0, more_columns, 0, more_features))
    return torch._int_mm(x, weight.T)[:rows, :out_features]


@lru_cache(maxsize=1)
def int_mm_pays() -> bool:
    """Whether `torch._int_mm` is exact on this processor, and faster than `float_product` on a small product."""
    if not int_mm_is_exact():
        return False
    x, weight = (torch.ones(rows, 256, dtype=torch.int8, device="cpu") for rows in (32, 256))
    integers, floats = (
        min(timeit.repeat(product, number=1, repeat=5))
        for product in (lambda: torch._int_mm(x, weight.T), lambda: float_product(x, weight))
    )
    return integers < floats


@lru_cache(maxsize=1)
def int_mm_is_exact() -> bool:
    """Whether `torch._int_mm` is exact on this processor, tested on the largest possible products."""
    largest = torch.full((16, 64), MAX_CODE, dtype=torch.int8, device="cpu")
    expected = 64 * MAX_CODE**2
    try:
        products = [torch._int_mm(largest[:rows], (sign * largest).T) * sign for rows in (1, 16) for sign in (1, -1)]
    except RuntimeError:
        return False
    return all(bool((product == expected).all()) for product in products)


@dataclass(frozen=True)
class W8A8(Int8):
    """Weights of 8 bits, and activations quantised to 8 bits dynamically."""

    method: ClassVar[str] = "w8a8"

    def apply(self, layer: QuantizedLinear, x: Tensor) -> Tensor:
        """`[rows, in]` → `[rows, out]`. NaN or infinity in a row makes that row of the result non-finite."""
        codes, scales = quantize_rows(x)
        y = integer_product(codes, layer.get_buffer("qweight")) * scales[:, None] * layer.get_buffer("scales")
        return (y if layer.bias is None else y + layer.bias).to(x.dtype)
