"""How large the tiles of a matrix product are: a table by kind, shape class and GPU, and the tool that fills it.

A product of few rows (decode, verification) is bound by reading the weights: small tiles, the depth split over several
programs so that all processors read. One of many rows (prefill) is bound by arithmetic: large tiles. What is best
depends on the GPU, so the table has its measured winners, and defaults for GPUs that nobody has measured. `measure`
finds them; what it prints is pasted into `MEASURED`. A choice in a table can be read and does not change from run to
run, which is why `triton.autotune`, which decides anew in every process and in the middle of a step, is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from minillm.ops.dispatch import interpreted
from minillm.ops.triton import machine
from minillm.ops.triton.machine import SMALLEST_DOT, power_of_two

FEW_ROWS, SOME_ROWS = 16, 64
CLASSES = ("few", "some", "many")


@dataclass(frozen=True)
class Tiles:
    """Sides of a tile, and how its program runs. It changes the speed, and the results in the last bits."""

    m: int
    """Rows of x."""
    n: int
    """Rows of the weight: outputs."""
    k: int
    """Columns at a time."""
    splits: int = 1
    """Programs that share the columns of one tile; a second kernel adds their sums, always in the same order."""
    warps: int = 4
    stages: int = 3


DEFAULTS = {"few": Tiles(16, 64, 128), "some": Tiles(32, 64, 64), "many": Tiles(64, 128, 64, warps=8)}
WIDE = {"few": Tiles(16, 32, 64), "some": Tiles(32, 32, 32), "many": Tiles(64, 64, 32, warps=8)}
"""Where products take registers instead of tensor cores: in fp32, and before sm_80."""
INTERPRETED = Tiles(16, 32, 32)
MEASURED: dict[tuple[str, str, str], Tiles] = {}
"""`(GPU, kind, shape class)` → the winner. Empty: no GPU has been measured yet."""
PER_PROCESSOR = 2
"""Programs that a processor should have, or the columns are split."""
LEAST_DEPTH = 256
"""Columns of a split at least."""
MAX_SPLITS = 16


def shape_class(rows: int) -> str:
    """`few`, `some` or `many` rows."""
    return CLASSES[0] if rows <= FEW_ROWS else CLASSES[1] if rows <= SOME_ROWS else CLASSES[2]


def choose(kind: str, rows: int, outputs: int, columns: int, dtype: torch.dtype) -> Tiles:
    """The tiles for a product of `kind` (`int8`, `w8a8`, `int4`): measured ones if there are, else the defaults."""
    if interpreted():
        return INTERPRETED
    found = MEASURED.get((machine.gpu_name(), kind, shape_class(rows)))
    if found is not None:
        return found
    fast = machine.has_fast_dots(torch.int8 if kind == "w8a8" else dtype)
    tiles = (DEFAULTS if fast else WIDE)[shape_class(rows)]
    return replace(tiles, splits=_splits(tiles, rows, outputs, columns))


def _splits(tiles: Tiles, rows: int, outputs: int, columns: int) -> int:
    """Enough to keep every processor busy, none of them too shallow; a power of two."""
    programs = -(-rows // tiles.m) * -(-outputs // tiles.n)
    wanted = PER_PROCESSOR * machine.num_processors() // max(programs, 1)
    most = max(1, min(wanted, columns // LEAST_DEPTH, MAX_SPLITS))
    return power_of_two(most // 2 + 1)  # the power of two at or below


def candidates(rows: int) -> Iterator[Tiles]:
    """What `measure` tries for so many rows."""
    sides = (SMALLEST_DOT,) if rows <= FEW_ROWS else (32, 64) if rows <= SOME_ROWS else (64, 128)
    for m, n, k, splits, warps, stages in product(sides, (32, 64, 128), (32, 64, 128), (1, 2, 4, 8), (4, 8), (2, 3, 4)):
        if rows <= SOME_ROWS or splits == 1:
            yield Tiles(m, n, k, splits, warps, stages)


def measure(run: Callable[[Tiles], Any], rows: int) -> tuple[Tiles, float]:
    """The fastest candidate for `run(tiles)`, and its median in milliseconds. For a real GPU only.

    Candidates that the GPU has no room for are passed over. Inputs should be larger than the second-level cache, or be
    rotated by `run`, or what is measured is the cache.
    """
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    best: tuple[Tiles, float] | None = None
    for tiles in candidates(rows):
        try:
            time = do_bench(lambda tiles=tiles: run(tiles), return_mode="median")
        except OutOfResources:
            continue
        if best is None or time < best[1]:
            best = (tiles, time)
    assert best is not None  # the smallest candidate fits any GPU
    return best
