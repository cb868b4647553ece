"""Vectors of sixteen floats: the type and the operations that the other files of this folder are written in.

numba compiles loops, and LLVM turns only some of them into vector instructions, depending on how they are written.
Here a vector is a type, `f32x16`, and each operation on it is one LLVM instruction. LLVM keeps such a vector in one
register with AVX-512, in two with AVX2, in four with NEON.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, overload, register_model

from minillm.ops.cpu.compiled import PART
from minillm.ops.cpu.processor import processor

LANES = 16
SQUARE = LANES if processor().registers >= 2 * LANES else 8
"""Rows of a square that `transpose` does in registers. Sixteen rows of sixteen floats fill half of those of AVX-512.
With AVX2 they would move between registers and memory: on a core of Zen 3 that takes about twice as long as four
squares of eight."""
BYTE_OFFSET = 0 if processor().byte_products == "sdot" else 128
"""Added to a signed byte of x before it is multiplied (`register_tiles.tile_dots`): 128 where the instruction takes
unsigned bytes."""
HALF, BFLOAT, BFLOAT_PAIRS, ONE_BYTE, TWO_BYTES, WORDS = np.int16, np.uint16, np.uint64, np.uint8, np.bool_, np.int64
"""dtypes of packed weights. numba has no 16-bit floats: `HALF` and `BFLOAT` hold their bits. The last four are in the
order of `tile_dots`: bfloat16s for activations rounded to bfloat16 (four in a number of 64 bits), and signed bytes for
activations of one byte, of two, and of one 16-bit number (eight bytes in a number of 64 bits). (int8 itself: signed
bytes cast to floats.)"""

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


class Vector(types.Type):
    """Sixteen floats."""

    def __init__(self) -> None:
        super().__init__(name="f32x16")


f32x16 = Vector()


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, FLOATS)


def address(context: Any, builder: ir.IRBuilder, kind: types.Array, array: Any, index: Any, to: ir.Type) -> Any:
    """A pointer to `array[index]`, cast to a pointer to type `to`."""
    data = context.make_array(kind)(context, builder, value=array).data
    return builder.bitcast(builder.gep(data, [index]), to.as_pointer())


def read(builder: ir.IRBuilder, pointer: Any) -> Any:
    """The value at `pointer`."""
    value = builder.load(pointer)
    value.align = 1  # no alignment is required: on today's processors an unaligned load costs the same
    return value


def repeat(builder: ir.IRBuilder, scalar: Any, vector: ir.VectorType) -> Any:
    """A vector of sixteen copies of `scalar`."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES))


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *args: Any) -> Any:
    """Call the LLVM intrinsic `name`."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def prefetch(builder: ir.IRBuilder, pointer: Any) -> None:
    """Bring the cache line at `pointer` into the L1 cache. The address need not be valid."""
    read_only, keep_near, data = (ir.Constant(I32, number) for number in (0, 3, 1))
    call(builder, "llvm.prefetch.p0i8", ir.VoidType(), pointer, read_only, keep_near, data)


def floats_at(builder: ir.IRBuilder, pointer: Any, stored: types.Type, lanes: int = LANES) -> Any:
    """The `lanes` numbers at `pointer`, stored as type `stored`, as floats."""
    floats, ints = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)

    def stored_as(element: ir.Type) -> Any:
        return read(builder, builder.bitcast(pointer, ir.VectorType(element, lanes).as_pointer()))

    if stored == types.float32:
        return stored_as(F32)
    if stored == types.int16:
        return builder.fpext(stored_as(ir.HalfType()), floats)
    if stored == types.uint16:  # the upper half of a float
        return builder.bitcast(builder.shl(builder.zext(stored_as(I16), ints), ir.Constant(ints, [16] * lanes)), floats)
    return builder.sitofp(builder.sext(stored_as(I8), ints), floats)


@intrinsic
def no_inline(typing: Any) -> Any:
    """The first line of a function that LLVM must not inline, so that its code exists only once."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), code


