"""The similarities of a contrastive loss in tiles: which tile exists, which are merged already, and what each holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minillm.errors import ConfigError
from minillm.viz.draw.colours import GREEN, HAIRLINE, INK, MUTED, ORANGE, PAPER
from minillm.viz.draw.output import Picture
from minillm.viz.draw.svg import MARGIN, MONO, Attributes, card, element, label, number, rectangle

MOST_TILES = 10
LEFT, TOP, SIDE, GAP = 132, 128, 46, 4
BAR_GAP, BAR_WIDTH = 44, 250
TITLE = "A contrastive loss, one tile at a time"
LOOKS: dict[str, Attributes] = {
    "now": {"fill": ORANGE, "stroke": INK, "stroke-width": 2.5},
    "merged": {"fill": GREEN, "stroke": GREEN},
    "later": {"fill": PAPER, "stroke": MUTED, "stroke-dasharray": "3 2"},
}
"""By state of a tile; a merged one is the stronger, the larger its share."""


@dataclass(frozen=True)
class LossTiles(Picture):
    """Tiles of the n × n similarities, row by row.

    `mass[i][j]`: the share of the softmax of row tile i that lies in tile (i, j), mean of its rows. `tile`: rows of a
    tile; `at`: the tile that exists now. Raises `ConfigError` for a grid that is empty, not square or larger than
    `MOST_TILES`, or a tile that is not in it.
    """

    mass: Sequence[Sequence[float]]
    tile: int
    at: tuple[int, int]

    def __post_init__(self) -> None:
        count = len(self.mass)
        if not 1 <= count <= MOST_TILES or any(len(row) != count for row in self.mass):
            raise ConfigError(f"{count} rows of tiles; room for 1 to {MOST_TILES}, and as many columns")
        if not all(0 <= index < count for index in self.at):
            raise ConfigError(f"tile {self.at} does not exist; there are {count} × {count}")

    def state(self, i: int, j: int) -> str:
        """Of tile (i, j): `now`, `merged` (its sum is in the row's log-sum-exp) or `later`."""
        return "now" if (i, j) == self.at else "merged" if (i, j) < self.at else "later"

    def merged(self, i: int) -> float:
        """The share of row tile i that its log-sum-exp holds, with the tile that exists now."""
        return sum(share for j, share in enumerate(self.mass[i]) if self.state(i, j) != "later")

    def describe(self) -> str:
        """The picture in words."""
        count, (row, column) = len(self.mass), self.at
        shares = "; ".join(f"rows of tile {i}: {self.merged(i):.0%}" for i in range(count))
        return (
            f"{TITLE}: {count} × {count} tiles of {self.tile} × {self.tile} similarities. Now there is tile ({row}, "
            f"{column}); those before it are merged and gone. Share of each softmax that is in its log-sum-exp so far: "
            f"{shares}."
        )

    def to_svg(self) -> str:
        """The picture."""
        count = len(self.mass)
        size = count * (SIDE + GAP)
        numbers = f"{self.tile**2:,} of {(count * self.tile) ** 2:,} similarities exist at a time"
        return card(
            "loss-tiles",
            TOP + size + 62,
            TITLE,
            self.describe(),
            label(MARGIN, 36, TITLE, size=17, weight=650, fill=INK),
            label(MARGIN, 60, f"{numbers}, and one log-sum-exp for each row", size=13),
            label(LEFT, TOP - 32, f"y, {self.tile} rows for each tile →", size=12),
            label(LEFT + size + BAR_GAP, TOP - 32, "log-sum-exp so far: its share of the softmax", size=12),
            *(label(LEFT + (j + 0.5) * (SIDE + GAP), TOP - 10, str(j), size=12, anchor="middle") for j in range(count)),
            *(part for i in range(count) for part in self._row(i, LEFT + size + BAR_GAP)),
            *self._legend(TOP + size + 34),
        )

    def __repr__(self) -> str:
        return "<LossTiles>"

    def _row(self, i: int, bar: float) -> list[str]:
        y = TOP + i * (SIDE + GAP)
        held = self.merged(i)
        middle = y + SIDE / 2
        return [
            label(LEFT - 12, middle + 4, f"x, tile {i}", size=12, anchor="end"),
            *(self._tile(i, j, LEFT + j * (SIDE + GAP), y) for j in range(len(self.mass))),
            rectangle(bar, middle - 7, BAR_WIDTH, 14, 2, {"fill": PAPER, "stroke": HAIRLINE}),
            rectangle(
                bar, middle - 7, BAR_WIDTH * held, 14, 2, {"fill": GREEN, "data-testid": "sum", "data-row": str(i)}
            )
            if held
            else "",
            label(bar + BAR_WIDTH + 10, middle + 4, f"{held:.0%}", size=12, fill=INK),
        ]

    def _tile(self, i: int, j: int, x: float, y: float) -> str:
        state, share = self.state(i, j), self.mass[i][j]
        look = dict(LOOKS[state])
        if state == "merged":
            look["fill-opacity"] = f"{0.15 + 0.6 * min(share, 1.0):.2f}"
        text = f"{share:.0%}" if state != "later" else ""
        drawn = [
            rectangle(x, y, SIDE, SIDE, 3, look),
            label(x + SIDE / 2, y + SIDE / 2 + 4, text, size=12, family=MONO, anchor="middle", fill=INK),
        ]
        if i == j:  # here are the pairs that belong together
            way = f"M{number(x + 3)} {number(y + 3)}l10 10M{number(x + SIDE - 13)} {number(y + SIDE - 13)}l10 10"
            drawn.append(element("path", {"d": way, "stroke": INK, "stroke-width": 1.6}))
        return element("g", {"data-testid": "tile", "data-state": state}, *drawn)

    def _legend(self, y: float) -> list[str]:
        shown: list[tuple[Attributes, str]] = [
            (LOOKS["now"], "exists now"),
            ({**LOOKS["merged"], "fill-opacity": "0.3"}, "merged and gone; its share of the row"),
            (LOOKS["later"], "later"),
        ]
        parts, x = [], float(MARGIN)
        for look, text in shown:
            parts += [rectangle(x, y - 11, 16, 14, 2, look), label(x + 24, y, text, size=12, fill=INK)]
            x += 60 + 6.4 * len(text)
        way = f"M{number(x + 2)} {number(y - 9)}l10 10"
        parts.append(element("path", {"d": way, "stroke": INK, "stroke-width": 1.6}))
        parts.append(label(x + 24, y, "pairs that belong together", size=12, fill=INK))
        return parts
