"""Which blocks of one request's cache a draft reads under each view, below the attention that every block got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minillm.errors import ConfigError
from minillm.viz.draw.colours import BLUE, FAINT, GREEN, HAIRLINE, INK, MUTED, ORANGE, VERMILLION
from minillm.viz.draw.output import Picture
from minillm.viz.draw.svg import (
    BOLD,
    MARGIN,
    RIGHT,
    TITLE,
    card,
    element,
    fit_words,
    heading,
    label,
    number,
    rectangle,
    spans,
)

LEFT = 190
WIDTH = RIGHT - LEFT
BARS_TOP, BARS_HEIGHT = 116, 84
ROWS_TOP, ROW = BARS_TOP + BARS_HEIGHT + 40, 76
CELL_HEIGHT = 26
MAX_VIEWS = 4


@dataclass(frozen=True)
class BlockView:
    """One view: the indices of the `blocks` that a draft reads, and what came of it in words (`outcome`)."""

    name: str
    blocks: Sequence[int]
    outcome: str = ""
    good: bool = True
    """Whether `outcome` is shown as a success."""


@dataclass(frozen=True)
class ViewedBlocks(Picture):
    """Views of a request of `len(attention)` blocks. `attention`: what each block got from the prompt's last queries.

    `marked`: blocks with something to point at, and what it is. Raises `ConfigError` if there is nothing to draw, or
    for a block that does not exist.
    """

    attention: Sequence[float]
    views: Sequence[BlockView]
    marked: Mapping[int, str]

    def __post_init__(self) -> None:
        if not self.attention or not 1 <= len(self.views) <= MAX_VIEWS:
            raise ConfigError(
                f"{len(self.attention)} blocks and {len(self.views)} views; the picture needs blocks, and 1 to "
                f"{MAX_VIEWS} views"
            )
        for block in [*self.marked, *(block for view in self.views for block in view.blocks)]:
            if not 0 <= block < len(self.attention):
                raise ConfigError(f"there is no block {block}; the request has blocks 0 to {len(self.attention) - 1}")

    def to_svg(self) -> str:
        """The picture: a column is a block, from the beginning of the text to its end."""
        height = ROWS_TOP + ROW * len(self.views) + 48
        return card(
            "viewed-blocks",
            height,
            "Which blocks does a draft read?",
            self.describe(),
            spans(MARGIN, 38, ("Which blocks does a draft read?", TITLE)),
            spans(
                MARGIN,
                64,
                ("a column is a block of the cache, from the first token to the newest · ", {}),
                (f"{len(self.attention)} blocks", BOLD),
            ),
            *self._pointers(),
            *self._bars(),
            *(part for i, view in enumerate(self.views) for part in self._view(i, view)),
            self._legend(height - 22),
        )

    def describe(self) -> str:
        """The picture in words."""
        most = sorted(range(len(self.attention)), key=lambda i: -self.attention[i])[:3]
        words = [f"{len(self.attention)} blocks. Most attention: blocks {', '.join(map(str, sorted(most)))}."]
        words += [f"{what}: block {block}." for block, what in self.marked.items()]
        for view in self.views:
            end = f": {view.outcome}" if view.outcome else ""
            words.append(f"{view.name} reads blocks {', '.join(map(str, view.blocks))}{end}.")
        return " ".join(words)

    def __repr__(self) -> str:
        return "<ViewedBlocks>"

    @property
    def _pitch(self) -> float:
        return WIDTH / len(self.attention)

    def _x(self, block: int) -> float:
        return LEFT + block * self._pitch

    def _pointers(self) -> list[str]:
        """For each marked block its text above, and a dashed line through its bar and its cells."""
        spans_of_y = [(BARS_TOP - 8, BARS_TOP + BARS_HEIGHT)]
        spans_of_y += [(ROWS_TOP + ROW * i - 8, ROWS_TOP + ROW * i + CELL_HEIGHT) for i in range(len(self.views))]
        parts = []
        for block, what in self.marked.items():
            x = self._x(block) + self._pitch / 2
            way = "".join(f"M{number(x)} {top}V{bottom}" for top, bottom in spans_of_y)
            look = {"stroke": VERMILLION, "stroke-width": 1.5, "stroke-dasharray": "4 4", "data-testid": "marked"}
            parts.append(element("path", {"d": way, **look}))
            anchor = "start" if block < len(self.attention) / 2 else "end"
            parts.append(label(x, BARS_TOP - 14, f"▾ {what}", size=12, fill=INK, weight=600, anchor=anchor))
        return parts

    def _bars(self) -> list[str]:
        most, base = max(self.attention) or 1.0, BARS_TOP + BARS_HEIGHT
        parts = [
            label(MARGIN, BARS_TOP + 34, "attention of the", size=12, fill=INK),
            label(MARGIN, BARS_TOP + 50, "prompt's last queries", size=12, fill=INK),
            label(MARGIN, BARS_TOP + 66, "(square-root scale)", size=11.5),
            element("path", {"d": f"M{LEFT} {base}H{RIGHT}", "stroke": MUTED}),
        ]
        for block, mass in enumerate(self.attention):
            high = BARS_HEIGHT * (mass / most) ** 0.5  # else the newest blocks would dwarf all others
            about = {"fill": ORANGE, "data-testid": "attention", "data-mass": f"{mass / most:.3f}"}
            parts.append(rectangle(self._x(block), base - high, max(1.0, self._pitch - 1), high, 0, about))
        return parts

    def _view(self, index: int, view: BlockView) -> list[str]:
        y = ROWS_TOP + ROW * index
        parts = [
            label(MARGIN, y + 12, fit_words(view.name, LEFT - MARGIN - 8, 13), size=13, weight=600, fill=INK),
            label(MARGIN, y + 29, f"{len(view.blocks)} of {len(self.attention)} blocks", size=11.5),
        ]
        parts += [self._cell(block, y, block in view.blocks) for block in range(len(self.attention))]
        if view.outcome:
            sign, colour = ("✓", GREEN) if view.good else ("✗", VERMILLION)
            about = {"data-testid": "outcome", "data-state": "good" if view.good else "bad"}
            line = spans(
                LEFT,
                y + CELL_HEIGHT + 18,
                (f"{sign} ", {"fill": colour, "font-weight": 700}),
                (view.outcome, {"fill": INK}),
            )
            parts.append(element("g", about, line))
        return parts

    def _cell(self, block: int, y: float, is_read: bool) -> str:
        """A tall filled bar for a block that is read, a low outline for one that is not."""
        width = max(1.0, self._pitch - 1.5)
        about = {"data-testid": "block", "data-state": "read" if is_read else "skipped"}
        if is_read:
            return rectangle(self._x(block), y, width, CELL_HEIGHT, 2, {**about, "fill": BLUE})
        low = {**about, "fill": FAINT, "stroke": HAIRLINE if width > 4 else None}
        return rectangle(self._x(block), y + CELL_HEIGHT - 8, width, 8, 1, low)

    def _legend(self, y: float) -> str:
        return element(
            "g",
            {"data-testid": "legend"},
            heading(MARGIN, y + 4, "blocks"),
            rectangle(LEFT, y - 12, 14, 18, 2, {"fill": BLUE}),
            label(LEFT + 22, y + 3, "read by the draft", size=12, fill=INK),
            rectangle(LEFT + 170, y - 2, 14, 8, 1, {"fill": FAINT, "stroke": HAIRLINE}),
            label(LEFT + 192, y + 3, "left out; the target still reads it when it verifies", size=12, fill=INK),
        )
