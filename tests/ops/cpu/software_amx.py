"""AMX's registers and instructions in NumPy, for processors that lack them.

`emulated()` makes the compiled code call these functions instead. So layouts and indices are tested on every processor;
the instructions themselves only where they exist.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from llvmlite import binding, ir

from minillm.ops.cpu import amx
from minillm.ops.cpu.simd import call

REGISTERS = 8
FUNCTIONS: list[object] = []
"""Keeps alive what compiled code may call."""
POINTER, BYTE, SIZE = ctypes.c_void_p, ctypes.c_uint8, ctypes.c_int64


class Tiles:
    """The eight tile registers of a thread, of up to 16 rows of 64 bytes."""

    def __init__(self) -> None:
        self.rows = [0] * REGISTERS
        self.bytes = np.zeros((REGISTERS, amx.ROWS, amx.ROW_BYTES), np.uint8)

    def ldtilecfg(self, config: int) -> None:
        """Set the shapes of the registers, which become zero."""
        found = _memory(config, amx.CONFIG_BYTES, 1, amx.CONFIG_BYTES)[0]
        assert found[0] == 1  # the palette
        columns = found[amx.COLUMNS_AT : amx.COLUMNS_AT + 2 * REGISTERS].view(np.uint16)
        self.rows = [int(rows) for rows in found[amx.ROWS_AT : amx.ROWS_AT + REGISTERS]]
        assert all(columns == amx.ROW_BYTES) and all(1 <= rows <= amx.ROWS for rows in self.rows)
        self.bytes[:] = 0

    def tilerelease(self) -> None:
        """Forget the shapes."""
        self.rows = [0] * REGISTERS

    def tilezero(self, register: int) -> None:
        """Set a register to zero."""
        assert self.rows[register]
        self.bytes[register] = 0

    def tileloadd64(self, register: int, pointer: int, stride: int) -> None:
        """Load a register; its rows lie `stride` bytes apart."""
        rows = self.rows[register]
        assert rows
        self.bytes[register, :rows] = _memory(pointer, stride, rows, amx.ROW_BYTES)

    def tilestored64(self, register: int, pointer: int, stride: int) -> None:
        """The inverse of `tileloadd64`."""
        rows = self.rows[register]
        assert rows
        _memory(pointer, stride, rows, amx.ROW_BYTES)[:] = self.bytes[register, :rows]

    def tdpbf16ps(self, sums: int, a: int, b: int) -> None:
        """sums += A · B: products of even columns one after the other, of odd ones, then their sum."""
        rows = self.rows[sums]
        assert rows == self.rows[a] and self.rows[b] == amx.ROWS
        left = _floats(self.bytes[a, :rows]).reshape(rows, amx.ROWS, 2)
        right = _floats(self.bytes[b]).reshape(amx.ROWS, amx.ROWS, 2)
        halves = np.zeros((2, rows, amx.ROWS), np.float32)
        for k in range(amx.ROWS):
            for odd in range(2):
                # a product of two bfloat16s fits into a float32, so float64 and one rounding are a fused multiply-add
                product = left[:, k, odd, None].astype(np.float64) * right[k, :, odd]
                halves[odd] = (halves[odd] + product).astype(np.float32)
        total = self.bytes[sums, :rows].view(np.float32)
        total += halves[0] + halves[1]


@contextmanager
def emulated() -> Iterator[None]:
    """Functions that are compiled within this block, and their callers, have AMX."""
    tiles = Tiles()
    kinds = {
        "ldtilecfg": (POINTER,),
        "tilerelease": (),
        "tilezero": (BYTE,),
        "tileloadd64": (BYTE, POINTER, SIZE),
        "tilestored64": (BYTE, POINTER, SIZE),
        "tdpbf16ps": (BYTE, BYTE, BYTE),
    }
    functions = {}
    for name, kind in kinds.items():
        functions[name] = ctypes.CFUNCTYPE(None, *kind)(getattr(tiles, name))
        FUNCTIONS.append(functions[name])
        binding.add_symbol(f"software_{name}", ctypes.cast(functions[name], POINTER).value)

    def redirected(builder: ir.IRBuilder, name: str, result: ir.Type, *args: Any) -> Any:
        instruction = name.removeprefix("llvm.x86.")
        return call(builder, f"software_{instruction}" if instruction in functions else name, result, *args)

    amx.call = redirected
    try:
        yield
    finally:
        amx.call = call


def _memory(pointer: int, stride: int, rows: int, size: int) -> np.ndarray:
    """`rows` rows of `size` bytes, `stride` bytes apart, as an array that shares the memory."""
    whole = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(BYTE)), ((rows - 1) * stride + size,))
    return np.lib.stride_tricks.as_strided(whole, (rows, size), (stride, 1))


def _floats(bits: np.ndarray) -> np.ndarray:
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
