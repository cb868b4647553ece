"""Lesson 04, INT8 and INT4 KV: symmetric codes, two codes to a byte, a scale per channel, bytes, a bound on scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minillm.models.config import ModelConfig
from minillm.teaching.exercise import Case, Exercise, WrongVersion
from minillm.teaching.exercises.l02_kv_cache import LLAMA_2_70B, LLAMA_3_8B, shape

SMALL_HEADS = shape(layers=12, hidden=512, heads=16, kv_heads=16, head_dim=32)
"""Many narrow heads: a scale for each of them weighs more."""

# ------------------------------------------------------------------------------------------------- quantise_symmetric


def quantise_symmetric(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """One scale per token and head: `x` `[tokens, heads, dim]` → codes of `x`'s shape (int8), scale `[tokens, heads]`.

    The scale is amax / `levels` in bfloat16, or 1 for a row of zeros; codes are x / stored scale, rounded.
    """
    amax = x.abs().amax(-1)
    scale = torch.where(amax == 0, 1.0, amax / levels).to(torch.bfloat16)
    codes = (x / scale.float()[..., None]).round().clamp(-levels, levels)
    return codes.to(torch.int8), scale


def _codes(x: Tensor, scale: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """What the wrong versions below do with a scale of any shape that broadcasts to `[tokens, heads]`."""
    scale = torch.where(scale == 0, 1.0, scale).expand(x.shape[:-1]).to(torch.bfloat16)
    return (x / scale.float()[..., None]).round().clamp(-levels, levels).to(torch.int8), scale


def _per_tensor(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    return _codes(x, x.abs().amax() / levels, levels)


def _heads_together(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    return _codes(x, x.abs().amax((1, 2))[:, None] / levels, levels)


def _without_abs(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    return _codes(x, x.amax(-1) / levels, levels)


def _from_the_mean(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    return _codes(x, x.abs().mean(-1) / levels, levels)


def _one_level_more(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    return _codes(x, x.abs().amax(-1) / (levels + 1), levels)


def _divides_by_zero(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    scale = (x.abs().amax(-1) / levels).to(torch.bfloat16)
    return (x / scale.float()[..., None]).round().clamp(-levels, levels).nan_to_num().to(torch.int8), scale


def _with_epsilon(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    amax = x.abs().amax(-1)
    return _codes(x, torch.where(amax == 0, 1.0, (amax / levels).clamp_min(1e-5)), levels)


def _truncates(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    _, scale = quantise_symmetric(x, levels)
    return (x / scale.float()[..., None]).clamp(-levels, levels).to(torch.int8), scale


def _exact_scale(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    amax = x.abs().amax(-1)
    scale = torch.where(amax == 0, 1.0, amax / levels)
    return (x / scale[..., None]).round().to(torch.int8), scale.to(torch.bfloat16)


def _rows(*rows: list[float]) -> Tensor:
    """One head: `[len(rows), 1, dim]`."""
    return torch.tensor(rows).unsqueeze(1)


def _symmetric_cases() -> list[Case]:
    return [
        Case("one row", (_rows([1.0, -2.1, 0.3, 4.0]), 127)),
        Case("the largest number is negative", (_rows([1.0, -5.0, 0.7, 2.4]), 127)),
        Case("seven levels, for four bits", (_rows([1.0, -2.1, 0.3, 4.0]), 7)),
        Case("a large row and a small one", (_rows([30.0, -9.2, 4.1, 2.0], [0.02, 0.012, -0.03, 0.004]), 127)),
        Case("two heads of one token", (torch.tensor([[[8.0, -3.1], [0.5, 0.13]]]), 127)),
        Case("a row of zeros", (_rows([0.0, 0.0, 0.0], [1.0, 2.1, -3.0]), 127)),
        Case("a row of very small numbers", (_rows([1e-5, -3e-6, 7e-6, 2e-6]), 127)),
        Case("a scale that bfloat16 rounds a long way", (_rows([127.4, -100.75, 88.3, 61.7]), 127)),
    ]


_SYMMETRIC = Exercise(
    name="l04.quantise_symmetric",
    reference=quantise_symmetric,
    cases=_symmetric_cases,
    hints=(
        "The largest absolute number of a row must become the largest code. Which dimension is a row?",
        "amax = x.abs().amax(-1), one number per token and head. The scale is amax / levels, or 1 where amax is 0, "
        "rounded to bfloat16 *before* anything is divided by it, because that is what the reader will multiply with.",
        "scale = torch.where(amax == 0, 1.0, amax / levels).to(torch.bfloat16); then x / scale.float()[..., None], "
        ".round(), .clamp(-levels, levels), .to(torch.int8).",
    ),
    wrong=(
        WrongVersion("takes one scale for the whole tensor", _per_tensor),
        WrongVersion("shares one scale between all heads of a token", _heads_together),
        WrongVersion("looks for the largest number and not for the largest absolute one", _without_abs),
        WrongVersion("takes the scale from the mean, so that whatever is larger is cut off", _from_the_mean),
        WrongVersion("divides by levels + 1 (128 for INT8), a code that does not exist", _one_level_more),
        WrongVersion("divides by zero when a row is all zeros", _divides_by_zero),
        WrongVersion("keeps scales away from zero by a constant, which swallows small rows", _with_epsilon),
        WrongVersion("cuts the fraction off instead of rounding", _truncates),
        WrongVersion("computes codes from the exact scale, and stores a rounded one", _exact_scale),
    ),
)

# ---------------------------------------------------------------------------------------------------------- pack_int4


def pack_int4(codes: Tensor) -> Tensor:
    """Two signed codes to a byte: int8 codes -8 … 7 `[..., n]`, n even → uint8 `[..., n / 2]`; the even ones lie low.

    Each code is kept in two's complement, as its lowest four bits.
    """
    nibbles = codes.to(torch.uint8) & 15
    return nibbles[..., ::2] | (nibbles[..., 1::2] << 4)


def _first_one_high(codes: Tensor) -> Tensor:
    return pack_int4(codes.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


def _signs_overwrite(codes: Tensor) -> Tensor:
    whole = codes.to(torch.uint8)
    return whole[..., ::2] | (whole[..., 1::2] << 4)


def _halves(codes: Tensor) -> Tensor:
    return pack_int4(torch.stack(codes.chunk(2, -1), -1).flatten(-2))


def _signs_dropped(codes: Tensor) -> Tensor:
    return pack_int4(codes.abs())


def _offset(codes: Tensor) -> Tensor:
    return pack_int4(codes + 8)


_PACK = Exercise(
    name="l04.pack_int4",
    reference=pack_int4,
    cases=[
        Case("two positive codes", (torch.tensor([3, 5], dtype=torch.int8),)),
        Case("a negative code in the low half", (torch.tensor([-1, 2], dtype=torch.int8),)),
        Case("a negative code in the high half", (torch.tensor([4, -7], dtype=torch.int8),)),
        Case(
            "six codes, the smallest and the largest among them", (torch.tensor([1, -8, 7, 0, -3, 6]).to(torch.int8),)
        ),
        Case("two rows", (torch.tensor([[1, 2, 3, 4], [-4, -3, -2, -1]], dtype=torch.int8),)),
    ],
    hints=(
        "A negative int8 is a byte of which all upper bits are set. Which of its bits do you want?",
        "Keep the lowest four bits of every code (& 15). Shift the odd ones up by four, and join them with the even "
        "ones by |. Do it in uint8: in int8 the shift meets the sign.",
        "nibbles = codes.to(torch.uint8) & 15; then nibbles[..., ::2] | (nibbles[..., 1::2] << 4).",
    ),
    wrong=(
        WrongVersion("puts the first code of a pair into the high half", _first_one_high),
        WrongVersion("lets the sign bits of a negative code run over its neighbour", _signs_overwrite),
        WrongVersion("pairs the first half of the row with the second, not neighbours", _halves),
        WrongVersion("loses the signs", _signs_dropped),
        WrongVersion("stores code + 8 instead of two's complement", _offset),
    ),
)

# -------------------------------------------------------------------------------------------------------- unpack_int4


def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of `pack_int4`: uint8 `[..., n / 2]` → int8 codes -8 … 7, `[..., n]`."""
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)


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


