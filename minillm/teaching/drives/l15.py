"""How a case of lesson 15 compiles and calls the learner's `panel_product`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numba import njit
from numba.core.errors import NumbaError
from torch import Tensor

from minillm.errors import LessonError
from minillm.ops.cpu.compiled import OPTIONS
from minillm.ops.cpu.panels import pack
from minillm.ops.cpu.simd import LANES
from minillm.teaching.drives.wall import check_between_walls
from minillm.teaching.fence import CANARY, Fences

ANSWERS = "minillm.teaching.exercises."
"""Where planted mistakes are defined."""


HELD = 1e6
"""The initial value of y: a number that no sum in the cases equals."""


@lru_cache(maxsize=64)
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    if (getattr(function, "__module__", None) or "").startswith(ANSWERS) and not hasattr(function, "py_func"):
        # planted mistakes run in Python: compiling all of them takes too long
        return FunctionType(function.__code__, function.__globals__ | _INTERPRETED, function.__name__)
    return function if hasattr(function, "py_func") else njit(**OPTIONS)(function)


def _at(array: np.ndarray, at: int) -> np.ndarray:
    """The sixteen numbers in memory from `array[at]` on, without bounds checks, like compiled code."""
    return np.ctypeslib.as_array((ctypes.c_float * LANES).from_address(array.ctypes.data + 4 * at))


def _store(array: np.ndarray, at: int, vector: np.ndarray) -> None:
    _at(array, at)[:] = vector


_INTERPRETED: dict[str, Callable[..., Any]] = {
    "load": lambda array, at: _at(array, at).copy(),
    "splat": lambda number: np.full(LANES, number, np.float32),
    "fma": lambda a, b, sums: a * b + sums,
    "store": _store,
}
"""The four SIMD functions in Python."""


def product_with(function: Callable[..., Any], weight: Tensor, x: Tensor, against_wall: bool = False) -> Tensor:
    """Compute `x` Wᵀ with `function(panels, x, y)`: `weight` `[out, in]`, `x` `[rows, in]` → `[rows, out]`, float32.

    Every array is surrounded by poison, wide enough for one panel per output. `y` holds `HELD` before the call, and
    unwritten elements are returned as NaN. With `against_wall` the function runs twice more, on arrays that end where
    their memory ends, and on arrays that begin where it begins. Raises `LessonError` if numba cannot compile it, and
    `OutOfBoundsError` if it wrote outside `y` or accessed a wall.
    """
    plain = getattr(function, "py_func", function)
    if "NotImplementedError" in getattr(getattr(plain, "__code__", None), "co_names", ()):
        return plain(None, None, None)  # a stub: raises NotImplementedError
    out = len(weight)
    packed = torch.from_numpy(pack(weight.numpy()))
    padded = -(-out // LANES) * LANES
    rows = []
    for row in x:
        fences = Fences(guard=max(4096, LANES * len(packed)))
        given = fences.input("panels", packed), fences.input("x", row)
        y = fences.output("y", (padded,), torch.float32).fill_(HELD)
        _run(function, *given, y)
        fences.check()
        y.view(torch.int32)[y == HELD] = CANARY[torch.float32]
        rows.append(y[:out].clone())
    if against_wall:
        check_between_walls(
            ("panels", "x", "y"),
            lambda wall: [wall(each) for each in (*given, y)],
            lambda copies: _run(function, *copies),
        )
    return torch.stack(rows)


def _run(function: Callable[..., Any], *arrays: Tensor) -> None:
    try:
        _compiled(function)(*(array.numpy() for array in arrays))
    except NumbaError as problem:
        message = [line for line in str(problem).splitlines() if line.strip()][:4]
        raise LessonError("numba cannot compile this: " + " ".join(message)) from None
