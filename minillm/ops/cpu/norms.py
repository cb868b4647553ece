"""What lies between the products: RMSNorm, RoPE, SiLU, and rounding activations to bytes. All of it moves only what the
cache nearest to the processor holds, so none of it matters, as long as it costs no call of its own."""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import overload

from minillm.ops.cpu.compiled import OPTIONS
from minillm.ops.cpu.simd import (
    LANES,
    ONE,
    absolute,
    exp,
    fma,
    largest,
    load,
    maximum,
    rint,
    splat,
    store,
    store_bytes,
    total,
)

ZERO, LARGEST, TINY = np.float32(0), np.float32(127), np.finfo(np.float32).tiny
MIDDLE = 128
"""What makes a signed byte unsigned."""
BYTE, PER_BYTE, UPWARDS = np.float32(256), np.float32(1 / 256), np.float32(1 / 512)
LARGEST_OF_TWO = np.float32(127 * 256 + 127)
"""The largest number whose two bytes are signed both. `UPWARDS`: halves go up, so that the second is at most 127."""


@njit(**OPTIONS)
def rms_norm(x, x_at, size, weights, weight_at, eps, out, out_at):
    """out = x / √(mean(x²) + ε) · weight, `size` numbers."""
    squares = splat(ZERO)
    for i in range(0, size, LANES):
        v = load(x, x_at + i)
        squares = fma(v, v, squares)
    scale = splat(ONE / np.sqrt(total(squares) / np.float32(size) + eps))
    for i in range(0, size, LANES):
        store(out, out_at + i, load(x, x_at + i) * scale * load(weights, weight_at + i))


@njit(**OPTIONS)
def rotate(x, at, size, cos, signed_sin, row):
    """RoPE of one head, in place: pairs (i, i + size / 2), by row `row` of the tables (`[positions, size]`, flat)."""
    half, table = size // 2, row * size
    for i in range(0, half, LANES):
        low, high = load(x, at + i), load(x, at + half + i)
        turned_low = fma(high, load(signed_sin, table + i), low * load(cos, table + i))
        turned_high = fma(low, load(signed_sin, table + half + i), high * load(cos, table + half + i))
        store(x, at + i, turned_low)
        store(x, at + half + i, turned_high)


@njit(**OPTIONS)
def silu_gate(x, gate_at, up_at, size, out, out_at):
    """out = gate / (1 + e^-gate) · up."""
    for i in range(0, size, LANES):
        gate = load(x, gate_at + i)
        store(out, out_at + i, gate / (splat(ONE) + exp(splat(ZERO) - gate)) * load(x, up_at + i))


def round_row(w, x, x_at, size, codes, row, scales, scale_at):
    """For weights `w` that are multiplied as bytes: the codes of row `row`, and its scale. Else nothing.

    `PAIRED` weights take a byte per number, moved up by 128; `TWICE_PAIRED` ones two, in rows 2 · `row` and the next:
    code = 256 · first + second, both moved up by 128.
    """
    raise NotImplementedError


@njit(**OPTIONS)
def _step(x, x_at, size, most, scales, scale_at):
    """What one unit of the codes stands for, if the largest of them is `most`."""
    high = absolute(load(x, x_at))
    for i in range(LANES, size, LANES):
        high = maximum(high, absolute(load(x, x_at + i)))
    step = largest(high) / most
    step = TINY if step < TINY else step
    scales[scale_at] = step
    return splat(step)


@njit(**OPTIONS)
def _round_row(x, x_at, size, codes, row, scales, scale_at):
    step, at = _step(x, x_at, size, LARGEST, scales, scale_at), row * size
    for i in range(0, size, LANES):
        store_bytes(codes, at + i, rint(load(x, x_at + i) / step), MIDDLE)


@njit(**OPTIONS)
def _round_row_twice(x, x_at, size, codes, row, scales, scale_at):
    step, at = _step(x, x_at, size, LARGEST_OF_TWO, scales, scale_at), 2 * row * size
    for i in range(0, size, LANES):
        code = rint(load(x, x_at + i) / step)
        first = rint(fma(code, splat(PER_BYTE), splat(UPWARDS)))
        store_bytes(codes, at + i, first, MIDDLE)
        store_bytes(codes, at + size + i, fma(first, splat(-BYTE), code), MIDDLE)


@overload(round_row, jit_options=OPTIONS)
def _typed_round_row(w, x, x_at, size, codes, row, scales, scale_at):
    if w.dtype == types.uint8:
        return lambda w, x, x_at, size, codes, row, scales, scale_at: _round_row(
            x, x_at, size, codes, row, scales, scale_at
        )
    if w.dtype == types.boolean:
        return lambda w, x, x_at, size, codes, row, scales, scale_at: _round_row_twice(
            x, x_at, size, codes, row, scales, scale_at
        )
    return lambda w, x, x_at, size, codes, row, scales, scale_at: None
