"""Sixteen floats at a time: the vocabulary that the other files of this folder are written in.

numba compiles loops, and LLVM turns *some* of them into vector instructions; which, depends on how they were put. So
that nothing is left to luck, a vector is a type here, `f32x16`, and each operation on it is one instruction of LLVM.
A processor with AVX-512 keeps such a vector in one register, one with AVX2 in two, with NEON in four; LLVM sees to it.

`tile` is where nearly all time goes: the inner product of a few rows with a few panels of a matrix, all sums kept in
registers. It computes every sum over k = 0, 1, 2 … in that order, however many rows and panels share the tile, so a
token's numbers do not depend on who else is in the batch, to the last bit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, overload, register_model

from minillm.ops.cpu.compiled import OPTIONS
from minillm.ops.cpu.processor import processor

LANES = 16
REGISTERS = processor().registers
"""How many such vectors fit into the processor's registers: 32 with AVX-512, 8 with AVX2 and with NEON."""
FITS_ALL = REGISTERS >= 32
"""Whether they hold the sums of six rows and four panels, 24; else they hold six sums."""
MIDDLE = 0 if processor().byte_products == "sdot" else 128
"""What `tile_bytes` wants to be added to a signed byte of x: nothing, or what makes it unsigned."""
HALF, BFLOAT, PAIRED, TWICE_PAIRED = np.int16, np.uint16, np.uint8, np.bool_
"""numba knows no 16-bit floats: their bits travel as these integers. The last two: signed bytes in `tile_bytes`' order,
for activations of one byte and of two. (int8 itself: signed bytes that become floats.)"""

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
    """A pointer to `array[index]`, as one to values of type `to`."""
    data = context.make_array(kind)(context, builder, value=array).data
    return builder.bitcast(builder.gep(data, [index]), to.as_pointer())


def read(builder: ir.IRBuilder, pointer: Any) -> Any:
    """What `pointer` points to."""
    value = builder.load(pointer)
    value.align = 1  # anywhere: an unaligned load costs the same today
    return value


def repeat(builder: ir.IRBuilder, scalar: Any, vector: ir.VectorType) -> Any:
    """A vector of sixteen times the same."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES))


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *args: Any) -> Any:
    """Call one of LLVM's own functions."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def floats_at(builder: ir.IRBuilder, pointer: Any, stored: types.Type, lanes: int = LANES) -> Any:
    """`lanes` numbers as floats, from where `pointer` points, whatever they are stored as."""
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
def stay_whole(typing: Any) -> Any:
    """First line of a function that LLVM is not to copy into its callers, so that its code is there once."""

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
def number(typing: Any, array: Any, at: Any) -> Any:
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
    """What `tile_bytes` left at `array[at : at + 16]`, less the integers at `minus`, as floats."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums = read(builder, address(context, builder, signature.args[0], args[0], args[1], INTS))
        less = read(builder, address(context, builder, signature.args[2], args[2], args[3], INTS))
        return builder.sitofp(builder.sub(sums, less), FLOATS)

    return f32x16(array, types.intp, minus, types.intp), code


@intrinsic
def store_bytes(typing: Any, array: Any, at: Any, value: Any, offset: Any) -> Any:
    """`array[at : at + 16] = round(value) + offset`, one byte each; halves round to even."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = builder.fptosi(call(builder, "llvm.rint.v16f32", FLOATS, args[2]), INTS)
        whole = builder.add(whole, repeat(builder, builder.trunc(args[3], I32), INTS))
        bytes_ = builder.trunc(whole, ir.VectorType(I8, LANES))
        builder.store(bytes_, address(context, builder, signature.args[0], args[0], args[1], bytes_.type)).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16, types.intp), code


@intrinsic
def load_nibbles(typing: Any, array: Any, at: Any) -> Any:
    """The sixteen numbers from 0 to 15 in `array[at : at + 8]`, two to a byte, the even ones low; as floats."""

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
    """The inverse of `load_nibbles`; `value` holds whole numbers from 0 to 15."""

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


