"""The slots of the pages, drawn with as few bytes as possible: one path for all slots that look the same.

A few slots are drawn as squares with round corners, many as dashes of thick lines, a dash per slot. The dash pattern
includes the gap between two pages, so rows of full pages side by side are one line:

    page 4       page 5       page 6
    ▀ ▀ ▀ ▀      ▀ ▀ ▀ ▀      ▀ ▀ ▀ ▀      M…h…  with the pattern  slot gap slot gap slot gap slot between
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minillm.trace.page import SlotState
from minillm.viz.draw.colours import INK, PAPER, VERMILLION
from minillm.viz.draw.svg import Attributes, element, hatched, number
from minillm.viz.pages.page_geometry import Geometry


@dataclass(frozen=True)
class Run:
    """`length` slots side by side from `column` on, in one row of slots of the page at `place`."""

    place: int
    row: int
    column: int
    length: int


def runs_of(slots: Sequence[tuple[SlotState, int]], place: int, columns: int) -> Iterator[tuple[SlotState, Run]]:
    """The runs of equal slots of one page (see `Page`), each within one row of the page; without free and cached slots,
    which the page itself shows."""
    first = 0
    for state, count in slots:
        end = first + count
        while first < end and state not in ("free", "cached"):
            row, column = divmod(first, columns)
            length = min(end - first, columns - column)
            yield state, Run(place, row, column, length)
            first += length
        first = end


def draw_runs(state: SlotState, runs: Sequence[Run], colour: str, geometry: Geometry, *, fine: bool) -> str:
    """The path of all `runs`, which have the same `state` and owner (`colour`). Its parent has `slots_look`."""
    about = {"data-testid": "slots", "data-state": state, "data-count": sum(run.length for run in runs)}
    if fine:
        return element("path", {**about, **_fine_look(state, colour), "d": _squares(state, runs, geometry)})
    colours = {"fresh": INK, "empty": PAPER, "rolled_back": hatched("tight")}
    return element("path", {**about, "stroke": colours.get(state, colour), "d": _dashes(runs, geometry)})


def slots_look(geometry: Geometry, *, fine: bool) -> Attributes:
    """The SVG attributes that all slots share."""
    if fine:
        return {"stroke-linejoin": "round"}
    slot, gap = geometry.slot, geometry.gap
    within = [slot, gap] * (geometry.columns - 1) + [slot] if gap else [geometry.row_width]
    dashes = " ".join(map(number, [*within, geometry.pitch - geometry.row_width]))
    return {"stroke-width": slot, "stroke-dasharray": dashes}


def _fine_look(state: SlotState, colour: str) -> Attributes:
    if state == "rolled_back":
        return {"fill": hatched("void"), "stroke": VERMILLION}
    if state == "empty":
        return {"fill": PAPER, "stroke": colour, "stroke-opacity": 0.5}
    fill = INK if state == "fresh" else colour
    return {"fill": fill, "stroke": fill, "stroke-width": 2}


def _squares(state: SlotState, runs: Sequence[Run], geometry: Geometry) -> str:
    # The stroke adds half its width on each side: 1 to solid slots, 0.5 to outlined ones.
    inset = 1.0 if state in ("written", "fresh") else 0.5
    side = number(geometry.slot - 2 * inset)
    square = f"h{side}v{side}h-{side}z"
    corners = (geometry.slot_corner(run.place, run.row, run.column + i) for run in runs for i in range(run.length))
    return "".join(f"M{number(x + inset)} {number(y + inset)}{square}" for x, y in corners)


def _dashes(runs: Sequence[Run], geometry: Geometry) -> str:
    whole = {(run.place, run.row) for run in runs if run.length == geometry.columns}
    path = []
    for run in runs:
        last = run.place
        if (last, run.row) in whole:
            if last % geometry.per_row and (last - 1, run.row) in whole:
                continue  # the line from the page on the left covers this run
            while (last + 1) % geometry.per_row and (last + 1, run.row) in whole:
                last += 1
        x, y = geometry.slot_corner(run.place, run.row, run.column)
        width = run.length * (geometry.slot + geometry.gap) - geometry.gap + (last - run.place) * geometry.pitch
        path.append(f"M{number(x)} {number(y + geometry.slot / 2)}h{number(width)}")
    return "".join(path)
