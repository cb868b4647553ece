"""Stage 7 of the GPU benchmark: the fastest tiles of the quantised products on this GPU, at the shapes of an 8B model.

Its results are lines to paste into `ops.triton.tiles.MEASURED`. Only candidates near the defaults are tried, because
compiling each takes a second; the number tried is reported. Among them are always the default and the tiles that were
the fastest on another GPU. The matrix is the largest of a layer, and the timer clears the L2 cache between two runs.
Tiles of narrow matrices are not measured. The winner and the default are timed again in turn, and the faster of the two
is the best.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from triton import testing

from minillm.bench.on_gpu import tune_tiles
from minillm.bench.on_gpu.findings import Report
from minillm.bench.on_gpu.random_models import CONFIGS, LARGE
from minillm.bench.on_gpu.stage_setup import StageSetup
from minillm.ops.dispatch import implementations, op
from minillm.ops.triton import machine, tiles
from minillm.ops.triton.tiles import Tiles
from minillm.quantization.int4 import Int4

ROWS = {"one": 1, "few": 4, "some": 32, "many": 512}
"""The number of rows with which a class is measured: decoding, verifying, a batch, a prefill."""
KINDS = ("int8", "w8a8", "int4")
TILES_S = 80.0
"""Seconds for all products."""
LAST_TRIAL_S = 5.0
"""With less time left to the stage, no product is begun."""
TURNS = 5
"""How often the winner and the default are timed again."""
LINES = "lines for tiles.MEASURED"


def find_tiles(setup: StageSetup, report: Report) -> None:
    """Measure every kind, few rows first."""
    combinations = [(kind, rows) for rows in ROWS for kind in KINDS if rows != "one" or kind == "int8"]
    began, budget = time.monotonic(), min(setup.size_for(TILES_S, 2.0), setup.seconds_left() - LAST_TRIAL_S)
    report.note(LINES, report.so_far().notes.get(LINES, []))
    done = {metric["name"] for metric in report.so_far().metrics}
    for number, (kind, rows) in enumerate(combinations):
        if f"{kind}_linear" not in _kernels(setup):
            report.note(f"{kind} {rows}", "its kernel does not run on this device")
            continue
        if _best(kind, rows) in done:
            continue
        left = budget - (time.monotonic() - began)
        if left <= 0:
            report.note(f"{kind} {rows}", "left out for lack of time")
            continue
        report.part(f"{kind} {rows}", _one_product, setup, report, kind, rows, left / (len(combinations) - number))


def _one_product(setup: StageSetup, report: Report, kind: str, rows: str, seconds: float) -> None:
    """Find the tiles of one kind and number of rows in about `seconds`, then time them and the default in turn."""
    default = tiles.choose(kind, ROWS[rows], *_shape(setup), setup.half)
    known = [found for (_, of, size), found in tiles.MEASURED.items() if (of, size) == (kind, rows)]
    run = product(setup, kind, ROWS[rows])
    with _timer(setup):
        to_try = _tiles_to_try(setup, [default, *known], ROWS[rows], seconds)
        winner, milliseconds, tried = tune_tiles.measure(run, to_try)
    _report_best(setup, report, kind, rows, winner, [milliseconds], tried)
    times: dict[Tiles, list[float]] = {winner: [], default: []}
    with _timer(setup):
        for _ in range(TURNS):
            for chosen, taken in times.items():
                taken.append(testing.do_bench(partial(run, chosen), return_mode="median"))
    best = min(times, key=lambda chosen: statistics.median(times[chosen]))
    _report_best(setup, report, kind, rows, best, times[best], tried)
    report.measured(f"{kind} {rows}, default", times[default], "ms", rows=ROWS[rows], tiles=str(default))


def _report_best(
    setup: StageSetup, report: Report, kind: str, rows: str, best: Tiles, milliseconds: list[float], tried: int
) -> None:
    """Report the best tiles and their line, in place of what was reported before."""
    report.measured(_best(kind, rows), milliseconds, "ms", rows=ROWS[rows], tiles=str(best), tried=tried)
    if not setup.is_rehearsal:
        key = f'    ("{machine.gpu_name()}", "{kind}", "{rows}"): '
        others = [line for line in report.so_far().notes[LINES] if not line.startswith(key)]
        report.note(LINES, [*others, f"{key}{best},"])


def _best(kind: str, rows: str) -> str:
    """Return the name of the metric of the best tiles."""
    return f"{kind} {rows}, best"


def _tiles_to_try(setup: StageSetup, always: Sequence[Tiles], rows: int, seconds: float) -> Iterator[Tiles]:
    """Yield the tiles `always`, then other candidates until `seconds` are over; in a rehearsal two tiles."""
    began = time.monotonic()
    most = setup.size_for(math.inf, 2)
    for number, chosen in enumerate(dict.fromkeys([*always, *tune_tiles.candidates(rows)])):
        if chosen not in always and (time.monotonic() - began > seconds or number >= most):
            return
        yield chosen


def product(setup: StageSetup, kind: str, rows: int) -> Callable[[Tiles], Any]:
    """Return a product of random codes. The speed does not depend on the values, unless they are zeros."""
    outputs, columns = _shape(setup)
    multiply = op(f"{kind}_linear", setup.device, "triton")
    x = torch.randn(rows, columns, device=setup.device).to(setup.half)
    if kind == "int4":
        group, groups = Int4().group_size, -(-columns // Int4().group_size)
        codes = torch.randint(0, 256, (outputs, columns // 2), dtype=torch.uint8, device=setup.device)
        zeros = torch.randint(0, 256, (outputs, -(-groups // 2)), dtype=torch.uint8, device=setup.device)
        scales = torch.rand(outputs, groups, device=setup.device).half()
        return lambda chosen: multiply(x, codes, scales, zeros, group, tiles=chosen)
    weight = torch.randint(-127, 128, (outputs, columns), dtype=torch.int8, device=setup.device)
    scales = torch.rand(outputs, device=setup.device)
    return lambda chosen: multiply(x, weight, scales, tiles=chosen)


def _shape(setup: StageSetup) -> tuple[int, int]:
    """Return the outputs and columns of the fused gate and up projection."""
    config = CONFIGS[setup.size_for(LARGE, "rehearsal")]
    return 2 * config.intermediate_size, config.hidden_size


def _kernels(setup: StageSetup) -> set[str]:
    names = {f"{kind}_linear" for kind in KINDS}
    return {name for name in names if "triton" in implementations(name, setup.device)}


@contextmanager
def _timer(setup: StageSetup) -> Iterator[None]:
    """Replace Triton's timer, which needs a GPU, in a rehearsal by one that runs the product once."""
    if not setup.is_rehearsal:
        yield
        return
    before = testing.do_bench
    testing.do_bench = lambda run, **options: 1.0 + 0 * bool(run() is None)
    try:
        yield
    finally:
        testing.do_bench = before
