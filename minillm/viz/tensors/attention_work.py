"""The work of generating a text, forward by forward: rows through the model and pairs in attention, new and recomputed.

Left, a column is a forward, and its height is the rows it ran. In the middle, the attention of one forward: a row is a
query, a column is a key that it attends to; a causal mask leaves the lower triangle. Right, the totals so far.
"""

from __future__ import annotations

from collections.abc import Sequence

from minillm.errors import TraceError
from minillm.trace import ForwardWork, Trace
from minillm.trace.forward_events import pairs_of
from minillm.viz.draw.colours import BLUE, FAINT, HAIRLINE, INK, ORANGE, PAPER
from minillm.viz.draw.svg import MARGIN, RIGHT, card, element, hatch, hatched, heading, label, number, rectangle
from minillm.viz.draw.view import View

GRID_TOP, GRID = 128, 240
COLUMNS_WIDTH = 380
TRIANGLE_LEFT = MARGIN + COLUMNS_WIDTH + 36
TOTALS_LEFT = TRIANGLE_LEFT + GRID + 36
STATES = {
    "new": "new: never computed before",
    "redone": "redone: an earlier forward computed the same",
    "remembered": "remembered: not run again",
}


class AttentionWorkView(View):
    """The `ForwardWork` events of a trace of one text.

    `num_steps` and `max_tokens` fix the scale in advance, so that it is constant in a live picture.
    """

    def __init__(self, trace: Trace, num_steps: int = 0, max_tokens: int = 0) -> None:
        super().__init__(trace)
        self.num_steps, self.max_tokens = num_steps, max_tokens

    def forwards(self, step: int | None = None) -> list[ForwardWork]:
        """The first `step` forwards (None: all). Raises `TraceError` if there are fewer."""
        everything = self.trace.of(ForwardWork)
        if step is not None and not 0 <= step <= len(everything):
            raise TraceError(f"there is no step {step} in this trace: its steps are 1 to {len(everything)}")
        return everything[:step]

    def to_svg(self, step: int | None = None) -> str:
        """The picture after `step` forwards."""
        everything, shown = self.forwards(), self.forwards(step)
        num_steps = max(self.num_steps, 1, len(everything))
        max_tokens = max([self.max_tokens, 1, *(work.num_tokens for work in everything)])
        longest = range(max(1, max_tokens - num_steps + 1), max_tokens + 1)  # lengths if every row is recomputed
        most = (sum(longest), sum(pairs_of(n, n) for n in longest))
        states = [s for s in STATES if any(s == part[0] for work in everything for part in work.spans())]
        facts = f"forward {len(shown)} of {num_steps}"
        facts += f" · the text has {shown[-1].num_tokens} tokens" if shown else ""
        return card(
            "attention-work",
            GRID_TOP + GRID + 28,
            f"Work of {len(shown)} of {num_steps} forwards",
            self.describe(step),
            element("defs", {}, hatch("redone", ORANGE, spacing=4)),
            label(MARGIN, 36, "What each new token costs", size=17, weight=650, fill=INK),
            label(300, 36, facts, size=13),
            *_legend(states or ["new"]),
            *_columns(shown, COLUMNS_WIDTH / num_steps, GRID / max_tokens),
            *_triangle(shown, GRID / max_tokens),
            *_totals(shown, most),
        )

    def describe(self, step: int | None = None) -> str:
        """The picture in words."""
        shown = self.forwards(step)
        if not shown:
            return "No forward yet."
        rows, pairs = _sums(shown)
        return (
            f"{len(shown)} forwards, the last over a text of {shown[-1].num_tokens} tokens. "
            f"{sum(rows):,} rows went through the model, {rows[0]:,} of them new and {rows[1]:,} redone; attention "
            f"compared {sum(pairs):,} pairs, {pairs[0]:,} of them new and {pairs[1]:,} redone."
        )


def _sums(forwards: Sequence[ForwardWork]) -> tuple[tuple[int, int], tuple[int, int]]:
    """(new, redone) rows and (new, redone) pairs."""
    new_rows, new_pairs = sum(work.num_new for work in forwards), sum(work.new_pairs for work in forwards)
    rows, pairs = sum(work.num_rows for work in forwards), sum(work.pairs for work in forwards)
    return (new_rows, rows - new_rows), (new_pairs, pairs - new_pairs)


