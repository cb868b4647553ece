"""The cost of growing a KV cache: rows written, copied and left empty, step by step, one panel per growth policy.

A column is a step and a row is a row of the cache (one layer; K and V look the same). A policy that copies shows whole
hatched columns; one with spare capacity shows hollow rows below the valid ones, dotted where cells are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from minillm.errors import ConfigError, TraceError
from minillm.trace import RowsWritten, Trace
from minillm.viz.draw.colours import BLUE, DISCARDED, HAIRLINE, INK, ORANGE, PAPER
from minillm.viz.draw.svg import MARGIN, RIGHT, UID, card, element, fit_words, hatched, label, number, rectangle
from minillm.viz.draw.view import View

GAP = 28
GRID_TOP = 132
GRID_HEIGHT = 200
SMALL = 7
"""Empty cells with a side below this are dots: outlines that touch would make hollow cells look solid."""
DOT_DISTANCE = 5
"""About so far apart are the dots of one cell."""
MAX_POLICIES = 3
STATES = {
    "kept": "valid, stays where it is",
    "written": "written this step",
    "copied": "copied this step",
    "empty": "allocated but empty",
}


@dataclass(frozen=True)
class Totals:
    """Sums over the steps of one policy."""

    written: int
    copied: int
    empty: int
    allocations: int

    @classmethod
    def of(cls, steps: Sequence[RowsWritten]) -> Totals:
        """Add up `steps`; a buffer is allocated whenever the capacity changes."""
        capacities = [0, *(step.capacity for step in steps)]
        return cls(
            written=sum(step.written for step in steps),
            copied=sum(step.copied for step in steps),
            empty=sum(step.empty for step in steps),
            allocations=sum(after != before for before, after in pairwise(capacities)),
        )


class CacheRowsView(View):
    """The `RowsWritten` events of a trace, up to three policies side by side.

    `num_steps` and `max_rows` fix the scale in advance, so that it is constant in a live picture.
    """

    def __init__(self, trace: Trace, num_steps: int = 0, max_rows: int = 0) -> None:
        super().__init__(trace)
        self.num_steps, self.max_rows = num_steps, max_rows

    def steps(self, step: int | None = None) -> dict[str, list[RowsWritten]]:
        """The events of the first `step` steps (None: of all), by policy."""
        policies: dict[str, list[RowsWritten]] = {}
        for event in self.trace.of(RowsWritten):
            policies.setdefault(event.policy, []).append(event)
        if len(policies) > MAX_POLICIES:
            raise ConfigError(f"the trace has {len(policies)} growth policies; the picture has room for {MAX_POLICIES}")
        last = max(map(len, policies.values()), default=0)
        if step is not None and not 0 <= step <= last:
            raise TraceError(f"there is no step {step} in this trace: its steps are 1 to {last}")
        return {policy: steps[:step] for policy, steps in policies.items()}

    def steps_to_replay(self) -> list[int]:
        """All steps, from 1 to the largest number of steps of a policy."""
        return list(range(1, max(map(len, self.steps().values()), default=0) + 1))

    def to_svg(self, step: int | None = None) -> str:
        """The picture after `step` steps."""
        everything, shown = self.steps(), self.steps(step)
        num_steps = max([self.num_steps, 1, *map(len, everything.values())])
        max_rows = max([self.max_rows, 1, *(s.capacity for steps in everything.values() for s in steps)])
        width = (RIGHT - MARGIN - GAP * (len(shown) - 1)) / max(1, len(shown))
        cell = (int(10 * width / num_steps) / 10, max(0.5, int(10 * GRID_HEIGHT / max_rows) / 10))
        panels = [
            _panel(policy, steps, MARGIN + i * (width + GAP), width, cell, num_steps * max_rows)
            for i, (policy, steps) in enumerate(shown.items())
        ]
        done = max(map(len, shown.values()), default=0)
        facts = f"step {done} of {num_steps} · one layer, K and V alike · a column is a step, row 0 is at the top"
        return card(
            "cache-rows",
            GRID_TOP + GRID_HEIGHT + 74,
            f"Rows of the KV cache after {done} of {num_steps} steps",
            self.describe(step),
            element("defs", {}, *(_tile(state, *cell) for state in STATES)),
            label(MARGIN, 36, "Rows of the KV cache", size=17, weight=650, fill=INK),
            label(262, 36, facts, size=13),
            *_legend(*cell),
            *panels,
        )

    def describe(self, step: int | None = None) -> str:
        """The picture in words."""
        return " ".join(
            f"{policy}: {len(steps)} steps, {totals.written} rows written, {totals.copied} copied, "
            f"{totals.empty} empty rows summed over the steps, allocated {totals.allocations}×."
            for policy, steps in self.steps(step).items()
            for totals in [Totals.of(steps)]
        )


def _panel(
    policy: str, steps: Sequence[RowsWritten], left: float, width: float, cell: tuple[float, float], area: int
) -> str:
    """The panel of one policy, in coordinates relative to its left edge; `area`: the rows of a full bar."""
    pitch, height = cell
    totals = Totals.of(steps)
    low, unit = GRID_TOP + GRID_HEIGHT + 16, (width - 130) / area
    columns = [
        element("g", {"data-testid": "step", "data-step": str(i + 1)}, *_column(step, i * pitch, pitch, height))
        for i, step in enumerate(steps)
    ]
    return element(
        "g",
        {"transform": f"translate({number(left)} 0)", "data-testid": "policy", "data-policy": policy},
        label(0, 106, fit_words(policy, width, 14), size=14, weight=650, fill=INK),
        label(0, 123, f"{totals.written} rows written, allocated {totals.allocations}×", size=11.5),
        rectangle(-2, GRID_TOP - 2, width + 2, GRID_HEIGHT + 4, 4, {"fill": "none", "stroke": HAIRLINE}),
        *columns,
        *_bar("copied rows", "copied", totals.copied, low, unit),
        *_bar("empty rows", "empty", totals.empty, low + 24, unit),
    )


def _column(step: RowsWritten, x: float, pitch: float, height: float) -> list[str]:
    return [
        rectangle(x, GRID_TOP + first * height, pitch, count * height, 0, {"fill": hatched(state), "data-state": state})
        for state, first, count in step.spans()
    ]


def _bar(name: str, state: str, count: int, y: float, unit: float) -> list[str]:
    colours = {"fill": ORANGE, "stroke": ORANGE} if state == "copied" else {"fill": PAPER, "stroke": DISCARDED}
    return [
        label(0, y + 11, name, size=12),
        rectangle(78, y, count * unit, 14, 2, colours) if count else "",
        label(84 + count * unit, y + 11, f"{count:,}", size=12, fill=INK, weight=600),
    ]


def _tile(state: str, pitch: float, height: float) -> str:
    """One cell of a state as a repeating pattern: a column of any length is then a single rectangle."""
    box = {"id": f"{state}-{UID}", "width": pitch, "height": height, "y": GRID_TOP, "patternUnits": "userSpaceOnUse"}
    return element("pattern", box, *_cell(state, pitch, height))


def _cell(state: str, pitch: float, height: float) -> list[str]:
    gap = 1.0 if min(pitch, height) > 3 else 0.0
    wide, high = pitch - gap, height - gap
    if state == "empty":
        if min(pitch, height) < SMALL:
            step = pitch / max(1, round(pitch / DOT_DISTANCE))
            dot = {"cy": height / 2, "r": min(step, height) / 5, "fill": DISCARDED}
            dots = (element("circle", {"cx": (i + 0.5) * step, **dot}) for i in range(round(pitch / step)))
            return [element("rect", {"width": pitch, "height": height, "fill": PAPER}), *dots]
        edge = {"x": 0.5, "y": 0.5, "width": wide - 1, "height": high - 1}
        return [element("rect", {**edge, "fill": PAPER, "stroke": DISCARDED})]
    look = {"fill": {"kept": BLUE, "written": INK, "copied": ORANGE}[state]}
    look |= {"fill-opacity": ".45"} if state == "kept" else {}
    solid = element("rect", {"width": wide, "height": high, **look})
    slash = {"x1": 0, "y1": high, "x2": wide, "y2": 0, "stroke": PAPER, "stroke-width": 1.2}
    return [solid, element("line", slash)] if state == "copied" else [solid]


def _legend(pitch: float, height: float) -> list[str]:
    """A sample of each state, a cell or, where the grid's cells are small, some of these, with its meaning."""
    parts, x = [], float(MARGIN)
    for state, text in STATES.items():
        several = [rectangle(0, 0, 16, 12, 0, {"fill": hatched(state)})]
        sample = several if min(pitch, height) < SMALL else _cell(state, 16, 12)
        place = {"transform": f"translate({number(x)} 56)", "data-testid": "legend"}
        parts.append(element("g", place, *sample))
        parts.append(label(x + 24, 66, text, size=12, fill=INK))
        x += 44 + 6.6 * len(text)
    return parts
