"""Quantisation of keys and values: the arithmetic that the quantised cache layouts share.

Symmetric (INT8): one scale s for a group of numbers, integer codes around zero.

    s = amax / levels, rounded to bfloat16        levels = 127
    code = round(x / s)                           x̂ = code · s        |x - x̂| ≤ s / 2

Affine (INT4 of KIVI): a group has a scale and a zero point, so all codes lie between its minimum and its maximum.

    zero = min, rounded down to float16           s = (max - zero) / 15, rounded up to float16
    code = round((x - zero) / s)                  x̂ = code · s + zero |x - x̂| ≤ s / 2

Codes are always computed from the *stored* scale, not from the exact one; otherwise the error bounds would not hold.

Why two 16-bit formats. A symmetric scale needs range: bfloat16 has the range of float32, so no amax underflows. (A
float16 scale becomes 0 below 3e-8 and loses precision below 6e-5, which is an amax of 0.008.) Rounding the scale to
bfloat16 costs no code: amax / s ≤ 127 · (1 + 2^-8) < 127.5. An affine zero point needs precision more than range,
because a channel of keys may lie far from zero and vary little: float16 is eight times as precise. Its largest number
is 65504; a larger key or value becomes infinite, and the engine rejects the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.errors import ConfigError, UnsupportedError

INT8_LEVELS = 127
AFFINE_CODES = 15
"""The largest 4-bit code."""
SMALLEST_SCALE = torch.finfo(torch.bfloat16).tiny
SMALLEST_STEP = 2.0**-24
"""Distance between the smallest float16 numbers."""


def quantize_symmetric(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Quantise `x` (`[..., n]`), one scale per last dimension: codes `[..., n]` int8, scales `[...]` bfloat16.

    Codes lie in `±levels`; |x - x̂| ≤ s / 2. A row of zeros gets the smallest scale and codes 0, so no division is by
    zero. A NaN in a row makes its scale NaN.
    """
    x = x.float()
    scale = (x.abs().amax(-1) / levels).clamp_min(SMALLEST_SCALE).bfloat16()
    return (x / scale.float().unsqueeze(-1)).round_().to(torch.int8), scale


def dequantize_symmetric(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantise `quantize_symmetric`: codes `[..., n]` times scale `[...]`, multiplied in float32."""
    return codes.float().mul_(scale.float().unsqueeze(-1)).to(dtype)


def quantize_affine(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise `x`, one scale and zero point per slice along `dim`: codes (uint8, 0 to 15), scale, zero (float16).

    Scale and zero keep `dim` with size 1. |x - x̂| ≤ s / 2. The two roundings make s larger than (max - min) / 15, by
    at most 2^-8 · (|min| + |max|) / 15 + 2^-23. A NaN in a slice makes its scale NaN.
    """
    x = x.float()
    low, high = x.aminmax(dim=dim, keepdim=True)
    zero = _half_below(low)
    scale = -_half_below((zero.float() - high) / AFFINE_CODES)
    scale = scale.clamp_min(SMALLEST_STEP)
    codes = ((x - zero.float()) / scale.float()).round_().clamp_(0, AFFINE_CODES)
    return codes.to(torch.uint8), scale, zero


def dequantize_affine(codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantise `quantize_affine`, computed in float32. `scale` and `zero` broadcast against `codes`."""
    return torch.addcmul(zero.float(), codes.float(), scale.float()).to(dtype)


def pack_int4(codes: Tensor) -> Tensor:
    """Pack codes 0 to 15 (`[..., n]` uint8, n even) two per byte: `[..., n / 2]`, even indices in the low bits."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of `pack_int4`: `[..., n / 2]` → `[..., n]`, uint8."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def head_group(head_dim: int, group_size: int) -> int:
    """Return how many numbers of a head share a scale in INT4: `group_size`, or the whole head if that is smaller.

    Raises `UnsupportedError` for an odd head size, `ConfigError` for a group size that does not divide it.
    """
    if head_dim % 2:
        raise UnsupportedError(
            f"an INT4 cache packs two numbers into a byte, so head size {head_dim} must be even; use "
            "kv_cache_dtype='int8'"
        )
    if not isinstance(group_size, int) or isinstance(group_size, bool) or group_size < 1:
        raise ConfigError(f"group_size={group_size!r} must be an integer of at least 1")
    group = min(group_size, head_dim)
    if head_dim % group:
        raise ConfigError(f"group_size={group_size} does not divide the head size {head_dim}; use a divisor of it")
    return group


def _half_below(x: Tensor) -> Tensor:
    """Return a float16 number that is at most `x` (float32) and never two steps below it."""
    near = x.half()
    # A step of float16 is at most |x| · 2^-10, or 2^-24 where numbers are tiny.
    below = (x - x.abs() * 2.0**-10 - SMALLEST_STEP).half()
    return torch.where(near.float() > x, below, near)
