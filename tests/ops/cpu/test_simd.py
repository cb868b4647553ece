"""Every operation on vectors of sixteen lanes against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from minillm.ops.cpu import simd
from minillm.ops.cpu.compiled import OPTIONS

RNG = np.random.default_rng(0)


@njit(**OPTIONS)
def exponentials(x, out):
    for i in range(0, len(x), 16):
        simd.store(out, i, simd.exp(simd.load(x, i)))


def exp_of(values) -> np.ndarray:
    x = np.resize(np.asarray(values, np.float32), -(-len(values) // 16) * 16)
    out = np.empty_like(x)
    exponentials(x, out)
    return out[: len(values)]


def test_exp_is_right_to_two_units_in_the_last_place() -> None:
    x = np.linspace(-86.9, 87.9, 16 * 4001).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(exp_of(x) - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()


def test_exp_at_its_ends() -> None:
    got = exp_of([0.0, -np.inf, -100.0, -87.5, 88.0, 1000.0, np.nan])
    assert got[0] == 1 and not got[1:4].any()
    assert np.isfinite(got[4:6]).all() and got[4] == got[5]
    assert np.isnan(got[6])


@njit(**OPTIONS)
def extremes(a, b, out):
    simd.store(out, 0, simd.maximum(simd.load(a, 0), simd.load(b, 0)))
    simd.store(out, 16, simd.minimum(simd.load(a, 0), simd.load(b, 0)))
    out[32], out[33] = simd.largest(simd.load(a, 0)), simd.smallest(simd.load(a, 0))


def test_maximum_and_minimum_with_nan_are_nan() -> None:
    a, b, out = np.arange(16, dtype=np.float32), np.full(16, 7, np.float32), np.empty(34, np.float32)
    a[3], b[5], a[8], b[9], a[0], a[15] = np.nan, np.nan, -np.inf, np.inf, np.inf, -np.inf
    extremes(a, b, out)
    assert np.array_equal(out[:16], np.maximum(a, b), equal_nan=True)
    assert np.array_equal(out[16:32], np.minimum(a, b), equal_nan=True)
    assert np.isnan(out[32:]).all()
    extremes(np.arange(16, 0, -1, dtype=np.float32), b, out)
    assert (out[32], out[33]) == (16, 1)


def test_no_llvm_intrinsic_is_used_that_older_versions_lack_on_x86() -> None:
    """Before version 17 of LLVM (numba 0.61 brings 15) compiling `llvm.maximum` of vectors ends the process."""
    a, out = np.zeros(16, np.float32), np.empty(34, np.float32)
    extremes(a, a, out)
    exp_of([1.0])
    for function in (extremes, exponentials):
        for code in function.inspect_llvm().values():
            assert "llvm.maximum" not in code and "llvm.minimum" not in code


@njit(**OPTIONS)
def as_floats(array, out):
    for i in range(0, len(array), 16):
        simd.store(out, i, simd.load(array, i))
    for i in range(len(array)):
        out[i] -= simd.load_scalar(array, i)


@njit(**OPTIONS)
def loaded(array, out):
    for i in range(0, len(array), 16):
        simd.store(out, i, simd.load(array, i))


@pytest.mark.parametrize("kind", ["float32", "half", "bfloat", "int8"])
def test_every_stored_dtype_is_loaded_as_floats(kind: str) -> None:
    exact = RNG.integers(-127, 128, 64).astype(np.float32)
    stored = {
        "float32": exact,
        "half": exact.astype(np.float16).view(simd.HALF),
        "bfloat": (exact.view(np.uint32) >> 16).astype(simd.BFLOAT),
        "int8": exact.astype(np.int8),
    }[kind]
    out = np.empty(64, np.float32)
    loaded(stored, out)
    assert np.array_equal(out, exact)
    as_floats(stored, out)
    assert not out.any()


@njit(**OPTIONS)
def lanes(x, out):
    v = simd.load(x, 0)
    out[0], out[1] = simd.total(v), simd.largest(v)


def test_sum_and_largest_of_the_lanes() -> None:
    x, out = RNG.standard_normal(16).astype(np.float32), np.empty(2, np.float32)
    lanes(x, out)
    assert out[0] == pytest.approx(x.sum(), abs=1e-5) and out[1] == x.max()
    x[3] = np.nan
    lanes(x, out)
    assert np.isnan(out).all()


@njit(**OPTIONS)
def rounded(x, out, offset):
    simd.store_bytes(out, 0, simd.load(x, 0), offset)


def test_bytes_round_halves_to_even() -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -127.0, 127.0, 3.49, 3.51, -3.5, -4.5, 0, 1, 2, 3], np.float32)
    out = np.empty(16, np.uint8)
    rounded(x, out, 128)
    assert np.array_equal(out, np.rint(x).astype(np.int32) + 128)


@njit(**OPTIONS)
def nibbles(x, packed, out):
    simd.store_nibbles(packed, 0, simd.load(x, 0))
    simd.store(out, 0, simd.load_nibbles(packed, 0))


def test_nibbles_are_two_to_a_byte_the_even_one_in_the_low_half() -> None:
    x, packed, out = np.arange(15, -1, -1).astype(np.float32), np.empty(8, np.uint8), np.empty(16, np.float32)
    nibbles(x, packed, out)
    assert np.array_equal(out, x)
    assert np.array_equal(packed & 15, x[::2]) and np.array_equal(packed >> 4, x[1::2])


@pytest.mark.parametrize("size", [8, 16])
def test_a_square_is_transposed_whatever_the_registers_hold(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simd, "SQUARE", size)

    @njit(**OPTIONS)
    def transpose(x):
        simd.transpose(x, 3, 20, x, 500)

    x = RNG.standard_normal(800).astype(np.float32)
    square = np.stack([x[3 + 20 * j : 19 + 20 * j] for j in range(16)])
    transpose(x)
    assert np.array_equal(x[500:756].reshape(16, 16), square.T)
