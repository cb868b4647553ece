"""The requests of a picture, a row each: letter, prompt, current work, and its block table in logical order."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from minillm.trace.cache_state import CacheState
from minillm.trace.request_state import RequestState
from minillm.viz.draw.colours import INK, MUTED, PAPER, ink_on, owner_colour, owner_letter
from minillm.viz.draw.request_labels import distinct_names
from minillm.viz.draw.svg import (
    MARGIN,
    MONO,
    Attributes,
    element,
    fit_mono,
    heading,
    label,
    mono_width,
    number,
    rectangle,
)
from minillm.viz.pages.cache_words import request_work
from minillm.viz.pages.pool_usage import SIDE

MAX_ROWS = 12
ROWS_TOP = 112
FADED = 0.45
"""How strongly a request that has finished has its colour; its text stays readable."""
TABLE = 424
"""Left edge of the block tables."""


def rows_to_show(state: CacheState, most: int = MAX_ROWS) -> tuple[list[RequestState], int]:
    """At most `most` requests in their order, and the number of the others. Of the finished ones, those that were added
    first are left out first."""
    requests = list(state.requests.values())
    surplus = len(requests) - most
    if surplus <= 0:
        return requests, 0
    finished = set([r.request_id for r in requests if r.status == "finished"][:surplus])
    return [r for r in requests if r.request_id not in finished][:most], surplus


def row_pitch(requests: Sequence[RequestState]) -> int:
    """Distance between two rows."""
    return 30 if len(requests) <= 5 else 25


def draw_requests(requests: Sequence[RequestState], hidden: int, tokens_name: str, table_name: str) -> str:
    """The rows of `requests`, and a note that `hidden` more are left out."""
    pitch, above = row_pitch(requests), ROWS_TOP - 14
    heads = heading(MARGIN, above, "requests") + heading(274, above, "doing") + heading(TABLE, above, table_name)
    heads += label(262, above, tokens_name, size=11.5, weight=600, anchor="end")
    names = distinct_names([request.prompt for request in requests])
    rows = "".join(_row(r, name, ROWS_TOP + i * pitch) for i, (r, name) in enumerate(zip(requests, names, strict=True)))
    more = label(56, ROWS_TOP + len(requests) * pitch + 12, f"and {hidden} more") if hidden else ""
    return heads + rows + more


def draw_chip(index: int, top: float, faded: bool = False) -> str:
    """The letter of request number `index` (from 0) on its colour, at the left margin."""
    colour, name = owner_colour(index), owner_letter(index)
    box = rectangle(MARGIN, top, 22, 22, 5, {"fill": colour, "fill-opacity": FADED if faded else None})
    size, ink = 13 if len(name) == 1 else 10.5, INK if faded else ink_on(colour)
    return box + label(35, top + 15.5, name, size=size, weight=700, fill=ink, anchor="middle")


def _row(request: RequestState, name: str, top: float) -> str:
    ended = request.status == "finished"
    base, ink = top + 15.5, MUTED if ended else None
    cached = "–" if ended else f"{request.num_computed} of {request.num_tokens}"
    count = label(262, base, cached, size=None, anchor="end")
    status = label(274, base, request_work(request), size=None, fill=None if request.marks.written else MUTED)
    prompt = label(56, base, fit_mono(name, 132, 11.5), size=None, fill=None)
    mono = element("g", {"font-family": MONO, "fill": ink}, prompt, draw_table(request, top))
    row = {"data-testid": "request", "data-state": request.status, "font-size": 11.5}
    return element("g", row, draw_chip(request.index, top, ended), count, status, mono)


def draw_table(request: RequestState, top: float, left: float = TABLE, right: float = SIDE - 20) -> str:
    """The block table; if it is long, its first and last blocks. Blocks new in this step are dark, reused ones ringed.

    For a request that has finished, its former table, dashed: its blocks were freed."""
    colour, gone = owner_colour(request.index), not request.block_table and request.status == "finished"
    blocks: list[str] = [str(block_id) for block_id in (request.former_table if gone else request.block_table)]
    if not blocks:
        return ""
    width = max(27, ceil(mono_width(max(blocks, key=len), 11.5)) + 8)
    most = int((right - left + 4) / (width + 4))
    if len(blocks) > most:
        blocks = [*blocks[:2], "…", *blocks[-(most - 3) :]]
    fresh = (*request.marks.allocated_blocks, *(target for _, target in request.marks.copied))
    new = set() if gone else {str(block_id) for block_id in fresh}
    reused = set(map(str, request.marks.reused_blocks)) - new
    places = [(left + i * (width + 4), name) for i, name in enumerate(blocks) if name != "…"]
    faded = FADED if request.status == "finished" else None
    light = {"fill": colour, "fill-opacity": 0.0 if gone else 0.13, "stroke-linejoin": "round"}
    light |= {"stroke-dasharray": "3 2.5"} if gone else {}
    plain = {**light, "stroke": colour, "stroke-width": 1.5, "stroke-opacity": faded}
    looks: tuple[tuple[Attributes, list[float]], ...] = (
        (plain, [x for x, name in places if name not in new | reused]),
        ({**light, "stroke": INK, "stroke-width": 2}, [x for x, name in places if name in reused]),
        ({"fill": INK, "stroke": INK, "stroke-width": 2}, [x for x, name in places if name in new]),
    )
    boxes = [
        element("path", {**look, "d": "".join(f"M{number(x)} {number(top)}h{width}v22h-{width}z" for x in xs)})
        for look, xs in looks
        if xs
    ]
    numbers = [
        element("tspan", {"x": left + i * (width + 4) + width / 2, "fill": PAPER if name in new else None}, name)
        for i, name in enumerate(blocks)
    ]
    return "".join(boxes) + element("text", {"y": top + 15.5, "text-anchor": "middle"}, *numbers)