def _minus_eight(packed: Tensor) -> Tensor:
    return _never_negative(packed) - 8


_UNPACK = Exercise(
    name="l04.unpack_int4",
    reference=unpack_int4,
    cases=[
        Case("3 and 5", (torch.tensor([0x53], dtype=torch.uint8),)),
        Case("-1 in the low half", (torch.tensor([0x2F], dtype=torch.uint8),)),
        Case("-8, the smallest code, in the high half", (torch.tensor([0x84], dtype=torch.uint8),)),
        Case("two rows of two bytes", (torch.tensor([[0x21, 0x43], [0xDC, 0xFE]], dtype=torch.uint8),)),
    ],
    hints=(
        "Four bits hold 0 to 15. Which of these numbers stand for negative codes?",
        "packed & 15 is the low half, packed >> 4 the high one. They must alternate in the result: stack them along a "
        "new last dimension and flatten. What is above 7 means 16 less.",
        "nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(torch.int8); "
        "return torch.where(nibbles > 7, nibbles - 16, nibbles).",
    ),
    wrong=(
        WrongVersion("loses the signs: no code is ever negative", _never_negative),
        WrongVersion("takes the high half first", _high_first),
        WrongVersion("puts all low halves before all high ones", _side_by_side),
        WrongVersion("reads -8 as 8", _eight_is_positive),
        WrongVersion("takes 8 off every code instead of 16 off those above 7", _minus_eight),
    ),
)

