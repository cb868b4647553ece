"""The style sheet that gives pictures the book's dark theme.

Pictures carry attributes and no style sheet, so the rules select by attribute: ink, paper and greys change, the colours
of requests and verdicts stay.
"""

from __future__ import annotations

from collections.abc import Iterable

from minillm.viz.draw.colours import (
    CACHED,
    DISCARDED,
    FAINT,
    HAIRLINE,
    INK,
    MUTED,
    OWNERS,
    PAPER,
    TEXT_ON_PAPER,
    ink_on,
    tint,
)
from minillm.viz.pages.page_grid import COARSE_TINT, FINE_TINT
from minillm.viz.tensors.error_map import LEVELS

DARK = 'html[data-theme="dark"]'
PICTURE = f"{DARK} svg[data-testid]"
DARK_INK, DARK_MUTED, DARK_LINE, DARK_HAIRLINE = "#e4e7ee", "#a3abb9", "#586172", "#3f4654"
DARK_FAINT, DARK_PAPER = "#2a303b", "#1b2029"
FILLS = {INK: DARK_INK, MUTED: DARK_MUTED, DISCARDED: DARK_MUTED, FAINT: DARK_FAINT, HAIRLINE: DARK_HAIRLINE}
FILLS |= {CACHED: DARK_HAIRLINE}
STROKES = FILLS | {HAIRLINE: DARK_LINE, CACHED: DARK_LINE, PAPER: DARK_PAPER}
WORDS = {"accepted": "#4fd1a5", "recovered": "#f0a04b", "bonus": "#6cc1f5"}
"""Colour by origin of a token, lightened until each has a contrast of at least 4.5 : 1 on dark paper."""


def dark_css() -> str:
    """The rules, one per line."""
    return "\n".join(_rules()) + "\n"


def _rules() -> Iterable[str]:
    yield f"{PICTURE} {{ fill: {DARK_INK}; }}"
    yield from (f"{PICTURE} {_fill(old)} {{ fill: {new}; }}" for old, new in FILLS.items())
    yield from (f'{PICTURE} [stroke="{old}"] {{ stroke: {new}; }}' for old, new in STROKES.items())
    yield from (f"{PICTURE} {_fill(TEXT_ON_PAPER[origin])} {{ fill: {new}; }}" for origin, new in WORDS.items())
    # White letters on a request's colour stay white; white shapes, and white numbers on ink, turn dark.
    yield f"{PICTURE} :not(text, tspan){_fill(PAPER)} {{ fill: {DARK_PAPER}; }}"
    yield f"{PICTURE} {_fill(INK)} + text{_fill(PAPER)} {{ fill: {DARK_PAPER}; }}"
    yield f'{DARK} svg[data-testid="cache-pages"] tspan{_fill(PAPER)} {{ fill: {DARK_PAPER}; }}'
    for colour in OWNERS:
        for strength in (FINE_TINT, COARSE_TINT):
            dark = f"color-mix(in srgb, {colour} {round(100 * strength) + 10}%, {DARK_PAPER})"
            yield f"{PICTURE} {_fill(tint(colour, strength))} {{ fill: {dark}; }}"
    # Dark letters on a bright colour stay dark.
    bright = ", ".join(_fill(colour) for colour in (*OWNERS, *LEVELS) if ink_on(colour) == INK)
    centred = f'text{_fill(INK)}[text-anchor="middle"]'
    yield f"{PICTURE} :is({bright}):not([fill-opacity]) + {centred} {{ fill: {INK}; }}"
    # Numbers on the lanes of the timeline, and letters on the stripes of the waterfall, get a dark edge.
    lanes = f'{DARK} svg[data-testid="timeline"] tspan{_fill(INK)}'
    stripes = f'{DARK} svg[data-testid="waterfall"] [fill^="url("] + {centred}'
    yield f"{lanes}, {stripes} {{ stroke: {DARK_PAPER}; stroke-width: 3px; paint-order: stroke; }}"


def _fill(colour: str) -> str:
    return f'[fill="{colour}"]'
