"""The lanes of a timeline: a row per request, a column per step, and below them the load of each step.

Columns narrower than 8 pixels would be unreadable, so a long run is condensed: a column stands for several steps and
shows what the request did in most of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from minillm.trace.timeline_state import WORKING, Cell, Row, Timeline
from minillm.viz.draw.colours import (
    DISCARDED,
    FAINT,
    HAIRLINE,
    INK,
    MUTED,
    PAPER,
    VERMILLION,
    ink_on,
    owner_colour,
    owner_letter,
)
from minillm.viz.draw.plural import plural
from minillm.viz.draw.request_labels import distinct_names
from minillm.viz.draw.svg import MARGIN, MONO, RIGHT, Attributes, element, fit_mono, hatched, label, number, rectangle

LEFT = 176.0
"""Left edge of the columns."""
DETAILS = ((8.0, 24), (12.0, 24), (18.0, 24), (28.0, 24), (28.0, 16), (28.0, 12), (28.0, 8))
"""(smallest column width, most rows): tried in this order until the picture is small enough."""
MAX_PITCH = 28.0
MAX_BYTES = 45_000
"""Limit for all lanes of a picture, so that a frame stays below 50 KB."""
STRIP = 40.0
"""Height of a strip of bars, which shows the load of each step."""
BARS = {"dark": INK, "light": "#9db7cf"}
"""Colours in the strips: dark for prefills, light for everything else."""
RARE = ("preempted", "recompute", "prefill", "verify", "decode", "idle", "waiting")
"""If two kinds are equally frequent in a column, the one that comes first here is shown."""


@dataclass(frozen=True)
class Columns:
    """The columns of a timeline: column `i` holds `bucket` steps from `first + i * bucket`; it is `pitch` px wide."""

    first: int
    num_steps: int
    bucket: int
    pitch: float

    @classmethod
    def of(cls, first: int, num_steps: int, min_pitch: float = DETAILS[0][0]) -> Columns:
        """Columns with as few steps each as possible, but at least `min_pitch` pixels wide."""
        room = RIGHT - LEFT
        bucket = max(1, -(-num_steps * min_pitch // room))
        count = -(-num_steps // bucket) or 1
        pitch = min(MAX_PITCH, int(room / count * 10) / 10)
        # Whole numbers have the fewest characters, and a condensed picture has many numbers.
        return cls(first, num_steps, int(bucket), float(int(pitch)) if bucket > 1 else pitch)

    def steps(self, column: int) -> range:
        """The steps of a column."""
        start = self.first + column * self.bucket
        return range(start, min(start + self.bucket, self.first + self.num_steps))

    def __iter__(self) -> Iterator[int]:
        return iter(range(-(-self.num_steps // self.bucket)))

    def x(self, column: int) -> float:
        """Left edge of a column."""
        return LEFT + column * self.pitch

    def place(self, step: int) -> float:
        """Right edge of the column that holds `step`."""
        return self.x((step - self.first) // self.bucket + 1)


@dataclass(frozen=True)
class Lanes:
    """Draws `timeline` with its top at `top`. Two timelines with the same `columns` have the same scale."""

    timeline: Timeline
    columns: Columns
    top: float
    max_rows: int = DETAILS[0][1]
    keep: frozenset[int] = frozenset()
    """Indices of requests that are always drawn, however few rows there are."""
    with_tokens: bool = True
    """Whether there is also a strip for the tokens of each step."""

    @property
    def shown(self) -> list[Row]:
        """The rows that are drawn."""
        kept = [row for row in self.timeline.rows if row.index in self.keep]
        others = [row for row in self.timeline.rows if row.index not in self.keep]
        return sorted([*kept, *others][: self.max_rows], key=lambda row: row.index)

    @property
    def row_height(self) -> float:
        """Distance between two rows."""
        return 24.0 if len(self.shown) <= 10 else 18.0

    @property
    def height(self) -> float:
        """Height of rows, axis and strips together."""
        more = 16 if len(self.timeline.rows) > self.max_rows else 0
        return max(len(self.shown), 1) * self.row_height + more + 24 + (1 + self.with_tokens) * (STRIP + 14)

    @cached_property
    def drawing(self) -> str:
        """Rows, axis, strips."""
        names = distinct_names([row.prompt for row in self.shown])
        tops = [self.top + i * self.row_height for i in range(len(self.shown))]
        rows = "".join(self._row(*parts) for parts in zip(self.shown, names, tops, strict=True))
        bottom = self.top + max(len(self.shown), 1) * self.row_height
        drawn = {row.index for row in self.shown}
        hidden = [row for row in self.timeline.rows if row.index not in drawn]
        more = f"and {plural(len(hidden), 'more request')}"
        if all(row.end is not None for row in hidden):
            more += ", none of which ends later" if len(hidden) > 1 else ", which ends no later"
        more = label(56, bottom + 11, more) if hidden else ""
        bottom += 16 if hidden else 0
        return rows + more + self._axis(bottom) + self._strips(bottom + 24)

    def column_kind(self, row: Row, column: int) -> str | None:
        """What `row` did in most steps of `column`; `None` if it has no step there."""
        kinds = Counter(row.cells[step].kind for step in self.columns.steps(column) if step in row.cells)
        return max(kinds, key=lambda kind: (kinds[kind], -RARE.index(kind))) if kinds else None

    def kinds(self) -> set[str]:
        """What the picture shows: kinds of cells, `cached`, `finished`, `aborted`."""
        present = {self.column_kind(row, column) for row in self.shown for column in self.columns} - {None}
        if any(cell.num_cached for row in self.shown for cell in row.cells.values()):
            present.add("cached")
        ended = {row.reason for row in self.shown} - {None}
        present |= {"aborted" if reason == "abort" else "finished" for reason in ended}
        return {kind for kind in present if kind}

    def numbered(self) -> set[str]:
        """The kinds of cells that have a number or a sign in them."""
        return {cell.kind for row in self.shown for cell in row.cells.values() if self._text_in(cell)}

    def _row(self, row: Row, name: str, top: float) -> str:
        colour, height = owner_colour(row.index), self.row_height - 4
        letter = owner_letter(row.index)
        chip = rectangle(MARGIN, top, 22, height, 4, {"fill": colour})
        size = 12 if len(letter) == 1 else 9.5
        base = top + height / 2 + 4
        chip += label(35, base, letter, size=size, weight=700, fill=ink_on(colour), anchor="middle")
        prompt = fit_mono(name, LEFT - 66, 11)
        chip += label(54, base, prompt, size=11, fill=INK, family=MONO) if prompt else ""
        places: dict[str, list[int]] = defaultdict(list)
        for column in self.columns:
            kind = self.column_kind(row, column)
            if kind:
                places[kind].append(column)
        cells = "".join(self._cells(kind, columns, top, height, colour) for kind, columns in places.items())
        numbers = self._numbers(row, top, height, colour)
        about = {"data-testid": "request", "data-state": "finished" if row.end is not None else "alive"}
        return element("g", about, chip, cells, self._cached(row, top, height), numbers, self._end(row, top, height))

    def _cells(self, kind: str, columns: Sequence[int], top: float, height: float, colour: str) -> str:
        about = {"data-testid": "cells", "data-state": kind, "data-count": len(columns)}
        gap = 0.0 if self.columns.bucket > 1 else 1.5
        boxes = [(self.columns.x(first), count * self.columns.pitch - gap) for first, count in self._runs(columns)]
        if kind == "waiting":
            middle = number(top + height / 2)
            path = "".join(f"M{number(x + 1)} {middle}h{number(wide - 1)}" for x, wide in boxes)
            return element("path", {**about, "d": path, "stroke": DISCARDED, "stroke-dasharray": "2 2"})
        inset = (height // 4 if kind in ("decode", "idle") else 0.0) + (0.5 if self.columns.bucket == 1 else 0.0)
        low, high = number(top + inset), number(height - 2 * inset)
        path = "".join(f"M{number(x)} {low}h{number(wide)}v{high}h-{number(wide)}z" for x, wide in boxes)
        return element("path", {**about, **cell_look(kind, colour), "d": path})

    def _runs(self, columns: Sequence[int]) -> list[tuple[int, int]]:
        """(first column, number of columns) of each bar: one column if a column is one step, else all neighbours."""
        if self.columns.bucket == 1:
            return [(column, 1) for column in columns]
        runs: list[tuple[int, int]] = []
        for column in columns:
            if runs and sum(runs[-1]) == column:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((column, 1))
        return runs

    def _numbers(self, row: Row, top: float, height: float, colour: str) -> str:
        texts, columns = [], self.columns
        for column in columns if columns.bucket == 1 else ():
            cell = row.cells.get(columns.first + column)
            if cell and (text := self._text_in(cell)):
                fill = {"prefill": ink_on(colour), "preempted": VERMILLION}.get(cell.kind, INK)
                halo = {"stroke": PAPER, "stroke-width": 3, "paint-order": "stroke"} if cell.kind == "recompute" else {}
                about = {"x": columns.x(column) + (columns.pitch - 1.5) / 2, "fill": fill, **halo}
                texts.append(element("tspan", about, text))
        about = {"y": top + height / 2 + 3.5, "font-size": 9.5, "text-anchor": "middle"}
        return element("text", about, *texts) if texts else ""

    def _text_in(self, cell: Cell) -> str:
        """The number or sign of a cell; empty if it has none, or no room."""
        text = _cell_text(cell)
        return text if self.columns.bucket == 1 and len(text) * 5.3 <= self.columns.pitch - 2 else ""

    def _cached(self, row: Row, top: float, height: float) -> str:
        """A hatched band at the bottom of steps in which tokens were reused from the cache, not computed."""
        found = [
            c for c in self.columns if any(row.cells[s].num_cached for s in self.columns.steps(c) if s in row.cells)
        ]
        if not found:
            return ""
        wide = number(self.columns.pitch - 1.5)
        path = "".join(f"M{number(self.columns.x(c))} {number(top + height - 5)}h{wide}v5h-{wide}z" for c in found)
        look = {"fill": hatched("cached"), "stroke": PAPER, "stroke-width": 0.7}
        return element(
            "path", {"data-testid": "cells", "data-state": "cached", "data-count": len(found), **look, "d": path}
        )

    def _end(self, row: Row, top: float, height: float) -> str:
        if row.end is None:
            return ""
        # A column of several steps shows what the request did in most of them. If it was idle in most, the end is drawn
        # at the left edge, next to its last work; if it never ran, where it arrived.
        column = (row.end - self.columns.first) // self.columns.bucket
        at_left = self.column_kind(row, column) in ("idle", None)
        x = (self.columns.x(column) if at_left else self.columns.place(row.end)) - 1
        about = {"data-testid": "end", "data-state": row.reason or ""}
        if row.reason == "abort":
            return element("g", about, label(x + 2, top + height / 2 + 5, "×", size=15, weight=700, fill=VERMILLION))
        return rectangle(x - 1.5, top, 3, height, 1, {**about, "fill": INK})

    def _axis(self, y: float) -> str:
        """Step numbers below the rows."""
        columns = self.columns
        every = next(
            n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**6) if n * columns.pitch / columns.bucket > 34
        )
        last = columns.first + columns.num_steps - 1
        ticks = [s for s in range(columns.first, last + 1) if s == columns.first or s % every == 0]
        texts = [
            element("tspan", {"x": columns.x((s - columns.first) // columns.bucket) + columns.pitch / 2 - 0.5}, str(s))
            for s in ticks
            if s == columns.first or s - columns.first >= every / 2
        ]
        about = {"y": y + 12, "font-size": 10.5, "fill": MUTED, "text-anchor": "middle"}
        return label(LEFT - 10, y + 12, "step", size=10.5, anchor="end") + element("text", about, *texts)

    def _strips(self, y: float) -> str:
        loads, limits = self.timeline.loads(), self.timeline
        requests = [(load.requests, load.prefills) for load in loads]
        tokens = [(load.tokens, load.prefill_tokens) for load in loads]
        above = self._strip(y, "requests", limits.max_num_seqs, requests)
        return (
            above
            if not self.with_tokens
            else above + self._strip(y + STRIP + 14, "tokens", limits.max_num_batched_tokens, tokens)
        )

    def _strip(self, y: float, name: str, limit: int, counts: Sequence[tuple[int, int]]) -> str:
        """A bar per column for `counts` (all, prefills) of each step: prefills dark, the rest light. `limit` is a line.

        A column of several steps shows their means."""
        means = [self._mean(counts, column) for column in self.columns]
        totals = [total for total, _ in means]
        peak = max((total for total, _ in counts), default=0)
        near = 0 < limit <= 5 * max(peak, 1)
        scale = (STRIP - 4) / max(limit if near else 0, peak, 1)
        wide = number(self.columns.pitch - 1.5)
        paths = {"light": "", "dark": ""}
        for column, (value, filled) in zip(self.columns, means, strict=True):
            x = number(self.columns.x(column))
            for shade, low, high in (("dark", 0.0, filled), ("light", filled, value)):
                if high > low:
                    tall = number((high - low) * scale)
                    paths[shade] += f"M{x} {number(y + STRIP - low * scale)}v-{tall}h{wide}v{tall}z"
        end = self.columns.x(len(totals))
        line = element("path", {"d": f"M{LEFT} {number(y + STRIP)}H{number(end)}", "stroke": HAIRLINE})
        if near:
            look = {"stroke": INK, "stroke-width": 1, "stroke-dasharray": "4 3"}
            line += element("path", {"d": f"M{LEFT} {number(y + STRIP - limit * scale)}H{number(end)}", **look})
        bars = [
            element("path", {"d": path, "fill": BARS[shade], "data-testid": f"strip-{name}", "data-state": shade})
            for shade, path in paths.items()
            if path
        ]
        most = f"peak {peak} of {limit}" if limit else f"peak {peak}"
        texts = label(MARGIN, y + 14, f"{name} in the step", size=11.5, fill=INK) + label(
            MARGIN, y + 30, most, size=10.5
        )
        return texts + "".join(bars) + line

    def _mean(self, counts: Sequence[tuple[int, int]], column: int) -> tuple[float, float]:
        first = column * self.columns.bucket
        steps = counts[first : first + self.columns.bucket]
        return sum(c for c, _ in steps) / max(len(steps), 1), sum(c for _, c in steps) / max(len(steps), 1)


def fitted(
    timelines: Sequence[Timeline], num_steps: int, top: float, gap: float = 0.0, most_rows: int = DETAILS[0][1]
) -> list[Lanes]:
    """Lanes for `timelines`, one below the other with `gap` pixels between them, all with room for `num_steps` steps.

    First the columns are widened, with more steps in each, then rows are left out, until all lanes together take at
    most `MAX_BYTES`. The request that ends last in any timeline has a row in all of them."""
    keep = frozenset(row.index for timeline in timelines for row in _last(timeline))
    for min_pitch, max_rows in DETAILS:
        lanes: list[Lanes] = []
        for timeline in timelines:
            columns = Columns.of(timeline.first_step, max(num_steps, 1), min_pitch)
            start = lanes[-1].top + lanes[-1].height + gap if lanes else top
            rows = min(max_rows, most_rows)
            lanes.append(Lanes(timeline, columns, start, rows, keep, with_tokens=len(timelines) == 1))
        if sum(len(lane.drawing.encode()) for lane in lanes) <= MAX_BYTES:
            break
    return lanes


def _last(timeline: Timeline) -> list[Row]:
    """The request that ends last, if any has ended or may still end."""
    return [max(timeline.rows, key=lambda row: (row.end is None, row.end or 0, -row.index))] if timeline.rows else []


def cell_look(kind: str, colour: str) -> Attributes:
    """The SVG attributes of the cells of `kind`."""
    looks: dict[str, Attributes] = {
        "prefill": {"fill": colour, "stroke": colour},
        "recompute": {"fill": hatched("void"), "stroke": VERMILLION},
        "decode": {"fill": colour, "fill-opacity": 0.45, "stroke": colour},
        "verify": {"fill": colour, "fill-opacity": 0.16, "stroke": colour},
        "preempted": {"fill": PAPER, "stroke": VERMILLION},
        "idle": {"fill": FAINT, "stroke": DISCARDED, "stroke-dasharray": "2 2"},
    }
    return looks[kind]


def _cell_text(cell: Cell) -> str:
    if cell.kind == "verify":
        return f"{cell.num_accepted}/{cell.num_drafts}" if cell.num_drafts else ""
    if cell.kind == "preempted":
        return "✗"
    return str(cell.num_tokens) if cell.kind in WORKING and cell.kind != "decode" else ""
