"""The legend of a picture of pages: the meaning of the signs that are in the picture."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from minillm.trace.page import Page
from minillm.viz.draw.colours import BLUE, CACHED, DISCARDED, FAINT, HAIRLINE, INK, ORANGE, PAPER, VERMILLION
from minillm.viz.draw.svg import MARGIN, RIGHT, Attributes, element, hatch, hatched, label, rectangle

LINE = 24
HATCHES = element(
    "defs", {}, hatch("void", VERMILLION), hatch("tight", VERMILLION, 2, 1.2), hatch("cached", CACHED, 6, 2)
)
"""Patterns for the fills of pages and of the legend."""
WHOLE = {"fill": BLUE}
SWATCHES: dict[str, tuple[str, Attributes]] = {
    "written": ("written slot", WHOLE),
    "fresh": ("written this step", {"fill": INK}),
    "rolled_back": ("rolled back", {"fill": hatched("void"), "stroke": VERMILLION}),
    "empty": ("empty slot", {"fill": PAPER, "stroke": BLUE}),
    "free": ("free", {"fill": FAINT, "stroke": HAIRLINE}),
    "freed": ("freed this step", {"fill": FAINT, "stroke": BLUE, "stroke-width": 1.4, "stroke-dasharray": "4 3"}),
    "cached": ("cached: free, contents kept", {"fill": hatched("cached"), "stroke": DISCARDED}),
    "findable": ("full, in the prefix cache", {"fill": hatched("cached")}),
    "evicted": ("evicted this step", {"fill": hatched("void")}),
    "reused": ("reused, not computed", {"fill": "none", "stroke": INK, "stroke-width": 1.8}),
    "shared": ("shared", {"fill": PAPER, "stroke": BLUE, "stroke-width": 3}),
    "copied": ("copied before writing", {}),
}


def kinds_in(pages: Sequence[Page]) -> set[str]:
    """The keys of `SWATCHES` that `pages` need."""
    present = {slot for page in pages for slot, _ in page.slots} | {page.state for page in pages}
    present |= {"findable" for page in pages if page.in_prefix_cache and page.state != "cached"}
    present |= {name for page in pages for name in ("evicted", "reused") if getattr(page, name)}
    present |= {"freed" for page in pages if page.state == "cached" and page.owners}
    present |= {"copied" for page in pages if page.copied_from is not None}
    if all(page.state != "free" for page in pages):
        present.discard("free")
    return present


def draw_legend(
    kinds: Collection[str], top: float, wasted: bool, right: float = RIGHT, two_owners: str = "×2"
) -> tuple[str, float]:
    """The legend from `top` down and to the left of `right`, and its height. `kinds`: keys of `SWATCHES`; `wasted`:
    empty slots are waste; `two_owners`: the sign of a page with two owners."""
    parts, x, y = [], float(MARGIN), top
    for kind in (kind for kind in SWATCHES if kind in kinds):
        text, look = SWATCHES[kind]
        if kind == "empty" and wasted:
            text += " (waste)"
        if kind == "shared":
            text += f", {two_owners}: two owners"
        width = 20 + len(text) * 6.3
        if x + width > right:
            x, y = float(MARGIN), y + LINE
        parts.append(_swatch(kind, look, x, y) + label(x + 20, y + 11.5, text, size=11.5, fill=INK))
        x += width + 18
    return element("g", {"data-testid": "legend"}, *parts), y - top + 14


def _swatch(kind: str, look: Attributes, x: float, y: float) -> str:
    if kind in ("findable", "evicted"):
        return rectangle(x, y + 5, 14, 5, 0, look)
    if kind == "copied":
        return label(x - 1, y + 12, "←", size=15, weight=700, fill=INK)
    if kind == "shared":
        second = {"fill": "none", "stroke": ORANGE, "stroke-width": 3, "stroke-dasharray": "5 5"}
        return rectangle(x, y, 14, 14, 3, look) + rectangle(x, y, 14, 14, 3, second)
    return rectangle(x, y, 14, 14, 3, look)