# ----------------------------------------------------------------------------------------------- quantise_per_channel


def quantise_per_channel(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """KIVI's keys: a scale and a zero point per channel for each group of `group_size` tokens.

    `x`: `[tokens, heads, dim]`, whole groups. Returns codes 0 … 15 (uint8, like `x`), scale and zero (float16,
    `[groups, heads, dim]`). A scale that is not above 0 becomes 1. Liu et al. 2024, section 3.
    """
    grouped = x.unflatten(0, (-1, group_size))
    low, high = grouped.amin(1), grouped.amax(1)
    zero = low.half()
    scale = ((high - zero.float()) / 15).half()
    scale = torch.where(scale > 0, scale, 1.0).half()
    codes = ((grouped - zero.float()[:, None]) / scale.float()[:, None]).round().clamp(0, 15)
    return codes.flatten(0, 1).to(torch.uint8), scale, zero


def _affine(x: Tensor, group_size: int, low: Tensor, high: Tensor, codes: int = 15) -> tuple[Tensor, Tensor, Tensor]:
    """What the wrong versions do with limits of any shape that broadcasts to `[groups, group_size, heads, dim]`."""
    grouped = x.unflatten(0, (-1, group_size))
    limits = (len(grouped), 1, *x.shape[1:])
    zero = low.half()
    scale = ((high - zero.float()) / codes).half()
    scale = torch.where(scale > 0, scale, 1.0).half()
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


def _sixteen_steps(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    grouped = x.unflatten(0, (-1, group_size))
    return _affine(x, group_size, grouped.amin(1, keepdim=True), grouped.amax(1, keepdim=True), codes=16)


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


def _per_channel_cases() -> list[Case]:
    torch.manual_seed(12)
    channels = torch.tensor([[0.0, -4.0], [1.0, -10.0], [3.2, -5.3], [2.1, -6.1]]).unsqueeze(1)
    offset = torch.tensor([100.04, 100.08, 100.1, 100.055]).view(4, 1, 1)
    return [
        Case("one channel, four tokens in one group", (channels[:, :, :1], 4)),
        Case("two channels with ranges of their own", (channels, 4)),
        Case("two groups of two tokens", (channels, 2)),
        Case("two heads", (torch.tensor([[[1.0], [20.0]], [[2.0], [50.0]], [[1.32], [34.0]]]), 3)),
        Case("a channel that never changes", (torch.tensor([[[2.0, 1.0]], [[2.0, 4.0]], [[2.0, 1.6]]]), 3)),
        Case("a channel far from zero: float16 rounds the zero point above the minimum", (offset, 4)),
        Case("eight tokens, three heads, two groups", (torch.randn(8, 3, 4), 4)),
    ]


_PER_CHANNEL = Exercise(
    name="l04.quantise_per_channel",
    reference=quantise_per_channel,
    cases=_per_channel_cases,
    hints=(
        "Bring the tokens of a group into a dimension of their own. Along which dimension are minimum and maximum?",
        "x.unflatten(0, (-1, group_size)) is [groups, group_size, heads, dim]. Minimum and maximum along dimension 1. "
        "zero = the minimum as float16, scale = (maximum - zero) / 15 as float16, or 1 if that is not above 0.",
        "codes = ((grouped - zero.float()[:, None]) / scale.float()[:, None]).round().clamp(0, 15), then "
        ".flatten(0, 1).to(torch.uint8). scale and zero go out as [groups, heads, dim], float16.",
    ),
    wrong=(
        WrongVersion("looks along the channels of a token, not along the tokens of a channel", _per_token),
        WrongVersion("takes all tokens for one group", _one_group),
        WrongVersion("shares the limits of a channel between heads", _channels_of_all_heads),
        WrongVersion("forgets the zero point, so what is below zero is cut off", _no_zero_point),
        WrongVersion("divides by 16: sixteen codes have fifteen steps between them", _sixteen_steps),
        WrongVersion("forgets to clamp, so -1 becomes code 255", _no_clamp),
        WrongVersion("stores a scale of zero for a channel that never changes", _constant_divides),
    ),
)

# -------------------------------------------------------------------------------------------------------- cache_bytes


def cache_bytes(config: ModelConfig, bits: int, group_size: int, group_bytes: int) -> int:
    """Bytes that one token adds to a quantised cache over all layers, scales included.

    `bits` per code; each group of `group_size` numbers has `group_bytes` beside them (scale, zero point).
    """
    numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return numbers * bits // 8 + numbers // group_size * group_bytes


def _no_scales(config: ModelConfig, bits: int, group_size: int, group_bytes: int) -> int:
    return cache_bytes(config, bits, group_size, 0)


def _keys_only(config: ModelConfig, bits: int, group_size: int, group_bytes: int) -> int:
    return cache_bytes(config, bits, group_size, group_bytes) // 2


def _query_heads(config: ModelConfig, bits: int, group_size: int, group_bytes: int) -> int:
    return cache_bytes(config, bits, group_size, group_bytes) * config.num_heads // config.num_kv_heads


def _scale_per_layer(config: ModelConfig, bits: int, group_size: int, group_bytes: int) -> int:
    return cache_bytes(config, bits, group_size, 0) + 2 * config.num_layers * group_bytes


def _whole_bytes(config: ModelConfig, bits: int, group_size: int, group_bytes: int) -> int:
    return cache_bytes(config, 8, group_size, group_bytes)


def _bits_for_bytes(config: ModelConfig, bits: int, group_size: int, group_bytes: int) -> int:
    return cache_bytes(config, 8 * bits, group_size, group_bytes)


_BYTES = Exercise(
    name="l04.cache_bytes",
    reference=cache_bytes,
    cases=[
        Case(
            "one layer, two query heads on one KV head of width 4, 8 bits, a scale of 2 bytes per head",
            (shape(layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4), 8, 4, 2),
        ),
        Case("Llama-3-8B, 8 bits, a scale per head", (LLAMA_3_8B, 8, 128, 2)),
        Case("Llama-3-8B, 4 bits, a scale per head", (LLAMA_3_8B, 4, 128, 2)),
        Case("Llama-2-70B, 4 bits, scale and zero for every 32 numbers", (LLAMA_2_70B, 4, 32, 4)),
        Case("sixteen heads of width 32", (SMALL_HEADS, 8, 32, 2)),
    ],
    hints=(
        "Count the numbers of one token first, as in lesson 2. Each costs bits; each group of them costs bytes.",
        "numbers = 2 (K and V) · layers · KV heads · width. Codes take numbers · bits / 8 bytes, and there are "
        "numbers / group_size groups of group_bytes each.",
        "return numbers * bits // 8 + numbers // group_size * group_bytes",
    ),
    wrong=(
        WrongVersion("forgets the scales", _no_scales),
        WrongVersion("counts the keys and forgets the values", _keys_only),
        WrongVersion("counts every query head, though only the KV heads are stored", _query_heads),
        WrongVersion("counts one scale per layer, not one per group", _scale_per_layer),
        WrongVersion("gives each code a whole byte", _whole_bytes),
        WrongVersion("takes bits for bytes", _bits_for_bytes),
    ),
)

# -------------------------------------------------------------------------------------------------- score_error_bound


def score_error_bound(q: Tensor, scale: Tensor) -> Tensor:
    """Most that quantised keys can move the scores q · k / √d: ‖q‖₁ · s / (2 √d).

    `q`: `[queries, dim]`; `scale`: `[keys]`, the scale of each key. Returns `[queries, keys]`.
    """
    return q.abs().sum(-1)[:, None] * scale[None, :] / (2 * math.sqrt(q.shape[-1]))


def _length_of_q(q: Tensor, scale: Tensor) -> Tensor:
    return q.norm(dim=-1)[:, None] * scale[None, :] / (2 * math.sqrt(q.shape[-1]))


def _signs_cancel(q: Tensor, scale: Tensor) -> Tensor:
    return q.sum(-1)[:, None] * scale[None, :] / (2 * math.sqrt(q.shape[-1]))


def _whole_step(q: Tensor, scale: Tensor) -> Tensor:
    return 2 * score_error_bound(q, scale)


def _unscaled(q: Tensor, scale: Tensor) -> Tensor:
    return score_error_bound(q, scale) * math.sqrt(q.shape[-1])


def _by_d(q: Tensor, scale: Tensor) -> Tensor:
    return score_error_bound(q, scale) / math.sqrt(q.shape[-1])


_BOUND = Exercise(
    name="l04.score_error_bound",
    reference=score_error_bound,
    cases=[
        Case("one query, one key", (torch.tensor([[1.0, 1.0, 2.0, 0.0]]), torch.tensor([0.5]))),
        Case("a query with signs", (torch.tensor([[1.0, -3.0, 0.5, -0.5]]), torch.tensor([0.1, 0.4]))),
        Case("two queries, three keys", (torch.tensor([[2.0, 1.0], [-4.0, 0.3]]), torch.tensor([0.2, 0.1, 1.0]))),
    ],
    hints=(
        "Each number of a key is off by at most s / 2, up or down. Which signs would hurt a given query most?",
        "The worst case adds |q_i| · s / 2 over all channels: the sum of absolute values of q, times s / 2. Then the "
        "division by √d that every score has.",
        "q.abs().sum(-1)[:, None] * scale[None, :] / (2 * math.sqrt(q.shape[-1]))",
    ),
    wrong=(
        WrongVersion("takes the length of q (2-norm), which bounds the usual error and not the worst", _length_of_q),
        WrongVersion("adds the numbers of q with their signs, so that they cancel", _signs_cancel),
        WrongVersion("allows a whole step of the scale where rounding is off by half a step", _whole_step),
        WrongVersion("forgets that scores are divided by √d", _unscaled),
        WrongVersion("divides by d instead of √d", _by_d),
    ),
)

EXERCISES = [_SYMMETRIC, _PACK, _UNPACK, _PER_CHANNEL, _BYTES, _BOUND]
