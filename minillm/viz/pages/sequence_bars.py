"""The places of a cache that stores whole sequences: one bar per place, as long as the context.

1024 single slots would be too small to see. What matters is how much of a place is filled, and how much is reserved for
tokens that may never come.
"""

from __future__ import annotations

from collections.abc import Sequence

from minillm.trace.page import Page, SlotState
from minillm.viz.draw.colours import FAINT, HAIRLINE, INK, MUTED, PAPER, VERMILLION, owner_colour, owner_letter
from minillm.viz.draw.svg import MARGIN, MONO, RIGHT, Attributes, element, hatched, label, rectangle


class SequenceBars:
    """Draws `pages` with their top at `top`; the counterpart of `PageGrid`."""

    def __init__(self, pages: Sequence[Page], block_size: int, indices: dict[str, int], top: float) -> None:
        self.pages, self.block_size, self.indices, self.top = pages, block_size, indices, top
        self.columns = 2 if len(pages) <= 24 else 4 if len(pages) <= 64 else 8
        self.pitch = (RIGHT - MARGIN + 16) / self.columns
        self.line = 24.0 if self.columns <= 4 else 16.0

    @property
    def height(self) -> float:
        """Height of all bars."""
        return -(-len(self.pages) // self.columns) * self.line + 6

    def draw(self) -> str:
        """The SVG of all bars, row by row."""
        return element("g", {"font-size": 11.5}, *(self._place(i, page) for i, page in enumerate(self.pages)))

    def _place(self, position: int, page: Page) -> str:
        row, column = divmod(position, self.columns)
        x, y, high = MARGIN + column * self.pitch, self.top + row * self.line, self.line - 8
        left, width = x + 50, self.pitch - 66
        colour = owner_colour(self.indices[page.owners[0]]) if page.owners else HAIRLINE
        gone = {"stroke-dasharray": "4 3"} if page.state == "freed" else {}
        about = {"data-testid": "page", "data-state": page.state, "data-block": page.block_id}
        box = rectangle(left, y, width, high, 2, {**about, **gone, "fill": FAINT, "stroke": colour})
        name = label(x + 26, y + high - 2, str(page.block_id), size=None, anchor="end", family=MONO)
        letter = owner_letter(self.indices[page.owners[0]]) if page.owners else ""
        fill = MUTED if page.state == "freed" else INK
        owner = label(x + 38, y + high - 2, letter, size=None, weight=700, fill=fill, anchor="middle") if letter else ""
        return box + self._slots(page, left, y, width, high, colour) + name + owner

    def _slots(self, page: Page, left: float, top: float, width: float, high: float, colour: str) -> str:
        parts: dict[bool, list[str]] = {True: [], False: []}
        first = 0
        for state, length in page.slots:
            if state not in ("free", "cached"):
                about = {"data-testid": "slots", "data-state": state, "data-count": length}
                # A single new token in a long context must still be visible.
                wide = max(length * width / self.block_size, 3.0 if state in ("fresh", "rolled_back") else 0.0)
                x = min(left + first * width / self.block_size, left + width - wide)
                parts[state == "empty"].append(rectangle(x, top, wide, high, 0, {**about, **_look(state, colour)}))
            first += length
        # Empty parts come first, because they would cover the widened ones.
        return "".join([*parts[True], *parts[False]])


def _look(state: SlotState, colour: str) -> Attributes:
    if state == "empty":
        return {"fill": PAPER, "stroke": colour, "stroke-opacity": 0.5}
    fills = {"fresh": INK, "rolled_back": hatched("void")}
    return {"fill": fills.get(state, colour), "stroke": VERMILLION if state == "rolled_back" else None}
