"""Products with 4-bit weights in groups: w = (q - z) · s, with one scale s and one zero point z per group.

Panels are as in `panels.py`, of 32-bit words. A word holds eight columns of one output; a load brings sixteen words,
one for each output of the panel. A panel is stored group by group, each with its scales and zero points first:

    sixteen s (float16), then sixteen z (16 bits each)     64 bytes
    columns 0 to 7 of sixteen outputs: byte j of a word is column j (low half) and 4 + j (high half)     64 bytes
    columns 8 to 15, and so on

So a matrix is still one stream, read from its first byte to its last, and no load crosses a cache line. A weight takes
4.25 bits in groups of 128 and 4.5 in groups of 64. (In the checkpoint it takes 4.16 and 4.31: z has four bits there.
llama.cpp's Q4_0 has 4.5: groups of 32, no z.)

Where the processor multiplies bytes (`NIBBLES`), a masked nibble is an unsigned byte and an activation is two signed
bytes, so no 128 has to be added. For a row of codes x, in units of `step`,

    y = step · Σ_groups s · (Σ_k q x - z · Σ_k x).

The bracket is computed in integers, exactly; Σ_k x is computed once, when the row is rounded (`rounding.py`). That is
as many multiplications as INT8 with two bytes, and a shift and two masks more per 128 weights. On other processors
(`FLOAT_NIBBLES`) nibbles are converted to floats, and the bracket is Σ_k (q - z) x in fp32.

Where it wins: when weights come from memory, because they are half the bytes of INT8; a little with one row when they
come from the last-level cache. Where it loses: with more rows and weights in a cache, arithmetic is the limit. There it
is some 5 % slower than INT8, and 10 to 30 % where weights become floats.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from minillm.ops.cpu.compiled import PART
from minillm.ops.cpu.register_tiles import FITS_ALL, add_products, loop_in_registers
from minillm.ops.cpu.simd import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    ZERO,
    address,
    call,
    floats_at,
    no_inline,
    read,
    repeat,
    splat,
    store,
)

NIBBLES, FLOAT_NIBBLES = np.uint32, np.int32
"""dtypes of the panels: for activations in two bytes, and for float activations. The bytes of both are the same."""
COLUMNS_PER_WORD = 8
"""Columns in a 32-bit word."""
MAX_GROUP_SIZE = 4096
"""Most columns whose products, each at most 15 · 32 639, have a sum that fits into 32 bits."""
TWO_TO_23 = 0x4B000000
"""The bits of the float 2^23, whose last bit is worth 1. With a small integer n in its last bits it is 2^23 + n, and
the difference of two such floats is exact. That is cheaper than converting n to a float."""


def pack_nibbles(
    codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group: int, kind: type = NIBBLES
) -> np.ndarray:
    """Codes `[out, in]` uint8, 0 to 15, `in` and `group` multiples of sixteen, float16 scales and uint8 zero points
    `[out, groups]` → panels, flat. `kind`: `NIBBLES` or `FLOAT_NIBBLES`."""
    padding = ((0, -len(codes) % LANES), (0, 0))
    codes, scales, zeros = (np.pad(x, padding) for x in (codes, scales, zeros))
    halves = codes.reshape(-1, LANES, codes.shape[1] // COLUMNS_PER_WORD, 2, 4)
    words = (halves[:, :, :, 0] | halves[:, :, :, 1] << 4).view(np.uint32)[..., 0]
    heads = np.stack([x.reshape(-1, LANES, x.shape[1]) for x in (scales.view(np.uint16), zeros.astype(np.uint16))], 1)
    parts, step = [], group // COLUMNS_PER_WORD
    for i in range(scales.shape[1]):
        head = np.ascontiguousarray(heads[..., i]).reshape(-1, 2 * LANES).view(np.uint32)
        parts += [head[:, None], words[:, :, i * step : (i + 1) * step].transpose(0, 2, 1)]
    return np.concatenate(parts, 1).reshape(-1).view(kind)


@njit(**PART)
def panel_size(columns, group):
    """32-bit words in a panel."""
    return (columns // COLUMNS_PER_WORD + -(-columns // group)) * LANES


@njit(**PART)
def row_size(columns, group):
    """Bytes of a row of activations: the first bytes of all numbers, then their second bytes, then the sum of each
    group's codes (int32)."""
    return 2 * columns + 4 * -(-columns // group)


@njit(**PART)
def wide_nibble_tiles(w, w_at, columns, group, x, x_at, x_row, y, y_at, y_row, rows, panels):
    """y[r, 16 p : 16 p + 16] = Σ_groups s · (…), as above, for any number of rows; `panels` is literal.

    `x`: bytes; row r (see `row_size`) lies at `x_at + r · x_row`.
    """
    no_inline()
    r = 0
    # Two rows of two bytes and four panels make 16 sums. Three rows would make 24, but nibbles need registers too: the
    # sums would be spilled to memory in each iteration (half as fast).
    while rows - r >= 2:
        _groups(w, w_at, columns, group, x, x_at + r * x_row, x_row, y, y_at + r * y_row, y_row, panels, 2)
        r += 2
    if rows > r:
        _groups(w, w_at, columns, group, x, x_at + r * x_row, x_row, y, y_at + r * y_row, y_row, panels, 1)


@njit(**PART)
def narrow_nibble_tiles(w, w_at, columns, group, x, x_at, x_row, y, y_at, y_row, rows, panels):
    """As `wide_nibble_tiles`, for few registers: one panel at a time."""
    for p in range(panels):
        at, y_p = w_at + p * panel_size(columns, group), y_at + p * LANES
        wide_nibble_tiles(w, at, columns, group, x, x_at, x_row, y, y_p, y_row, rows, 1)


@njit(**PART)
def wide_float_nibble_tiles(w, w_at, columns, group, x, x_at, x_row, y, y_at, y_row, rows, panels):
    """As `wide_nibble_tiles`, for `x` in floats."""
    no_inline()
    r = 0
    while rows - r >= 4:
        _groups(w, w_at, columns, group, x, x_at + r * x_row, x_row, y, y_at + r * y_row, y_row, panels, 4)
        r += 4
    left = rows - r
    x_at, y_at = x_at + r * x_row, y_at + r * y_row
    if left == 1:
        _groups(w, w_at, columns, group, x, x_at, x_row, y, y_at, y_row, panels, 1)
    elif left == 2:
        _groups(w, w_at, columns, group, x, x_at, x_row, y, y_at, y_row, panels, 2)
    elif left == 3:
        _groups(w, w_at, columns, group, x, x_at, x_row, y, y_at, y_row, panels, 3)


@njit(**PART)
def narrow_float_nibble_tiles(w, w_at, columns, group, x, x_at, x_row, y, y_at, y_row, rows, panels):
    """As `wide_float_nibble_tiles`, for few registers: one panel at a time."""
    for p in range(panels):
        at, y_p = w_at + p * panel_size(columns, group), y_at + p * LANES
        wide_float_nibble_tiles(w, at, columns, group, x, x_at, x_row, y, y_p, y_row, rows, 1)


nibble_tiles = wide_nibble_tiles if FITS_ALL else narrow_nibble_tiles
float_nibble_tiles = wide_float_nibble_tiles if FITS_ALL else narrow_float_nibble_tiles


@njit(**PART)
def _groups(w, w_at, columns, group, x, x_at, x_row, y, y_at, y_row, panels, rows):
    panel, sum_at = panel_size(columns, group), x_at + 2 * columns
    for r in range(rows):
        for p in range(panels):
            store(y, y_at + r * y_row + p * LANES, splat(ZERO))
    for first in range(0, columns, group):
        steps = min(group, columns - first) // COLUMNS_PER_WORD
        add_group(w, w_at, panel, x, x_at + first, x_row, columns, sum_at, steps, y, y_at, y_row, panels, rows)
        w_at += (steps + 1) * LANES
        sum_at += 4


@intrinsic(prefer_literal=True)
def add_group(
    typing: Any, w: Any, w_at: Any, panel: Any, x: Any, x_at: Any, x_row: Any, second: Any, sum_at: Any, steps: Any,
    y: Any, y_at: Any, y_row: Any, panels: Any, rows: Any,
) -> Any:  # fmt: skip
    """y[r, 16 p : 16 p + 16] += s · (…) of one group, which begins at `w_at`, for literal numbers of rows and panels.

    `steps`: its columns / 8. For x in bytes: the first byte of a number is at `x_at`, its second byte `second` behind
    it, the sum of the group's codes at `sum_at`.
    """
    if not isinstance(panels, types.IntegerLiteral):
        return None
    intp = types.intp
    signature = types.void(w, intp, intp, x, intp, intp, intp, intp, intp, y, intp, intp, panels, rows)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        w_, w_at, panel, x_, x_at, x_row, second, sum_at, steps, y_, y_at, y_row = args[:12]

        def pointers(kind: Any, array: Any, at: Any, distance: Any, count: int, to: ir.Type) -> list[Any]:
            starts = [builder.add(at, builder.mul(distance, ir.Constant(I64, i))) for i in range(count)]
            return [address(context, builder, kind, array, start, to) for start in starts]

        n, m = panels.literal_value, rows.literal_value
        matrix = pointers(w, w_, w_at, panel, n, INTS)
        scales = [floats_at(builder, builder.bitcast(q, I16.as_pointer()), types.int16) for q in matrix]
        zeros = [_zero_points(builder, q) for q in matrix]
        if x.dtype == types.uint8:
            tokens = pointers(x, x_, x_at, x_row, m, I8)
            sums = [repeat(builder, read(builder, q), INTS) for q in pointers(x, x_, sum_at, x_row, m, I32)]
            brackets = _in_bytes(builder, matrix, zeros, tokens, second, sums, steps)
        else:
            tokens = pointers(x, x_, x_at, x_row, m, F32)
            brackets = _in_floats(builder, matrix, zeros, tokens, steps)
        out = [builder.gep(q, [ir.Constant(I64, p)]) for p in range(n) for q in pointers(y, y_, y_at, y_row, m, FLOATS)]
        factors = [s for s in scales for _ in range(m)]
        for pointer, scale, bracket in zip(out, factors, brackets, strict=True):
            value = call(builder, "llvm.fma.v16f32", FLOATS, scale, bracket, read(builder, pointer))
            builder.store(value, pointer).align = 1
        return context.get_dummy_value()

    return signature, code


def _zero_points(builder: ir.IRBuilder, group: Any) -> Any:
    """The sixteen zero points of the group that begins at `group`, as integers."""
    sixteen = ir.VectorType(I16, LANES)
    pointer = builder.gep(builder.bitcast(group, sixteen.as_pointer()), [ir.Constant(I64, 1)])
    return builder.zext(read(builder, pointer), INTS)


def _words(builder: ir.IRBuilder, matrix: list[Any], step: Any) -> list[Any]:
    """Load word `step` of a group for each panel: eight columns of each of sixteen outputs."""
    return [read(builder, builder.gep(q, [builder.add(step, ir.Constant(I64, 1))])) for q in matrix]


def _extract_bits(builder: ir.IRBuilder, words: Any, bits: int, mask: int) -> Any:
    by, kept = (ir.Constant(INTS, [number] * LANES) for number in (bits, mask))
    return builder.and_(builder.lshr(words, by) if bits else words, kept)


def _in_bytes(
    builder: ir.IRBuilder, matrix: list[Any], zeros: list[Any], tokens: list[Any], second: Any, code_sums: list[Any],
    steps: Any,
) -> list[Any]:  # fmt: skip
    """Σ q x - z Σ x for each panel and row: computed in integers, then converted to floats."""

    def body(step: Any, sums: list[Any]) -> list[Any]:
        words = _words(builder, matrix, step)
        for half in range(2):
            weights = [_extract_bits(builder, v, 4 * half, 0x0F0F0F0F) for v in words]
            at = builder.add(builder.mul(step, ir.Constant(I64, 8)), ir.Constant(I64, 4 * half))
            places = [builder.gep(q, [i]) for q in tokens for i in (at, builder.add(at, second))]
            fours = [builder.bitcast(place, I32.as_pointer()) for place in places]
            numbers = [repeat(builder, read(builder, pointer), INTS) for pointer in fours]
            factors = [(a, b) for a in weights for b in numbers]
            sums = [add_products(builder, s, b, a) for (a, b), s in zip(factors, sums, strict=True)]
        return sums

    zero_sums = ir.Constant(INTS, [0] * LANES)
    sums = loop_in_registers(builder, steps, [zero_sums] * (2 * len(matrix) * len(tokens)), body)
    brackets = []
    for i, (zero, total) in enumerate((zero, total) for zero in zeros for total in code_sums):
        first = builder.shl(sums[2 * i], ir.Constant(INTS, [8] * LANES))
        bracket = builder.sub(builder.add(first, sums[2 * i + 1]), builder.mul(zero, total))
        brackets.append(builder.sitofp(bracket, FLOATS))
    return brackets


def _in_floats(builder: ir.IRBuilder, matrix: list[Any], zeros: list[Any], tokens: list[Any], steps: Any) -> list[Any]:
    """Σ (q - z) x for each panel and row."""
    above = ir.Constant(INTS, [TWO_TO_23] * LANES)

    def number(integer: Any) -> Any:
        return builder.bitcast(builder.or_(integer, above), FLOATS)

    zero_points = [number(zero) for zero in zeros]

    def body(step: Any, sums: list[Any]) -> list[Any]:
        words = _words(builder, matrix, step)
        for column in range(COLUMNS_PER_WORD):
            bits = 8 * (column % 4) + 4 * (column // 4)
            weights = [
                builder.fsub(number(_extract_bits(builder, v, bits, 15)), c)
                for v, c in zip(words, zero_points, strict=True)
            ]
            at = builder.add(builder.mul(step, ir.Constant(I64, 8)), ir.Constant(I64, column))
            numbers = [repeat(builder, read(builder, builder.gep(q, [at])), FLOATS) for q in tokens]
            factors = [(a, b) for a in weights for b in numbers]
            sums = [call(builder, "llvm.fma.v16f32", FLOATS, a, b, s) for (a, b), s in zip(factors, sums, strict=True)]
        return sums

    start = [ir.Constant(FLOATS, [0.0] * LANES)] * (len(matrix) * len(tokens))
    return loop_in_registers(builder, steps, start, body)


@intrinsic
def store_int32(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """Store `value` as the four bytes of an int32 in `array[at : at + 4]`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = address(context, builder, signature.args[0], args[0], args[1], I32)
        builder.store(builder.trunc(args[2], I32), pointer).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), code
