"""The tokens of a round as boxes, each with the sign and the colour of its verdict."""

from __future__ import annotations

from collections.abc import Sequence

from minillm.trace.acceptance_state import Round
from minillm.viz.draw.colours import DISCARDED, GREEN, INK, MUTED, ORANGE, SKY, VERMILLION
from minillm.viz.draw.glyphs import visible
from minillm.viz.draw.svg import MONO, Attributes, element, fit_mono, label, mono_width, rectangle

MAX_COLUMNS = 20
BOX, SIBLING_GAP = 32, 3
FEW = 8
"""Drafts per round that all have a column, whether a round has as many or not."""
MORE = 40
"""Width for the number of drafts that have no column."""

SIGNS = {"accepted": "✓", "rejected": "✗", "discarded": "·", "recovered": "↻", "bonus": "★", "sampled": "●"}
COLOURS = {
    "accepted": GREEN,
    "rejected": VERMILLION,
    "discarded": DISCARDED,
    "recovered": ORANGE,
    "bonus": SKY,
    "sampled": INK,
}
THROWN_AWAY = ("rejected", "discarded")


def num_columns(shown: Sequence[Round], gamma: int, most: int = MAX_COLUMNS) -> int:
    """The number of draft columns for these rounds; at most `most`. Few drafts (γ) all have one, so that the columns
    stay where they are from round to round. A tree of γ drafts has fewer positions than γ."""
    if shown and (gamma > FEW or any(judged.parents is not None for judged in shown)):
        gamma = 0
    return min(max([gamma, 1, *(judged.num_positions for judged in shown)]), most)


def draw_more(judged: Round, count: int, x: float, base: float) -> str:
    """What `count` columns leave out of a round, as `+4`, or `+4 ✗` if the rejected draft is among them."""
    hidden = [judged.verdicts[node] for place in judged.candidates_by_position[count:] for node in place]
    sign = f" {SIGNS['rejected']}" if "rejected" in hidden else ""
    look = {"fill": VERMILLION if sign else INK, "weight": 700, "size": 11.5}
    more = label(x, base, f"+{len(hidden)}{sign}", **look)
    return element("g", {"data-testid": "more", "data-count": len(hidden)}, more) if hidden else ""


def draw_place(
    judged: Round, place: Sequence[int], x: float, top: float, width: float, height: float = BOX
) -> list[str]:
    """The drafts at one position, side by side."""
    each = max(1.0, (width - (len(place) - 1) * SIBLING_GAP) / len(place))
    return [
        draw_token(x + i * (each + SIBLING_GAP), top, each, judged.drafts[node], judged.verdicts[node], height)
        for i, node in enumerate(place)
    ]


def draw_token(x: float, top: float, width: float, text: str, state: str, height: float = BOX) -> str:
    """A token with the sign of its verdict; only the sign if there is no room for text."""
    colour, thrown = COLOURS[state], state in THROWN_AWAY
    dash: Attributes = {"stroke-dasharray": "4 3"} if thrown else {}
    frame = {"fill": colour, "fill-opacity": 0.05 if thrown else 0.14, "stroke": colour, "stroke-width": 1.4, **dash}
    box = rectangle(x, top, width, height, 7, frame)
    base = top + height / 2 + 5
    ink = colour if state in ("accepted", "rejected", "discarded") else INK
    left, size = (27, 13) if width >= 90 else (22, 11.5) if width >= 70 else (18, 10.5)
    inner = width - left - 6
    if inner < 14:
        sign = label(x + width / 2, base, SIGNS[state], size=13, weight=700, fill=ink, anchor="middle")
        return element("g", {"data-testid": "token", "data-state": state}, box, sign)
    sign = label(x + left / 3, base, SIGNS[state], size=size, weight=700, fill=ink)
    shown = fit_mono(visible(text), inner, size)
    word = label(x + left, base - 0.5, shown, size=size, fill=MUTED if thrown else INK, family=MONO)
    y, end = base - 4.5, x + left + 1 + mono_width(shown, size)
    through = element("line", {"x1": x + left - 1, "x2": end, "y1": y, "y2": y, "stroke": MUTED}) if thrown else ""
    return element("g", {"data-testid": "token", "data-state": state}, box, sign, word, through)
