"""Tile sizes of the quantised matrix products: a table by kind, shape class and GPU.

A product with few rows (decode, verification) is bound by reading the weights. It uses small tiles, and splits the
columns over several programs (split-K) so that all SMs read. A product with many rows (prefill) is bound by arithmetic
and uses large tiles. An INT8 product with one row has a kernel, and so tiles, of its own. The best tiles depend on the
GPU, so the table holds measured winners, and defaults for GPUs that have not been measured.
`minillm.bench.on_gpu.tune_tiles` finds the winners, to be pasted into `MEASURED`. `triton.autotune` is not used: it
chooses anew in every process, in the middle of a step. The choices of a table can be read and never change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from minillm.ops.dispatch import interpreted
from minillm.ops.triton import machine
from minillm.ops.triton.machine import power_of_two

FEW_ROWS, SOME_ROWS = 16, 64
CLASSES = ("few", "some", "many")


@dataclass(frozen=True)
class Tiles:
    """Tile sizes and launch options. They change the speed, and the results only in the last bits."""

    m: int
    """Rows of x per tile."""
    n: int
    """Rows of the weight, that is outputs, per tile."""
    k: int
    """Columns per iteration."""
    splits: int = 1
    """Programs that share the columns of one tile (split-K); a second kernel adds their sums, always in one order."""
    warps: int = 4
    stages: int = 3


DEFAULTS = {"few": Tiles(16, 64, 128), "some": Tiles(32, 64, 128), "many": Tiles(64, 128, 64, warps=8)}
NO_TENSOR_CORE_DEFAULTS = {"few": Tiles(16, 32, 64), "some": Tiles(32, 32, 32), "many": Tiles(64, 64, 32, warps=8)}
"""Defaults where products run in registers and not on tensor cores: in fp32, and before sm_80."""
ONE_ROW = Tiles(1, 8, 512)
"""Default of the INT8 product with one row (class `"one"`), in every dtype: it uses no tensor cores, and no splits."""
INTERPRETED = Tiles(16, 32, 32)
MEASURED: dict[tuple[str, str, str], Tiles] = {
    ("NVIDIA H100 80GB HBM3", "int8", "one"): Tiles(m=1, n=8, k=512, splits=1, warps=4, stages=3),
    ("NVIDIA H100 80GB HBM3", "int8", "few"): Tiles(m=16, n=32, k=256, splits=1, warps=4, stages=4),
    ("NVIDIA H100 80GB HBM3", "int8", "few, narrow"): Tiles(m=16, n=32, k=256, splits=4, warps=4, stages=3),
    ("NVIDIA H100 80GB HBM3", "int8", "some"): Tiles(m=32, n=64, k=128, splits=1, warps=4, stages=3),
    ("NVIDIA H100 80GB HBM3", "int8", "some, narrow"): Tiles(m=32, n=64, k=128, splits=4, warps=4, stages=3),
    ("NVIDIA H100 80GB HBM3", "int8", "many"): Tiles(m=128, n=128, k=64, splits=1, warps=4, stages=3),
    ("NVIDIA H100 80GB HBM3", "w8a8", "few"): Tiles(m=16, n=64, k=256, splits=1, warps=4, stages=3),
    ("NVIDIA H100 80GB HBM3", "w8a8", "some"): Tiles(m=64, n=128, k=64, splits=1, warps=8, stages=3),
    ("NVIDIA H100 80GB HBM3", "w8a8", "many"): Tiles(m=128, n=128, k=128, splits=1, warps=8, stages=3),
    ("NVIDIA H100 80GB HBM3", "int4", "few"): Tiles(m=16, n=64, k=128, splits=2, warps=4, stages=4),
    ("NVIDIA H100 80GB HBM3", "int4", "some"): Tiles(m=32, n=128, k=128, splits=1, warps=8, stages=3),
    ("NVIDIA H100 80GB HBM3", "int4", "many"): Tiles(m=128, n=128, k=128, splits=1, warps=8, stages=3),
}
"""`(GPU, kind, shape class)` → the fastest tiles, at the shapes of an 8B model. A class such as `"few, narrow"` is for
matrices that have too few outputs to keep every SM busy without splits; without one, these take the tiles of the class
and more splits. Of tiles within two percent, the smaller are listed: the rows of a class vary."""
STAND_INS = {(9, 0): "NVIDIA H100 80GB HBM3"}
"""Compute capability → a measured GPU, for GPUs of it that are not in `MEASURED`, such as an H200: their SMs are the
same, their number and the memory may differ."""
INT4_DEPTH = 128
"""Columns per iteration of an INT4 product: a whole group of the usual size, whose scale is applied once."""
PROGRAMS_PER_SM = 2
"""With fewer programs per SM than this, the columns are split."""
MIN_COLUMNS_PER_SPLIT = 256
"""Least columns per split."""
MAX_SPLITS = 16


def shape_class(rows: int) -> str:
    """Return `few`, `some` or `many`."""
    return CLASSES[0] if rows <= FEW_ROWS else CLASSES[1] if rows <= SOME_ROWS else CLASSES[2]


def choose(kind: str, rows: int, outputs: int, columns: int, dtype: torch.dtype) -> Tiles:
    """Return the tiles for a product of `kind` (`int8`, `w8a8`, `int4`): the measured ones of this GPU, else those of
    its stand-in, else the defaults."""
    if interpreted():
        return INTERPRETED
    if kind == "int8" and rows == 1:
        return _measured(kind, "one") or ONE_ROW
    size = shape_class(rows)
    if not machine.uses_tensor_cores(torch.int8 if kind == "w8a8" else dtype):
        tiles = NO_TENSOR_CORE_DEFAULTS[size]
    else:  # what was measured in 16 bits says nothing about fp32
        default = replace(DEFAULTS[size], k=INT4_DEPTH) if kind == "int4" else DEFAULTS[size]
        tiles = _measured(kind, size) or default
        if _programs(tiles, rows, outputs) < PROGRAMS_PER_SM * machine.num_sms():
            tiles = _measured(kind, f"{size}, narrow") or tiles
    return replace(tiles, splits=_splits(tiles, rows, outputs, columns))


def _measured(kind: str, size: str) -> Tiles | None:
    gpus = machine.gpu_name(), STAND_INS.get(machine.capability())
    return next((MEASURED[gpu, kind, size] for gpu in gpus if (gpu, kind, size) in MEASURED), None)


def _programs(tiles: Tiles, rows: int, outputs: int) -> int:
    """Return the number of programs without splits."""
    return -(-rows // tiles.m) * -(-outputs // tiles.n)


def _splits(tiles: Tiles, rows: int, outputs: int, columns: int) -> int:
    """Return the splits of the tiles, or more if these leave SMs idle, but none with fewer than
    `MIN_COLUMNS_PER_SPLIT` columns; a power of two."""
    wanted = PROGRAMS_PER_SM * machine.num_sms() // max(_programs(tiles, rows, outputs), 1)
    most = max(1, min(max(wanted, tiles.splits), columns // MIN_COLUMNS_PER_SPLIT, MAX_SPLITS))
    return power_of_two(most // 2 + 1)  # the power of two at or below
