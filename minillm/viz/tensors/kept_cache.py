"""What a query may read of one head's cache under several techniques: which rows, of which tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minillm.errors import ConfigError
from minillm.viz.draw.colours import BLUE, FAINT, GREEN, INK, MUTED
from minillm.viz.draw.output import Picture
from minillm.viz.draw.svg import (
    BOLD,
    MARGIN,
    RIGHT,
    TITLE,
    card,
    element,
    fit_words,
    hatch,
    hatched,
    label,
    number,
    rectangle,
    spans,
)

COLUMNS, GAP = 2, 48
BOX_HEIGHT = 96
PANEL = BOX_HEIGHT + 82
TOP = 96
AXIS = 26
"""Width of the name of the rows, left of each panel's box."""
BOX_WIDTH = (RIGHT - MARGIN - GAP * (COLUMNS - 1)) / COLUMNS - AXIS
MAX_PARTS = 8


@dataclass(frozen=True)
class KeptPart:
    """What one technique keeps: of the tokens before `whole_from` the `rows` that are kept, of the `tokens` that are
    kept; of all later tokens everything."""

    name: str
    row_name: str
    """What a row is: `channels`, `ranks`."""
    rows: Sequence[bool]
    tokens: Sequence[bool]
    whole_from: int
    note: str = ""

    @property
    def share(self) -> float:
        """Kept cells / all cells."""
        row_share = sum(map(bool, self.rows)) / len(self.rows)
        old = sum(map(bool, self.tokens[: self.whole_from]))
        return (row_share * old + len(self.tokens) - self.whole_from) / len(self.tokens)


@dataclass(frozen=True)
class KeptCache(Picture):
    """A panel for each technique: the cache of one head, a token per column, a channel or rank per row.

    Raises `ConfigError` if there is nothing to draw, or a window begins outside of the tokens.
    """

    parts: Sequence[KeptPart]

    def __post_init__(self) -> None:
        if not 1 <= len(self.parts) <= MAX_PARTS:
            raise ConfigError(f"{len(self.parts)} techniques; this picture shows 1 to {MAX_PARTS}")
        for part in self.parts:
            if not part.rows or not part.tokens:
                raise ConfigError(
                    f"{part.name!r} has {len(part.rows)} rows and {len(part.tokens)} tokens; it needs both"
                )
            if not 0 <= part.whole_from <= len(part.tokens):
                raise ConfigError(f"{part.name!r}: whole_from={part.whole_from} must be from 0 to {len(part.tokens)}")

    def to_svg(self) -> str:
        """The picture: filled cells are read, the hatched end is whole with every technique."""
        lines = -(-len(self.parts) // COLUMNS)
        height = TOP + PANEL * lines + 34
        return card(
            "kept-cache",
            height,
            "What may a query read?",
            self.describe(),
            element("defs", {}, hatch("whole", GREEN)),
            spans(MARGIN, 38, ("What may a query read?", TITLE)),
            spans(MARGIN, 64, ("the cache of one head · a column is a token, from the first to the newest", {})),
            *(
                text
                for i, part in enumerate(self.parts)
                for text in _panel(
                    part, MARGIN + (i % COLUMNS) * (BOX_WIDTH + AXIS + GAP), TOP + PANEL * (i // COLUMNS)
                )
            ),
            _legend(height - 24),
        )

    def describe(self) -> str:
        """The picture in words."""
        words = []
        for part in self.parts:
            rows, tokens = sum(map(bool, part.rows)), sum(map(bool, part.tokens[: part.whole_from]))
            end = f" {part.note}." if part.note else ""
            words.append(
                f"{part.name}: {rows} of {len(part.rows)} {part.row_name} of {tokens} of {part.whole_from} old tokens, "
                f"and {len(part.tokens) - part.whole_from} whole tokens: {part.share:.0%} of the cells.{end}"
            )
        return " ".join(words)

    def __repr__(self) -> str:
        return "<KeptCache>"


def _panel(part: KeptPart, left: float, top: float) -> list[str]:
    """The name, the box with the kept cells, and below it how much is kept."""
    x, y = left + AXIS, top + 12
    across, down = BOX_WIDTH / len(part.tokens), BOX_HEIGHT / len(part.rows)
    about = {"data-testid": "panel", "data-name": part.name, "data-share": f"{part.share:.3f}"}
    border = x + part.whole_from * across
    cells = [
        rectangle(
            x + first * across,
            y + row * down,
            (last - first) * across,
            (end - row) * down,
            0,
            {"fill": BLUE, "data-testid": "kept"},
        )
        for row, end in _runs(part.rows)
        for first, last in _runs(part.tokens[: part.whole_from])
    ]
    middle = y + BOX_HEIGHT / 2
    turned = {"transform": f"rotate(-90 {number(x - 9)} {number(middle)})"}
    axis = element("g", turned, label(x - 9, middle, part.row_name, size=11.5, anchor="middle"))
    named = label(x, top, fit_words(part.name, BOX_WIDTH, 13), size=13, weight=600, fill=INK)
    share = spans(x, y + BOX_HEIGHT + 20, (f"{part.share:.0%}", BOLD), (" of the cells", {}), size=12)
    note = label(x, y + BOX_HEIGHT + 37, fit_words(part.note, BOX_WIDTH, 11.5), size=11.5) if part.note else ""
    whole = {"fill": hatched("whole"), "data-testid": "whole"}
    return [
        named,
        axis,
        element(
            "g",
            about,
            rectangle(x, y, BOX_WIDTH, BOX_HEIGHT, 0, {"fill": FAINT}),
            *cells,
            rectangle(border, y, x + BOX_WIDTH - border, BOX_HEIGHT, 0, whole),
            rectangle(x, y, BOX_WIDTH, BOX_HEIGHT, 0, {"fill": "none", "stroke": MUTED}),
        ),
        share,
        note,
    ]


def _runs(kept: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """The stretches of neighbours that are kept: first and last + 1."""
    first = None
    for i, value in enumerate([*kept, False]):
        if value and first is None:
            first = i
        elif not value and first is not None:
            yield first, i
            first = None


def _legend(y: float) -> str:
    left = MARGIN + AXIS
    return element(
        "g",
        {"data-testid": "legend"},
        rectangle(left, y - 11, 14, 14, 0, {"fill": BLUE}),
        label(left + 22, y + 1, "read", size=12, fill=INK),
        rectangle(left + 90, y - 11, 14, 14, 0, {"fill": FAINT, "stroke": MUTED}),
        label(left + 112, y + 1, "not read", size=12, fill=INK),
        rectangle(left + 206, y - 11, 14, 14, 0, {"fill": hatched("whole"), "stroke": MUTED}),
        label(left + 228, y + 1, "the newest tokens, read whole", size=12, fill=INK),
    )
