"""Linear layers with AMX: bfloat16 weights times activations in tiles of bfloat16.

Activations that are rounded to bfloat16 (`BFLOAT_PAIRS` weights) need one product. Those that stay float32 (`BFLOAT`)
are multiplied exactly: a float32 has 24 significant bits, a bfloat16 eight, so a number x is split into three bfloat16s
that add up to it,

    x = first + middle + last

and x · w = first · w + middle · w + last · w, where each product fits into a float32 (8 + 8 bits). Only the sums are
rounded, as in any float32 product. So results are as exact as those of `panels.py`, which processors without AMX use,
but not the same to the last bit. Tiles count numbers below 2^-126 as zero, and an infinite number gives NaN.

Operations: three tile products instead of one. That leaves 171 multiply-adds per cycle, against 32 of two vector units
of sixteen floats. Measured with 128 rows on one core of a virtual machine (Xeon) whose speed varies: 180 to 258 G
multiply-adds a second at its best times, 65 to 75 at others; in vectors 54 and 38.

Bytes: the matrix is read once per `CHUNK` rows of x. Those rows are multiplied by `BLOCK` · 32 columns of all panels
before the next columns, so that x stays in the L2 cache; the sums wait in the result's memory. A tile takes nearly as
long for one row as for sixteen, so up to `FEW` rows are multiplied in vectors, which add up in the same order (and keep
numbers below 2^-126): with so few rows the time goes to reading the matrix.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numba.extending import overload

from minillm.ops.cpu.amx import (
    DEPTH,
    PARTS,
    ROW_BYTES,
    ROWS,
    TILE_BYTES,
    add_row,
    add_tiles,
    configure,
    load_tiles,
    release,
    split_sixteen,
    store_tiles,
    zero_tiles,
)
from minillm.ops.cpu.compiled import PART
from minillm.ops.cpu.matrix_fields import BIAS, COLUMNS, NONE
from minillm.ops.cpu.simd import LANES, ZERO, load, no_inline, splat, store, store_bfloats

FEW = 2
"""Most rows for which vectors are as fast as tiles."""
CHUNK = 128
"""Rows of x that are multiplied by the whole matrix together."""
BLOCK = 32
"""These rows are multiplied by `BLOCK` · `DEPTH` columns at a time."""
SLAB = 64
"""Panels whose sums are kept in scratch memory until a bias or the residual is added."""
AMX_SUMS_SIZE = CHUNK * SLAB * LANES
"""Floats of scratch memory that `multiply_tiles` needs."""


def pack_tiles(bits: np.ndarray) -> np.ndarray:
    """`[out, in]`, the bits of bfloat16s (uint16) → tiles of B, flat: panels of sixteen rows, and in a panel pairs of
    interleaved columns. Rows are padded to a multiple of sixteen and columns to one of `DEPTH`, with zeros."""
    out, columns = bits.shape
    padded = np.zeros((-(-out // LANES) * LANES, -(-columns // DEPTH) * DEPTH), np.uint16)
    padded[:out, :columns] = bits
    pairs = padded.reshape(-1, LANES, padded.shape[1] // 2, 2).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(pairs).reshape(-1)


@njit(**PART)
def tiled_panel_size(columns):
    """bfloat16s in a panel."""
    return -(-columns // DEPTH) * DEPTH * LANES


@njit(**PART)
def split_size(columns, parts):
    """Bytes of a row of x in tiles; rows are stored in groups of `ROWS`."""
    return -(-columns // DEPTH) * parts * ROW_BYTES


@njit(**PART)
def split_row(x, x_at, columns, codes, row, parts):
    """Write row `row` of the tiles of A to `codes`, from `columns` floats at `x[x_at]`: split into three `parts`, or
    rounded to one.

    Of a group of `ROWS` rows come first the tiles of its first `DEPTH` columns, one for each part, then of the next.
    """
    at = row // ROWS * ROWS * split_size(columns, parts) + row % ROWS * ROW_BYTES
    for i in range(0, columns, LANES):
        here = at + i // DEPTH * parts * TILE_BYTES + i % DEPTH * 2
        if parts == 1:
            store_bfloats(codes, here, load(x, x_at + i))
        else:
            split_sixteen(x, x_at + i, codes, here)
    if columns % DEPTH:
        at += columns // DEPTH * parts * TILE_BYTES + ROW_BYTES // 2
        for part in range(parts):
            codes[at + part * TILE_BYTES : at + part * TILE_BYTES + ROW_BYTES // 2] = 0


def _product(w, w_at, columns, first, steps, codes, x_at, y, y_at, y_row, parts, groups, panels):
    """y (+)= x Wᵀ over `steps` · `DEPTH` columns from column `first` on, for literal numbers of groups and panels (see
    `add_tiles`). For `first` = 0 y is overwritten, otherwise added to."""
    raise NotImplementedError


@overload(_product, jit_options=PART, prefer_literal=True)
def _typed_product(w, w_at, columns, first, steps, codes, x_at, y, y_at, y_row, parts, groups, panels):
    def product(w, w_at, columns, first, steps, codes, x_at, y, y_at, y_row, parts, groups, panels):
        if first:
            load_tiles(y, y_at, y_row, groups, panels)
        else:
            zero_tiles()
        size = ROWS * split_size(columns, parts)
        x_first = x_at + first // DEPTH * parts * TILE_BYTES
        panel = tiled_panel_size(columns)
        if parts == 1:
            add_tiles(w, w_at + first * LANES, panel, codes, x_first, size, steps, 1, groups, panels)
        else:
            add_tiles(w, w_at + first * LANES, panel, codes, x_first, size, steps, PARTS, groups, panels)
        store_tiles(y, y_at, y_row, groups, panels)

    return product


@njit(**PART)
def _one_group(w, w_at, columns, first, steps, codes, x_at, rows, y, y_at, y_row, parts, panels):
    """Up to sixteen rows, any number of panels."""
    configure(rows, rows)
    panel, p = tiled_panel_size(columns), 0
    while panels - p >= 4:
        at, y_p = w_at + p * panel, y_at + p * LANES
        _product(w, at, columns, first, steps, codes, x_at, y, y_p, y_row, parts, 1, 4)
        p += 4
    while p < panels:
        at, y_p = w_at + p * panel, y_at + p * LANES
        _product(w, at, columns, first, steps, codes, x_at, y, y_p, y_row, parts, 1, 1)
        p += 1


@njit(**PART)
def _two_groups(w, w_at, columns, first, steps, codes, x_at, rows, y, y_at, y_row, parts):
    """More than sixteen rows, two panels: two groups of rows at a time."""
    r = configured = 0
    while r < rows:
        count = min(2 * ROWS, rows - r)
        if count != configured:
            configure(min(count, ROWS), count - ROWS if count > ROWS else count)
            configured = count
        x_r, y_r = x_at + r * split_size(columns, parts), y_at + r * y_row
        if count > ROWS:
            _product(w, w_at, columns, first, steps, codes, x_r, y, y_r, y_row, parts, 2, 2)
        else:
            _product(w, w_at, columns, first, steps, codes, x_r, y, y_r, y_row, parts, 1, 2)
        r += count


@njit(**PART)
def _few_rows(w, w_at, columns, steps, codes, x_at, rows, y, y_at, y_row, parts, panels):
    """Up to `FEW` rows, any number of panels, without tiles."""
    panel, p = tiled_panel_size(columns), 0
    while p < panels:
        together = 4 if panels - p >= 4 else 1
        for r in range(rows):
            at, x_r, y_r = w_at + p * panel, x_at + r * ROW_BYTES, y_at + r * y_row + p * LANES
            for lane in range(0, together * LANES, LANES):
                store(y, y_r + lane, splat(ZERO))
            if together == 4 and parts == 1:
                add_row(w, at, panel, codes, x_r, steps, y, y_r, 1, 4)
            elif together == 4:
                add_row(w, at, panel, codes, x_r, steps, y, y_r, PARTS, 4)
            elif parts == 1:
                add_row(w, at, panel, codes, x_r, steps, y, y_r, 1, 1)
            else:
                add_row(w, at, panel, codes, x_r, steps, y, y_r, PARTS, 1)
        p += together


@njit(**PART)
def _sums(w, w_at, columns, codes, x_at, rows, y, y_at, y_row, parts, panels):
    """y = x Wᵀ for up to `CHUNK` rows and any number of panels."""
    steps, panel = -(-columns // DEPTH), tiled_panel_size(columns)
    if rows <= FEW:
        _few_rows(w, w_at, columns, steps, codes, x_at, rows, y, y_at, y_row, parts, panels)
        return
    if rows <= ROWS:
        _one_group(w, w_at, columns, 0, steps, codes, x_at, rows, y, y_at, y_row, parts, panels)
        return
    for step in range(0, steps, BLOCK):
        many, first, even = min(BLOCK, steps - step), step * DEPTH, panels // 2 * 2
        for p in range(0, even, 2):
            at, y_p = w_at + p * panel, y_at + p * LANES
            _two_groups(w, at, columns, first, many, codes, x_at, rows, y, y_p, y_row, parts)
        for r in range(0, rows if even < panels else 0, ROWS):
            at, x_r, y_r = w_at + even * panel, x_at + r * split_size(columns, parts), y_at + r * y_row + even * LANES
            count = min(ROWS, rows - r)
            _one_group(w, at, columns, first, many, codes, x_r, count, y, y_r, y_row, parts, 1)


@njit(**PART)
def multiply_tiles(
    w, w_first, matrix, vectors, codes, parts, rows, first, last, out, out_at, out_row, add, scratch, scratch_at
):
    """Panels `first` to `last - 1` of one linear layer, for `rows` rows: out (+)= x Wᵀ + b; see `panels.multiply`.

    The matrix begins at `w[w_first]`. `codes`: x by `split_row`, in `parts` parts.
    `scratch[scratch_at]`: `AMX_SUMS_SIZE` floats that no other thread uses.
    """
    no_inline()
    columns, needs_scratch = matrix[COLUMNS], add or matrix[BIAS] != NONE
    for start in range(0, rows, CHUNK):
        count = min(CHUNK, rows - start)
        x_at, row_at = start * split_size(columns, parts), out_at + start * out_row
        for p in range(first, last, SLAB):
            panels, w_at = min(SLAB, last - p), w_first + p * tiled_panel_size(columns)
            if not needs_scratch:
                _sums(w, w_at, columns, codes, x_at, count, out, row_at + p * LANES, out_row, parts, panels)
                continue
            width = panels * LANES
            _sums(w, w_at, columns, codes, x_at, count, scratch, scratch_at, width, parts, panels)
            for r in range(count):
                for lane in range(0, width, LANES):
                    y, column = load(scratch, scratch_at + r * width + lane), p * LANES + lane
                    if matrix[BIAS] != NONE:
                        y = y + load(vectors, matrix[BIAS] + column)
                    if add:
                        y = load(out, row_at + r * out_row + column) + y
                    store(out, row_at + r * out_row + column, y)
    if rows > FEW:
        release()