def _look(state: str) -> dict[str, str | float | None]:
    """SVG attributes: solid, hatched or hollow, so that the states differ without colour."""
    return {
        "new": {"fill": INK},
        "redone": {"fill": hatched("redone"), "stroke": ORANGE, "stroke-width": 0.6},
        "remembered": {"fill": PAPER, "stroke": BLUE, "stroke-opacity": ".45", "stroke-width": 0.8},
    }[state] | {"data-state": state}


def _legend(states: Sequence[str]) -> list[str]:
    parts, x = [], float(MARGIN)
    for state in states:
        parts.append(rectangle(x, 56, 16, 12, 0, {**_look(state), "data-state": None}))
        parts.append(label(x + 24, 66, STATES[state], size=12, fill=INK))
        x += 48 + 6.6 * len(STATES[state])
    return parts


def _columns(forwards: Sequence[ForwardWork], pitch: float, height: float) -> list[str]:
    """Rows through the model: one column per forward."""
    gap = 1.0 if pitch > 3 else 0.0
    columns = [
        element(
            "g",
            {"data-testid": "forward", "data-step": str(i + 1)},
            *(
                rectangle(
                    MARGIN + i * pitch, GRID_TOP + first * height, pitch - gap, (end - first) * height, 0, _look(s)
                )
                for s, first, end in work.spans()
            ),
        )
        for i, work in enumerate(forwards)
    ]
    return [
        label(MARGIN, 102, "Rows through every layer", size=14, weight=650, fill=INK),
        label(MARGIN, 119, "a column is a forward, a row is a token of the text", size=11.5),
        rectangle(MARGIN - 2, GRID_TOP - 2, COLUMNS_WIDTH + 4, GRID + 4, 4, {"fill": "none", "stroke": HAIRLINE}),
        *columns,
    ]


def _triangle(forwards: Sequence[ForwardWork], cell: float) -> list[str]:
    """The last forward's attention: each query with the keys that it attends to."""
    spans = forwards[-1].spans() if forwards else []
    box = {"fill": FAINT, "stroke": HAIRLINE}
    return [
        label(TRIANGLE_LEFT, 102, "Attention in this forward", size=14, weight=650, fill=INK),
        label(TRIANGLE_LEFT, 119, "a row is a query, a column is a key", size=11.5),
        rectangle(TRIANGLE_LEFT - 2, GRID_TOP - 2, GRID + 4, GRID + 4, 4, box),
        *(
            element("path", {"data-testid": "queries", "d": _stairs(first, end, cell), **_look(state)})
            for state, first, end in spans
        ),
    ]


def _stairs(first: int, end: int, cell: float) -> str:
    """Outline of queries `first … end - 1`, query i being i + 1 cells wide."""
    steps = "".join(
        f"H{number(TRIANGLE_LEFT + (i + 1) * cell)}V{number(GRID_TOP + (i + 1) * cell)}" for i in range(first, end)
    )
    return f"M{TRIANGLE_LEFT} {number(GRID_TOP + first * cell)}{steps}H{TRIANGLE_LEFT}Z"


def _totals(forwards: Sequence[ForwardWork], most: tuple[int, int]) -> list[str]:
    """Rows and pairs so far, as bars; a full bar is the total of a run that recomputes everything."""
    parts = [label(TOTALS_LEFT, 102, "So far", size=14, weight=650, fill=INK)]
    rows, pairs = _sums(forwards)
    for top, name, (new, redone), full in (
        (GRID_TOP, "rows", rows, most[0]),
        (GRID_TOP + 118, "pairs", pairs, most[1]),
    ):
        scale = (RIGHT - TOTALS_LEFT) / max(full, new + redone)
        parts += [
            heading(TOTALS_LEFT, top + 8, "rows through the model" if name == "rows" else "pairs of query and key"),
            label(TOTALS_LEFT, top + 38, f"{new + redone:,}", size=24, weight=650, fill=INK),
            rectangle(TOTALS_LEFT, top + 50, new * scale, 16, 0, {**_look("new"), "data-testid": name}),
            rectangle(
                TOTALS_LEFT + new * scale, top + 50, redone * scale, 16, 0, {**_look("redone"), "data-testid": name}
            )
            if redone
            else "",
            label(TOTALS_LEFT, top + 84, f"{new:,} new, {redone:,} redone", size=12, fill=INK),
            label(TOTALS_LEFT, top + 100, f"{(new + redone) / new:.1f} times what is new", size=12) if new else "",
        ]
    return parts
