"""Questions on the lessons 04 and 05."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from instructors.exam.l01_to_l03 import config_of, model_sizes
from instructors.exam.question import Answer, Numbers, Question
from minillm.teaching.variants.random_numbers import Draw

Function = Callable[..., Any]


def _codes(d: Draw) -> Numbers:
    scale = d.one_of(0.25, 0.5, 1.0, 2.0)
    codes = [d.int(-6, 6) + d.one_of(-0.3, -0.2, 0.2, 0.3) for _ in range(4)] + [d.one_of(-7.0, 7.0)]
    return {"row": [round(scale * codes[i], 3) for i in d.some(range(5), 5)]}


def _codes_answer(quantise: Function, row: list[float]) -> Answer:
    codes, scale = quantise(torch.tensor(row)[None, None], 7)
    error = (codes.float() * scale.float()[..., None] - torch.tensor(row)).abs().max()
    return {"scale": float(scale), "codes": codes.flatten().tolist(), "largest error": round(float(error), 4)}


def _packed(d: Draw) -> Numbers:
    return {"codes": [d.int(-8, -1), d.int(0, 7), d.int(1, 7), d.int(-8, -1)]}


def _packed_answer(pack: Function, codes: list[int]) -> Answer:
    return {"bytes, hexadecimal": [f"{byte:02x}" for byte in pack(torch.tensor(codes, dtype=torch.int8)).tolist()]}


def _cache(d: Draw) -> Numbers:
    return {**model_sizes(d), "group": d.one_of(16, 32)}


def _cache_answer(cache_bytes: Function, layers: int, heads: int, kv_heads: int, head_dim: int, group: int) -> Answer:
    each = cache_bytes(config_of(layers, heads, kv_heads, head_dim), 4, group, 4)
    return {"bytes per token": each, "bits per number": 8 * each / (2 * layers * kv_heads * head_dim)}


def _product(d: Draw) -> Numbers:
    x = [127, *(d.int(-90, 90) for _ in range(2))]
    step = d.one_of(0.125, 0.25, 0.5)
    return {
        "x": [x[i] * step for i in d.some(range(3), 3)],
        "codes": [d.int(-127, 127) for _ in range(3)],
        "scale": d.one_of(0.02, 0.03, 0.04),
    }


def _product_answer(w8a8_linear: Function, x: list[float], codes: list[int], scale: float) -> Answer:
    y = w8a8_linear(torch.tensor([x]), torch.tensor([codes], dtype=torch.int8), torch.tensor([scale]))
    return {"scale of the token": max(map(abs, x)) / 127, "y": float(y)}


def _groups(d: Draw) -> Numbers:
    return {"billions": d.float(1, 30), "group": d.one_of(32, 64, 128)}


def _groups_answer(quantise_groups: Function, billions: float, group: int) -> Answer:
    weight = torch.linspace(-1, 1, 4 * group).view(2, -1)
    codes, scale, zero = quantise_groups(weight, group)
    bits = (4 * codes.numel() + 8 * scale.nbytes + 8 * zero.nbytes) / weight.numel()
    return {"bits per weight": bits, "GB": billions * bits / 8, "times smaller than float16": 16 / bits}


QUESTIONS = [
    Question(
        "04.codes",
        5,
        "Quantise the row {row} symmetrically to INT4 with codes from −7 to 7 and one scale for the row. Give the "
        "scale, the codes in order, and the largest absolute error.",
        _codes,
        _codes_answer,
        "The scale is the largest magnitude / 7; each code is the number / scale, rounded; an error is at most half a "
        "scale.",
        "l04.quantise_symmetric",
    ),
    Question(
        "04.packing",
        4,
        "Pack the INT4 codes {codes} into two bytes, two's complement, the first code of each pair in the low half. "
        "Give both bytes in hexadecimal.",
        _packed,
        _packed_answer,
        "A negative code c is stored as c + 16; byte = low + 16 · high.",
        "l04.pack_int4",
    ),
    Question(
        "04.cache_bytes",
        5,
        "A model has {layers} layers, {heads} query heads, {kv_heads} KV heads of width {head_dim}. Its cache is INT4, "
        "with 4 bytes (a scale and a zero point in float16) for each group of {group} numbers. How many bytes does one "
        "token add, and how many bits does a number take, scales included?",
        _cache,
        _cache_answer,
        "2 · layers · KV heads · width numbers, half a byte each, and 4 bytes per group: 4 + 32 / group bits.",
        "l04.cache_bytes",
    ),
    Question(
        "05.w8a8",
        5,
        "A W8A8 linear layer has one output with the INT8 weight codes {codes} and the scale {scale}. Its input is "
        "{x}. Quantise the input symmetrically (codes within ±127, one scale for the token), multiply integers, and "
        "rescale. What are the token's scale and the output?",
        _product,
        _product_answer,
        "Scale of the token: largest magnitude / 127. y = Σ (input codes · weight codes) · both scales.",
        "l05.w8a8_linear",
    ),
    Question(
        "05.group_bits",
        4,
        "Weights are stored in 4 bits, with a float16 scale and an 8-bit zero point for each group of {group} weights. "
        "How many bits does a weight take? How many GB (10⁹ bytes) do {billions} billion weights take, and how many "
        "times smaller is that than float16?",
        _groups,
        _groups_answer,
        "4 + 24 / group bits per weight.",
        "l05.quantise_groups",
    ),
]
