"""Stage 7 of the GPU benchmark: which tiles the quantised products want on this GPU, at the shapes of an 8B model.

What it finds are lines to paste into `ops.triton.tiles.MEASURED`. Of the candidates only a part is tried, those that
are near the defaults, for compiling each takes a second; the number tried is told. The matrix is the largest of a
layer, and between two runs the timer clears the second-level cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from triton import testing

from minillm.bench.on_gpu.models import CONFIGS, LARGE
from minillm.bench.on_gpu.report import Report
from minillm.bench.on_gpu.site import Site
from minillm.ops.dispatch import implementations, op
from minillm.ops.triton import machine, tiles
from minillm.ops.triton.tiles import Tiles
from minillm.quantization.int4 import Int4

ROWS = {"few": 4, "some": 32, "many": 512}
"""Rows that stand for a class: decoding and verifying, a batch, a prefill."""
KINDS = ("int8", "w8a8", "int4")
TILES_S = 80.0
"""Seconds for all of them."""


def find_tiles(site: Site, report: Report) -> None:
    """Few rows of every kind first."""
    combinations = [(kind, rows) for rows in ROWS for kind in KINDS]
    began, budget = time.monotonic(), site.pick(TILES_S, 2.0)
    lines = []
    for number, (kind, rows) in enumerate(combinations):
        if f"{kind}_linear" not in _kernels(site):
            report.note(f"{kind} {rows}", "its kernel does not run on this device")
            continue
        left = budget - (time.monotonic() - began)
        if left <= 0:
            report.note(f"{kind} {rows}", "left out for lack of time")
            continue
        trial = Trial(product(site, kind, ROWS[rows]), left / (len(combinations) - number), site.pick(None, 2))
        try:
            with _timer(site):
                best, milliseconds = tiles.measure(trial, ROWS[rows])
        except Exception as problem:  # the other products are tried all the same
            report.note(f"{kind} {rows} failed", f"{type(problem).__name__}: {str(problem)[:300]}")
            continue
        default = tiles.choose(kind, ROWS[rows], *_shape(site), site.half)
        report.measured(f"{kind} {rows}, best", milliseconds, "ms", rows=ROWS[rows], tiles=str(best), tried=trial.tried)
        with _timer(site):
            ours = testing.do_bench(partial(trial.run, default), return_mode="median")
        report.measured(f"{kind} {rows}, default", ours, "ms", rows=ROWS[rows], tiles=str(default))
        lines.append(f'    ("{machine.gpu_name()}", "{kind}", "{rows}"): {best},')
    report.note("lines for tiles.MEASURED", [] if site.is_rehearsal else lines)


class Trial:
    """One product, as `tiles.measure` calls it; candidates that are not to be tried look as if there was no room."""

    def __init__(self, run: Callable[[Tiles], Any], seconds: float, most: int | None) -> None:
        self.run, self.seconds, self.most = run, seconds, most
        self.began, self.tried, self.last = time.monotonic(), 0, None

    def __call__(self, chosen: Tiles) -> Any:
        """Multiply with these tiles. Raises Triton's `OutOfResources` for a candidate that is passed over."""
        from triton.runtime.errors import OutOfResources

        if chosen != self.last:
            late = self.tried and (time.monotonic() - self.began > self.seconds or self.tried == self.most)
            if late or not is_likely(chosen):
                raise OutOfResources(0, 0, "time")
            self.tried, self.last = self.tried + 1, chosen
        return self.run(chosen)


def is_likely(chosen: Tiles) -> bool:
    """Whether tiles are near what is known to be good: some eight candidates of a class.

    Three stages; four warps, or eight for a large tile; with few rows deep tiles and split columns, otherwise tiles 64
    deep and at least as wide.
    """
    warps = 8 if chosen.m * chosen.n >= 64 * 128 else 4
    if chosen.stages != 3 or chosen.warps != warps:
        return False
    if chosen.m <= tiles.FEW_ROWS:
        return chosen.k == 128 and chosen.splits > 1
    return chosen.k == 64 and chosen.n >= 64 and chosen.splits <= 2


def product(site: Site, kind: str, rows: int) -> Callable[[Tiles], Any]:
    """A product of random codes; speed does not depend on what they are, zeros excepted."""
    outputs, columns = _shape(site)
    multiply = op(f"{kind}_linear", site.device, "triton")
    x = torch.randn(rows, columns, device=site.device).to(site.half)
    if kind == "int4":
        group, groups = Int4().group_size, -(-columns // Int4().group_size)
        codes = torch.randint(0, 256, (outputs, columns // 2), dtype=torch.uint8, device=site.device)
        zeros = torch.randint(0, 256, (outputs, -(-groups // 2)), dtype=torch.uint8, device=site.device)
        scales = torch.rand(outputs, groups, device=site.device).half()
        return lambda chosen: multiply(x, codes, scales, zeros, group, tiles=chosen)
    weight = torch.randint(-127, 128, (outputs, columns), dtype=torch.int8, device=site.device)
    scales = torch.rand(outputs, device=site.device)
    return lambda chosen: multiply(x, weight, scales, tiles=chosen)


def _shape(site: Site) -> tuple[int, int]:
    """Outputs and columns of gate and up together."""
    config = CONFIGS[site.pick(LARGE, "rehearsal")]
    return 2 * config.intermediate_size, config.hidden_size


def _kernels(site: Site) -> set[str]:
    names = {f"{kind}_linear" for kind in KINDS}
    return {name for name in names if "triton" in implementations(name, site.device)}


@contextmanager
def _timer(site: Site) -> Iterator[None]:
    """A rehearsal has no device that Triton's timer could ask: there, one that only runs once stands in for it."""
    if not site.is_rehearsal:
        yield
        return
    before = testing.do_bench
    testing.do_bench = lambda run, **options: 1.0 + 0 * bool(run() is None)
    try:
        yield
    finally:
        testing.do_bench = before
