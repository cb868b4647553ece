"""Linear layers, y = x Wᵀ: the matrix is stored in panels, and the outputs are the lanes of a vector.

A panel is sixteen rows of W, stored column by column: panel p, column k holds W[16 p … 16 p + 15, k]. So one load
brings one weight of each of sixteen outputs, one number of x multiplies all of them, no sum is taken across lanes, and
a step reads the matrix from its first byte to its last.

Bytes moved: the matrix once per `CHUNK` rows of x from memory, once per 6 from the L1 cache. With one row only memory
counts. Six rows and four panels make 24 sums, as many as the registers of AVX-512 hold, and each loaded weight is used
six times: there arithmetic is the limit (57 G multiply-adds a second on one core of an AMD EPYC 9004; one row reaches
25). The registers of AVX2 and NEON hold six sums beside their operands: there six rows go with one panel, two with two,
one with four. Weights are stored in the fewest bits that hold them exactly: a checkpoint in 16-bit floats stays so and
is multiplied in fp32, which halves the bytes and changes no bit of the result.

INT8 weights are multiplied as bytes where the processor can (VNNI on x86, dot products on ARM): 220 G multiply-adds a
second with AVX-512. Four columns lie together, as `tile_dots` needs them, and activations are first rounded to bytes:
one per number (`ONE_BYTE`: W8A8), or two, a high and a low byte (`TWO_BYTES`). The error of two bytes is at most
1/65,000 of the largest number of the row; for that number bfloat16's is a hundred times as large, float32's smaller.
Two bytes are two rows: twice the arithmetic of W8A8 for the same bytes of weights, and half the time of casting the
weights to floats and multiplying those. An x86 processor without VNNI rounds activations to 16-bit numbers instead and
multiplies pairs of those (`WORDS`); other processors cast.

In a model of dtype bfloat16 activations are rounded to bfloat16 before each product, and two columns lie together
(`BFLOAT_PAIRS`). One instruction of AVX512_BF16 multiplies 32 pairs: 115 G multiply-adds a second on the same core.

INT4 weights in groups have panels of their own, 4.25 bits a weight (`nibbles.py`). Where the processor has AMX, it
multiplies the bfloat16s of both kinds (`amx_products.py`).
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import overload
from numba.np.numpy_support import from_dtype as numba_type

from minillm.ops.cpu.amx import DEPTH, PARTS
from minillm.ops.cpu.amx_products import AMX_SUMS_SIZE, multiply_tiles, pack_tiles, tiled_panel_size
from minillm.ops.cpu.compiled import PART
from minillm.ops.cpu.matrix_fields import BIAS, CODE_SUMS, COLUMNS, GROUP, NONE, PANEL, SCALES
from minillm.ops.cpu.nibbles import float_nibble_tiles, nibble_tiles, panel_size, row_size
from minillm.ops.cpu.processor import has_amx, processor
from minillm.ops.cpu.register_tiles import EXACT_COLUMNS, FITS_ALL, has_byte_products, tile, tile_dots
from minillm.ops.cpu.simd import (
    BFLOAT_PAIRS,
    LANES,
    ONE_BYTE,
    TWO_BYTES,
    WORDS,
    fma,
    load,
    load_scalar,
    load_sums,
    no_inline,
    splat,
    store,
)

PANELS = 4
"""Panels that one tile multiplies, if as many are left; otherwise it multiplies one."""
DOT_ROWS = 4 if processor().byte_products == "vpmaddwd" else 6
"""Rows of the largest tile of bytes or pairs. `vpmaddwd` leaves fewer registers: even and odd bytes need their own."""
CHUNK = 48
"""Rows of x that are multiplied by all panels before the next rows: they stay in the L2 cache."""
TILED = (types.uint16, types.uint64) if has_amx() else ()
"""numba types of the weights that AMX tiles multiply: `BFLOAT` and `BFLOAT_PAIRS`."""
SUMS_SIZE = max(2 * CHUNK * LANES * PANELS, AMX_SUMS_SIZE if TILED else 0)
"""Floats of scratch memory that `multiply` needs."""
WORDS_BYTES = np.dtype(WORDS).itemsize
BYTE = np.float32(256)
"""An activation in two bytes is 256 · first + second."""


def pack(weight: np.ndarray) -> np.ndarray:
    """`[out, in]` in any dtype that `simd.load` reads → panels, flat; rows are padded to sixteen with zeros."""
    out, columns = weight.shape
    padded = np.zeros((-(-out // LANES) * LANES, columns), weight.dtype)
    padded[:out] = weight
    return np.ascontiguousarray(padded.reshape(-1, LANES, columns).transpose(0, 2, 1)).reshape(-1)


def pack_pairs(codes: np.ndarray, kind: type = ONE_BYTE) -> np.ndarray:
    """`[out, in]` int8, `in` a multiple of 4 → panels for `tile_dots`, flat. `kind`: `ONE_BYTE`, `TWO_BYTES` or
    `WORDS`."""
    out, columns = codes.shape
    padded = np.zeros((-(-out // LANES) * LANES, columns), np.int8)
    padded[:out] = codes
    together = 2 if kind is WORDS else 4
    groups = padded.reshape(-1, LANES, columns // together, together).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(groups).reshape(-1).view(kind)


def int8_kind() -> type:
    """The fastest layout here of INT8 weights for activations in full precision."""
    if has_byte_products():
        return TWO_BYTES
    return WORDS if processor().byte_products == "vpmaddwd" else np.int8


def pack_int8(codes: np.ndarray) -> np.ndarray:
    """`[out, in]` int8, `in` a multiple of 4 → panels of `int8_kind`, flat."""
    kind = int8_kind()
    return pack(codes) if kind is np.int8 else pack_pairs(codes, kind)


def pack_floats(weight: np.ndarray) -> np.ndarray:
    """`[out, in]` in any dtype that `simd.load` reads → the layout that `multiply` reads, flat."""
    return pack_tiles(weight) if numba_type(weight.dtype) in TILED else pack(weight)


def pack_bfloat_pairs(bits: np.ndarray) -> np.ndarray:
    """`[out, in]`, the bits of bfloat16s (uint16) → panels of `BFLOAT_PAIRS`, flat, in the order of AMX's tiles."""
    return pack_tiles(bits).view(BFLOAT_PAIRS)