@intrinsic
def bfloat_bits(typing: Any, number: Any) -> Any:
    """The bits of the nearest bfloat16, uint16; halves round to even."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], I32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 1))
        rounded = builder.add(builder.add(bits, ir.Constant(I32, 0x7FFF)), odd)
        return builder.trunc(builder.lshr(rounded, ir.Constant(I32, 16)), I16)

    return types.uint16(types.float32), code


@intrinsic
def splat(typing: Any, number: Any) -> Any:
    """Sixteen times the same float32."""
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
    """One of LLVM's functions of `count` vectors."""
    parameters = ", ".join("abc"[:count])

    def typer(typing: Any, *kinds: Any) -> Any:
        return f32x16(*[f32x16] * count), lambda context, builder, signature, args: call(builder, name, FLOATS, *args)

    namespace: dict[str, Any] = {"typer": typer}
    exec(f"def made(typing, {parameters}): return typer(typing, {parameters})", namespace)  # numba counts parameters
    return intrinsic(namespace["made"])


fma = _function("llvm.fma.v16f32", 3)
"""a · b + c, rounded once."""
absolute = _function("llvm.fabs.v16f32", 1)
rint = _function("llvm.rint.v16f32", 1)
"""The nearest whole number, halves to even."""


def _beyond(builder: ir.IRBuilder, a: Any, b: Any, sign: str) -> Any:
    """`a` in the lanes where it is beyond `b` (`sign` is ">" or "<"), else `b`; NaN where either is.

    LLVM's own `llvm.maximum` says the same, but before version 17 it has no x86 code for vectors and ends the process.
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


def _fold(builder: ir.IRBuilder, vector: Any, join: Callable[[Any, Any], Any], down_to: int = 1) -> Any:
    """Join the upper half of a vector to the lower until `down_to` lanes are left: always the same tree."""
    lanes = LANES
    while lanes > down_to:
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

    Four times every vector is paired with the one 8, 4, 2, 1 behind it and the two exchange halves, quarters, …
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, source, source_row, out, target = args

        def at(index: Any) -> Any:
            return address(context, builder, signature.args[0], array, index, FLOATS)

        rows = [
            read(builder, at(builder.add(source, builder.mul(source_row, ir.Constant(I64, j))))) for j in range(LANES)
        ]
        distance = LANES // 2
        while distance:
            low = [lane if not lane & distance else lane - distance + LANES for lane in range(LANES)]
            high = [lane + distance if not lane & distance else lane + LANES for lane in range(LANES)]
            for first in [j for j in range(LANES) if not j & distance]:
                a, b = rows[first], rows[first + distance]
                rows[first] = builder.shuffle_vector(a, b, ir.Constant(INTS, low))
                rows[first + distance] = builder.shuffle_vector(a, b, ir.Constant(INTS, high))
            distance //= 2
        for i, row in enumerate(rows):
            to = builder.add(target, ir.Constant(I64, LANES * i))
            builder.store(row, address(context, builder, signature.args[3], out, to, FLOATS)).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, out, types.intp), code


@intrinsic
def _two_to_the(typing: Any, exponent: Any) -> Any:
    """2 to the power of whole numbers from -126 to 127."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        biased = builder.add(builder.fptosi(args[0], INTS), ir.Constant(INTS, [127] * LANES))
        return builder.bitcast(builder.shl(biased, ir.Constant(INTS, [23] * LANES)), FLOATS)

    return f32x16(f32x16), code


