"""Lesson 04, the references: symmetric codes, two codes to a byte, a scale per channel, bytes, a bound on scores."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.models.config import ModelConfig


def quantise_symmetric(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """One scale per token and head: `x` `[tokens, heads, dim]` → codes of `x`'s shape (int8), scale `[tokens, heads]`.

    The scale is amax / `levels` in bfloat16, or 1 for a row of zeros; codes are x / stored scale, rounded.
    """
    amax = x.abs().amax(-1)
    scale = torch.where(amax == 0, 1.0, amax / levels).to(torch.bfloat16)
    codes = (x / scale.float()[..., None]).round().clamp(-levels, levels)
    return codes.to(torch.int8), scale


def pack_int4(codes: Tensor) -> Tensor:
    """Pack two signed codes into each byte: int8 codes -8 … 7 `[..., n]`, n even → uint8 `[..., n / 2]`.

    Codes 0, 2, 4 … are in the low halves. Each code is stored as its lowest four bits, in two's complement.
    """
    nibbles = codes.to(torch.uint8) & 15
    return nibbles[..., ::2] | (nibbles[..., 1::2] << 4)


def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of `pack_int4`: uint8 `[..., n / 2]` → int8 codes -8 … 7, `[..., n]`."""
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)


def quantise_per_channel(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise keys as KIVI does: a scale and a zero point per channel for each group of `group_size` tokens.

    `x`: `[tokens, heads, dim]`, tokens a multiple of `group_size`. Returns codes 0 … 15 (uint8, shaped like
    `x`), scale and zero (float16, `[groups, heads, dim]`). The scale is (maximum - stored zero) / 15; one that is not
    above 0 becomes 1. Liu et al. 2024, section 3.
    """
    grouped = x.unflatten(0, (-1, group_size))
    low, high = grouped.amin(1), grouped.amax(1)
    zero = low.half()
    scale = ((high - zero.float()) / 15).half()
    scale = torch.where(scale > 0, scale, 1.0)
    codes = ((grouped - zero.float()[:, None]) / scale.float()[:, None]).round().clamp(0, 15)
    return codes.flatten(0, 1).to(torch.uint8), scale, zero


def cache_bytes(config: ModelConfig, bits: int, group_size: int, group_bytes: int) -> int:
    """Bytes that one token adds to a quantised cache over all layers, scales included.

    `bits` per code, and `group_bytes` for each group of `group_size` numbers (its scale and zero point).
    """
    numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return numbers * bits // 8 + numbers // group_size * group_bytes


def score_error_bound(q: Tensor, scale: Tensor) -> Tensor:
    """Return how far quantised keys can move the scores q · k / √d at most: ‖q‖₁ · s / (2 √d).

    `q`: `[queries, dim]`; `scale`: `[keys]`, the scale of each key. Returns `[queries, keys]`.
    """
    return q.abs().sum(-1)[:, None] * scale[None, :] / (2 * q.shape[-1] ** 0.5)