@intrinsic
def load(typing: Any, array: Any, at: Any) -> Any:
    """`array[at : at + 16]` as floats; `array` holds float32, the bits of 16-bit floats, or int8."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=args[0]).data
        return floats_at(builder, builder.gep(data, [args[1]]), signature.args[0].dtype)

    return f32x16(array, types.intp), code


@intrinsic
def load_scalar(typing: Any, array: Any, at: Any) -> Any:
    """`array[at]` as a float32; `array` as in `load`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=args[0]).data
        one = floats_at(builder, builder.gep(data, [args[1]]), signature.args[0].dtype, 1)
        return builder.extract_element(one, ir.Constant(I32, 0))

    return types.float32(array, types.intp), code


@intrinsic
def store(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """`array[at : at + 16] = value`, float32."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = address(context, builder, signature.args[0], args[0], args[1], FLOATS)
        builder.store(args[2], pointer).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), code


@intrinsic
def load_sums(typing: Any, array: Any, at: Any, minus: Any, minus_at: Any) -> Any:
    """The int32 sums that `tile_dots` stored at `array[at]`, minus the integers at `minus[minus_at]`, as floats."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums = read(builder, address(context, builder, signature.args[0], args[0], args[1], INTS))
        subtrahend = read(builder, address(context, builder, signature.args[2], args[2], args[3], INTS))
        return builder.sitofp(builder.sub(sums, subtrahend), FLOATS)

    return f32x16(array, types.intp, minus, types.intp), code


@intrinsic
def store_bytes(typing: Any, array: Any, at: Any, value: Any, offset: Any) -> Any:
    """`array[at : at + 16] = round(value) + offset`, one byte each; halves round to even."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        integers = builder.fptosi(call(builder, "llvm.rint.v16f32", FLOATS, args[2]), INTS)
        integers = builder.add(integers, repeat(builder, builder.trunc(args[3], I32), INTS))
        bytes_ = builder.trunc(integers, ir.VectorType(I8, LANES))
        builder.store(bytes_, address(context, builder, signature.args[0], args[0], args[1], bytes_.type)).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16, types.intp), code


@intrinsic
def store_words(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """`round(value)`, sixteen signed 16-bit numbers, stored at `array[at]`, an array of bytes; halves round to even."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        integers = builder.fptosi(call(builder, "llvm.rint.v16f32", FLOATS, args[2]), INTS)
        words = builder.trunc(integers, ir.VectorType(I16, LANES))
        builder.store(words, address(context, builder, signature.args[0], args[0], args[1], words.type)).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), code


@intrinsic
def load_nibbles(typing: Any, array: Any, at: Any) -> Any:
    """The sixteen 4-bit numbers in `array[at : at + 8]`, as floats. The low half of a byte is the even one."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        eight = ir.VectorType(I8, LANES // 2)
        packed = read(builder, address(context, builder, signature.args[0], args[0], args[1], eight))
        low = builder.and_(packed, ir.Constant(eight, [15] * 8))
        high = builder.lshr(packed, ir.Constant(eight, [4] * 8))
        order = [lane // 2 + lane % 2 * 8 for lane in range(LANES)]
        return builder.uitofp(builder.zext(builder.shuffle_vector(low, high, ir.Constant(INTS, order)), INTS), FLOATS)

    return f32x16(array, types.intp), code


@intrinsic
def store_nibbles(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """The inverse of `load_nibbles`; `value` holds integers from 0 to 15."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bytes_ = builder.trunc(builder.fptosi(args[2], INTS), ir.VectorType(I8, LANES))
        eight = ir.VectorType(I32, LANES // 2)
        low, high = (
            builder.shuffle_vector(bytes_, bytes_, ir.Constant(eight, list(range(first, LANES, 2)))) for first in (0, 1)
        )
        packed = builder.or_(low, builder.shl(high, ir.Constant(high.type, [4] * 8)))
        builder.store(packed, address(context, builder, signature.args[0], args[0], args[1], packed.type)).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), code


@intrinsic
def half_bits(typing: Any, number: Any) -> Any:
    """The bits of the nearest float16, int16."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), I16)

    return types.int16(types.float32), code


def _round_to_bfloat(builder: ir.IRBuilder, bits: Any, constant: Callable[[int], Any]) -> Any:
    """The bits of the bfloat16s nearest to float32s, given as their bits; halves round to even. NaN stays NaN: the sum
    below could carry from its last bits into its sign."""
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.lshr(builder.add(builder.add(bits, constant(0x7FFF)), odd), constant(16))
    is_nan = builder.icmp_unsigned(">", builder.and_(bits, constant(0x7FFFFFFF)), constant(0x7F800000))
    return builder.select(is_nan, constant(0x7FC0), rounded)


@intrinsic
def bfloat_bits(typing: Any, number: Any) -> Any:
    """The bits of the nearest bfloat16, uint16."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rounded = _round_to_bfloat(builder, builder.bitcast(args[0], I32), lambda number: ir.Constant(I32, number))
        return builder.trunc(rounded, I16)

    return types.uint16(types.float32), code


