"""The products of attention over keys and values in bfloat16: two numbers in a lane, as in `register_tiles.tile_dots`.

Queries and softmax weights are rounded to bfloat16 too; scores, the softmax and all sums are float32. Half the products
of float32 remain where the processor has AVX512_BF16.

Scores: the pairs of a key are neighbouring channels, so a row of the cache already is a row of pairs, and transposing
sixteen keys moves half the lanes. Values: the pairs are neighbouring positions, so two rows are interleaved first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from minillm.ops.cpu.compiled import PART
from minillm.ops.cpu.panels import dot_tiles
from minillm.ops.cpu.simd import I16, I32, LANES, address, load, read, store_bfloats

SHORTS = ir.VectorType(I16, 2 * LANES)


def pair_tiles(scratch, w_at, panel, x_at, x_row, length, y_at, y_row, rows, add, panels):
    """`tile_dots` of pairs for operands in `scratch`: all indices and distances are in floats, `length` in pairs.

    `w_at`, `panel`: even.
    """
    raise NotImplementedError


@overload(pair_tiles, jit_options=PART, prefer_literal=True)
def _typed_pair_tiles(scratch, w_at, panel, x_at, x_row, length, y_at, y_row, rows, add, panels):
    def product(scratch, w_at, panel, x_at, x_row, length, y_at, y_row, rows, add, panels):
        dot_tiles(
            scratch.view(np.uint64), w_at // 2, panel // 2, scratch.view(np.uint8), 4 * x_at, 4 * x_row, length,
            scratch, y_at, y_row, rows, add, panels,
        )  # fmt: skip

    return product


@intrinsic
def _interleave(typing: Any, pool: Any, first: Any, second: Any, has_second: Any, out: Any, at: Any, panel: Any) -> Any:
    """Pairs of the 32 bfloat16s at `pool[first]` with those at `pool[second]`, or with zeros: sixteen pairs go to
    `out[at]`, sixteen to `out[at + panel]`. Both arrays are float32."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pool, first, second, has_second, out, at, panel = args
        kind, out_kind = signature.args[0], signature.args[4]
        a = read(builder, address(context, builder, kind, pool, first, SHORTS))
        b = read(builder, address(context, builder, kind, pool, builder.select(has_second, second, first), SHORTS))
        b = builder.select(has_second, b, ir.Constant(SHORTS, [0] * 2 * LANES))
        for half in range(2):
            lanes = [lane + source * 2 * LANES for lane in range(half * LANES, (half + 1) * LANES) for source in (0, 1)]
            order = ir.Constant(ir.VectorType(I32, 2 * LANES), lanes)
            to = builder.add(at, panel) if half else at
            pointer = address(context, builder, out_kind, out, to, SHORTS)
            builder.store(builder.shuffle_vector(a, b, order), pointer).align = 1
        return context.get_dummy_value()

    intp = types.intp
    return types.void(pool, intp, intp, types.boolean, out, intp, intp), code


@njit(**PART)
def interleave_rows(pool, source, row, count, size, out, out_at, pair, most):
    """Interleave `count` rows of `size` pairs of channels, `row` floats apart, from `pool[source]` on, in twos.

    Panel p holds channels 16 p … 16 p + 15 of at most `most` pairs of rows; these become its pairs from `pair` on. A
    last row without a partner is paired with zeros.
    """
    panel = most * LANES
    for i in range(0, count, 2):
        first, at = source + i * row, out_at + (pair + i // 2) * LANES
        for j in range(0, size, LANES):
            _interleave(pool, first + j, first + row + j, i + 1 < count, out, at + j // LANES * 2 * panel, panel)


@njit(**PART)
def add_pair_rows(scratch, at, head_dim, count, weights, row, rows, sums):
    """Add `count` weighted values to the sums of all rows. `scratch[at]`: the values, by `interleave_rows`, for
    `row` / 2 pairs at most. `scratch[weights]`: the weights of each row, `row` floats apart; they are rounded in place.

    Weights behind the last value, up to a multiple of sixteen, must be zero.
    """
    panel, size, pairs = row // 2 * LANES, head_dim + LANES, (count + 1) // 2
    for r in range(rows):
        for j in range(0, count, LANES):
            store_bfloats(scratch, weights + r * row + j // 2, load(scratch, weights + r * row + j))
    for p in range(0, head_dim, 4 * LANES):
        if head_dim - p >= 4 * LANES:
            pair_tiles(scratch, at + p // LANES * panel, panel, weights, row, pairs, sums + p, size, rows, True, 4)
        else:
            pair_tiles(scratch, at + p // LANES * panel, panel, weights, row, pairs, sums + p, size, rows, True, 2)
