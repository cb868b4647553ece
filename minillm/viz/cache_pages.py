"""The picture of the block pool: requests with their block tables on top, the physical pages below."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from minillm.trace import Trace
from minillm.viz.cache_changes import changes, letter, plural
from minillm.viz.cache_state import CacheState, StepFigures
from minillm.viz.cache_words import describe, doing, pool_size, waste_share
from minillm.viz.colours import BLUE, FAINT, HAIRLINE, INK, MUTED, PAPER, VERMILLION, ink_on, owner_colour
from minillm.viz.glyphs import one_line
from minillm.viz.page_grid import PageGrid, chosen
from minillm.viz.replay import Replay
from minillm.viz.request_state import RequestState
from minillm.viz.svg import (
    MARGIN,
    MONO,
    RIGHT,
    Attributes,
    card,
    element,
    fit_clauses,
    fit_mono,
    hatch,
    hatched,
    heading,
    label,
    mono_width,
    number,
    rectangle,
    spans,
)
from minillm.viz.view import View

MAX_ROWS = 12
SIDE = 660
"""Left edge of the column with the usage bar and the history."""
ROWS_TOP = 112
TABLE = 424
"""Left edge of the block tables."""


class CachePagesView(View):
    """Which request owns which page of the KV cache, slot by slot, and what the step changed."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self._replay = Replay(trace, CacheState)

    def to_svg(self, step: int | None = None) -> str:
        """The picture after `step`, by default after the last event. Raises `TraceError` for an unknown step."""
        state = self._replay.at(step)
        requests, hidden = rows_to_show(state)
        grid_top = ROWS_TOP + max(len(requests), 3) * _row_pitch(requests) + (20 if hidden else 0) + 34
        drawn = chosen({*state.owners, *state.freed}, state.num_blocks)
        indices = {request.request_id: request.index for request in state.requests.values()}
        grid = PageGrid([state.page(block_id) for block_id in drawn], state.block_size or 1, indices, grid_top)
        bottom = grid_top + grid.height
        return card(
            "cache-pages",
            bottom + 42,
            f"KV cache pages, step {state.step}",
            " ".join(describe(state, tables=False).replace("\n", ". ").replace("..", ".").split()),
            element("defs", {}, hatch("void", VERMILLION), hatch("tight", VERMILLION, 2, 1.2)),
            _header(state),
            _usage(state),
            _history(state, ROWS_TOP, min(grid_top - 48, ROWS_TOP + 120)),
            _table(requests, hidden),
            heading(MARGIN, grid_top - 14, "physical pages, one per block"),
            _not_drawn(state, drawn, grid_top - 14),
            grid.draw(),
            _legend(bottom + 14),
        )

    def describe(self, step: int | None = None) -> str:
        """The picture in words, with all block tables."""
        return describe(self._replay.at(step))

    def busiest_step(self) -> int | None:
        """The step that ended with the most used blocks (the first of them): the frame to show in print."""
        history = self._replay.at().history
        return max(history, key=lambda figures: figures.used_blocks).step if history else None


def rows_to_show(state: CacheState) -> tuple[list[RequestState], int]:
    """At most `MAX_ROWS` requests in their order, those that finished long ago left out first; how many are left."""
    requests = list(state.requests.values())
    surplus = len(requests) - MAX_ROWS
    if surplus <= 0:
        return requests, 0
    finished = [r.request_id for r in requests if r.status == "finished"][:surplus]
    return [r for r in requests if r.request_id not in finished][:MAX_ROWS], surplus


def _row_pitch(requests: Sequence[RequestState]) -> int:
    return 30 if len(requests) <= 5 else 25


