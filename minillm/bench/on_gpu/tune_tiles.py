"""The fastest tiles of a quantised matrix product on this GPU, for `ops.triton.tiles.MEASURED`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

from triton import testing
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

from minillm.ops.triton.machine import MIN_TILE_SIDE
from minillm.ops.triton.tiles import FEW_ROWS, SOME_ROWS, Tiles


def candidates(rows: int) -> Iterator[Tiles]:
    """Yield tiles near those known to be good for this number of rows: at most nine, because compiling each takes a
    second. For one row they are those of the INT8 kernel.

    They have three stages, and four warps, or eight for a large tile. They are 128 columns deep, the largest also 64.
    With few rows, columns are split up to four times, with some rows twice. With one row a tile has 4096 weights, 32
    per thread.
    """
    if rows == 1:
        yield from (Tiles(1, n, 4096 // n) for n in (2, 4, 8, 16))
        return
    if rows <= FEW_ROWS:
        sides, widths, splits = (MIN_TILE_SIDE,), (32, 64, 128), (1, 2, 4)
    elif rows <= SOME_ROWS:
        sides, widths, splits = (32, 64), (64, 128), (1, 2)
    else:
        sides, widths, splits = (64, 128), (64, 128), (1,)
    for m, n, count in product(sides, widths, splits):
        for k in (64, 128) if m == 128 else (128,):
            yield Tiles(m, n, k, count, warps=8 if m * n >= 64 * 128 else 4)


def measure(run: Callable[[Tiles], Any], tiles: Iterable[Tiles]) -> tuple[Tiles, float, int]:
    """Return the fastest of `tiles` for `run(tiles)`, its median time in milliseconds, and the number of tiles tried.
    Needs a real GPU.

    Tiles that need more shared memory or registers than the GPU has are skipped, and those that Triton cannot compile.
    The inputs should be larger than the L2 cache, or `run` should rotate them; otherwise the cache is measured. If none
    run, raises the first error other than a lack of resources.
    """
    best: tuple[Tiles, float] | None = None
    reason: Exception | None = None
    tried = 0
    for one in tiles:
        tried += 1
        try:
            time = testing.do_bench(lambda one=one: run(one), return_mode="median")
        except Exception as problem:
            if not _is_of_one_candidate(problem):
                raise
            if reason is None or isinstance(reason, OutOfResources):
                reason = problem
            continue
        if best is None or time < best[1]:
            best = (one, time)
    if best is None:
        assert reason is not None  # all were skipped
        raise reason
    return *best, tried


def _is_of_one_candidate(problem: Exception) -> bool:
    """Whether Triton could not compile, or the GPU not load, this candidate; others may run.

    Triton raises its own `TritonError` (a lack of resources, a compile error of Triton or of ptxas), but a bare
    `RuntimeError` if one of its passes fails.
    """
    return isinstance(problem, TritonError) or "PassManager::run failed" in str(problem)
