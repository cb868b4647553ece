"""The picture of the block pool: requests with their block tables on top, the physical pages below."""

from __future__ import annotations

from collections.abc import Sequence

from minillm.trace import Trace
from minillm.trace.cache_state import CacheState
from minillm.trace.replay import Replay
from minillm.viz.draw.colours import INK
from minillm.viz.draw.plural import plural
from minillm.viz.draw.svg import MARGIN, RIGHT, SANS_EM, TITLE, card, fit_clauses, heading, paragraph, spans
from minillm.viz.draw.view import View
from minillm.viz.pages.block_tables import ROWS_TOP, draw_requests, row_pitch, rows_to_show
from minillm.viz.pages.cache_changes import changes
from minillm.viz.pages.cache_words import describe, pool_size, title, unit
from minillm.viz.pages.narrow_pages import draw_narrow
from minillm.viz.pages.page_grid import PageGrid, blocks_to_draw, not_drawn
from minillm.viz.pages.page_legend import HATCHES, draw_legend, kinds_in
from minillm.viz.pages.pool_usage import SIDE, draw_history, draw_usage, usage_kinds
from minillm.viz.pages.sequence_bars import SequenceBars


class CachePagesView(View):
    """Which request owns which page of the KV cache, slot by slot, and what the step changed.

    `narrow`: at half the width, to be shown beside another picture."""

    def __init__(self, trace: Trace, *, narrow: bool = False) -> None:
        super().__init__(trace)
        self.narrow = narrow
        self._replay = Replay(trace, CacheState)

    def to_svg(self, step: int | None = None) -> str:
        """The picture after `step`, by default after the last event. Raises `TraceError` for an unknown step."""
        state = self._replay.at(step)
        if self.narrow:
            return draw_narrow(state)
        requests, hidden = rows_to_show(state)
        grid_top = ROWS_TOP + max(len(requests), 3) * row_pitch(requests) + (20 if hidden else 0) + 34
        drawn = blocks_to_draw(state)
        indices = {request.request_id: request.index for request in state.requests.values()}
        pages = [state.page(block_id) for block_id in drawn]
        grid = (SequenceBars if state.whole_sequences else PageGrid)(pages, state.block_size or 1, indices, grid_top)
        kinds = kinds_in(pages) | usage_kinds(state)
        legend, legend_height = draw_legend(kinds, grid_top + grid.height + 14, state.keeps_every_token)
        return card(
            "cache-pages",
            grid_top + grid.height + 28 + legend_height,
            f"{title(state)}, step {state.step}",
            paragraph(describe(state, requests)),
            HATCHES,
            _header(state),
            draw_usage(state),
            draw_history(state, ROWS_TOP, min(grid_top - 48, ROWS_TOP + 120)),
            draw_requests(requests, hidden, *_columns(state)),
            heading(
                MARGIN,
                grid_top - 14,
                "places, one per request" if state.whole_sequences else "physical pages, one per block",
            ),
            not_drawn(state, drawn, RIGHT, grid_top - 14),
            grid.draw(),
            legend,
        )

    def describe(self, step: int | None = None) -> str:
        """The picture in words, with all block tables."""
        return describe(self._replay.at(step))

    def most_informative_step(self) -> int | None:
        """The first step with the most used blocks at its end; `None` before the first step."""
        history = self._replay.at().history
        return max(history, key=lambda figures: figures.used_blocks).step if history else None


def _header(state: CacheState) -> str:
    name = (title(state), TITLE)
    if state.engine is None:
        return spans(MARGIN, 38, name, ("waiting for the engine", {"dx": 10}))
    one = unit(state)
    facts = f"step {state.step} · {one} = {plural(state.block_size, 'token')} · {plural(state.num_blocks, one)}"
    first, second = _two_lines(changes(state) or ["nothing changed" if state.step else "nothing has run yet"])
    look = {"fill": INK, "data-testid": "changes"}
    return "".join(
        [
            spans(MARGIN, 38, name, (f"{facts} · {pool_size(state)}", {"dx": 10})),
            spans(MARGIN, 60, ("This step", {"font-weight": 600}), (first, {"dx": 8, **look}), size=12.5),
            spans(MARGIN, 76, (second, look), size=12.5) if second else "",
        ]
    )


def _two_lines(clauses: Sequence[str]) -> tuple[str, str]:
    """The `clauses` on two lines: as many as fit on the first, the others on the second."""
    room, size = SIDE - MARGIN - 24, 12.5
    kept = 1
    while kept < len(clauses) and len(" · ".join(clauses[: kept + 1])) * SANS_EM * size <= room - 66:
        kept += 1
    return fit_clauses(clauses[:kept], room - 66, size), fit_clauses(clauses[kept:], room, size)


def _columns(state: CacheState) -> tuple[str, str]:
    """The names of the columns with a request's tokens and with its blocks."""
    tokens = "IN CACHE" if state.keeps_every_token else "COMPUTED"
    return tokens, "place" if state.whole_sequences else "block table"
