"""The fastest tiles of a quantised matrix product on this GPU, for `ops.triton.tiles.MEASURED`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

from triton import testing
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

from minillm.ops.triton.machine import MIN_TILE_SIDE
from minillm.ops.triton.tiles import FEW_ROWS, SOME_ROWS, Tiles


def candidates(rows: int) -> Iterator[Tiles]:
    """Yield the tiles that `measure` tries for this number of rows. For one row they are those of the INT8 kernel."""
    if rows == 1:
        for n, k, warps, stages in product((2, 4, 8, 16), (256, 512, 1024, 2048), (2, 4, 8), (2, 3, 4)):
            yield Tiles(1, n, k, 1, warps, stages)
        return
    sides = (MIN_TILE_SIDE,) if rows <= FEW_ROWS else (32, 64) if rows <= SOME_ROWS else (64, 128)
    for m, n, k, splits, warps, stages in product(sides, (32, 64, 128), (32, 64, 128), (1, 2, 4, 8), (4, 8), (2, 3, 4)):
        if rows <= SOME_ROWS or splits == 1:
            yield Tiles(m, n, k, splits, warps, stages)


def measure(run: Callable[[Tiles], Any], rows: int, also: Sequence[Tiles] = ()) -> tuple[Tiles, float]:
    """Return the fastest candidate for `run(tiles)` and its median time in milliseconds. Needs a real GPU.

    The tiles in `also` are tried first: those in use, so that the winner is never slower than they are.
    Candidates that need more shared memory or registers than the GPU has are skipped, and those that Triton cannot
    compile. The inputs should be larger than the L2 cache, or `run` should rotate them; otherwise the cache is
    measured. If no candidate runs, raises the first error other than a lack of resources.
    """
    best: tuple[Tiles, float] | None = None
    reason: Exception | None = None
    for tiles in dict.fromkeys([*also, *candidates(rows)]):
        try:
            time = testing.do_bench(lambda tiles=tiles: run(tiles), return_mode="median")
        except Exception as problem:
            if not _is_of_one_candidate(problem):
                raise
            if reason is None or isinstance(reason, OutOfResources):
                reason = problem
            continue
        if best is None or time < best[1]:
            best = (tiles, time)
    if best is None:
        assert reason is not None  # every candidate was skipped
        raise reason
    return best


def _is_of_one_candidate(problem: Exception) -> bool:
    """Whether Triton could not compile, or the GPU not load, this candidate; others may run.

    Triton raises its own `TritonError` (a lack of resources, a compile error of Triton or of ptxas), but a bare
    `RuntimeError` if one of its passes fails.
    """
    return isinstance(problem, TritonError) or "PassManager::run failed" in str(problem)
