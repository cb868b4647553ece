"""The positions and sizes of pages and slots: the more blocks, the smaller they are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, sqrt

from minillm.viz.draw.svg import MARGIN, number

LARGE = 70.0
"""Width of the largest pages."""
FINE_SLOTS, SMALLEST_SLOT = 1000, 2.5
"""Up to so many slots, of this side and larger, are drawn as squares with round corners, others as dashes of thick
lines."""


@dataclass(frozen=True)
class Geometry:
    """Sizes in pixels."""

    per_row: int
    page_width: float
    pitch: float
    head: float
    """Height of the line with block id and owner's letter."""
    pad: float
    gap: float
    columns: int
    rows: int
    slot: float
    left: float
    dense: bool = False
    """Whether the pages are so small that block ids are shown per row, not per page."""

    @property
    def page_height(self) -> float:
        """Height of one page."""
        return self.head + self.rows * self.slot + (self.rows - 1) * self.gap + self.pad

    @property
    def row_pitch(self) -> float:
        """Distance between the tops of two rows."""
        return self.page_height + (14 if self.page_width == LARGE else 6)

    @property
    def row_width(self) -> float:
        """Width of a row of slots."""
        return self.columns * self.slot + (self.columns - 1) * self.gap

    def height(self, num_pages: int) -> float:
        """Height of `num_pages` pages."""
        return ceil(num_pages / self.per_row) * self.row_pitch

    def corner(self, place: int) -> tuple[float, float]:
        """Left and top of the page at `place` in the grid, relative to the top of the grid."""
        row, column = divmod(place, self.per_row)
        return self.left + column * self.pitch, row * self.row_pitch

    def outline(self, place: int, outset: float = 0.0) -> str:
        """Path around the page at `place`, `outset` pixels away from it."""
        x, y = self.corner(place)
        width, height = number(self.page_width + 2 * outset), number(self.page_height + 2 * outset)
        return f"M{number(x - outset)} {number(y - outset)}h{width}v{height}h-{width}z"

    def slot_corner(self, place: int, row: int, column: int) -> tuple[float, float]:
        """Left and top of a slot of the page at `place`."""
        left, top = self.corner(place)
        return left + self.pad + column * (self.slot + self.gap), top + self.head + row * (self.slot + self.gap)


Sizes = tuple[int, float, float, float, float, float, float]
"""Pages per row, page width, pitch, head, pad, gap, left edge of the first page."""
WIDE: tuple[Sizes, Sizes, Sizes] = (
    (12, LARGE, 78.0, 26.0, 9.0, 2.4, float(MARGIN)),
    (20, 41.0, 46.8, 17.0, 5.0, 1.5, float(MARGIN)),
    # Whole numbers, which have the fewest characters.
    (32, 25.0, 28.0, 11.0, 3.0, 1.0, 52.0),
)
NARROW: tuple[Sizes, Sizes, Sizes] = (
    (8, 50.0, 55.4, 19.0, 6.5, 1.8, float(MARGIN)),
    (12, 33.0, 36.6, 16.0, 4.0, 1.2, float(MARGIN)),
    (32, 11.0, 12.7, 11.0, 1.0, 0.6, 52.0),
)


def geometry(num_pages: int, block_size: int, *, narrow: bool = False) -> Geometry:
    """The sizes for `num_pages` pages: large pages if they fit into two or three rows, else smaller ones."""
    columns = _slot_columns(block_size)
    rows = ceil(block_size / columns)
    detail = 0 if num_pages <= 24 else 1 if num_pages <= 60 else 2
    per_row, width, pitch, head, pad, gap, left = (NARROW if narrow else WIDE)[detail]
    slot = (width - 2 * pad - (columns - 1) * gap) / columns
    if slot < SMALLEST_SLOT:
        gap, slot = 0.0, (width - 2 * pad) / columns
    # Rounded down to tenths, the precision of the SVG: else the dashes of a long row would drift away from its slots.
    return Geometry(per_row, width, pitch, head, pad, gap, columns, rows, floor(slot * 10) / 10, left, detail == 2)


def _slot_columns(block_size: int) -> int:
    """The number of slot columns: the divisor of the block size that makes a page most nearly square, or else wider
    than high."""
    return next(c for c in range(ceil(sqrt(block_size)), block_size + 1) if block_size % c == 0)
