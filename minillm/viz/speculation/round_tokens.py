"""What the pictures of rounds are made of: tokens as boxes with their verdict, bars of acceptance, the legend."""

from __future__ import annotations

from collections.abc import Sequence

from minillm.trace.acceptance_state import Round
from minillm.viz.draw.colours import DISCARDED, FAINT, GREEN, INK, MUTED, ORANGE, SKY, TEXT_ON_PAPER, VERMILLION
from minillm.viz.draw.glyphs import visible
from minillm.viz.draw.svg import MARGIN, MONO, Attributes, element, fit_mono, label, mono_width, rectangle, spans
from minillm.viz.draw.token_text import style

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
SIGN_COLOURS = {**COLOURS, **TEXT_ON_PAPER, "discarded": MUTED}
"""Darker, so that a sign can be read on white."""
THROWN_AWAY = ("rejected", "discarded")
LEGEND = {
    "accepted": "accepted",
    "rejected": "rejected",
    "discarded": "discarded",
    "recovered": "recovered from the residual",
    "bonus": "bonus: all were right",
}


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
    ink = SIGN_COLOURS[state] if state in ("accepted", "rejected", "discarded") else INK
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


def draw_share(x: float, top: float, width: float, height: float, position: int, counts: tuple[int, int] | None) -> str:
    """A bar below the drafts at `position` (from 1) for the share of them that were accepted. `counts`: accepted and
    all; None: a position without drafts."""
    track = rectangle(x, top, width, height, 4, {"fill": FAINT})
    if counts is None:
        return track
    accepted, judged = counts
    tall, middle = height * accepted / judged, x + width / 2
    bar = rectangle(x, top + height - tall, width, tall, 4, {"fill": GREEN, "fill-opacity": 0.8})
    share, size = f"{accepted / judged:.0%}", 12.0
    if width < 34:
        share, size = share[:-1], 9 if width >= 18 else 7.5
    base = top + height - tall + (14 if tall > 18 else -4)
    text = label(middle, base, share, size=size, weight=700, anchor="middle", fill=INK)
    of = f"{position}: {accepted} of {judged}" if width >= 60 else str(position)
    under = label(middle, top + height + 15, of, size=11.5 if width >= 76 else 11, anchor="middle")
    about = {"data-testid": "position", "data-accepted": accepted, "data-judged": judged}
    return element("g", about, track, bar, text, under)


def draw_legend(top: float, right: float) -> str:
    """The signs and their meaning, from the left margin to `right`, in as many lines as needed. `top`: baseline of the
    first."""
    parts, x, y = [], float(MARGIN), top
    for state, text in LEGEND.items():
        width = 18 + len(text) * 6.9
        if x + width > right:
            x, y = float(MARGIN), y + 20
        look = style(state) if state not in THROWN_AWAY else {"fill": MUTED}
        parts.append(label(x, y, SIGNS[state], size=13, weight=700, fill=SIGN_COLOURS[state]))
        parts.append(spans(x + 18, y, (text, look), size=12))
        x += width + 24
    return element("g", {"data-testid": "legend"}, *parts)
