"""AMX: the unit of some Intel processors that multiplies whole tiles of bfloat16.

A tile register holds up to 16 rows of 64 bytes. One instruction takes a tile of A (up to 16 rows of 32 numbers) and a
tile of B (32 by 16) and adds their product to a tile of sums (16 by 16 floats): 8,192 multiply-adds in 16 cycles, where
two vector units of sixteen floats do 512. A row of B's tile is two rows of B, interleaved: [k, n], [k + 1, n].

The instruction multiplies and adds in float32, each rounded to nearest. For every sum it adds up the products of even k
in order, separately those of odd k in order, adds the two, and adds the result to the sum. Denormals count as zero.
Rows are independent: a row gives the same bits whatever the other rows are.

A sum is ready for the next addition after 52 cycles, so four sums take turns: of two panels and two groups of sixteen
rows, or of four panels and one group. The instructions name the eight tile registers directly, so a tile stays in its
register from one function here to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from minillm.ops.cpu.register_tiles import even_and_odd, loop_in_registers
from minillm.ops.cpu.simd import FLOATS, I8, I16, I32, I64, INTS, LANES, address, call, read, repeat

ROWS, ROW_BYTES = 16, 64
"""Size of a full tile."""
TILE_BYTES = ROWS * ROW_BYTES
DEPTH = 32
"""Columns of A, rows of B, that one instruction sums over."""
PARTS = 3
"""Tiles of A that are multiplied by the same tile of B for exact products: a float32 is the sum of three bfloat16s. One
tile of A is enough for numbers that were rounded to bfloat16."""
SUMS, B, A = range(4), range(4, 6), range(6, 8)
"""The tile registers."""
CONFIG_BYTES, COLUMNS_AT, ROWS_AT = 64, 16, 48
"""What `ldtilecfg` reads: byte 0 is 1; from byte 16 on the bytes per row of each register (16 bits each); from byte 48
on its rows."""
VOID = ir.VoidType()
INT16S = ir.VectorType(I16, LANES)


def _constant(number: int) -> ir.Constant:
    return ir.Constant(I8, number)


def _strided(builder: ir.IRBuilder, name: str, register: int, pointer: Any, row_bytes: Any) -> None:
    call(builder, f"llvm.x86.{name}", VOID, _constant(register), pointer, row_bytes)


@intrinsic
def configure(typing: Any, first: Any, second: Any) -> Any:
    """Set the number of rows (1 to 16) of this thread's tiles of A and of sums: `first` for the first half of each,
    `second` for the second half. All tiles become zero."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        config = cgutils.alloca_once(builder, ir.ArrayType(I8, CONFIG_BYTES))
        builder.store(ir.Constant(ir.ArrayType(I8, CONFIG_BYTES), None), config)
        start = builder.bitcast(config, I8.as_pointer())

        def put(at: int, value: Any) -> None:
            builder.store(value, builder.gep(start, [ir.Constant(I64, at)]))

        put(0, _constant(1))
        halves = [builder.trunc(arg, I8) for arg in args]
        for kind in (SUMS, B, A):
            for i, register in enumerate(kind):
                put(COLUMNS_AT + 2 * register, _constant(ROW_BYTES))
                put(ROWS_AT + register, _constant(ROWS) if kind is B else halves[2 * i // len(kind)])
        call(builder, "llvm.x86.ldtilecfg", VOID, start)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), code


@intrinsic
def release(typing: Any) -> Any:
    """Release this thread's tiles, so that the operating system need not save them."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call(builder, "llvm.x86.tilerelease", VOID)
        return context.get_dummy_value()

    return types.void(), code


@intrinsic
def zero_tiles(typing: Any) -> Any:
    """Set all sums to zero."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for register in SUMS:
            call(builder, "llvm.x86.tilezero", VOID, _constant(register))
        return context.get_dummy_value()

    return types.void(), code


def _for_each_sum(name: str) -> Callable[..., Any]:
    """A function that loads the sums of a literal number of groups and panels from `y`, or stores them there."""

    @intrinsic(prefer_literal=True)
    def move(typing: Any, y: Any, at: Any, row: Any, groups: Any, panels: Any) -> Any:
        """The sums of group g and panel p begin at `y[at + 16 g · row + 16 p]`, with rows `row` floats apart."""
        if not isinstance(panels, types.IntegerLiteral):
            return None

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            row = args[2]
            for register, (g, p) in _registers(groups.literal_value, panels.literal_value).items():
                group = builder.mul(row, ir.Constant(I64, ROWS * g))
                index = builder.add(builder.add(args[1], group), ir.Constant(I64, LANES * p))
                pointer = address(context, builder, y, args[0], index, I8)
                _strided(builder, name, register, pointer, builder.mul(row, ir.Constant(I64, 4)))
            return context.get_dummy_value()

        return types.void(y, types.intp, types.intp, groups, panels), code

    return move


load_tiles, store_tiles = _for_each_sum("tileloadd64"), _for_each_sum("tilestored64")


def _registers(groups: int, panels: int) -> dict[int, tuple[int, int]]:
    """Register → the (group, panel) of its sums. A second group begins at the second half of the registers."""
    return {SUMS[g * 2 + p]: (g, p) for g in range(groups) for p in range(panels)}


@intrinsic(prefer_literal=True)
def add_tiles(
    typing: Any, w: Any, w_at: Any, panel: Any, x: Any, x_at: Any, group: Any, steps: Any, parts: Any, groups: Any,
    panels: Any,
) -> Any:  # fmt: skip
    """sums += A · B over `steps` times `DEPTH` columns, for one group of rows and up to four panels, or for two groups
    and two panels; `parts`, `groups` and `panels` are literal.

    B: panel p's tiles begin at `w[w_at + p · panel]`, one after the other. A: group g's tiles begin at the byte
    `x[x_at + g · group]`, for each step one tile per part. Each sum goes through steps, then parts, in order.
    """
    if not isinstance(panels, types.IntegerLiteral):
        return None
    part_count, g_count, p_count = parts.literal_value, groups.literal_value, panels.literal_value

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row_bytes = ir.Constant(I64, ROW_BYTES)

        def starts(kind: Any, array: Any, at: Any, distance: Any, count: int) -> list[Any]:
            indices = [builder.add(at, builder.mul(distance, ir.Constant(I64, i))) for i in range(count)]
            return [address(context, builder, kind, array, index, I8) for index in indices]

        b_starts = starts(w, args[0], args[1], args[2], p_count)
        a_starts = starts(x, args[3], args[4], args[5], g_count)

        def load_tile(register: int, start: Any, number: Any) -> None:
            offset = builder.mul(number, ir.Constant(I64, TILE_BYTES))
            _strided(builder, "tileloadd64", register, builder.gep(start, [offset]), row_bytes)

        sums = {place: register for register, place in _registers(g_count, p_count).items()}
        with cgutils.for_range(builder, args[6], intp=I64) as loop:
            for first in range(0, p_count, len(B)):
                pair = list(zip(range(first, min(first + len(B), p_count)), B, strict=False))
                for p, b in pair:
                    load_tile(b, b_starts[p], loop.index)
                for part in range(part_count):
                    number = builder.add(builder.mul(loop.index, ir.Constant(I64, part_count)), ir.Constant(I64, part))
                    for g in range(g_count):
                        a = A[g] if g_count == len(A) else A[part % len(A)]
                        load_tile(a, a_starts[g], number)
                        for p, b in pair:
                            operands = (_constant(sums[g, p]), _constant(a), _constant(b))
                            call(builder, "llvm.x86.tdpbf16ps", VOID, *operands)
        return context.get_dummy_value()

    intp = types.intp
    return types.void(w, intp, intp, x, intp, intp, intp, parts, groups, panels), code


@intrinsic(prefer_literal=True)
def add_row(
    typing: Any, w: Any, w_at: Any, panel: Any, x: Any, x_at: Any, steps: Any, y: Any, y_at: Any, parts: Any,
    panels: Any,
) -> Any:  # fmt: skip
    """As `add_tiles` for one row, with the same bits except for numbers below 2^-126, in vectors of sixteen: y += A · B
    over `steps` times `DEPTH` columns, sixteen floats for each panel; `parts` and `panels` are literal. `x[x_at]`: the
    row in its first tile.

    Each tile instruction becomes two sums per output, of even and of odd columns, which start from zero.
    """
    if not isinstance(panels, types.IntegerLiteral):
        return None
    part_count, count = parts.literal_value, panels.literal_value

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b_starts = [
            address(context, builder, w, args[0], builder.add(args[1], builder.mul(args[2], ir.Constant(I64, p))), INTS)
            for p in range(count)
        ]
        a_start = address(context, builder, x, args[3], args[4], I32)
        out = [
            address(context, builder, y, args[6], builder.add(args[7], ir.Constant(I64, LANES * p)), FLOATS)
            for p in range(count)
        ]
        zero = ir.Constant(FLOATS, [0.0] * LANES)

        with cgutils.for_range(builder, args[5], intp=I64) as loop:
            first_row = builder.mul(loop.index, ir.Constant(I64, ROWS))
            first_part = builder.mul(loop.index, ir.Constant(I64, part_count * TILE_BYTES // 4))

            def body(k: Any, sums: list[Any]) -> list[Any]:
                numbers = []
                for part in range(part_count):
                    at = builder.add(builder.add(first_part, k), ir.Constant(I64, part * TILE_BYTES // 4))
                    numbers += even_and_odd(builder, repeat(builder, read(builder, builder.gep(a_start, [at])), INTS))
                new = []
                for start in b_starts:
                    weights = even_and_odd(builder, read(builder, builder.gep(start, [builder.add(first_row, k)])))
                    for i, number in enumerate(numbers):
                        operands = (weights[i % 2], number, sums[len(new)])
                        new.append(call(builder, "llvm.fma.v16f32", FLOATS, *operands))
                return new

            ended = loop_in_registers(builder, ir.Constant(I64, ROWS), [zero] * (2 * part_count * count), body)
            for p, pointer in enumerate(out):
                total = read(builder, pointer)
                for i in range(2 * part_count * p, 2 * part_count * (p + 1), 2):
                    total = builder.fadd(total, builder.fadd(ended[i], ended[i + 1]))
                builder.store(total, pointer).align = 1
        return context.get_dummy_value()

    intp = types.intp
    return types.void(w, intp, intp, x, intp, intp, y, intp, parts, panels), code


def _cut(builder: ir.IRBuilder, floats: Any) -> tuple[Any, Any]:
    """The first eight significant bits of each float, as the bits of a float, and the rest, as floats."""
    upper = builder.and_(builder.bitcast(floats, INTS), ir.Constant(INTS, [0xFFFF0000] * LANES))
    return upper, builder.fsub(floats, builder.bitcast(upper, FLOATS))


@intrinsic
def split_sixteen(typing: Any, x: Any, x_at: Any, codes: Any, at: Any) -> Any:
    """Split each of `x[x_at : x_at + 16]` (float32) into three bfloat16s that add up to it. The last parts (32 bytes)
    go to `codes[at]`, the middle ones one tile behind it, the first ones two tiles behind it.

    The upper half of a float32 is a bfloat16 with its first eight significant bits. The rest is a float32 with sixteen
    significant bits, which is split in the same way. Every subtraction is exact.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        floats = read(builder, address(context, builder, x, args[0], args[1], FLOATS))
        first, left = _cut(builder, floats)
        middle, left = _cut(builder, left)
        start = address(context, builder, codes, args[2], args[3], I8)
        for tile, part in enumerate((builder.bitcast(left, INTS), middle, first)):
            place = builder.gep(start, [ir.Constant(I64, tile * TILE_BYTES)])
            value = builder.trunc(builder.lshr(part, ir.Constant(INTS, [16] * LANES)), INT16S)
            builder.store(value, builder.bitcast(place, INT16S.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(x, types.intp, codes, types.intp), code