def _header(state: CacheState) -> str:
    title = ("KV cache pages", {"font-size": 17, "font-weight": 650, "fill": INK})
    if state.engine is None:
        return spans(MARGIN, 38, title, ("waiting for the engine", {"dx": 10}))
    facts = f"step {state.step} · block = {plural(state.block_size, 'token')} · {plural(state.num_blocks, 'block')}"
    done = fit_clauses(changes(state), SIDE - MARGIN - 90, 12.5) or "nothing changed"
    return spans(MARGIN, 38, title, (f"{facts} · {pool_size(state)}", {"dx": 10})) + spans(
        MARGIN,
        64,
        ("This step", {"font-weight": 600}),
        (done if state.step else "nothing has run yet", {"dx": 8, "fill": INK, "data-testid": "changes"}),
        size=12.5,
    )


def _usage(state: CacheState) -> str:
    """The bar: what is filled, what is taken but empty, what is free."""
    width = RIGHT - SIDE
    per_slot = width / max(state.num_blocks * state.block_size, 1)
    used, waste = state.used_slots * per_slot, state.waste_slots * per_slot
    bar = rectangle(SIDE, 26, width, 12, 3, {"fill": FAINT, "stroke": HAIRLINE})
    if used:
        bar += rectangle(SIDE, 26, used, 12, 3, {"fill": PAPER, "stroke": INK})
        bar += rectangle(SIDE, 26, used - waste, 12, 3, {"fill": INK})
    blocks = label(SIDE, 56, f"{state.used_blocks} used · {state.free_blocks} free", size=11.5)
    return bar + blocks + label(RIGHT, 56, waste_share(state), size=11.5, anchor="end")


def _history(state: CacheState, top: float, bottom: float) -> str:
    """Used blocks at the end of each step so far, the filled part in blue, the empty part of them in light."""
    history = [StepFigures(0, 0, 0), *_thinned(state.history)]
    peak = state.totals.peak_blocks
    head = heading(SIDE, top - 14, "used blocks, step by step")
    base = element("path", {"d": f"M{SIDE} {number(bottom)}H{RIGHT}", "stroke": HAIRLINE})
    if len(history) < 2 or not peak:
        return head + base
    bottom -= 0.5
    across, up = (RIGHT - SIDE - 4) / (len(history) - 1), (bottom - top - 4) / peak
    used = [(SIDE + i * across, bottom - f.used_blocks * up) for i, f in enumerate(history)]
    filled = [(x, y + f.waste_slots / state.block_size * up) for (x, y), f in zip(used, history, strict=True)]
    now_x, now_y = used[-1]
    return "".join(
        [
            head,
            label(RIGHT, top - 14, f"peak {peak} of {state.num_blocks}", size=11.5, anchor="end"),
            element("path", {"d": _area(used, bottom), "fill": BLUE, "fill-opacity": 0.18}),
            element("path", {"d": _area(filled, bottom), "fill": BLUE, "fill-opacity": 0.55}),
            base,
            element("circle", {"cx": now_x, "cy": now_y, "r": 3.5, "fill": INK}),
        ]
    )


