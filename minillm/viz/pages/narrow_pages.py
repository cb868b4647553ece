"""The block pool at half a page's width, to be shown beside the rounds of a request (`narrow_rounds`)."""

from __future__ import annotations

from collections.abc import Sequence

from minillm.trace.cache_state import CacheState
from minillm.trace.request_state import RequestState
from minillm.viz.draw.colours import INK, MUTED
from minillm.viz.draw.plural import plural
from minillm.viz.draw.request_labels import distinct_names
from minillm.viz.draw.svg import (
    MARGIN,
    MONO,
    TITLE,
    card,
    element,
    fit_clauses,
    fit_mono,
    heading,
    label,
    paragraph,
    spans,
)
from minillm.viz.pages.block_tables import draw_chip, draw_table, rows_to_show
from minillm.viz.pages.cache_changes import changes
from minillm.viz.pages.cache_words import describe, request_work, title, unit
from minillm.viz.pages.page_grid import PageGrid, blocks_to_draw, not_drawn
from minillm.viz.pages.page_legend import HATCHES, draw_legend, kinds_in
from minillm.viz.pages.pool_usage import draw_history, draw_usage, usage_kinds

WIDTH = 484
RIGHT = WIDTH - MARGIN
CHANGES, ROWS_TOP, ROW, MAX_ROWS = 116, 152, 28, 6
COUNT, TABLE = 196, 206
"""Right edge of the tokens in the cache, left edge of the block tables."""
HISTORY, LEGEND_HEIGHT = 44, 62


def draw_narrow(state: CacheState) -> str:
    """The picture: the pool's numbers, the requests with their block tables, the pages."""
    requests, hidden = rows_to_show(state, MAX_ROWS)
    more_height = 18 if hidden else 0
    grid_top = ROWS_TOP + max(len(requests), 1) * ROW + more_height + 34
    indices = {request.request_id: request.index for request in state.requests.values()}
    drawn = blocks_to_draw(state)
    pages = [state.page(block_id) for block_id in drawn]
    grid = PageGrid(pages, state.block_size or 1, indices, grid_top, narrow=True)
    kinds = kinds_in(pages) | usage_kinds(state)
    legend_top = grid_top + grid.height + 8
    legend, legend_height = draw_legend(kinds, legend_top, state.keeps_every_token, RIGHT, grid.two_owners)
    # At least three lines of legend, so that the height of the card is constant as signs come and go.
    history_top = grid_top + grid.height + max(legend_height, LEGEND_HEIGHT) + 46
    name = "places, one per request" if state.whole_sequences else "physical pages, one per block"
    if len(drawn) < state.num_blocks:
        name = name.partition(",")[0]  # beside it stands how many are left out
    return card(
        "cache-pages",
        history_top + HISTORY + 20,
        f"{title(state)}, step {state.step}",
        paragraph(describe(state, requests)),
        HATCHES,
        _header(state),
        draw_usage(state, MARGIN, RIGHT, 52),
        _requests(requests, hidden),
        heading(MARGIN, grid_top - 12, name),
        not_drawn(state, drawn, RIGHT, grid_top - 12),
        grid.draw(),
        legend,
        draw_history(state, history_top, history_top + HISTORY, MARGIN, RIGHT),
        width=WIDTH,
    )


def _header(state: CacheState) -> str:
    facts = "waiting for the engine"
    if state.engine is not None:
        one = unit(state)
        facts = f"step {state.step} · {plural(state.num_blocks, one)} of {plural(state.block_size, 'token')}"
    done = changes(state) or ["nothing changed" if state.step else "nothing has run yet"]
    changes_text = fit_clauses(done, RIGHT - MARGIN - 62, 12)
    return spans(MARGIN, 36, (title(state), TITLE), (facts, {"dx": 10})) + spans(
        MARGIN,
        CHANGES,
        ("This step", {"font-weight": 600}),
        (changes_text, {"dx": 7, "fill": INK, "data-testid": "changes"}),
        size=12,
    )


def _requests(requests: Sequence[RequestState], hidden: int) -> str:
    heads = heading(MARGIN, ROWS_TOP - 10, "requests") + heading(TABLE, ROWS_TOP - 10, "block table")
    heads += label(COUNT, ROWS_TOP - 10, "TOKENS", size=11.5, weight=600, anchor="end")
    names = distinct_names([request.prompt for request in requests])
    rows = [_row(r, name, ROWS_TOP + i * ROW) for i, (r, name) in enumerate(zip(requests, names, strict=True))]
    if hidden:
        rows.append(label(54, ROWS_TOP + len(rows) * ROW + 11, f"and {plural(hidden, 'more request')}", size=11))
    return heads + "".join(rows)


def _row(request: RequestState, name: str, top: float) -> str:
    base = top + 15.5
    ended = request.status == "finished"
    cached = "–" if ended else f"{request.num_computed} of {request.num_tokens}"
    ink = MUTED if ended else INK
    parts = [
        draw_chip(request.index, top, ended),
        label(54, base, fit_mono(name, 78, 11), size=11, fill=ink, family=MONO),
        label(COUNT, base, cached, size=11.5, anchor="end"),
        element("g", {"font-family": MONO, "font-size": 11.5, "fill": ink}, draw_table(request, top, TABLE, RIGHT)),
    ]
    if not (request.block_table or request.former_table):
        parts.append(label(TABLE, base, request_work(request), size=11.5))
    return element("g", {"data-testid": "request", "data-state": request.status}, *parts)
