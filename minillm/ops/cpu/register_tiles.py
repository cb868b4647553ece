"""Matrix products in registers: a few rows of x times a few panels of a matrix, all sums kept in registers.

Nearly all time of a step goes here. `tile` multiplies floats; `tile_dots` bytes, bfloat16s and 16-bit integers, of
which a lane holds several. Each sum is taken over k = 0, 1, 2 … in that order (of a pair of bfloat16s, the odd one
first), whatever the number of rows and panels in the tile. So a token's numbers do not depend, to the last bit, on
which other requests are in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from minillm.ops.cpu.processor import processor
from minillm.ops.cpu.simd import FLOATS, I8, I16, I32, I64, INTS, LANES, call, floats_at, prefetch, read, repeat

REGISTERS = processor().registers
"""Vectors of sixteen floats that the processor's registers hold: 32 with AVX-512, 8 with AVX2 and with NEON."""
FITS_ALL = REGISTERS >= 32
"""Whether they hold the 24 sums of six rows and four panels. If not, they hold six sums."""

PMADDWD = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}
"""LLVM's name of the instruction `vpmaddwd` by its number of lanes."""
EXACT_COLUMNS = 512
"""Columns that a sum of products of signed bytes and 16-bit numbers up to 32,639 may have before it leaves int32."""

AHEAD = 2048
"""Bytes of each panel between what is prefetched and what is read."""


def has_byte_products() -> bool:
    """Whether one instruction adds up four products of bytes per lane (x86: VNNI, ARM: dot products)."""
    return processor().multiplies_bytes


def loop_in_registers(
    builder: ir.IRBuilder,
    count: Any,
    start: list[Any],
    body: Callable[[Any, list[Any]], list[Any]],
) -> list[Any]:
    """Emit `for i in range(count): sums = body(i, sums)` with the sums in registers; returns the last sums. `count`: at
    least 1."""
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
        again.set_metadata("llvm.loop", _no_unroll(builder.module))
    builder.position_at_end(after)
    return new


def _no_unroll(module: ir.Module) -> ir.MDValue:
    """Metadata that keeps LLVM from unrolling a loop. Two iterations at once need more registers than there are, and
    sums would be spilled to memory in each. (That is three times as slow; whether LLVM unrolls depends on what else is
    compiled.)"""
    disable = module.add_metadata(["llvm.loop.unroll.disable"])
    loop = ir.MDValue(module, [disable], name=str(len(module.metadata)))
    loop.operands = (loop, disable)  # itself first, so that LLVM keeps the metadata of two loops apart
    return loop