@intrinsic
def store_bfloats(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """The bits of the sixteen nearest bfloat16s, stored at `array[at]`, an array of any type."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[2], INTS)
        rounded = _round_to_bfloat(builder, bits, lambda number: ir.Constant(INTS, [number] * LANES))
        halves = builder.trunc(rounded, ir.VectorType(I16, LANES))
        builder.store(halves, address(context, builder, signature.args[0], args[0], args[1], halves.type)).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), code


@intrinsic
def splat(typing: Any, number: Any) -> Any:
    """A vector of sixteen copies of a float32."""
    return f32x16(types.float32), lambda context, builder, signature, args: repeat(builder, args[0], FLOATS)


def _binary(name: str) -> Callable[..., Any]:
    @intrinsic
    def operation(typing: Any, a: Any, b: Any) -> Any:
        return f32x16(f32x16, f32x16), lambda context, builder, signature, args: getattr(builder, name)(*args)

    return operation


def _register(symbol: Any, name: str) -> None:
    operation = _binary(name)

    @overload(symbol)
    def typed(a, b):  # type: ignore[no-untyped-def]  (numba compares its signature with the lambda's)
        if a == f32x16 and b == f32x16:
            return lambda a, b: operation(a, b)
        return None


for _symbol, _name in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _register(_symbol, _name)


def _function(name: str, count: int) -> Callable[..., Any]:
    """A function of `count` vectors that calls the LLVM intrinsic `name`."""
    parameters = ", ".join("abc"[:count])

    def typer(typing: Any, *kinds: Any) -> Any:
        return f32x16(*[f32x16] * count), lambda context, builder, signature, args: call(builder, name, FLOATS, *args)

    namespace: dict[str, Any] = {"typer": typer}
    # numba inspects the parameters, so they need names
    exec(f"def made(typing, {parameters}): return typer(typing, {parameters})", namespace)
    return intrinsic(namespace["made"])


fma = _function("llvm.fma.v16f32", 3)
"""a · b + c, rounded once."""
absolute = _function("llvm.fabs.v16f32", 1)
rint = _function("llvm.rint.v16f32", 1)
"""The nearest whole number, halves to even."""


def _beyond(builder: ir.IRBuilder, a: Any, b: Any, sign: str) -> Any:
    """`a` in the lanes where it is beyond `b` (`sign` is ">" or "<"), else `b`; NaN where either is.

    LLVM's own `llvm.maximum` does the same, but before version 17 it has no x86 code for vectors and ends the process.
    """
    chosen = builder.select(builder.fcmp_unordered(sign, a, b), a, b)  # a, where it is NaN
    return builder.select(builder.fcmp_unordered("uno", b, b), b, chosen)


@intrinsic
def maximum(typing: Any, a: Any, b: Any) -> Any:
    """The larger of each pair; NaN if either is."""
    return f32x16(f32x16, f32x16), lambda context, builder, signature, args: _beyond(builder, *args, ">")


@intrinsic
def minimum(typing: Any, a: Any, b: Any) -> Any:
    """The smaller of each pair; NaN if either is."""
    return f32x16(f32x16, f32x16), lambda context, builder, signature, args: _beyond(builder, *args, "<")


def _fold(builder: ir.IRBuilder, vector: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Join the upper half of a vector with the lower one until one lane is left: always in the same order."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        mask = ir.VectorType(I32, lanes)
        low, high = (
            builder.shuffle_vector(vector, vector, ir.Constant(mask, list(range(first, first + lanes))))
            for first in (0, lanes)
        )
        vector = join(low, high)
    return vector


@intrinsic
def total(typing: Any, vector: Any) -> Any:
    """The sum of the lanes, float32."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(_fold(builder, args[0], builder.fadd), ir.Constant(I32, 0))

    return types.float32(f32x16), code


def _extreme(sign: str) -> Callable[..., Any]:
    @intrinsic
    def extreme(typing: Any, vector: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            folded = _fold(builder, args[0], lambda a, b: _beyond(builder, a, b, sign))
            return builder.extract_element(folded, ir.Constant(I32, 0))

        return types.float32(f32x16), code

    return extreme


largest = _extreme(">")
"""The largest lane, float32; NaN if one is."""
smallest = _extreme("<")


@intrinsic
def transpose(typing: Any, array: Any, source: Any, source_row: Any, out: Any, target: Any) -> Any:
    """`out[target + 16 i + j] = array[source + j · source_row + i]` for sixteen i and sixteen j, float32.

    It is done in squares of `SQUARE` rows. In a square every row is paired with the one half a square behind it, and
    the two exchange halves; then with the one a quarter behind it, and they exchange quarters; and so on.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, source, source_row, out, target = args
        floats, mask = ir.VectorType(F32, SQUARE), ir.VectorType(I32, SQUARE)

        def at(kind: Any, array: Any, first: Any, row: int, row_size: Any, column: int) -> Any:
            index = builder.add(first, builder.mul(row_size, ir.Constant(I64, row)))
            return address(context, builder, kind, array, builder.add(index, ir.Constant(I64, column)), floats)

        for top, left in itertools.product(range(0, LANES, SQUARE), repeat=2):
            rows = [
                read(builder, at(signature.args[0], array, source, top + j, source_row, left)) for j in range(SQUARE)
            ]
            distance = SQUARE // 2
            while distance:
                low = [lane if not lane & distance else lane - distance + SQUARE for lane in range(SQUARE)]
                high = [lane + distance if not lane & distance else lane + SQUARE for lane in range(SQUARE)]
                for first in [j for j in range(SQUARE) if not j & distance]:
                    a, b = rows[first], rows[first + distance]
                    rows[first] = builder.shuffle_vector(a, b, ir.Constant(mask, low))
                    rows[first + distance] = builder.shuffle_vector(a, b, ir.Constant(mask, high))
                distance //= 2
            for i, row in enumerate(rows):
                to = at(signature.args[3], out, target, left + i, ir.Constant(I64, LANES), top)
                builder.store(row, to).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, out, types.intp), code


@intrinsic
def _two_to_the(typing: Any, exponent: Any) -> Any:
    """2 to the power of integers from -126 to 127."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        biased = builder.add(builder.fptosi(args[0], INTS), ir.Constant(INTS, [127] * LANES))
        return builder.bitcast(builder.shl(biased, ir.Constant(INTS, [23] * LANES)), FLOATS)

    return f32x16(f32x16), code


@intrinsic
def _zero_below(typing: Any, value: Any, x: Any, limit: Any) -> Any:
    """`value`, but 0 in the lanes where `x` is below `limit`. NaN counts as not below."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, x, limit = args
        below = builder.fcmp_ordered("<", x, repeat(builder, limit, FLOATS))
        return builder.select(below, ir.Constant(FLOATS, [0.0] * LANES), value)

    return f32x16(f32x16, f32x16, types.float32), code


LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1.44269504088896341), np.float32(0.693359375), np.float32(-2.12194440e-4)
LOWEST, HIGHEST = np.float32(-87.0), np.float32(88.0)
C0, C1, C2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
C3, C4, C5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
ZERO, ONE = np.float32(0), np.float32(1)


@njit(**PART)
def exp(x):
    """e^x, off by at most 2 units in the last place; 0 below -87, and e^88 above 88."""
    return exp_within(x, minimum(maximum(x, splat(LOWEST)), splat(HIGHEST)))


@njit(**PART)
def exp_within(x, bounded):
    """`exp` of x; `bounded`: x clamped to `LOWEST` … `HIGHEST`.

    x = n ln 2 + r with |r| ≤ ln 2 / 2, then 2^n times a polynomial in r (Cephes, `expf`; Moshier 1989).
    """
    n = rint(bounded * splat(LOG2_E))
    r = fma(n, splat(-LN2_LOW), fma(n, splat(-LN2_HIGH), bounded))
    p = fma(splat(C0), r, splat(C1))
    p = fma(fma(fma(fma(p, r, splat(C2)), r, splat(C3)), r, splat(C4)), r, splat(C5))
    return _zero_below(fma(p, r * r, r + splat(ONE)) * _two_to_the(n), x, LOWEST)
