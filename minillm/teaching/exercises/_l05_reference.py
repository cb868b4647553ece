"""Lesson 05, the references: rows, integer products, groups, scaled channels, outliers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Rounding = Callable[[Tensor], Tensor]
"""Quantises a matrix `[out, in]` and dequantises it again."""


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise to INT8, symmetrically, with one scale per output channel: codes `[out, in]` within ±127, scale `[out]`.

    `weight` and scale are float32, codes int8. |weight - codes · scale| ≤ scale / 2; a row of zeros has the scale 1.
    """
    amax = weight.abs().amax(1)
    scale = torch.where(amax == 0, 1.0, amax / 127)
    return (weight / scale[:, None]).round().to(torch.int8), scale


def w8a8_linear(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Round each token by its own scale, multiply integers, rescale: `[tokens, in]` → `[tokens, out]`, float32.

    `codes` (`[out, in]` int8, within ±127) and `scale` (`[out]`) are a weight as `quantise_rows` returns it. The
    sums are in float32, where integers are exact up to 2^24: up to 1040 columns.
    """
    x_codes, x_scale = quantise_rows(x)
    return (x_codes.float() @ codes.float().T) * x_scale[:, None] * scale


def quantise_groups(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round to the nearest of 16 levels; every `group_size` neighbours in a row share a scale and a zero point.

    `weight`: `[out, in]` float32, `in` a multiple of `group_size`. Returns codes `[out, in]` uint8 (0 … 15), scale
    `[out, groups]` float16 and zero `[out, groups]` uint8, the code that stands for 0; weight ≈ (codes - zero) · scale.
    A scale that float16 makes 0 becomes 1. (The engine rounds its scale up instead of to nearest.)
    """
    grouped = weight.unflatten(1, (-1, group_size))
    low, high = grouped.amin(2).clamp_max(0), grouped.amax(2).clamp_min(0)
    scale = ((high - low) / 15).half()
    scale = torch.where(scale > 0, scale, 1.0)
    zero = (-low / scale.float()).round().clamp(0, 15)
    codes = ((grouped / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15)
    return codes.flatten(1).to(torch.uint8), scale, zero.to(torch.uint8)


def awq_scale(weight: Tensor, x: Tensor, rounded: Rounding, exponents: Sequence[float]) -> tuple[float, Tensor]:
    """Return the exponent a, and s = mean|x|^a per input channel, with the least ‖Q(W s)(x / s) − W x‖².

    AWQ (Lin et al. 2023, arXiv:2306.00978). `weight`: `[out, in]`; `x`: `[tokens, in]`, a sample of inputs; `rounded`
    is Q. Returns (a, s `[in]`): s = max(mean|x|^a, 1e-4), so that a channel that is never active gets no s of 0.
    """
    mean, exact = x.abs().mean(0), x @ weight.T
    best, least = (0.0, torch.ones_like(mean)), float("inf")
    for a in exponents:
        s = mean.pow(a).clamp_min(1e-4)
        error = ((x / s) @ rounded(weight * s).T - exact).square().sum().item()
        if error < least:
            best, least = (a, s), error
    return best


def split_outliers(weight: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Split off the int(share · numel) weights of the largest magnitude: (dense, sparse), both `[out, in]`.

    `dense` has 0 in their positions, `sparse` has 0 everywhere else, so dense + sparse is `weight` (SqueezeLLM's
    dense-and-sparse decomposition, Kim et al. 2023). Of weights of equal magnitude, any may be chosen.
    """
    kept = torch.zeros(weight.numel(), dtype=torch.bool)
    kept[weight.abs().flatten().topk(int(share * weight.numel())).indices] = True
    kept = kept.view_as(weight)
    return weight.masked_fill(kept, 0.0), weight.masked_fill(~kept, 0.0)