def _prefetch_panels(builder: ir.IRBuilder, matrix: list[Any], k: Any, step: Any, size: int) -> None:
    """Prefetch what a later iteration reads of each panel; behind the end of a panel it is the beginning of the next.

    A matrix is read once per step, and only the L3 cache or memory holds it. The processor prefetches by itself, but
    begins anew in each page of 4 KB, and then arithmetic would wait: a forward of five rows of minicoder (fp32, two
    cores of Zen 5) takes 0.36 ms, without this 0.45. In attention the panels are columns of the values, and a later
    iteration is a later position. `step`: bytes from one iteration to the next; `size`: bytes of one panel that an
    iteration reads.
    """
    at = builder.mul(builder.add(k, ir.Constant(I64, AHEAD // size)), step)
    for panel in matrix:
        prefetch(builder, builder.gep(builder.bitcast(panel, I8.as_pointer()), [at]))


def _pairs_in_order(
    matrix: list[Any], weights: Callable[[Any], Any], tokens: list[Any], number: Callable[[Any], Any]
) -> Iterator[tuple[Any, Any]]:
    """Yield every panel's weights with every row's number, and load each when it is first needed.

    LLVM keeps that order. If all were loaded first, they would need more registers than the sums leave, and sums would
    move between registers in each iteration: half as fast with AVX-512.
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
    `add` (literal bool): sums start from y, not from zero. Σ runs over k in order, one multiply-add each.
    """
    if not isinstance(panels, types.IntegerLiteral):
        return None
    n, m, adds_to_y = panels.literal_value, rows.literal_value, add.literal_value
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

        size = w.dtype.bitwidth // 8

        def body(k: Any, sums: list[Any]) -> list[Any]:
            _prefetch_panels(builder, matrix, k, builder.mul(step, ir.Constant(I64, size)), LANES * size)
            offset = builder.mul(k, step)

            def weights(q: Any) -> Any:
                return floats_at(builder, builder.gep(q, [offset]), w.dtype)

            def number(q: Any) -> Any:
                return repeat(builder, builder.load(builder.gep(q, [k])), FLOATS)

            pairs = _pairs_in_order(matrix, weights, tokens, number)
            return [call(builder, "llvm.fma.v16f32", FLOATS, a, b, s) for (a, b), s in zip(pairs, sums, strict=True)]

        zero = ir.Constant(FLOATS, [0.0] * LANES)
        start = [read(builder, pointer) if adds_to_y else zero for pointer in out]
        for value, pointer in zip(loop_in_registers(builder, length, start, body), out, strict=True):
            builder.store(value, pointer).align = 1
        return context.get_dummy_value()

    return signature, code


@intrinsic(prefer_literal=True)
def tile_dots(
    typing: Any, w: Any, w_at: Any, panel: Any, x: Any, x_at: Any, x_row: Any, length: Any,
    y: Any, y_at: Any, y_row: Any, add: Any, panels: Any, rows: Any,
) -> Any:  # fmt: skip
    """As `tile` for numbers of x of which a lane of 32 bits holds several: four bytes, two bfloat16s or two 16-bit
    integers, by the dtype of `w`.

    With n in a lane: `w[p, k // n, 0 : 16, k % n]`, and `length` counts the lanes of a row of x. `w_at` and `panel` are
    in elements of `w`, `x_at` and `x_row` in bytes.

    Bytes: the sums are exact, and the floats of `y` hold the bits of int32. w is signed; x unsigned if `BYTE_OFFSET` is
    128, signed if it is 0 (see `add_products`). bfloat16s (`BFLOAT_PAIRS`): the sums are floats (see `add_pairs`).
    16-bit integers (`WORDS`): w has signed bytes; the sums are exact up to `EXACT_COLUMNS`, and become floats, to which
    `add` adds.
    """
    if not isinstance(panels, types.IntegerLiteral):
        return None
    n, m = panels.literal_value, rows.literal_value
    of_words = w.dtype == types.int64
    add_to, kind = (add_pairs, FLOATS) if w.dtype == types.uint64 else (add_words if of_words else add_products, INTS)
    stored = ir.VectorType(I8, 2 * LANES) if of_words else INTS
    adds_to_y, intp = add.literal_value, types.intp
    signature = types.void(w, intp, intp, x, intp, intp, intp, y, intp, intp, add, panels, rows)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        w_, w_at, panel, x_, x_at, x_row, length, y_, y_at, y_row = args[:10]

        def place(kind: Any, array: Any, at: Any, index: int, distance: Any) -> Any:
            data = context.make_array(kind)(context, builder, value=array).data
            return builder.gep(data, [builder.add(at, builder.mul(distance, ir.Constant(I64, index)))])

        matrix = [builder.bitcast(place(w, w_, w_at, p, panel), stored.as_pointer()) for p in range(n)]
        tokens = [builder.bitcast(place(x, x_, x_at, r, x_row), I32.as_pointer()) for r in range(m)]
        out = [
            builder.bitcast(
                builder.gep(place(y, y_, y_at, r, y_row), [ir.Constant(I64, LANES * p)]),
                (FLOATS if of_words else kind).as_pointer(),
            )
            for p in range(n)
            for r in range(m)
        ]

        size = (2 if of_words else 4) * LANES

        def body(k: Any, sums: list[Any]) -> list[Any]:
            if m > 1:  # for one row it was no faster: only memory counts there
                _prefetch_panels(builder, matrix, k, ir.Constant(I64, size), size)

            def weights(q: Any) -> Any:
                own = read(builder, builder.gep(q, [k]))
                return builder.bitcast(builder.sext(own, ir.VectorType(I16, 2 * LANES)), INTS) if of_words else own

            def numbers(q: Any) -> Any:
                return repeat(builder, read(builder, builder.gep(q, [k])), INTS)

            pairs = _pairs_in_order(matrix, weights, tokens, numbers)
            return [add_to(builder, s, a, b) for (a, b), s in zip(pairs, sums, strict=True)]

        zero = ir.Constant(kind, [0] * LANES)
        start = [read(builder, pointer) if adds_to_y and not of_words else zero for pointer in out]
        for value, pointer in zip(loop_in_registers(builder, length, start, body), out, strict=True):
            if of_words:
                value = builder.sitofp(value, FLOATS)
                value = builder.fadd(value, read(builder, pointer)) if adds_to_y else value
            builder.store(value, pointer).align = 1
        return context.get_dummy_value()

    return signature, code


def add_products(builder: ir.IRBuilder, sums: Any, signed: Any, unsigned: Any) -> Any:
    """sums + the four products of each lane. A lane of `signed` is four signed bytes, of `unsigned` four unsigned ones;
    `sdot` reads both as signed (below 128 that is the same).

        vpdpbusd   64 products per instruction (AVX-512 VNNI) or 32 (AVX-VNNI)
        sdot       16 (NEON)
        vpmaddwd   pairs of 16-bit numbers, so even and odd bytes one after the other (AVX2, AVX-512)

    Without any of them each byte is extracted and multiplied on its own.
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


def add_words(builder: ir.IRBuilder, sums: Any, a: Any, b: Any) -> Any:
    """sums + the two products of each lane, by `vpmaddwd`; `a`, `b`: two signed 16-bit numbers per lane."""
    vectors = (_split(builder, v, processor().byte_lanes) for v in (sums, a, b))
    return _joined(builder, [_add_pmaddwd(builder, s, x, y) for s, x, y in zip(*vectors, strict=True)])


def add_pairs(builder: ir.IRBuilder, sums: Any, a: Any, b: Any) -> Any:
    """sums + the two products of each lane; `a`, `b`: two bfloat16s per lane. The odd product is added first, then the
    even one: in one instruction (`vdpbf16ps`, which counts numbers below 2^-126 as zero), otherwise as floats."""
    if processor().bfloat_products:
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, sums, a, b)
    (even_a, odd_a), (even_b, odd_b) = even_and_odd(builder, a), even_and_odd(builder, b)
    for x, y in ((odd_a, odd_b), (even_a, even_b)):
        sums = call(builder, "llvm.fma.v16f32", FLOATS, x, y, sums)
    return sums


def even_and_odd(builder: ir.IRBuilder, pairs: Any) -> tuple[Any, Any]:
    """The two bfloat16s of each lane, as floats."""
    even = builder.shl(pairs, ir.Constant(INTS, [16] * LANES))
    odd = builder.and_(pairs, ir.Constant(INTS, [0xFFFF0000] * LANES))
    return builder.bitcast(even, FLOATS), builder.bitcast(odd, FLOATS)


def _split(builder: ir.IRBuilder, vector: Any, lanes: int) -> list[Any]:
    """The vector cut into vectors of `lanes` lanes."""
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
    """`add_products` by `vpmaddwd`: each lane adds two products of 16-bit numbers, together 2 · 127 · 255 at most."""
    pairs = ir.VectorType(I16, 2 * sums.type.count)
    eight, low = (ir.Constant(pairs, [number] * pairs.count) for number in (8, 255))
    a, b = (builder.bitcast(v, pairs) for v in (signed, unsigned))
    odd = builder.ashr(a, eight), builder.lshr(b, eight)
    even = builder.ashr(builder.shl(a, eight), eight), builder.and_(b, low)
    for factors in (even, odd):
        sums = _add_pmaddwd(builder, sums, *factors)
    return sums


def _add_pmaddwd(builder: ir.IRBuilder, sums: Any, a: Any, b: Any) -> Any:
    """`sums` of 8 or 16 lanes + the two products of 16-bit numbers in each lane of `a` and `b`."""
    pairs = ir.VectorType(I16, 2 * sums.type.count)
    factors = builder.bitcast(a, pairs), builder.bitcast(b, pairs)
    return builder.add(sums, call(builder, PMADDWD[sums.type.count], sums.type, *factors))


def _add_products_of_each_byte(builder: ir.IRBuilder, sums: Any, signed: Any, unsigned: Any) -> Any:
    shift = ir.Constant(INTS, [24] * LANES)
    for left in (24, 16, 8, 0):
        by = ir.Constant(INTS, [left] * LANES)
        a = builder.ashr(builder.shl(signed, by), shift)
        b = builder.lshr(builder.shl(unsigned, by), shift)
        sums = builder.add(sums, builder.mul(a, b))
    return sums
