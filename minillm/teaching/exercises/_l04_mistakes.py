"""Lesson 04, mistakes that learners make, planted so that a check can name them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from minillm.models.config import ModelConfig
from minillm.teaching.exercise import WrongVersion
from minillm.teaching.exercises._l04_reference import (
    cache_bytes,
    pack_int4,
    quantise_per_channel,
    quantise_symmetric,
    score_error_bound,
    unpack_int4,
)

# ------------------------------------------------------------------------------------------------- quantise_symmetric


def _codes(x: Tensor, scale: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Codes and scale for a given scale, of any shape that broadcasts to `[tokens, heads]`."""
    scale = torch.where(scale == 0, 1.0, scale).expand(x.shape[:-1]).to(torch.bfloat16)
    return (x / scale.float()[..., None]).round().clamp(-levels, levels).to(torch.int8), scale


def _divides_by_zero(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    scale = (x.abs().amax(-1) / levels).to(torch.bfloat16)
    return (x / scale.float()[..., None]).round().clamp(-levels, levels).nan_to_num().to(torch.int8), scale


def _stores_a_limited_scale(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    codes, scale = quantise_symmetric(x, levels)
    return codes, scale.clamp_min(1e-5)


def _with_epsilon(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    amax = x.abs().amax(-1)
    return _codes(x, torch.where(amax == 0, 1.0, (amax / levels).clamp_min(1e-5)), levels)


def _exact_scale(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    amax = x.abs().amax(-1)
    scale = torch.where(amax == 0, 1.0, amax / levels)
    return (x / scale[..., None]).round().to(torch.int8), scale.to(torch.bfloat16)


def _truncates(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    _, scale = quantise_symmetric(x, levels)
    return (x / scale.float()[..., None]).clamp(-levels, levels).to(torch.int8), scale


def _rounds_down(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    _, scale = quantise_symmetric(x, levels)
    return (x / scale.float()[..., None]).floor().clamp(-levels, levels).to(torch.int8), scale


def _multiplies(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    _, scale = quantise_symmetric(x, levels)
    return (x * scale.float()[..., None]).round().clamp(-levels, levels).to(torch.int8), scale


SYMMETRIC = (
    WrongVersion("uses one scale for the whole tensor", lambda x, levels: _codes(x, x.abs().amax() / levels, levels)),
    WrongVersion(
        "shares one scale between all heads of a token",
        lambda x, levels: _codes(x, x.abs().amax((1, 2))[:, None] / levels, levels),
    ),
    WrongVersion(
        "shares one scale between all tokens of a head",
        lambda x, levels: _codes(x, x.abs().amax((0, 2))[None] / levels, levels),
    ),
    WrongVersion(
        "uses the largest number instead of the largest absolute value",
        lambda x, levels: _codes(x, x.amax(-1) / levels, levels),
    ),
    WrongVersion(
        "computes the scale from the mean, so that larger numbers are clamped",
        lambda x, levels: _codes(x, x.abs().mean(-1) / levels, levels),
    ),
    WrongVersion(
        "computes the scale from the smallest number", lambda x, levels: _codes(x, x.abs().amin(-1) / levels, levels)
    ),
    WrongVersion(
        "divides by levels + 1 (128 for INT8), a code that does not exist",
        lambda x, levels: _codes(x, x.abs().amax(-1) / (levels + 1), levels),
    ),
    WrongVersion(
        "always divides by 127, whatever levels is", lambda x, levels: _codes(x, x.abs().amax(-1) / 127, levels)
    ),
    WrongVersion(
        "forgets to divide the largest number by levels", lambda x, levels: _codes(x, x.abs().amax(-1), levels)
    ),
    WrongVersion(
        "divides the whole range, 2 · amax, by levels",
        lambda x, levels: _codes(x, 2 * x.abs().amax(-1) / levels, levels),
    ),
    WrongVersion("divides by zero when a row is all zeros", _divides_by_zero),
    WrongVersion(
        "limits all scales from below by a constant, which is too coarse for rows of small numbers", _with_epsilon
    ),
    WrongVersion("stores a scale limited from below; the codes use the exact one", _stores_a_limited_scale),
    WrongVersion("truncates instead of rounding", _truncates),
    WrongVersion("rounds down instead of to nearest", _rounds_down),
    WrongVersion("computes codes from the exact scale, and stores a rounded one", _exact_scale),
    WrongVersion("multiplies by the scale instead of dividing", _multiplies),
    WrongVersion(
        "rounds the scale to float16 instead of bfloat16",
        lambda x, levels: (quantise_symmetric(x, levels)[0], quantise_symmetric(x, levels)[1].half()),
    ),
    WrongVersion(
        "returns the scale in float32; it is stored in bfloat16",
        lambda x, levels: (quantise_symmetric(x, levels)[0], quantise_symmetric(x, levels)[1].float()),
    ),
    WrongVersion(
        "gives the scale a last dimension of 1 (keepdim)",
        lambda x, levels: (quantise_symmetric(x, levels)[0], quantise_symmetric(x, levels)[1][..., None]),
    ),
    WrongVersion(
        "returns codes in floating point instead of int8",
        lambda x, levels: (quantise_symmetric(x, levels)[0].float(), quantise_symmetric(x, levels)[1]),
    ),
    WrongVersion("returns the scale first and the codes second", lambda x, levels: quantise_symmetric(x, levels)[::-1]),
)

# ---------------------------------------------------------------------------------------------------------- pack_int4


def _first_one_high(codes: Tensor) -> Tensor:
    return pack_int4(codes.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


def _signs_overwrite(codes: Tensor) -> Tensor:
    whole = codes.to(torch.uint8)
    return whole[..., ::2] | (whole[..., 1::2] << 4)


def _halves(codes: Tensor) -> Tensor:
    return pack_int4(torch.stack(codes.chunk(2, -1), -1).flatten(-2))


def _second_dimension(codes: Tensor) -> Tensor:
    even, odd = (codes[:, ::2], codes[:, 1::2]) if codes.dim() > 1 else (codes[::2], codes[1::2])
    return (even.to(torch.uint8) & 15) | (odd.to(torch.uint8) << 4)


PACK = (
    WrongVersion("puts the first code of a pair into the high half", _first_one_high),
    WrongVersion("lets the sign bits of a negative code overwrite its neighbour", _signs_overwrite),
    WrongVersion("pairs the first half of the row with the second, not neighbours", _halves),
    WrongVersion("loses the signs", lambda codes: pack_int4(codes.abs())),
    WrongVersion("stores code + 8 instead of two's complement", lambda codes: pack_int4(codes + 8)),
    WrongVersion("keeps three bits of each code (& 7); four bits are & 15", lambda codes: pack_int4(codes & 7)),
    WrongVersion("leaves out the odd codes", lambda codes: codes[..., ::2].to(torch.uint8) & 15),
    WrongVersion("leaves out the even codes", lambda codes: (codes[..., 1::2].to(torch.uint8) & 15) << 4),
    WrongVersion(
        "shifts by three bits instead of four",
        lambda codes: (codes[..., ::2].to(torch.uint8) & 15) | ((codes[..., 1::2].to(torch.uint8) & 15) << 3),
    ),
    WrongVersion(
        "does not shift, so that both codes share the low half",
        lambda codes: (codes[..., ::2].to(torch.uint8) | codes[..., 1::2].to(torch.uint8)) & 15,
    ),
    WrongVersion("does not pack: one code to a byte", lambda codes: codes.to(torch.uint8) & 15),
    WrongVersion("returns int8 instead of uint8", lambda codes: pack_int4(codes).view(torch.int8)),
    WrongVersion("pairs codes along the second dimension, [:, ::2]; the last one is [..., ::2]", _second_dimension),
)

# -------------------------------------------------------------------------------------------------------- unpack_int4


def _never_negative(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(torch.int8)


def _high_first(packed: Tensor) -> Tensor:
    return unpack_int4(packed).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _side_by_side(packed: Tensor) -> Tensor:
    codes = unpack_int4(packed)
    return torch.cat((codes[..., ::2], codes[..., 1::2]), -1)


def _eight_is_positive(packed: Tensor) -> Tensor:
    nibbles = _never_negative(packed)
    return torch.where(nibbles > 8, nibbles - 16, nibbles)


UNPACK = (
    WrongVersion("loses the signs: no code is ever negative", _never_negative),
    WrongVersion("puts the high half first", _high_first),
    WrongVersion("puts all low halves before all high ones", _side_by_side),
    WrongVersion("reads -8 as 8", _eight_is_positive),
    WrongVersion(
        "reads 7 as -9: 7 is the largest positive code",
        lambda packed: torch.where(_never_negative(packed) >= 7, _never_negative(packed) - 16, _never_negative(packed)),
    ),
    WrongVersion(
        "subtracts 8 from every code instead of 16 from those above 7", lambda packed: _never_negative(packed) - 8
    ),
    WrongVersion(
        "subtracts 8 from the codes above 7 instead of 16",
        lambda packed: torch.where(_never_negative(packed) > 7, _never_negative(packed) - 8, _never_negative(packed)),
    ),
    WrongVersion(
        "subtracts 15 from the codes above 7 instead of 16",
        lambda packed: torch.where(_never_negative(packed) > 7, _never_negative(packed) - 15, _never_negative(packed)),
    ),
    WrongVersion("subtracts 16 from every code", lambda packed: _never_negative(packed) - 16),
    WrongVersion(
        "flips the signs: the codes up to 7 become negative",
        lambda packed: torch.where(_never_negative(packed) > 7, _never_negative(packed), _never_negative(packed) - 16),
    ),
    WrongVersion("returns only the low halves", lambda packed: unpack_int4(packed)[..., ::2]),
    WrongVersion("returns only the high halves", lambda packed: unpack_int4(packed)[..., 1::2]),
    WrongVersion(
        "keeps the high half in a dimension of its own", lambda packed: unpack_int4(packed).unflatten(-1, (-1, 2))
    ),
    WrongVersion(
        "flattens from dimension 1 on; only the last two dimensions become one",
        lambda packed: unpack_int4(packed).flatten(min(1, packed.dim() - 1)),
    ),
    WrongVersion(
        "reads the whole byte as the low half (& 15 is missing)",
        lambda packed: torch.stack((packed.to(torch.int8), unpack_int4(packed)[..., 1::2]), -1).flatten(-2),
    ),
)

# ----------------------------------------------------------------------------------------------- quantise_per_channel

Coded = tuple[Tensor, Tensor, Tensor]


def _affine(x: Tensor, group_size: int, low: Tensor, high: Tensor, codes: int = 15) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and zero for given limits, of any shape that broadcasts to `[groups, group_size, heads, dim]`."""
    grouped = x.unflatten(0, (-1, group_size))
    limits = (len(grouped), 1, *x.shape[1:])
    zero = low.half()
    scale = ((high - zero.float()) / codes).half()
    scale = torch.where(scale > 0, scale, 1.0)
    found = ((grouped - zero.float()) / scale.float()).round().clamp(0, 15)
    narrow = (part.expand(len(grouped), -1, -1, -1)[:, :1].expand(limits).squeeze(1) for part in (scale, zero))
    return (found.flatten(0, 1).to(torch.uint8), *narrow)


def _per_token(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    grouped = x.unflatten(0, (-1, group_size))
    return _affine(x, group_size, grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True))


def _one_group(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    return _affine(x, group_size, x.amin(0, keepdim=True)[None], x.amax(0, keepdim=True)[None])


def _channels_of_all_heads(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    grouped = x.unflatten(0, (-1, group_size))
    return _affine(x, group_size, grouped.amin((1, 2), keepdim=True), grouped.amax((1, 2), keepdim=True))


def _no_zero_point(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    grouped = x.unflatten(0, (-1, group_size))
    return _affine(x, group_size, torch.zeros_like(grouped[:, :1]), grouped.amax(1, keepdim=True))


def _no_clamp(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    _, scale, zero = quantise_per_channel(x, group_size)
    grouped = x.unflatten(0, (-1, group_size))
    codes = ((grouped - zero.float()[:, None]) / scale.float()[:, None]).round()
    return codes.flatten(0, 1).to(torch.int32).to(torch.uint8), scale, zero


def _constant_divides(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    grouped = x.unflatten(0, (-1, group_size))
    low, high = grouped.amin(1), grouped.amax(1)
    scale = ((high - low.half().float()) / 15).half()
    codes, _, zero = quantise_per_channel(x, group_size)
    return codes, scale, zero


def _truncated(x: Tensor, group_size: int) -> Coded:
    _, scale, zero = quantise_per_channel(x, group_size)
    codes = (x.unflatten(0, (-1, group_size)) - zero.float()[:, None]) / scale.float()[:, None]
    return codes.clamp(0, 15).flatten(0, 1).to(torch.uint8), scale, zero


def _with_steps(steps: int) -> Callable[[Tensor, int], Coded]:
    def quantise(x: Tensor, group_size: int) -> Coded:
        grouped = x.unflatten(0, (-1, group_size))
        return _affine(x, group_size, grouped.amin(1, keepdim=True), grouped.amax(1, keepdim=True), codes=steps)

    return quantise


def _exact_limits(x: Tensor, group_size: int) -> Coded:
    grouped = x.unflatten(0, (-1, group_size))
    low, high = grouped.amin(1), grouped.amax(1)
    scale = torch.where(high > low, (high - low) / 15, 1.0)
    codes = ((grouped - low[:, None]) / scale[:, None]).round().clamp(0, 15)
    return codes.flatten(0, 1).to(torch.uint8), scale.half(), low.half()


def _strided(x: Tensor, group_size: int) -> Coded:
    order = torch.arange(len(x)).view(group_size, -1).T.flatten()
    codes, scale, zero = quantise_per_channel(x[order], group_size)
    return codes[order.argsort()], scale, zero


def _symmetric(x: Tensor, group_size: int) -> Coded:
    amax = x.unflatten(0, (-1, group_size)).abs().amax(1, keepdim=True)
    return _affine(x, group_size, -amax, amax)


def _from_zero_point(x: Tensor, group_size: int) -> Coded:
    _, scale, zero = quantise_per_channel(x, group_size)
    codes = (x.unflatten(0, (-1, group_size)) / scale.float()[:, None]).round().clamp(0, 15)
    return codes.flatten(0, 1).to(torch.uint8), scale, zero


def _changed(change: Callable[[Tensor, Tensor, Tensor], tuple]) -> Callable[[Tensor, int], tuple]:
    return lambda x, group_size: change(*quantise_per_channel(x, group_size))


PER_CHANNEL = (
    WrongVersion(
        "takes minimum and maximum along the channels of a token, not along the tokens of a channel", _per_token
    ),
    WrongVersion("treats all tokens as one group", _one_group),
    WrongVersion("puts every n-th token into a group instead of neighbours", _strided),
    WrongVersion("shares the limits of a channel between heads", _channels_of_all_heads),
    WrongVersion("leaves out the zero point, so that numbers below zero are clamped", _no_zero_point),
    WrongVersion("stores the zero point, but does not subtract it before dividing", _from_zero_point),
    WrongVersion("makes the range symmetric around 0 instead of from the minimum to the maximum", _symmetric),
    WrongVersion("divides by 16: sixteen codes have fifteen steps between them", _with_steps(16)),
    WrongVersion("divides by 255, as for 8 bits", _with_steps(255)),
    WrongVersion("divides by 7, as for symmetric codes", _with_steps(7)),
    WrongVersion("forgets to clamp, so -1 becomes code 255", _no_clamp),
    WrongVersion("truncates instead of rounding", _truncated),
    WrongVersion("computes codes from exact limits, and stores scale and zero point rounded to float16", _exact_limits),
    WrongVersion("stores a scale of zero for a channel that never changes", _constant_divides),
    WrongVersion(
        "stores a scale limited from below; the codes use the exact one",
        _changed(lambda codes, scale, zero: (codes, scale.clamp_min(1e-5), zero)),
    ),
    WrongVersion("swaps scale and zero point", _changed(lambda codes, scale, zero: (codes, zero, scale))),
    WrongVersion(
        "returns the scale in float32; it is stored in float16",
        _changed(lambda codes, scale, zero: (codes, scale.float(), zero)),
    ),
    WrongVersion(
        "returns the zero point in float32; it is stored in float16",
        _changed(lambda codes, scale, zero: (codes, scale, zero.float())),
    ),
    WrongVersion(
        "returns the codes in groups, [groups, group_size, heads, dim]: flatten the first two dimensions",
        _changed(lambda codes, scale, zero: (codes.unflatten(0, (len(scale), -1)), scale, zero)),
    ),
)

# -------------------------------------------------------------------------------------------------------- cache_bytes


def _with_numbers(
    count: Callable[[ModelConfig], float],
) -> Callable[[ModelConfig, int, int, int], int]:
    """The right formula for `count(config)` times as many numbers."""
    return lambda config, *rest: int(cache_bytes(config, *rest) * count(config))


def _codes_only(config: ModelConfig, bits: int) -> int:
    return cache_bytes(config, bits, 1, 0)


BYTES = (
    WrongVersion("counts no bytes for the scales", lambda config, bits, size, each: _codes_only(config, bits)),
    WrongVersion(
        "counts no bytes for the codes, and so only the scales",
        lambda config, bits, size, each: cache_bytes(config, 0, size, each),
    ),
    WrongVersion("counts the keys and forgets the values", _with_numbers(lambda config: 0.5)),
    WrongVersion(
        "counts every query head, though only the KV heads are stored",
        _with_numbers(lambda config: config.num_heads / config.num_kv_heads),
    ),
    WrongVersion("forgets the layers", _with_numbers(lambda config: 1 / config.num_layers)),
    WrongVersion("forgets the heads: it counts one KV head", _with_numbers(lambda config: 1 / config.num_kv_heads)),
    WrongVersion(
        "counts one scale per layer, not one per group",
        lambda config, bits, size, each: _codes_only(config, bits) + 2 * config.num_layers * each,
    ),
    WrongVersion(
        "counts one scale per token, not one per group",
        lambda config, bits, size, each: _codes_only(config, bits) + each,
    ),
    WrongVersion(
        "counts one scale per head, whatever group_size is",
        lambda config, bits, size, each: cache_bytes(config, bits, config.head_dim, each),
    ),
    WrongVersion(
        "counts a scale for every number", lambda config, bits, size, each: cache_bytes(config, bits, 1, each)
    ),
    WrongVersion(
        "counts groups of the keys only; values have scales, too",
        lambda config, bits, size, each: _codes_only(config, bits) + cache_bytes(config, 0, size, each) // 2,
    ),
    WrongVersion("gives each code a whole byte", lambda config, bits, size, each: cache_bytes(config, 8, size, each)),
    WrongVersion(
        "counts bits as bytes: divide the bits by 8",
        lambda config, bits, size, each: cache_bytes(config, 8 * bits, size, each),
    ),
    WrongVersion(
        "counts the bytes of a group as bits",
        lambda config, bits, size, each: (cache_bytes(config, 8 * bits, size, each)) // 8,
    ),
    WrongVersion(
        "counts one number per group instead of group_bytes",
        lambda config, bits, size, each: cache_bytes(config, bits, size, 1),
    ),
)

# -------------------------------------------------------------------------------------------------- score_error_bound


def _times(factor: Callable[[int], float]) -> Callable[[Tensor, Tensor], Tensor]:
    """The right bound times `factor(dim)`."""
    return lambda q, scale: score_error_bound(q, scale) * factor(q.shape[-1])


def _of_q(size: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """`size(q)`, `[queries]`, in the place of the sum of absolute values."""
    return lambda q, scale: size(q)[:, None] * scale[None, :] / (2 * math.sqrt(q.shape[-1]))


BOUND = (
    WrongVersion(
        "uses the length of q (2-norm), which bounds the usual error, not the worst",
        _of_q(lambda q: q.norm(dim=-1)),
    ),
    WrongVersion("adds the numbers of q with their signs, so that they cancel out", _of_q(lambda q: q.sum(-1))),
    WrongVersion("uses the largest absolute value of q instead of the sum", _of_q(lambda q: q.abs().amax(-1))),
    WrongVersion("uses the mean of q's absolute values instead of the sum", _of_q(lambda q: q.abs().mean(-1))),
    WrongVersion("adds squares instead of absolute values", _of_q(lambda q: q.square().sum(-1))),
    WrongVersion("assumes an error of one step of the scale; rounding is off by half a step", _times(lambda dim: 2)),
    WrongVersion("forgets that scores are divided by √d", _times(math.sqrt)),
    WrongVersion("divides by d instead of √d", _times(lambda dim: 1 / math.sqrt(dim))),
    WrongVersion("multiplies by √d instead of dividing", _times(lambda dim: dim)),
    WrongVersion("multiplies by 2 instead of dividing by 2", _times(lambda dim: 4)),
    WrongVersion("returns [keys, queries] instead of [queries, keys]", lambda q, scale: score_error_bound(q, scale).T),
    WrongVersion(
        "adds over the queries instead of over the channels",
        lambda q, scale: q.abs().sum(0)[:, None] * scale[None, :] / (2 * math.sqrt(q.shape[-1])),
    ),
)