def float_panel_size(columns: int, kind: np.dtype) -> int:
    """Numbers in a panel of `pack_floats` or `pack_bfloat_pairs`, padding included."""
    if kind == BFLOAT_PAIRS:
        return int(_pairs_panel_size.py_func(columns))
    return int(tiled_panel_size.py_func(columns)) if numba_type(kind) in TILED else columns * LANES


@njit(**PART)
def pairs_row_size(columns):
    """Bytes of a row of x for `BFLOAT_PAIRS`, padded as their panels are."""
    return -(-columns // DEPTH) * DEPTH * 2


@njit(**PART)
def _pairs_panel_size(columns):
    """Numbers of 64 bits in a panel of `BFLOAT_PAIRS`."""
    return -(-columns // DEPTH) * DEPTH * LANES // 4


@njit(**PART)
def wide_tiles(w, w_at, panel, step, x, x_at, x_row, length, y, y_at, y_row, rows, add, panels):
    """`tile` for any number of rows; `add` and `panels` are literal."""
    no_inline()
    r = 0
    while rows - r >= 6:
        tile(w, w_at, panel, step, x, x_at + r * x_row, x_row, length, y, y_at + r * y_row, y_row, add, panels, 6)
        r += 6
    left = rows - r
    x_at, y_at = x_at + r * x_row, y_at + r * y_row
    if left == 1:
        tile(w, w_at, panel, step, x, x_at, x_row, length, y, y_at, y_row, add, panels, 1)
    elif left == 2:
        tile(w, w_at, panel, step, x, x_at, x_row, length, y, y_at, y_row, add, panels, 2)
    elif left == 3:
        tile(w, w_at, panel, step, x, x_at, x_row, length, y, y_at, y_row, add, panels, 3)
    elif left == 4:
        tile(w, w_at, panel, step, x, x_at, x_row, length, y, y_at, y_row, add, panels, 4)
    elif left == 5:
        tile(w, w_at, panel, step, x, x_at, x_row, length, y, y_at, y_row, add, panels, 5)


@njit(**PART)
def narrow_tiles(w, w_at, panel, step, x, x_at, x_row, length, y, y_at, y_row, rows, add, panels):
    """As `wide_tiles`, for few registers: a tile has at most six sums."""
    if panels == 1 or rows == 1:
        wide_tiles(w, w_at, panel, step, x, x_at, x_row, length, y, y_at, y_row, rows, add, panels)
    elif rows == 2:
        for p in range(0, panels, 2):
            at, y_p = w_at + p * panel, y_at + p * LANES
            wide_tiles(w, at, panel, step, x, x_at, x_row, length, y, y_p, y_row, rows, add, 2)
    else:
        for p in range(panels):
            at, y_p = w_at + p * panel, y_at + p * LANES
            wide_tiles(w, at, panel, step, x, x_at, x_row, length, y, y_p, y_row, rows, add, 1)


@njit(**PART)
def wide_dot_tiles(w, w_at, panel, x, x_at, x_row, length, y, y_at, y_row, rows, add, panels):
    """`tile_dots` for any number of rows; `add` and `panels` are literal."""
    no_inline()
    r = 0
    while rows - r >= DOT_ROWS:
        at, y_r = x_at + r * x_row, y_at + r * y_row
        tile_dots(w, w_at, panel, x, at, x_row, length, y, y_r, y_row, add, panels, DOT_ROWS)
        r += DOT_ROWS
    left = rows - r
    x_at, y_at = x_at + r * x_row, y_at + r * y_row
    if left == 1:
        tile_dots(w, w_at, panel, x, x_at, x_row, length, y, y_at, y_row, add, panels, 1)
    elif left == 2:
        tile_dots(w, w_at, panel, x, x_at, x_row, length, y, y_at, y_row, add, panels, 2)
    elif left == 3:
        tile_dots(w, w_at, panel, x, x_at, x_row, length, y, y_at, y_row, add, panels, 3)
    elif left == 4:
        tile_dots(w, w_at, panel, x, x_at, x_row, length, y, y_at, y_row, add, panels, 4)
    elif left == 5:
        tile_dots(w, w_at, panel, x, x_at, x_row, length, y, y_at, y_row, add, panels, 5)


@njit(**PART)
def narrow_dot_tiles(w, w_at, panel, x, x_at, x_row, length, y, y_at, y_row, rows, add, panels):
    """As `wide_dot_tiles`, for few registers: a tile has at most six sums."""
    if panels == 1 or rows == 1:
        wide_dot_tiles(w, w_at, panel, x, x_at, x_row, length, y, y_at, y_row, rows, add, panels)
    elif rows == 2:
        for p in range(0, panels, 2):
            wide_dot_tiles(w, w_at + p * panel, panel, x, x_at, x_row, length, y, y_at + p * LANES, y_row, rows, add, 2)
    else:
        for p in range(panels):
            wide_dot_tiles(w, w_at + p * panel, panel, x, x_at, x_row, length, y, y_at + p * LANES, y_row, rows, add, 1)


tiles = wide_tiles if FITS_ALL else narrow_tiles
dot_tiles = wide_dot_tiles if FITS_ALL else narrow_dot_tiles


def _panel_size(w, matrix):
    """Numbers in a panel, by the dtype of `w`."""
    raise NotImplementedError


@overload(_panel_size, jit_options=PART)
def _typed_panel_size(w, matrix):
    if w.dtype in (types.uint32, types.int32):
        return lambda w, matrix: panel_size(matrix[COLUMNS], matrix[GROUP])
    if w.dtype == types.uint64:
        return lambda w, matrix: _pairs_panel_size(matrix[COLUMNS])
    if w.dtype == types.int64:
        return lambda w, matrix: matrix[COLUMNS] * LANES // WORDS_BYTES
    return lambda w, matrix: matrix[COLUMNS] * LANES


def _sums(w, w_at, matrix, x, x_at, codes, row, rows, y, y_at, y_row, panels):
    """The inner products of `rows` rows of the input with `panels` panels, written to `y`: floats, or for `ONE_BYTE`
    and `TWO_BYTES` weights the bits of int32."""
    raise NotImplementedError


@overload(_sums, jit_options=PART, prefer_literal=True)
def _typed_sums(w, w_at, matrix, x, x_at, codes, row, rows, y, y_at, y_row, panels):
    if w.dtype == types.uint8:

        def product(w, w_at, matrix, x, x_at, codes, row, rows, y, y_at, y_row, panels):
            columns = matrix[COLUMNS]
            at, panel = row * columns, columns * LANES
            dot_tiles(w, w_at, panel, codes, at, columns, columns // 4, y, y_at, y_row, rows, False, panels)
    elif w.dtype == types.boolean:

        def product(w, w_at, matrix, x, x_at, codes, row, rows, y, y_at, y_row, panels):
            columns = matrix[COLUMNS]
            at, panel = 2 * row * columns, columns * LANES
            dot_tiles(w, w_at, panel, codes, at, columns, columns // 4, y, y_at, y_row, 2 * rows, False, panels)
    elif w.dtype == types.int64:

        def product(w, w_at, matrix, x, x_at, codes, row, rows, y, y_at, y_row, panels):
            columns = matrix[COLUMNS]
            at, size, panel = 2 * row * columns, 2 * columns, columns * LANES // WORDS_BYTES
            count = min(columns, EXACT_COLUMNS)
            dot_tiles(w, w_at, panel, codes, at, size, count // 2, y, y_at, y_row, rows, False, panels)
            for k in range(count, columns, EXACT_COLUMNS):
                count = min(columns - k, EXACT_COLUMNS)
                w_k, x_k = w_at + k * LANES // WORDS_BYTES, at + 2 * k
                dot_tiles(w, w_k, panel, codes, x_k, size, count // 2, y, y_at, y_row, rows, True, panels)
    elif w.dtype == types.uint64:

        def product(w, w_at, matrix, x, x_at, codes, row, rows, y, y_at, y_row, panels):
            size = pairs_row_size(matrix[COLUMNS])
            panel = _pairs_panel_size(matrix[COLUMNS])
            dot_tiles(w, w_at, panel, codes, row * size, size, size // 4, y, y_at, y_row, rows, False, panels)
    elif w.dtype == types.uint32:

        def product(w, w_at, matrix, x, x_at, codes, row, rows, y, y_at, y_row, panels):
            columns, group = matrix[COLUMNS], matrix[GROUP]
            size = row_size(columns, group)
            nibble_tiles(w, w_at, columns, group, codes, row * size, size, y, y_at, y_row, rows, panels)
    elif w.dtype == types.int32:

        def product(w, w_at, matrix, x, x_at, codes, row, rows, y, y_at, y_row, panels):
            columns, group = matrix[COLUMNS], matrix[GROUP]
            at = x_at + row * columns
            float_nibble_tiles(w, w_at, columns, group, x, at, columns, y, y_at, y_row, rows, panels)
    else:

        def product(w, w_at, matrix, x, x_at, codes, row, rows, y, y_at, y_row, panels):
            columns = matrix[COLUMNS]
            at, panel = x_at + row * columns, columns * LANES
            tiles(w, w_at, panel, LANES, x, at, columns, columns, y, y_at, y_row, rows, False, panels)

    return product


def _finish(w, y, y_at, y_row, r, vectors, matrix, column, scale):
    """Sixteen outputs of row `r`, without bias, from the result of `_sums` at `y[y_at]`."""
    raise NotImplementedError


@overload(_finish, jit_options=PART)
def _typed_finish(w, y, y_at, y_row, r, vectors, matrix, column, scale):
    # `BYTE_OFFSET` was added to the bytes to make them unsigned: `load_sums` subtracts BYTE_OFFSET · Σ w.
    if w.dtype == types.uint8:

        def finish(w, y, y_at, y_row, r, vectors, matrix, column, scale):
            sums = load_sums(y, y_at + r * y_row, vectors, matrix[CODE_SUMS] + column)
            return sums * splat(scale) * load(vectors, matrix[SCALES] + column)
    elif w.dtype == types.boolean:

        def finish(w, y, y_at, y_row, r, vectors, matrix, column, scale):
            at, minus = y_at + 2 * r * y_row, matrix[CODE_SUMS] + column
            sums = fma(load_sums(y, at, vectors, minus), splat(BYTE), load_sums(y, at + y_row, vectors, minus))
            return sums * splat(scale) * load(vectors, matrix[SCALES] + column)
    elif w.dtype == types.int64:

        def finish(w, y, y_at, y_row, r, vectors, matrix, column, scale):
            return load(y, y_at + r * y_row) * splat(scale) * load(vectors, matrix[SCALES] + column)
    elif w.dtype == types.uint32:

        def finish(w, y, y_at, y_row, r, vectors, matrix, column, scale):
            return load(y, y_at + r * y_row) * splat(scale)
    elif w.dtype == types.int8:

        def finish(w, y, y_at, y_row, r, vectors, matrix, column, scale):
            return load(y, y_at + r * y_row) * load(vectors, matrix[SCALES] + column)
    else:

        def finish(w, y, y_at, y_row, r, vectors, matrix, column, scale):
            return load(y, y_at + r * y_row)

    return finish


@njit(**PART)
def multiply(
    w, matrix, vectors, scratch, x_at, codes, scales_at, rows, first, last, out, out_at, out_row, add, sums_at
):
    """Panels `first` to `last - 1` of one linear layer, for `rows` rows: out (+)= x Wᵀ + b.

    `w`: the weights of all layers; `matrix`: the fields of one (see `matrix_fields`). x: `[rows, columns]` at
    `scratch[x_at]`. For weights in the order of `tile_dots` and for `TILED` ones x is in `codes` (see
    `rounding.prepare_row`); bytes have their scales at `scratch[scales_at]`. Row r of the result goes to
    `out[out_at + r · out_row]`; `add`: it is added there. `scratch[sums_at]`: `SUMS_SIZE` floats that no
    other thread uses.
    """
    _multiply(
        w, matrix, vectors, scratch, x_at, codes, scales_at, rows, first, last, out, out_at, out_row, add, sums_at
    )


def _multiply(
    w, matrix, vectors, scratch, x_at, codes, scales_at, rows, first, last, out, out_at, out_row, add, sums_at
):
    """`multiply`, by the dtype of the weights."""
    raise NotImplementedError


def _in_vectors(
    w, matrix, vectors, scratch, x_at, codes, scales_at, rows, first, last, out, out_at, out_row, add, sums_at
):
    """`multiply` in vectors of sixteen, without AMX."""
    no_inline()
    panel, wide = _panel_size(w, matrix), PANELS * LANES
    for start in range(0, rows, CHUNK):
        count = min(CHUNK, rows - start)
        p = first
        while p < last:
            w_at = matrix[PANEL] + p * panel
            if last - p >= PANELS:
                together = PANELS
                _sums(w, w_at, matrix, scratch, x_at, codes, start, count, scratch, sums_at, wide, 4)
            else:
                together = 1
                _sums(w, w_at, matrix, scratch, x_at, codes, start, count, scratch, sums_at, wide, 1)
            for r in range(count):
                scale = scratch[scales_at + start + r]
                for lane in range(0, together * LANES, LANES):
                    column = p * LANES + lane
                    y = _finish(w, scratch, sums_at + lane, wide, r, vectors, matrix, column, scale)
                    if matrix[BIAS] != NONE:
                        y = y + load(vectors, matrix[BIAS] + column)
                    at = out_at + (start + r) * out_row + column
                    if add:
                        y = load(out, at) + y
                    store(out, at, y)
            p += together


@overload(_multiply, jit_options=PART)
def _typed_multiply(
    w, matrix, vectors, scratch, x_at, codes, scales_at, rows, first, last, out, out_at, out_row, add, sums_at
):
    if w.dtype not in TILED:
        return _in_vectors

    def split_in_tiles(
        w, matrix, vectors, scratch, x_at, codes, scales_at, rows, first, last, out, out_at, out_row, add, sums_at
    ):
        multiply_tiles(
            w, matrix[PANEL], matrix, vectors, codes, PARTS, rows, first, last, out, out_at, out_row, add, scratch,
            sums_at,
        )  # fmt: skip

    def rounded_in_tiles(
        w, matrix, vectors, scratch, x_at, codes, scales_at, rows, first, last, out, out_at, out_row, add, sums_at
    ):
        multiply_tiles(
            w.view(np.uint16), 4 * matrix[PANEL], matrix, vectors, codes, 1, rows, first, last, out, out_at, out_row,
            add, scratch, sums_at,
        )  # fmt: skip

    return rounded_in_tiles if w.dtype == types.uint64 else split_in_tiles


@njit(**PART)
def _unpack_from_pairs(w, columns, row, out, out_at):
    """`unpack_row` of `pack_tiles`."""
    first = row // LANES * tiled_panel_size(columns) + row % LANES * 2
    for i in range(columns):
        out[out_at + i] = load_scalar(w, first + i // 2 * 2 * LANES + i % 2)


def unpack_row(w, columns, row, out, out_at):
    """Store row `row` of the matrix that begins at `w[0]`, as floats, in `out[out_at : out_at + columns]`."""
    raise NotImplementedError


@overload(unpack_row, jit_options=PART)
def _typed_unpack_row(w, columns, row, out, out_at):
    if w.dtype == types.uint64:
        return lambda w, columns, row, out, out_at: _unpack_from_pairs(w.view(np.uint16), columns, row, out, out_at)
    if w.dtype in TILED:
        return lambda w, columns, row, out, out_at: _unpack_from_pairs(w, columns, row, out, out_at)

    def unpack(w, columns, row, out, out_at):
        first = row // LANES * columns * LANES + row % LANES
        for i in range(columns):
            out[out_at + i] = load_scalar(w, first + i * LANES)

    return unpack
