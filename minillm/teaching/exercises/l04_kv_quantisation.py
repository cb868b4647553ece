"""Lesson 04, INT8 and INT4 KV: symmetric codes, two codes to a byte, a scale per channel, bytes, a bound on scores."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.teaching.compare import close
from minillm.teaching.exercise import Attempt, Case, Exercise
from minillm.teaching.exercises import _l04_slips as slips
from minillm.teaching.exercises._facts import about_factor
from minillm.teaching.exercises._l04_mistakes import BOUND, BYTES, PACK, PER_CHANNEL, SYMMETRIC, UNPACK
from minillm.teaching.exercises._l04_reference import (
    cache_bytes,
    pack_int4,
    quantise_per_channel,
    quantise_symmetric,
    score_error_bound,
    unpack_int4,
)
from minillm.teaching.exercises.l02_kv_cache import LLAMA_2_70B, LLAMA_3_8B, shape
from minillm.teaching.source import body_of

RELATIVE = close(1e-4, 0.0)
"""Compares numbers of any size: scales and outputs can be far below the absolute tolerance of `values_match`."""
SMALL_HEADS = shape(layers=12, hidden=512, heads=16, kv_heads=16, head_dim=32)
"""Many narrow heads, so that the scale of each head is a larger share of the bytes."""


def _rows(*rows: list[float]) -> Tensor:
    """One head: `[len(rows), 1, dim]`."""
    return torch.tensor(rows).unsqueeze(1)


def _symmetric_cases() -> list[Case]:
    return [
        Case("one row", (_rows([1.0, -2.1, 0.3, 4.0]), 127)),
        Case("the largest number is negative", (_rows([1.0, -5.0, 0.7, 2.4]), 127)),
        Case("largest code 7, for four bits", (_rows([1.0, -2.1, 0.3, 4.0]), 7)),
        Case("a large row and a small one", (_rows([30.0, -9.2, 4.1, 2.0], [0.02, 0.012, -0.03, 0.004]), 127)),
        Case("two heads of one token", (torch.tensor([[[8.0, -3.1], [0.5, 0.13]]]), 127)),
        Case("a row of zeros", (_rows([0.0, 0.0, 0.0], [1.0, 2.1, -3.0]), 127)),
        Case("a row with one zero", (_rows([0.0, -2.1, 0.7, 4.0]), 127)),
        Case("a row of very small numbers", (_rows([1e-20, -3e-21, 7e-21, 2e-21]), 127)),
        Case("a scale with a large rounding error in bfloat16", (_rows([127.4, -100.75, 88.3, 61.7]), 127)),
    ]


def _about_rows_of_zeros(attempt: Attempt) -> str | None:
    """The scale of a row of zeros, if it is not 1."""
    (x, _), (_, scale) = attempt.case.args, attempt.got
    of_zeros = scale[x.abs().amax(-1) == 0]
    others = of_zeros[of_zeros != 1]
    return f"a row of zeros must get the scale 1, and gets {others[0].item():.3g}" if len(others) else None


_SYMMETRIC = Exercise(
    name="l04.quantise_symmetric",
    reference=quantise_symmetric,
    compare=RELATIVE,
    cases=_symmetric_cases,
    hints=(
        "The largest absolute number of a row must become the largest code. Which dimension is a row?",
        "One number per token and head: the largest absolute value, x.abs().amax(-1). The scale is that / levels, or 1 "
        "where it is 0. Round it to bfloat16 before you divide by it, because dequantising multiplies by the rounded "
        "scale.",
        "amax = …; scale = torch.where(amax == 0, …, …).to(torch.bfloat16); codes = (x / …).round() within ±levels, as "
        "int8. The scale needs a last dimension to divide x: scale.float()[..., None].",
        body_of(quantise_symmetric),
    ),
    wrong=(*SYMMETRIC, *slips.SYMMETRIC),
    fallback_diagnosis=_about_rows_of_zeros,
    parts=("codes", "scale"),
)

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
        Case("two tokens of two heads", (torch.tensor([[[1, 2], [3, 4]], [[-4, -3], [-2, -1]]], dtype=torch.int8),)),
    ],
    hints=(
        "A negative int8 is a byte of which all upper bits are set. Which of its bits do you want?",
        "Keep the lowest four bits of every code (& 15). Shift the odd codes left by four bits and combine them "
        "with the even ones by |. Do it in uint8: in int8 the shift changes the sign bit.",
        "nibbles = codes.to(torch.uint8) & …; return nibbles[..., ::2] | (… << …).",
        body_of(pack_int4),
    ),
    wrong=(*PACK, *slips.PACK),
)

_UNPACK = Exercise(
    name="l04.unpack_int4",
    reference=unpack_int4,
    cases=[
        Case("3 and 5", (torch.tensor([0x53], dtype=torch.uint8),)),
        Case("-1 in the low half", (torch.tensor([0x2F], dtype=torch.uint8),)),
        Case("-8, the smallest code, in the high half", (torch.tensor([0x84], dtype=torch.uint8),)),
        Case("7, the largest code, in both halves", (torch.tensor([0x77, 0x61], dtype=torch.uint8),)),
        Case("two rows of two bytes", (torch.tensor([[0x21, 0x43], [0xDC, 0xFE]], dtype=torch.uint8),)),
        Case("two tokens of two heads", (torch.tensor([[[0x21], [0x43]], [[0xDC], [0xFE]]], dtype=torch.uint8),)),
    ],
    hints=(
        "Four bits hold 0 to 15. Which of these numbers stand for negative codes?",
        "packed & 15 is the low half, packed >> 4 the high one. They must alternate in the result: stack them along a "
        "new last dimension and flatten. Subtract 16 from values above 7.",
        "nibbles = torch.stack((…, …), dim=-1).flatten(-2).to(torch.int8); return torch.where(…, …, nibbles).",
        body_of(unpack_int4),
    ),
    wrong=(*UNPACK, *slips.UNPACK),
)


def _per_channel_cases() -> list[Case]:
    draw = torch.Generator().manual_seed(12)
    channels = torch.tensor([[0.0, -4.0], [1.0, -10.0], [3.2, -5.3], [2.1, -6.1]]).unsqueeze(1)
    offset = torch.tensor([100.04, 100.08, 100.1, 100.055]).view(4, 1, 1)
    constant = torch.full((4, 1, 1), 100.04)
    tiny = torch.tensor([0.0, 1e-6, 3.1e-7, 6.2e-7]).view(4, 1, 1)
    return [
        Case("one channel, four tokens in one group", (channels[:, :, :1], 4)),
        Case("two channels with ranges of their own", (channels, 4)),
        Case("two groups of two tokens", (channels, 2)),
        Case("two heads", (torch.tensor([[[1.0], [20.0]], [[2.0], [50.0]], [[1.32], [34.0]]]), 3)),
        Case("a channel that never changes", (torch.tensor([[[2.0, 1.0]], [[2.0, 4.0]], [[2.0, 1.6]]]), 3)),
        Case("a channel far from zero: float16 rounds the zero point above the minimum", (offset, 4)),
        Case("a channel that never changes, of which float16 rounds the zero point up", (constant, 4)),
        Case("a range so small that float16 rounds its scale down by a tenth", (tiny, 4)),
        Case("a range so small that float16 makes its scale 0", (0.1 * tiny, 4)),
        Case("eight tokens, three heads, two groups", (torch.randn(8, 3, 4, generator=draw), 4)),
    ]


_PER_CHANNEL = Exercise(
    name="l04.quantise_per_channel",
    reference=quantise_per_channel,
    compare=RELATIVE,
    cases=_per_channel_cases,
    hints=(
        "Give the tokens of a group their own dimension. Along which dimension do you take minimum and maximum?",
        "x.unflatten(0, (-1, group_size)) is [groups, group_size, heads, dim]. Minimum and maximum along dimension 1. "
        "zero = the minimum as float16, scale = (maximum - zero) / 15 as float16, or 1 if that is not above 0.",
        "grouped = …; low, high = …; zero = low.half(); scale = (…).half(), and 1 where it is not above 0; codes = "
        "((grouped - …) / …).round().clamp(…), and back to [tokens, heads, dim] by .flatten(0, 1). zero and scale need "
        "another dimension there: zero.float()[:, None].",
        body_of(quantise_per_channel),
    ),
    wrong=(*PER_CHANNEL, *slips.PER_CHANNEL),
    parts=("codes", "scale", "zero"),
)

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
        "numbers = 2 * …; return numbers * … // 8 + numbers // … * ….",
        body_of(cache_bytes),
    ),
    wrong=(*BYTES, *slips.BYTES),
    fallback_diagnosis=about_factor,
)

_BOUND = Exercise(
    name="l04.score_error_bound",
    reference=score_error_bound,
    cases=[
        Case("one query, one key", (torch.tensor([[1.0, 1.0, 2.0, 0.0]]), torch.tensor([0.5]))),
        Case("a query with signs", (torch.tensor([[1.0, -3.0, 0.5, -0.5]]), torch.tensor([0.1, 0.4]))),
        Case("two queries, three keys", (torch.tensor([[2.0, 1.0], [-4.0, 0.3]]), torch.tensor([0.2, 0.1, 1.0]))),
    ],
    hints=(
        "Each number of a key is off by at most s / 2, up or down. Which signs of the errors move a score most?",
        "The worst case adds |q_i| · s / 2 over all channels: the sum of absolute values of q, times s / 2. Then the "
        "division by √d that every score has.",
        "…[:, None] · scale[None, :] / (…): one number per query, as a column, times one per key, as a row.",
        body_of(score_error_bound),
    ),
    wrong=(*BOUND, *slips.BOUND),
)

EXERCISES = [_SYMMETRIC, _PACK, _UNPACK, _PER_CHANNEL, _BYTES, _BOUND]
