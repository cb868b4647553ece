"""A softmax that is taken block by block (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").

Three things are kept of a row: the largest score so far, m; the sum of e^(s - m) so far; and the sum of the values with
these weights. If a block has a larger score, both sums are multiplied by e^(m_old - m_new), and go on from there.

The sum of weights is kept in sixteen lanes until the end, and lies behind the `size` sums of values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.extending import intrinsic

from minillm.ops.cpu.compiled import OPTIONS
from minillm.ops.cpu.simd import LANES, LOWEST, exp_within, f32x16, largest, load, splat, store, total

ZERO, NOTHING = np.float32(0), np.float32(-np.inf)


@intrinsic
def larger(typing: Any, a: Any, b: Any) -> Any:
    """`a` in the lanes where it is larger, else `b`, also where either is NaN: one instruction of x86."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, b = args
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    return f32x16(f32x16, f32x16), code


@njit(**OPTIONS)
def exp_of_negative(x):
    """`exp` for what is not above zero, in fewer instructions. NaN stays NaN."""
    return exp_within(x, larger(splat(LOWEST), x))


@njit(**OPTIONS)
def start_row(largest_scores, row, sums, sums_at, size):
    """Nothing seen yet."""
    largest_scores[row] = NOTHING
    for i in range(0, size + LANES, LANES):
        store(sums, sums_at + i, splat(ZERO))


@njit(**OPTIONS)
def weigh_block(scores, scores_at, width, first, last, largest_scores, row, sums, sums_at, size):
    """Turn a block of scores into weights e^(s - m), those outside `first` to `last - 1` into zero, in place; `width`,
    a multiple of sixteen, is their number. The sums become those for this m, but for the values of the block.

    A NaN among the scores becomes one among the weights, whatever m is.
    """
    if first >= last:
        for j in range(0, width, LANES):
            store(scores, scores_at + j, splat(ZERO))
        return
    for j in range(first):
        scores[scores_at + j] = NOTHING
    for j in range(last, width):
        scores[scores_at + j] = NOTHING
    before = largest_scores[row]
    high = splat(before)
    for j in range(0, width, LANES):
        high = larger(load(scores, scores_at + j), high)
    peak = largest(high)
    if peak > before:
        largest_scores[row] = peak
        shrink = exp_of_negative(splat(before) - splat(peak))
        for i in range(0, size + LANES, LANES):
            store(sums, sums_at + i, load(sums, sums_at + i) * shrink)
    whole = load(sums, sums_at + size)
    for j in range(0, width, LANES):
        e = exp_of_negative(load(scores, scores_at + j) - splat(peak))
        whole = whole + e
        store(scores, scores_at + j, e)
    store(sums, sums_at + size, whole)


@njit(**OPTIONS)
def finish_row(sums, sums_at, size, out, out_at):
    """The weighted mean of the values."""
    whole = splat(total(load(sums, sums_at + size)))
    for i in range(0, size, LANES):
        store(out, out_at + i, load(sums, sums_at + i) / whole)
