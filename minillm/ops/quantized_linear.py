"""Linear layers over quantised weights, y = x Wᵀ + b: the references in PyTorch, one function per format.

The formats are those of `quantization/int8.py`, `w8a8.py` and `int4.py`, whose schemes are faster on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.ops.kv_quant import unpack_int4

MAX_CODE = 127
"""The largest code of 8 bits. -128 is unused, so that the codes are symmetric."""


def int8_linear(x: Tensor, qweight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x`: `[rows, in]`, `qweight`: `[out, in]` int8, `scales`: `[out]` fp32 → `[rows, out]` in the dtype of `x`."""
    return F.linear(x, (qweight * scales[:, None]).to(x.dtype), bias)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row of `x` (`[rows, columns]`) to INT8 with its own scale max|x| / 127: codes `[rows, columns]` and
    scales `[rows]`, fp32.

    |codes · scales - x| ≤ scales / 2. A row of zeros gets the smallest normal number as its scale.
    """
    x = x.float()
    scales = (x.abs().amax(dim=1) / MAX_CODE).clamp_min(torch.finfo(torch.float32).tiny)
    return (x / scales[:, None]).round().clamp(-MAX_CODE, MAX_CODE).to(torch.int8), scales


def w8a8_linear(x: Tensor, qweight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `int8_linear`, with the activations also quantised to INT8, per token.

    The sum of products is exact, because it is computed in fp64.
    """
    codes, x_scales = quantize_rows(x)
    y = (codes.double() @ qweight.double().T).float() * x_scales[:, None] * scales
    return (y if bias is None else y + bias).to(x.dtype)


def int4_linear(
    x: Tensor, qweight: Tensor, scales: Tensor, qzeros: Tensor, group_size: int, bias: Tensor | None = None
) -> Tensor:
    """`qweight`: `[out, ⌈in / 2⌉]` uint8, two codes per byte, the even column in the low bits; `scales`: `[out,
    groups]` fp16; `qzeros`: `[out, ⌈groups / 2⌉]`, packed in the same way; w = (code - zero) · scale. The last group
    may be shorter."""
    columns, groups = x.shape[1], scales.shape[1]
    codes, zeros = unpack_int4(qweight)[:, :columns], unpack_int4(qzeros)[:, :groups]
    group = torch.arange(columns, device=x.device) // group_size
    weight = (codes.float() - zeros.float()[:, group]) * scales.float()[:, group]
    return F.linear(x, weight.to(x.dtype), bias)
