"""The tiles of `panels.py` alone, on a matrix that stays in the processor's cache: the compute limit of a step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from minillm.ops.cpu.compiled import entry_point
from minillm.ops.cpu.panels import CHUNK, PANELS, tiles
from minillm.ops.cpu.simd import LANES

COLUMNS, GROUPS, TIMES = 384, 6, 40
"""Columns of the matrix, groups of panels (together 384 outputs), and products per run."""


@entry_point()
def _multiply(weights, x, y, times):
    """y = x Wᵀ, repeated `times` times: x `[CHUNK, COLUMNS]`, W in panels, y `[CHUNK, GROUPS · PANELS · LANES]`."""
    panel, outputs = COLUMNS * LANES, GROUPS * PANELS * LANES
    for _ in range(times):
        for g in range(GROUPS):
            at, y_at = g * PANELS * panel, g * PANELS * LANES
            tiles(weights, at, panel, LANES, x, 0, COLUMNS, COLUMNS, y, y_at, outputs, CHUNK, False, 4)


def tile_product(num_threads: int) -> tuple[int, Callable[[], object]]:
    """(operations of one run, a function that does a run). Every thread has its own x and y; the first run compiles."""
    outputs = GROUPS * PANELS * LANES
    draw = np.random.default_rng(0)
    weights = draw.standard_normal(outputs * COLUMNS, np.float32)
    own = [
        (draw.standard_normal(CHUNK * COLUMNS, np.float32), np.zeros(CHUNK * outputs, np.float32))
        for _ in range(num_threads)
    ]
    work = 2 * num_threads * TIMES * CHUNK * COLUMNS * outputs
    if num_threads == 1:
        return work, lambda: _multiply(weights, *own[0], TIMES)
    pool = ThreadPoolExecutor(num_threads)
    return work, lambda: list(pool.map(lambda xy: _multiply(weights, *xy, TIMES), own))
