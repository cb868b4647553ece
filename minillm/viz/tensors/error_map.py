"""The errors of a quantised tensor as heat maps, side by side on one scale.

The caller names rows and columns, such as tokens and channels of keys. With one scale per token, an outlier channel
makes the scale coarse for every channel, and the whole map is dark. With one scale per channel, the error stays in the
outlier's own column.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from typing import Any, Literal

from minillm.errors import ConfigError
from minillm.viz.draw.colours import INK, VERMILLION
from minillm.viz.draw.output import Picture
from minillm.viz.draw.svg import MARGIN, RIGHT, TITLE, card, element, fit_words, label, number, rectangle, spans

LEVELS = ("#f1f6fb", "#d6e6f2", "#b4d2e7", "#8dbad8", "#629fc6", "#3b82b1", "#1f6599", "#0e4779", "#062b52")
"""One hue, from light to dark in about equal steps of lightness."""
MAX_PANELS = 4
MAX_CELLS = 4096
"""Limit for all panels together, so that a picture stays below 50 KB."""
TOP, HEIGHT, GAP = 122, 240, 30
SIDE = 30
"""Width of the row numbers."""


@dataclass(frozen=True)
class Panel:
    """One map, ready to be drawn."""

    name: str
    cells: list[list[float]]
    """For each cell, the largest error in its part of the tensor."""
    per_cell: tuple[int, int]
    """Rows and columns of the tensor that one cell stands for."""
    shape: tuple[int, int]
    largest: float
    at: tuple[int, int]
    """Row and column of the largest error."""
    mean: float


@dataclass(frozen=True)
class ErrorMap(Picture):
    """Heat maps of absolute errors that share one scale.

    `errors` maps a name to a matrix `[rows, columns]` (nested sequences, or anything with `tolist()`). Each is a panel,
    and there are at most four; the sign is dropped. In a large matrix a cell stands for several errors and shows the
    largest of them, so that an outlier never disappears. `scale="log"` covers four decades below the largest error.
    Raises `ConfigError` for no or too many panels, a matrix that is empty or ragged, or an error that is not finite.
    """

    errors: Mapping[str, Any]
    title: str = "Quantisation error"
    rows: str = "token"
    columns: str = "channel"
    unit: str = "absolute error"
    scale: Literal["linear", "log"] = "linear"

    def __post_init__(self) -> None:
        if not 1 <= len(self.errors) <= MAX_PANELS:
            raise ConfigError(f"ErrorMap has {len(self.errors)} panels; give it 1 to {MAX_PANELS}")
        if self.scale not in ("linear", "log"):
            raise ConfigError(f"scale={self.scale!r} must be 'linear' or 'log'")
        for name, values in self.errors.items():
            _matrix(name, values)

    @cached_property
    def panels(self) -> list[Panel]:
        """The maps, each with as many cells as there is room for."""
        count = len(self.errors)
        width = (RIGHT - MARGIN - GAP * (count - 1)) / count - SIDE
        return [_panel(name, _matrix(name, v), int(width / 4), MAX_CELLS // count) for name, v in self.errors.items()]

    @property
    def largest(self) -> float:
        """The end of the scale: the largest error of all panels."""
        return max(panel.largest for panel in self.panels)

    def to_svg(self) -> str:
        """The picture; the same errors give the same bytes."""
        panels = self.panels
        largest = max(panel.largest for panel in panels)
        width = (RIGHT - MARGIN - GAP * (len(panels) - 1)) / len(panels)
        drawn = [self._draw(panel, MARGIN + i * (width + GAP), width, largest) for i, panel in enumerate(panels)]
        bottom = TOP + max(height for _, height in drawn)
        each = {panel.per_cell for panel in panels}
        most = f"{'up to ' if len(each) > 1 else ''}{max(r * c for r, c in each)}"
        coarse = f"a cell shows the largest of {most} neighbours" if each != {(1, 1)} else ""
        return card(
            "error-map",
            bottom + 76,
            self.title,
            self.describe().replace("\n", " "),
            spans(MARGIN, 38, (self.title, TITLE), (coarse, {"dx": 10})),
            *(part for part, _ in drawn),
            self._legend(largest, bottom + 34),
        )

    def describe(self) -> str:
        """The picture in words, a line per panel."""
        return "\n".join(
            f"{p.name}: {p.shape[0]} {self.rows}s × {p.shape[1]} {self.columns}s, largest {self.unit} "
            f"{p.largest:.3g} at {self.rows} {p.at[0]}, {self.columns} {p.at[1]}; mean {p.mean:.3g}."
            for p in self.panels
        )

    def __repr__(self) -> str:
        return "<ErrorMap>"

    def level(self, error: float, largest: float) -> int:
        """Index into `LEVELS` of `error` on the scale that ends at `largest`."""
        if not largest or not error:
            return 0
        share = error / largest
        if self.scale == "log":
            share = max(0.0, 1 + math.log10(share) / 4)
        return min(len(LEVELS) - 1, int(share * len(LEVELS)))

    def _draw(self, panel: Panel, left: float, width: float, largest: float) -> tuple[str, float]:
        """The drawing of one panel, and its height."""
        across, down = len(panel.cells[0]), len(panel.cells)
        pitch = min(24.0, int(10 * (width - SIDE) / across) / 10)
        high = min(24.0, max(4.0, int(10 * HEIGHT / down) / 10))
        x0 = left + SIDE
        lines: dict[int, list[str]] = defaultdict(list)
        for i, row in enumerate(panel.cells):
            y, column = number(TOP + (i + 0.5) * high), 0
            for level, run in groupby(self.level(error, largest) for error in row):
                length = len(list(run))
                lines[level].append(f"M{number(x0 + column * pitch)} {y}h{number(length * pitch)}")
                column += length
        paths = [
            element(
                "path",
                {"d": "".join(parts), "stroke": LEVELS[level], "data-testid": "errors", "data-state": str(level)},
            )
            for level, parts in sorted(lines.items())
        ]
        at = panel.at[0] // panel.per_cell[0], panel.at[1] // panel.per_cell[1]
        x, y = x0 + (at[1] + 0.5) * pitch, TOP + (at[0] + 0.5) * high
        ring = element("circle", {"cx": x, "cy": y, "r": 7, "fill": "none", "stroke": VERMILLION, "stroke-width": 2})
        facts = f"largest {panel.largest:.3g} · mean {panel.mean:.3g}"
        body = [
            label(x0, TOP - 42, fit_words(panel.name, width, 14), size=14, weight=650, fill=INK),
            label(x0, TOP - 24, facts, size=11.5),
            label(x0, TOP - 8, f"{self.columns}s 0 to {panel.shape[1] - 1} →", size=10.5),
            element("g", {"stroke-width": high + 0.3}, *paths),
            ring if panel.largest else "",
            label(x0 - 6, TOP + 9, "0", size=10.5, anchor="end"),
            label(x0 - 6, TOP + down * high, str(panel.shape[0] - 1), size=10.5, anchor="end")
            if down * high > 24
            else "",
            label(x0 - 6, TOP + down * high / 2 + 4, f"{self.rows}s", size=10.5, anchor="end")
            if down * high > 60
            else "",
        ]
        return element("g", {"data-testid": "panel", "data-panel": panel.name}, *body), down * high

    def _legend(self, largest: float, y: float) -> str:
        """The colour scale, with the error at each border of two levels."""
        step, x0 = 62.0, MARGIN + SIDE
        boxes = [rectangle(x0 + i * step, y, step, 12, 0, {"fill": colour}) for i, colour in enumerate(LEVELS)]
        texts = [
            label(x0 + i * step, y + 26, _short(self._border(i) * largest), size=10.5, anchor="middle")
            for i in range(len(LEVELS) + 1)
        ]
        name = label(x0, y - 7, f"{self.unit}, {self.scale} scale", size=11.5, fill=INK)
        end = x0 + len(LEVELS) * step + 30
        ring = element(
            "circle", {"cx": end + 7, "cy": y + 6, "r": 7, "fill": "none", "stroke": VERMILLION, "stroke-width": 2}
        )
        return element(
            "g",
            {"data-testid": "legend"},
            name,
            *boxes,
            *texts,
            ring,
            label(end + 22, y + 10, f"the largest {self.unit}", size=11.5, fill=INK),
        )

    def _border(self, i: int) -> float:
        """Share of the largest error at which level `i` begins."""
        share = i / len(LEVELS)
        return share if self.scale == "linear" else (10 ** (4 * (share - 1)) if i else 0.0)


def _short(value: float) -> str:
    """Two digits, or a whole number: 0.067, 1.3, 45, 134."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _matrix(name: str, values: Any) -> list[list[float]]:
    rows = values.tolist() if hasattr(values, "tolist") else values
    try:
        matrix = [[abs(float(error)) for error in row] for row in rows]
    except TypeError:
        raise ConfigError(f"errors {name!r} must be a matrix of [rows, columns]") from None
    if not matrix or not matrix[0] or len({len(row) for row in matrix}) > 1:
        raise ConfigError(
            f"errors {name!r} have rows of lengths {sorted({len(r) for r in matrix})}; give a full matrix"
        )
    if not all(map(math.isfinite, chain.from_iterable(matrix))):
        raise ConfigError(
            f"errors {name!r} hold a value that is not finite (NaN or inf); find its cause before drawing"
        )
    return matrix


def _panel(name: str, matrix: list[list[float]], max_columns: int, max_cells: int) -> Panel:
    rows, columns = len(matrix), len(matrix[0])
    wide = _even(columns, -(-columns // max_columns))
    high = _even(rows, -(-rows // min(HEIGHT // 4, max_cells // -(-columns // wide))))
    cells = [
        [max(max(row[left : left + wide]) for row in matrix[top : top + high]) for left in range(0, columns, wide)]
        for top in range(0, rows, high)
    ]
    largest, i, j = max((error, -i, -j) for i, row in enumerate(matrix) for j, error in enumerate(row))
    mean = math.fsum(chain.from_iterable(matrix)) / (rows * columns)
    return Panel(name, cells, (high, wide), (rows, columns), largest, (-i, -j), mean)


def _even(count: int, least: int) -> int:
    """The smallest divisor of `count` from `least` to `2 * least`, so that all cells stand for equally many errors;
    `least` if there is none."""
    return next((size for size in range(least, 2 * least + 1) if count % size == 0), least)
