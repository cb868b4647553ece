"""Online softmax, block by block (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").

The state of a row: the largest score so far, m; the sum of the weights e^(s - m) so far; and the sum of the values with
these weights. If a block has a larger score, both sums are first multiplied by e^(m_old - m_new).

The sum of weights is kept in sixteen lanes until the end. It lies behind the `size` sums of values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.extending import intrinsic

from minillm.ops.cpu.compiled import PART
from minillm.ops.cpu.simd import LANES, LOWEST, ZERO, exp_within, f32x16, largest, load, splat, store, total

NEGATIVE_INFINITY = np.float32(-np.inf)


@intrinsic
def larger(typing: Any, a: Any, b: Any) -> Any:
    """`a` in the lanes where it is larger, else `b`, also where either is NaN: one instruction on x86."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, b = args
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    return f32x16(f32x16, f32x16), code


@njit(**PART)
def exp_of_negative(x):
    """`exp` of x ≤ 0, in fewer instructions. NaN stays NaN."""
    return exp_within(x, larger(splat(LOWEST), x))


@njit(**PART)
def start_row(largest_scores, row, sums, sums_at, size):
    """Initialise the state of a row."""
    largest_scores[row] = NEGATIVE_INFINITY
    for i in range(0, size + LANES, LANES):
        store(sums, sums_at + i, splat(ZERO))


@njit(**PART)
def softmax_block(scores, scores_at, width, first, last, largest_scores, row, sums, sums_at, size):
    """Turn the scores of a block into weights e^(s - m), in place. `width`: their number, a multiple of sixteen;
    weights outside `first` to `last - 1` become zero. Updates m, rescales both sums and adds the weights to
    theirs; the caller adds the weighted values.

    A NaN among the scores becomes a NaN among the weights, whatever m is.
    """
    if first >= last:
        for j in range(0, width, LANES):
            store(scores, scores_at + j, splat(ZERO))
        return
    for j in range(first):
        scores[scores_at + j] = NEGATIVE_INFINITY
    for j in range(last, width):
        scores[scores_at + j] = NEGATIVE_INFINITY
    before = largest_scores[row]
    high = splat(before)
    for j in range(0, width, LANES):
        high = larger(load(scores, scores_at + j), high)
    peak = largest(high)
    if peak > before:
        largest_scores[row] = peak
        rescale = exp_of_negative(splat(before) - splat(peak))
        for i in range(0, size + LANES, LANES):
            store(sums, sums_at + i, load(sums, sums_at + i) * rescale)
    weight_sum = load(sums, sums_at + size)
    for j in range(0, width, LANES):
        e = exp_of_negative(load(scores, scores_at + j) - splat(peak))
        weight_sum = weight_sum + e
        store(scores, scores_at + j, e)
    store(sums, sums_at + size, weight_sum)


@njit(**PART)
def finish_row(sums, sums_at, size, out, out_at):
    """Store the weighted mean of the values in `out`."""
    weight_sum = splat(total(load(sums, sums_at + size)))
    for i in range(0, size, LANES):
        store(out, out_at + i, load(sums, sums_at + i) / weight_sum)
