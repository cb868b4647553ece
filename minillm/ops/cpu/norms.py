"""The operations between the matrix products: RMSNorm, RoPE, SiLU. Their data is in the L1 cache, so they cost little,
as long as none of them is a call of its own."""

from __future__ import annotations

import numpy as np
from numba import njit

from minillm.ops.cpu.compiled import PART
from minillm.ops.cpu.simd import LANES, ONE, ZERO, exp, fma, load, splat, store, total


@njit(**PART)
def rms_norm(x, x_at, size, weights, weight_at, eps, out, out_at):
    """out = x / √(mean(x²) + ε) · weight, of `size` numbers."""
    squares = splat(ZERO)
    for i in range(0, size, LANES):
        v = load(x, x_at + i)
        squares = fma(v, v, squares)
    scale = splat(ONE / np.sqrt(total(squares) / np.float32(size) + eps))
    for i in range(0, size, LANES):
        store(out, out_at + i, load(x, x_at + i) * scale * load(weights, weight_at + i))


@njit(**PART)
def rotate(x, at, size, cos, signed_sin, row):
    """RoPE of one head, in place: rotates the pairs (i, i + size / 2) by row `row` of the tables (`[positions, size]`,
    flat)."""
    half, table = size // 2, row * size
    for i in range(0, half, LANES):
        low, high = load(x, at + i), load(x, at + half + i)
        rotated_low = fma(high, load(signed_sin, table + i), low * load(cos, table + i))
        rotated_high = fma(low, load(signed_sin, table + half + i), high * load(cos, table + half + i))
        store(x, at + i, rotated_low)
        store(x, at + half + i, rotated_high)


@njit(**PART)
def silu(x, at, size, out, out_at):
    """out = x / (1 + e^-x)."""
    for i in range(0, size, LANES):
        v = load(x, at + i)
        store(out, out_at + i, v / (splat(ONE) + exp(splat(ZERO) - v)))


@njit(**PART)
def silu_gate(x, gate_at, up_at, size, out, out_at):
    """out = gate / (1 + e^-gate) · up."""
    for i in range(0, size, LANES):
        gate = load(x, gate_at + i)
        store(out, out_at + i, gate / (splat(ONE) + exp(splat(ZERO) - gate)) * load(x, up_at + i))