@intrinsic
def _zero_below(typing: Any, value: Any, x: Any, limit: Any) -> Any:
    """`value`, or 0 in the lanes where `x` is below `limit`. NaN is not."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, x, limit = args
        below = builder.fcmp_ordered("<", x, repeat(builder, limit, FLOATS))
        return builder.select(below, ir.Constant(FLOATS, [0.0] * LANES), value)

    return f32x16(f32x16, f32x16, types.float32), code


LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1.44269504088896341), np.float32(0.693359375), np.float32(-2.12194440e-4)
LOWEST, HIGHEST = np.float32(-87.0), np.float32(88.0)
C0, C1, C2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
C3, C4, C5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
ONE = np.float32(1)


@njit(**OPTIONS)
def exp(x):
    """e^x, off by at most 2 units in the last place; 0 below -87, and above 88 what e^88 is."""
    return exp_within(x, minimum(maximum(x, splat(LOWEST)), splat(HIGHEST)))


@njit(**OPTIONS)
def exp_within(x, bounded):
    """`exp`, if `bounded` is x between `LOWEST` and `HIGHEST`.

    x = n ln 2 + r with |r| ≤ ln 2 / 2, then 2^n times a polynomial in r (Cephes, `expf`; Moshier 1989).
    """
    n = rint(bounded * splat(LOG2_E))
    r = fma(n, splat(-LN2_LOW), fma(n, splat(-LN2_HIGH), bounded))
    p = fma(splat(C0), r, splat(C1))
    p = fma(fma(fma(fma(p, r, splat(C2)), r, splat(C3)), r, splat(C4)), r, splat(C5))
    return _zero_below(fma(p, r * r, r + splat(ONE)) * _two_to_the(n), x, LOWEST)


def has_byte_products() -> bool:
    """Whether the processor adds up products of bytes four by four (x86: VNNI, ARM: dot products)."""
    return processor().multiplies_bytes


def loop_in_registers(
    builder: ir.IRBuilder,
    count: Any,
    start: list[Any],
    body: Callable[[Any, list[Any]], list[Any]],
) -> list[Any]:
    """for i in range(count): sums = body(i, sums), the sums in registers; `count` is at least 1."""
    before, loop, after = builder.block, builder.append_basic_block("k"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    i = builder.phi(I64)
    sums = [builder.phi(value.type) for value in start]
    new = body(i, sums)
    following = builder.add(i, ir.Constant(I64, 1))
    for phi, first, then in zip((i, *sums), (ir.Constant(I64, 0), *start), (following, *new), strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(then, builder.block)
    again = builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    if len(start) > REGISTERS // 2:
        again.set_metadata("llvm.loop", _as_it_is(builder.module))
    builder.position_at_end(after)
    return new


def _as_it_is(module: ir.Module) -> ir.MDValue:
    """What tells LLVM not to unroll a loop: two rounds at once need more registers than there are, and the sums would
    go to memory and back in each (three times as slow, and not always, for it depends on what else is compiled)."""
    disable = module.add_metadata(["llvm.loop.unroll.disable"])
    loop = ir.MDValue(module, [disable], name=str(len(module.metadata)))
    loop.operands = (loop, disable)  # itself first: so LLVM tells one loop's from another's
    return loop


def _pairs_in_turn(
    matrix: list[Any], weights: Callable[[Any], Any], tokens: list[Any], number: Callable[[Any], Any]
) -> Iterator[tuple[Any, Any]]:
    """Every panel's weights with every row's number, each loaded when it is needed first.

    LLVM keeps to that order. Were all loaded at once, they would need more registers than sums leave, and sums would
    move from register to register in each round: half as fast with AVX-512.
    """
    if len(matrix) == 1:
        [only] = map(weights, matrix)
        yield from ((only, number(q)) for q in tokens)
        return
    numbers = [number(q) for q in tokens]
    for q in matrix:
        own = weights(q)
        yield from ((own, b) for b in numbers)


@intrinsic(prefer_literal=True)
def tile(
    typing: Any, w: Any, w_at: Any, panel: Any, step: Any, x: Any, x_at: Any, x_row: Any, length: Any,
    y: Any, y_at: Any, y_row: Any, add: Any, panels: Any, rows: Any,
) -> Any:  # fmt: skip
    """y[r, 16 p : 16 p + 16] (+)= Σ_k x[r, k] · w[p, k, 0 : 16], for `rows` rows and `panels` panels (literal numbers).

    `w[p, k]` lies at `w_at + p · panel + k · step`, `x[r, k]` at `x_at + r · x_row + k`, `y[r]` at `y_at + r · y_row`.
    `add` (literal bool): go on from what y holds. Σ runs over k in order, one multiply-add each.
    """
    if not isinstance(panels, types.IntegerLiteral):
        return None
    n, m, goes_on = panels.literal_value, rows.literal_value, add.literal_value
    intp = types.intp
    signature = types.void(w, intp, intp, intp, x, intp, intp, intp, y, intp, intp, add, panels, rows)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        w_, w_at, panel, step, x_, x_at, x_row, length, y_, y_at, y_row = args[:11]

        def place(kind: Any, array: Any, at: Any, index: int, distance: Any) -> Any:
            data = context.make_array(kind)(context, builder, value=array).data
            return builder.gep(data, [builder.add(at, builder.mul(distance, ir.Constant(I64, index)))])

        matrix = [place(w, w_, w_at, p, panel) for p in range(n)]
        tokens = [place(x, x_, x_at, r, x_row) for r in range(m)]
        out = [
            builder.bitcast(
                builder.gep(place(y, y_, y_at, r, y_row), [ir.Constant(I64, LANES * p)]), FLOATS.as_pointer()
            )
            for p in range(n)
            for r in range(m)
        ]

        def body(k: Any, sums: list[Any]) -> list[Any]:
            offset = builder.mul(k, step)

            def weights(q: Any) -> Any:
                return floats_at(builder, builder.gep(q, [offset]), w.dtype)

            def number(q: Any) -> Any:
                return repeat(builder, builder.load(builder.gep(q, [k])), FLOATS)

            pairs = _pairs_in_turn(matrix, weights, tokens, number)
            return [call(builder, "llvm.fma.v16f32", FLOATS, a, b, s) for (a, b), s in zip(pairs, sums, strict=True)]

        zero = ir.Constant(FLOATS, [0.0] * LANES)
        start = [read(builder, pointer) if goes_on else zero for pointer in out]
        for value, pointer in zip(loop_in_registers(builder, length, start, body), out, strict=True):
            builder.store(value, pointer).align = 1
        return context.get_dummy_value()

    return signature, code


@intrinsic(prefer_literal=True)
def tile_bytes(
    typing: Any, w: Any, w_at: Any, panel: Any, x: Any, x_at: Any, x_row: Any, length: Any,
    y: Any, y_at: Any, y_row: Any, panels: Any, rows: Any,
) -> Any:  # fmt: skip
    """As `tile` for bytes: y, int32 in the place of floats, = Σ_k x[r, k] · w[p, k], exact, in any order.

    Four k lie together: `w[p, k // 4, 0 : 16, k % 4]`, signed. `length`: the number of such fours. The bytes of `x` are
    signed or unsigned, as `MIDDLE` says. See `add_products`.
    """
    if not isinstance(panels, types.IntegerLiteral):
        return None
    n, m = panels.literal_value, rows.literal_value
    intp = types.intp
    signature = types.void(w, intp, intp, x, intp, intp, intp, y, intp, intp, panels, rows)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        w_, w_at, panel, x_, x_at, x_row, length, y_, y_at, y_row = args[:10]

        def place(kind: Any, array: Any, at: Any, index: int, distance: Any) -> Any:
            data = context.make_array(kind)(context, builder, value=array).data
            return builder.gep(data, [builder.add(at, builder.mul(distance, ir.Constant(I64, index)))])

        matrix = [place(w, w_, w_at, p, panel) for p in range(n)]
        tokens = [builder.bitcast(place(x, x_, x_at, r, x_row), I32.as_pointer()) for r in range(m)]
        out = [
            builder.bitcast(builder.gep(place(y, y_, y_at, r, y_row), [ir.Constant(I64, LANES * p)]), INTS.as_pointer())
            for p in range(n)
            for r in range(m)
        ]

        def body(k: Any, sums: list[Any]) -> list[Any]:
            offset = builder.mul(k, ir.Constant(I64, 4 * LANES))

            def weights(q: Any) -> Any:
                return read(builder, builder.bitcast(builder.gep(q, [offset]), INTS.as_pointer()))

            def number(q: Any) -> Any:
                return repeat(builder, read(builder, builder.gep(q, [k])), INTS)

            pairs = _pairs_in_turn(matrix, weights, tokens, number)
            return [add_products(builder, s, a, b) for (a, b), s in zip(pairs, sums, strict=True)]

        zero = ir.Constant(INTS, [0] * LANES)
        for value, pointer in zip(loop_in_registers(builder, length, [zero] * (n * m), body), out, strict=True):
            builder.store(value, pointer).align = 1
        return context.get_dummy_value()

    return signature, code


def add_products(builder: ir.IRBuilder, sums: Any, signed: Any, unsigned: Any) -> Any:
    """sums + the four products of each lane: a lane of `signed` is four signed bytes, of `unsigned` four unsigned ones,
    except for `sdot`: it takes those for signed too (below 128 both are the same).

        vpdpbusd   64 products a time (AVX-512 VNNI) or 32 (AVX-VNNI)
        sdot       16 (NEON)
        vpmaddwd   pairs of 16 bits, so even and odd bytes one after the other (AVX2, AVX-512)

    Elsewhere each byte is cut out and multiplied by itself.
    """
    chip = processor()
    if chip.byte_products is None:
        return _add_products_of_each_byte(builder, sums, signed, unsigned)
    parts = []
    for s, a, b in zip(*(_split(builder, v, chip.byte_lanes) for v in (sums, signed, unsigned)), strict=True):
        if chip.byte_products == "vpdpbusd":
            parts.append(call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * chip.byte_lanes}", s.type, s, b, a))
        elif chip.byte_products == "sdot":
            bytes_ = [builder.bitcast(v, ir.VectorType(I8, 16)) for v in (a, b)]
            parts.append(call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", s.type, s, *bytes_))
        else:
            parts.append(_add_products_of_pairs(builder, s, a, b))
    return _joined(builder, parts)


def _split(builder: ir.IRBuilder, vector: Any, lanes: int) -> list[Any]:
    """The vector as vectors of `lanes` lanes."""
    if lanes == LANES:
        return [vector]
    masks = [list(range(first, first + lanes)) for first in range(0, LANES, lanes)]
    return [builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, lanes), mask)) for mask in masks]


def _joined(builder: ir.IRBuilder, parts: list[Any]) -> Any:
    """The inverse of `_split`."""
    while len(parts) > 1:
        mask = list(range(2 * parts[0].type.count))
        order = ir.Constant(ir.VectorType(I32, len(mask)), mask)
        parts = [builder.shuffle_vector(a, b, order) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _add_products_of_pairs(builder: ir.IRBuilder, sums: Any, signed: Any, unsigned: Any) -> Any:
    """`add_products` by `vpmaddwd`: two products of 16 bits are added up in each lane, 2 · 127 · 255 at most."""
    lanes = sums.type.count
    pairs = ir.VectorType(I16, 2 * lanes)
    name = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}[lanes]
    eight, low = (ir.Constant(pairs, [number] * 2 * lanes) for number in (8, 255))
    a, b = (builder.bitcast(v, pairs) for v in (signed, unsigned))
    odd = builder.ashr(a, eight), builder.lshr(b, eight)
    even = builder.ashr(builder.shl(a, eight), eight), builder.and_(b, low)
    for factors in (even, odd):
        sums = builder.add(sums, call(builder, name, sums.type, *factors))
    return sums


def _add_products_of_each_byte(builder: ir.IRBuilder, sums: Any, signed: Any, unsigned: Any) -> Any:
    shift = ir.Constant(INTS, [24] * LANES)
    for left in (24, 16, 8, 0):
        by = ir.Constant(INTS, [left] * LANES)
        a = builder.ashr(builder.shl(signed, by), shift)
        b = builder.lshr(builder.shl(unsigned, by), shift)
        sums = builder.add(sums, builder.mul(a, b))
    return sums
