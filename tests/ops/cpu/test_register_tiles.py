"""Tiles of bytes and of bfloat16s, with every instruction for their products that this processor has."""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import replace

import numpy as np
import pytest
from numba import njit

from minillm.ops.cpu import register_tiles
from minillm.ops.cpu.compiled import OPTIONS
from minillm.ops.cpu.processor import Processor

PROT_NONE = 0
RNG = np.random.default_rng(0)


def byte_sums():
    @njit(**OPTIONS)
    def product(w, x, fours, out):
        register_tiles.tile_dots(w, 0, fours * 64, x, 0, 4 * fours, fours, out, 0, 32, False, 2, 3)

    return product


def ways_here() -> list[Processor]:
    """This processor, then the same with fewer instructions for products of bytes: none, AVX2, AVX-VNNI."""
    here = register_tiles.processor()
    ways = [here, replace(here, byte_products=None, byte_lanes=0)]
    if here.is_x86:
        ways.append(replace(here, byte_products="vpmaddwd", byte_lanes=8))
        if here.byte_lanes == 16:
            ways.append(replace(here, byte_products="vpmaddwd"))
        if here.byte_products == "vpdpbusd":
            ways.append(replace(here, byte_lanes=8))
    return ways


@pytest.mark.parametrize("way", ways_here(), ids=lambda way: f"{way.byte_products} x {way.byte_lanes}")
def test_sums_of_bytes_are_exact_at_their_largest_with_every_instruction(
    way: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(register_tiles, "processor", lambda: way)
    fours = 9
    w = RNG.integers(-127, 128, (2, fours, 16, 4)).astype(np.int8)
    w[0, :, 0], w[0, :, 1] = 127, -127
    x = RNG.integers(0, 256, (3, fours * 4)).astype(np.uint8)
    x[0] = 255
    out = np.empty(3 * 32, np.float32)
    product = byte_sums()
    product(w.reshape(-1).view(np.uint8), x.reshape(-1), fours, out)
    rows = w.transpose(0, 2, 1, 3).reshape(32, -1).astype(np.int64)
    meant = x.astype(np.int64) if way.byte_products != "sdot" else x.view(np.int8).astype(np.int64)
    assert np.array_equal(out.view(np.int32).reshape(3, 32), meant @ rows.T)
    [code] = product.inspect_asm().values()
    registers = {8: "%ymm", 16: "%zmm"}.get(way.byte_lanes, "") if way.is_x86 else ""
    # LLVM joins vpmaddwd and the addition after it to vpdpwssd where it knows that to be fast (Zen 4).
    names = {"vpmaddwd": ("vpmaddwd", "vpdpwssd")}.get(way.byte_products, (way.byte_products,))
    found = [line for line in code.splitlines() if any(f"\t{name}\t" in line for name in names)]
    assert bool(found) == bool(way.byte_products) and all(registers in line for line in found)


@pytest.mark.parametrize(
    "way",
    [way for way in ways_here() if way.byte_lanes in register_tiles.PMADDWD],
    ids=lambda way: f"{way.byte_products} x {way.byte_lanes}",
)
def test_sums_of_words_are_exact_at_their_largest_with_every_instruction(
    way: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`EXACT_COLUMNS` of the largest products fit into int32. The second call adds to the floats of the first."""
    monkeypatch.setattr(register_tiles, "processor", lambda: way)

    @njit(**OPTIONS)
    def product(w, x, twos, out):
        register_tiles.tile_dots(w, 0, twos * 4, x, 0, 4 * twos, twos, out, 0, 32, False, 2, 3)
        register_tiles.tile_dots(w, 0, twos * 4, x, 0, 4 * twos, twos, out, 0, 32, True, 2, 3)

    twos = register_tiles.EXACT_COLUMNS // 2
    w = RNG.integers(-127, 128, (2, twos, 16, 2)).astype(np.int8)
    w[0, :, 0], w[0, :, 1] = -128, 127
    x = RNG.integers(-32_639, 32_640, (3, twos * 2)).astype(np.int16)
    x[0], x[1] = 32_639, -32_639
    out = np.empty(3 * 32, np.float32)
    product(w.reshape(-1).view(np.int64), x.reshape(-1).view(np.uint8), twos, out)
    sums = x.astype(np.int64) @ w.transpose(0, 2, 1, 3).reshape(32, -1).astype(np.int64).T
    assert np.array_equal(out.reshape(3, 32), 2 * sums.astype(np.float32))
    [code] = product.inspect_asm().values()
    assert "vpmaddwd" in code or "vpdpwssd" in code


@pytest.mark.parametrize("instruction", [True, False], ids=["AVX512_BF16", "in floats"])
def test_products_of_bfloats_are_exact(instruction: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of a sum are whole and small enough that a float32 holds every partial sum: no rounding."""
    here = register_tiles.processor()
    if instruction and not here.bfloat_products:
        pytest.skip("this processor has no AVX512_BF16")
    monkeypatch.setattr(register_tiles, "processor", lambda: replace(here, bfloat_products=instruction))

    @njit(**OPTIONS)
    def product(w, x, pairs, out):
        register_tiles.tile_dots(w, 0, pairs * 8, x, 0, 4 * pairs, pairs, out, 0, 32, False, 2, 3)
        register_tiles.tile_dots(w, 0, pairs * 8, x, 0, 4 * pairs, pairs, out, 0, 32, True, 2, 3)

    pairs = 9
    w, x = RNG.integers(-200, 201, (2, pairs, 16, 2)), RNG.integers(-200, 201, (3, 2 * pairs))
    out = np.empty(3 * 32, np.float32)
    product(bfloats(w).view(np.uint64), bfloats(x).view(np.uint8), pairs, out)
    rows = w.transpose(0, 2, 1, 3).reshape(32, -1)
    assert np.array_equal(out.reshape(3, 32), 2 * x @ rows.T)  # the second call added the same again
    [code] = product.inspect_asm().values()
    assert ("vdpbf16ps" in code) == instruction


@pytest.mark.parametrize("instruction", [True, False], ids=["AVX512_BF16", "in floats"])
def test_the_odd_product_of_a_pair_is_added_first(instruction: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """2^24 - 2^24 + 1 is 1. The even product first would leave 0: 2^24 + 1 rounds to 2^24."""
    here = register_tiles.processor()
    if instruction and not here.bfloat_products:
        pytest.skip("this processor has no AVX512_BF16")
    monkeypatch.setattr(register_tiles, "processor", lambda: replace(here, bfloat_products=instruction))

    @njit(**OPTIONS)
    def product(w, x, out):
        register_tiles.tile_dots(w, 0, 8, x, 0, 4, 1, out, 0, 16, True, 1, 1)

    w, x = np.tile([1, -4096], (16, 1)), np.array([1, 4096])  # even, odd
    out = np.full(16, 2**24, np.float32)
    product(bfloats(w).view(np.uint64), bfloats(x).view(np.uint8), out)
    assert (out == 1).all()


def bfloats(x: np.ndarray) -> np.ndarray:
    """The bits of numbers that bfloat16 holds exactly, flat."""
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).reshape(-1)


@njit(**OPTIONS)
def one_tile(w, x, y, length):
    register_tiles.tile(w, 0, length * 16, 16, x, 0, length, length, y, 0, 64, False, 4, 6)


def test_a_tile_of_24_sums_is_not_unrolled() -> None:
    """Two iterations at once need more than 32 registers: the sums would be spilled to memory in each."""
    w, x, y = np.zeros(64 * 8, np.float32), np.zeros(6 * 8, np.float32), np.zeros(6 * 64, np.float32)
    one_tile(w, x, y, 8)
    [code] = one_tile.inspect_llvm().values()
    assert code.count("call <16 x float> @llvm.fma.v16f32") == 24
    assert code.count("call void @llvm.prefetch") == 4  # once for each panel


@pytest.mark.skipif(sys.platform != "linux", reason="calls mprotect")
def test_prefetching_behind_the_end_of_memory_is_no_error() -> None:
    """The last panel ends where a page begins that must not be touched."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    libc, first = ctypes.CDLL(None, use_errno=True), ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(first + page), ctypes.c_size_t(page), PROT_NONE) == 0
    w = np.frombuffer(memory, np.float32, 64 * 8, page - 64 * 8 * 4)
    w[:], y = 2, np.zeros(6 * 64, np.float32)
    one_tile(w, np.ones(6 * 8, np.float32), y, 8)
    assert (y == 16).all()