def _thinned(history: Sequence[StepFigures], most: int = 148) -> list[StepFigures]:
    """At most `most` evenly spread steps, the last one among them."""
    stride = -(-len(history) // most)
    return list(history[::-1][:: max(stride, 1)])[::-1]


def _area(points: Sequence[tuple[float, float]], bottom: float) -> str:
    line = "L".join(f"{number(x)} {number(y)}" for x, y in points)
    return f"M{number(points[0][0])} {number(bottom)}L{line}V{number(bottom)}z"


def _table(requests: Sequence[RequestState], hidden: int) -> str:
    pitch, above = _row_pitch(requests), ROWS_TOP - 14
    heads = heading(MARGIN, above, "requests") + heading(274, above, "doing") + heading(TABLE, above, "block table")
    heads += label(262, above, "IN CACHE", size=11.5, weight=600, anchor="end")
    rows = "".join(_row(request, ROWS_TOP + i * pitch) for i, request in enumerate(requests))
    more = label(56, ROWS_TOP + len(requests) * pitch + 12, f"and {hidden} more") if hidden else ""
    return heads + rows + more


def _row(request: RequestState, top: float) -> str:
    colour = owner_colour(request.index)
    faded = 0.45 if request.status == "finished" else None
    name, base = letter(request), top + 15.5
    chip = rectangle(MARGIN, top, 22, 22, 5, {"fill": colour})
    chip += label(35, base, name, size=13 if len(name) == 1 else 10.5, weight=700, fill=ink_on(colour), anchor="middle")
    cached = "–" if request.status == "finished" else f"{request.num_computed} of {request.num_tokens}"
    count = label(262, base, cached, size=None, anchor="end")
    status = label(274, base, doing(request), size=None, fill=None if request.marks.written else MUTED)
    prompt = label(56, base, fit_mono(one_line(request.prompt), 132, 11.5), size=None, fill=None)
    mono = element("g", {"font-family": MONO}, prompt, _cells(request, top, colour))
    row = {"data-testid": "request", "data-state": request.status, "font-size": 11.5, "opacity": faded}
    return element("g", row, chip, count, status, mono)


def _cells(request: RequestState, top: float, colour: str) -> str:
    """The block table in logical order; if it is long, its first and last blocks."""
    if not request.block_table:
        return ""
    blocks: list[str] = [str(block_id) for block_id in request.block_table]
    width = max(27, ceil(mono_width(max(blocks, key=len), 11.5)) + 8)
    most = int((SIDE - 20 - TABLE + 4) / (width + 4))
    if len(blocks) > most:
        blocks = [*blocks[:2], "…", *blocks[-(most - 3) :]]
    new = set(map(str, request.marks.took))
    places = [(TABLE + i * (width + 4), name) for i, name in enumerate(blocks)]
    old_boxes = [_cell(x, top, width) for x, name in places if name not in new and name != "…"]
    new_boxes = [_cell(x, top, width) for x, name in places if name in new]
    old_look = {"fill": colour, "fill-opacity": 0.13, "stroke": colour, "stroke-width": 1.5, "stroke-linejoin": "round"}
    new_look = {"fill": INK, "stroke": INK, "stroke-width": 2, "stroke-linejoin": "round"}
    boxes = [
        element("path", {**look, "d": "".join(cells)})
        for look, cells in ((old_look, old_boxes), (new_look, new_boxes))
        if cells
    ]
    numbers = [
        element("tspan", {"x": x + width / 2, "fill": PAPER if name in new else None}, name) for x, name in places
    ]
    return "".join(boxes) + element("text", {"y": top + 15.5, "text-anchor": "middle"}, *numbers)


def _cell(x: float, top: float, width: float) -> str:
    """Path of the box of one block."""
    return f"M{number(x)} {number(top)}h{width}v22h-{width}z"


def _not_drawn(state: CacheState, drawn: Sequence[int], y: float) -> str:
    missing = state.num_blocks - len(drawn)
    if not missing:
        return ""
    used = len(state.owners.keys() - set(drawn))
    text = f"{len(drawn)} of {state.num_blocks} drawn; left out: {used} used, {missing - used} free or just freed"
    return label(RIGHT, y, text, size=11.5, anchor="end")


def _legend(top: float) -> str:
    solid, dark = {"fill": BLUE}, {"fill": INK}
    entries: list[tuple[str, Attributes]] = [
        ("written slot", solid),
        ("written this step", dark),
        ("rolled back", {"fill": hatched("void"), "stroke": VERMILLION}),
        ("empty slot (waste)", {"fill": PAPER, "stroke": BLUE}),
        ("free", {"fill": FAINT, "stroke": HAIRLINE}),
        ("freed this step", {"fill": FAINT, "stroke": BLUE, "stroke-width": 1.4, "stroke-dasharray": "4 3"}),
    ]
    parts, x = [], float(MARGIN)
    for text, look in entries:
        parts.append(rectangle(x, top, 14, 14, 3, look) + label(x + 20, top + 11.5, text, size=11.5, fill=INK))
        x += 20 + len(text) * 6.6 + 20
    shared = spans(
        x, top + 11.5, ("×2", {"font-weight": 700, "fill": INK}), (" shared by two requests", {"fill": INK}), size=11.5
    )
    return element("g", {"data-testid": "legend"}, *parts, shared)
