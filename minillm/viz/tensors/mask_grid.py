"""An attention mask as a grid: one row per new token, one column per key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minillm.errors import ConfigError
from minillm.viz.draw.colours import BLUE, FAINT, HAIRLINE, INK, MUTED, PAPER
from minillm.viz.draw.glyphs import visible
from minillm.viz.draw.output import Picture
from minillm.viz.draw.svg import MARGIN, MONO, RIGHT, card, element, fit_mono, label, mono_width, number, rectangle

NAMES_WIDTH = 190
GRID_TOP = 112
ROW = 26


@dataclass(frozen=True)
class MaskGrid(Picture):
    """A mask over named tokens. `mask[i][j]`: new token i attends to key j. The first `past` keys are cached ones.

    Raises `ConfigError` without new tokens, or unless there is a key for each of them and for `past` cached ones.
    """

    mask: Sequence[Sequence[bool]]
    keys: Sequence[str]
    """Text of the token behind each column; the last `len(mask)` are the new tokens themselves."""
    past: int

    def __post_init__(self) -> None:
        num_new, num_keys = len(self.mask), len(self.keys)
        if not num_new or self.past < 0 or {num_keys, *map(len, self.mask)} != {self.past + num_new}:
            raise ConfigError(
                f"{num_new} new tokens after {self.past} cached ones, {num_keys} keys, rows of "
                f"{sorted(set(map(len, self.mask)))}: give one key per token, and a row over all keys per new token"
            )

    def to_svg(self) -> str:
        """The picture: a filled cell with a dot is a key that the token attends to; an empty cell is masked."""
        left = MARGIN + NAMES_WIDTH
        pitch = min(56.0, (RIGHT - left) / len(self.keys))
        rows = [self._row(i, left, pitch) for i in range(len(self.mask))]
        bottom = GRID_TOP + ROW * len(self.mask)
        edge = left + self.past * pitch - 1.5
        new, anchor = left + self.past * pitch + 6, None
        if new > RIGHT - 50:
            new, anchor = new - 12, "end"
        line = element("path", {"d": f"M{number(edge)} 60V{bottom + 4}", "stroke": INK, "stroke-dasharray": "4 3"})
        return card(
            "mask",
            bottom + 24,
            "Attention mask",
            self.describe(),
            label(MARGIN, 36, "Attention mask", size=17, weight=650, fill=INK),
            label(206, 36, "a filled cell: the new token on the left attends to this key", size=13),
            label(left, 72, f"{self.past} keys from the cache", size=12) if self.past else "",
            label(new, 72, f"{len(self.mask)} new", size=12, fill=INK, weight=600, anchor=anchor),
            *(self._key(j, left, pitch) for j in range(len(self.keys))),
            *rows,
            line if self.past else "",
        )

    def describe(self) -> str:
        """The picture in words."""
        counts = ", ".join(str(sum(bool(seen) for seen in row)) for row in self.mask)
        return f"{len(self.mask)} new tokens after {self.past} cached ones may see {counts} of {len(self.keys)} keys."

    def __repr__(self) -> str:
        return "<MaskGrid>"

    def _key(self, j: int, left: float, pitch: float) -> str:
        if pitch - 3 < mono_width("x", 11):
            return ""
        name = fit_mono(visible(self.keys[j]), pitch - 3, 11)
        return label(left + (j + 0.5) * pitch, 100, name, size=11, anchor="middle", family=MONO)

    def _row(self, i: int, left: float, pitch: float) -> str:
        y = GRID_TOP + i * ROW
        name = fit_mono(visible(self.keys[len(self.keys) - len(self.mask) + i]), NAMES_WIDTH - 70, 12)
        parts = [label(left - 10, y + 16, f"new {i}  {name}", size=12, fill=INK, anchor="end", family=MONO)]
        width = pitch - min(3, pitch / 4)
        for j, seen in enumerate(self.mask[i]):
            x = left + j * pitch
            fill, edge, state = (BLUE, BLUE, "seen") if seen else (FAINT, HAIRLINE, "hidden")
            look = {"fill": fill, "stroke": edge, "data-state": state}
            parts.append(rectangle(x, y, width, ROW - 4, min(4, width / 3), look))
            if seen:
                dot = {"cx": x + width / 2, "cy": y + ROW / 2 - 2, "r": min(2.5, width / 3), "fill": PAPER}
                parts.append(element("circle", dot))
        return element("g", {"data-testid": "query", "fill": MUTED}, *parts)
