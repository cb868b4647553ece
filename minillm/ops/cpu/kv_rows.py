"""Keys and values as the paged layouts store them: one row per token and KV head, written and read as floats.

`rows` is a tuple of flat arrays, one per field. Their number and dtypes identify the layout:

    float32, or the bits of bfloat16s (uint16)     PagedKVCache
    int8 codes, bfloat16 scale                     PagedInt8KVCache     x̂ = code · s
    packed uint8 codes, float16 scales and zeros   PagedInt4KVCache     x̂ = code · s + zero, per group
    the same and packed uint8 lower codes          PagedTwoLevelKVCache x̂ = (code + lower / 16) · s + zero, per group

Stored rows are the same to the bit as those of `minillm.ops.kv_quant`: PyTorch can read what the compiled step wrote,
and the other way round.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import overload

from minillm.ops.cpu.compiled import PART
from minillm.ops.cpu.simd import (
    LANES,
    ZERO,
    absolute,
    bfloat_bits,
    half_bits,
    largest,
    load,
    load_nibbles,
    load_scalar,
    maximum,
    minimum,
    rint,
    smallest,
    splat,
    store,
    store_bfloats,
    store_bytes,
    store_nibbles,
)
from minillm.ops.kv_quant import AFFINE_CODES, INT8_LEVELS, SMALLEST_SCALE, SMALLEST_STEP

LEVELS, SMALLEST = np.float32(INT8_LEVELS), np.float32(SMALLEST_SCALE)
CODES, STEP = np.float32(AFFINE_CODES), np.float32(SMALLEST_STEP)
SUB_STEPS, HALF_STEP = np.float32(16), np.float32(8)
"""Steps of the lower code in one step of the upper, and in half of one."""
RELATIVE_STEP = np.float32(2.0**-10)


def write_row(rows, at, x, x_at, size):
    """Store `x[x_at : x_at + size]` (float32) as row `at`."""
    raise NotImplementedError


def read_row(rows, at, out, out_at, size):
    """Store row `at`, as floats, in `out[out_at : out_at + size]`."""
    raise NotImplementedError


@njit(**PART)
def _write_floats(rows, at, x, x_at, size):
    for i in range(0, size, LANES):
        store(rows[0], at * size + i, load(x, x_at + i))


@njit(**PART)
def _write_bfloats(rows, at, x, x_at, size):
    for i in range(0, size, LANES):
        store_bfloats(rows[0], at * size + i, load(x, x_at + i))


@njit(**PART)
def _read_floats(rows, at, out, out_at, size):
    for i in range(0, size, LANES):
        store(out, out_at + i, load(rows[0], at * size + i))


@njit(**PART)
def _write_int8(rows, at, x, x_at, size):
    codes, scales = rows
    high = absolute(load(x, x_at))
    for i in range(LANES, size, LANES):
        high = maximum(high, absolute(load(x, x_at + i)))
    step = largest(high) / LEVELS
    scales[at] = bfloat_bits(SMALLEST if step < SMALLEST else step)  # NaN is not smaller, so it stays
    scale = splat(load_scalar(scales, at))
    for i in range(0, size, LANES):
        store_bytes(codes, at * size + i, load(x, x_at + i) / scale, 0)


@njit(**PART)
def _read_int8(rows, at, out, out_at, size):
    codes, scales = rows
    scale = splat(load_scalar(scales, at))
    for i in range(0, size, LANES):
        store(out, out_at + i, load(codes, at * size + i) * scale)


@njit(**PART)
def _half_below(array, at, x):
    """Store in `array[at]` the bits of a float16 that is at most x, the same as in `kv_quant._half_below`."""
    array[at] = half_bits(x)
    if load_scalar(array, at) > x:
        array[at] = half_bits(x - abs(x) * RELATIVE_STEP - STEP)


@njit(**PART)
def _scale_and_zero(scales, zeros, here, x, first, group):
    """Store the scale and zero point of `x[first : first + group]` and return them."""
    low = high = load(x, first)
    for i in range(LANES, group, LANES):
        low, high = minimum(low, load(x, first + i)), maximum(high, load(x, first + i))
    _half_below(zeros, here, smallest(low))
    zero = load_scalar(zeros, here)
    _half_below(scales, here, (zero - largest(high)) / CODES)
    step = -load_scalar(scales, here)
    scales[here] = half_bits(STEP if step < STEP else step)
    return splat(load_scalar(scales, here)), splat(zero)


@njit(**PART)
def _write_int4(rows, at, x, x_at, size):
    packed, scales, zeros, groups = rows
    group = size // groups
    for g in range(groups):
        first = x_at + g * group
        scale, zero = _scale_and_zero(scales, zeros, at * groups + g, x, first, group)
        for i in range(0, group, LANES):
            code = rint((load(x, first + i) - zero) / scale)
            code = minimum(maximum(code, splat(ZERO)), splat(CODES))
            store_nibbles(packed, (at * size + g * group + i) // 2, code)


@njit(**PART)
def _write_two_level(rows, at, x, x_at, size):
    packed, scales, zeros, packed_lower, groups = rows
    group = size // groups
    for g in range(groups):
        first = x_at + g * group
        scale, zero = _scale_and_zero(scales, zeros, at * groups + g, x, first, group)
        for i in range(0, group, LANES):
            steps, place = (load(x, first + i) - zero) / scale, (at * size + g * group + i) // 2
            code = minimum(maximum(rint(steps), splat(ZERO)), splat(CODES))
            lower = rint((steps - code) * splat(SUB_STEPS)) + splat(HALF_STEP)
            store_nibbles(packed, place, code)
            store_nibbles(packed_lower, place, minimum(maximum(lower, splat(ZERO)), splat(CODES)))


@njit(**PART)
def _read_int4(rows, at, out, out_at, size):
    packed, scales, zeros, groups = rows
    group = size // groups
    for g in range(groups):
        scale, zero = splat(load_scalar(scales, at * groups + g)), splat(load_scalar(zeros, at * groups + g))
        for i in range(g * group, (g + 1) * group, LANES):
            store(out, out_at + i, load_nibbles(packed, (at * size + i) // 2) * scale + zero)


@njit(**PART)
def _read_two_level(rows, at, out, out_at, size):
    packed, scales, zeros, packed_lower, groups = rows
    group = size // groups
    for g in range(groups):
        scale, zero = splat(load_scalar(scales, at * groups + g)), splat(load_scalar(zeros, at * groups + g))
        for i in range(g * group, (g + 1) * group, LANES):
            place = (at * size + i) // 2
            rest = (load_nibbles(packed_lower, place) - splat(HALF_STEP)) / splat(SUB_STEPS)
            store(out, out_at + i, (load_nibbles(packed, place) + rest) * scale + zero)


WRITERS = {
    (types.float32, 1): _write_floats,
    (types.uint16, 1): _write_bfloats,
    (types.int8, 2): _write_int8,
    (types.uint8, 4): _write_int4,
    (types.uint8, 5): _write_two_level,
}
READERS = {
    (types.float32, 1): _read_floats,
    (types.int8, 2): _read_int8,
    (types.uint8, 4): _read_int4,
    (types.uint8, 5): _read_two_level,
}
"""Key: dtype of the first field, number of fields. bfloat16s are not read here: attention multiplies them in pairs
(`find_rows`)."""


@overload(write_row, jit_options=PART)
def _typed_write(rows, at, x, x_at, size):
    write = WRITERS[rows[0].dtype, len(rows)]
    return lambda rows, at, x, x_at, size: write(rows, at, x, x_at, size)


@overload(read_row, jit_options=PART)
def _typed_read(rows, at, out, out_at, size):
    read = READERS[rows[0].dtype, len(rows)]
    return lambda rows, at, out, out_at, size: read(rows, at, out, out_at, size)
