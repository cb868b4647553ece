"""The linear layer, y = x Wᵀ + b, on a CPU.

`F.linear` passes its arguments to the BLAS library unchanged. With one row that is a matrix-vector product; with a few
rows it is a product whose long side BLAS does not split well. Both leave most of the CPU idle. This file has two
alternatives, each used for the numbers of rows at which it is the fastest. Milliseconds for all layers of minicoder
(47 MB of fp32 weights, one core of an AMD EPYC with AVX-512, PyTorch 2.13, MKL and oneDNN; the best of 25 runs):

    rows                         1      2      3      4      8     16     32    256
    F.linear                  5.37   8.14      –   7.26   8.28  10.10  13.95  67.73
    few rows: (W xᵀ)ᵀ         2.94   2.85   3.72   4.27   6.93  11.51  15.56  75.19
    packed: oneDNN's layout   3.91   4.33   4.22   3.64   4.41   5.40   9.24  56.38

A single row is duplicated, which makes a small matrix product of it. Packing copies the weights into the order in which
the kernel reads them, once, at the first product that profits. The copy takes as many bytes again as the weights. Sums
are taken in another order than in `F.linear`, so results differ in the last bits.

Bytes moved: the weights once, and rows · (in + out) numbers; with few rows the weights dominate.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEW_ROWS = 8
"""Up to this many rows, the transposed product is faster than `F.linear`."""
PACKED_ROWS = 4
"""From this many rows on, packed weights are faster than both."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x`: `[rows, in]`, `weight`: `[out, in]`, `bias`: `[out]` → `[rows, out]`, contiguous."""
    rows = x.shape[0]
    if rows > FEW_ROWS or not is_plain_cpu(x):
        return F.linear(x, weight, bias)
    columns = torch.cat((x, x)).T if rows == 1 else x.T
    y = (weight @ columns).T[:rows].contiguous()
    return y if bias is None else y + bias


def is_plain_cpu(x: Tensor) -> bool:
    """Whether the faster alternatives apply: fp32 on a CPU, and no gradient is recorded."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_grad_enabled()


def _can_hold(weight: Tensor) -> bool:
    """Whether a packed copy of `weight` can be kept. A compiler would trace the packing instead of running it. Changes
    of inference tensors are not counted in `_version`, nor are those that fused optimisers make in training."""
    return not weight.requires_grad and not torch.compiler.is_compiling() and not weight.is_inference()


@dataclass(frozen=True)
class PackedWeight:
    """A weight in oneDNN's own layout, and the tensor it was packed from."""

    weight: Tensor
    version: int
    data: Tensor
    """An opaque tensor: only the product below can read it."""

    @classmethod
    def of(cls, weight: Tensor) -> PackedWeight:
        """Copy `weight` (`[out, in]`, fp32) into the layout that the kernel reads."""
        # 16 stands for "a few rows". A layout made for one row serves no other number of rows.
        data = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 16)
        return cls(weight, weight._version, data)

    def holds(self, weight: Tensor) -> bool:
        """Whether this was packed from `weight` as it is now: neither replaced nor changed in place since."""
        return self.weight is weight and self.version == weight._version

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[rows, in]` → `[rows, out]`, contiguous."""
        return torch.ops.mkldnn._linear_pointwise(x, self.data, bias, "none", [], "")


@cache
def can_pack() -> bool:
    """Whether oneDNN has the operators with which PyTorch's own compiler packs weights (x86 only)."""
    return (
        platform.machine().lower() in ("x86_64", "amd64")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class Linear(nn.Linear):
    """`nn.Linear` on `linear` above, or on packed weights where they are faster. With gradients it is `F.linear`.

    A weight that is replaced or changed in place is packed again; a change through `weight.data` is not noticed.
    """

    _packed: PackedWeight | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that nn.Linear gives it)
        """`[rows, in]` → `[rows, out]`."""
        weight = self.weight
        if input.shape[0] < PACKED_ROWS or not is_plain_cpu(input) or not can_pack() or not _can_hold(weight):
            return linear(input, weight, self.bias)
        packed = self._packed
        if packed is None or not packed.holds(weight):
            packed = self._packed = PackedWeight.of(weight)
        return packed.product(input, self.bias)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without packed weights, which can be neither copied nor pickled."""
        return {name: value for name, value in self.__dict__.items() if name != "_packed"}
