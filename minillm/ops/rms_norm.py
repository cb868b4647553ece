"""RMSNorm, x / rms(x) · weight (Zhang & Sennrich 2019), plain and with the residual addition that comes before it.

The mean square is taken in fp32 whatever the dtype of x, and the result is rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of `x` (`[..., size]`) and multiply by `weight` (`[size]`, or any shape that
    broadcasts with `x`)."""
    exact = x.float()
    scale = torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + eps)
    return (exact * scale * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `(rms_norm(s), s)` with s = x + residual, rounded to the dtype of `x`; s is the new residual.

    `x`, `residual`: `[..., size]`, of one dtype.
    """
    total = x + residual
    return rms_norm(total, weight, eps), total
