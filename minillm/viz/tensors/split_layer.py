"""One decoder layer split over ranks: which strip of each matrix a rank holds, and where all ranks add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minillm.errors import ConfigError
from minillm.viz.draw.colours import HAIRLINE, INK, MUTED, PAPER, VERMILLION, owner_colour, owner_letter
from minillm.viz.draw.output import Picture
from minillm.viz.draw.svg import MARGIN, MONO, card, element, label, number, rectangle

MOST_RANKS = 8
TOP, LANE, SIDE = 132, 92, 60
INPUT, QKV, HEADS, OUT, FIRST, GATE, UP, SILU, DOWN, SECOND, OUTPUT = (
    (96, 150, 226, 366, 450, 522, 596, 664, 722, 806, 882)
)  # fmt: skip
"""Left edge of each column."""
BAR = 40
TITLE = "One layer on several ranks: who holds what, and what is exchanged"


@dataclass(frozen=True)
class SplitLayer(Picture):
    """A lane per rank. A matrix is drawn as in y = x W, inputs from top to bottom and outputs from left to right, and
    the strip that the rank holds is filled.

    `heads`: for each rank its query heads and its KV heads. `num_heads`, `inner`: of the whole layer; `hidden`: how
    many numbers of each token an all-reduce sums. Raises `ConfigError` for no ranks, more than `MOST_RANKS`, or a rank
    without heads.
    """

    heads: Sequence[tuple[range, range]]
    num_heads: int
    inner: int
    hidden: int

    def __post_init__(self) -> None:
        if not 1 <= len(self.heads) <= MOST_RANKS:
            raise ConfigError(f"{len(self.heads)} ranks; the picture has room for 1 to {MOST_RANKS}")
        for rank, (heads, kv_heads) in enumerate(self.heads):
            if not heads or not kv_heads:
                raise ConfigError(f"rank {rank} has query heads {heads} and KV heads {kv_heads}; give it one of each")

    def describe(self) -> str:
        """The picture in words."""
        size = len(self.heads)
        words = [f"{TITLE}."]
        for rank, (heads, kv_heads) in enumerate(self.heads):
            words.append(
                f"Rank {rank} holds query heads {_span(heads)} and KV heads {_span(kv_heads)}: these columns of q, k "
                f"and v and these rows of o; and inner channels {_span(self._channels(rank))}: these columns of gate "
                "and up and these rows of down."
            )
        words.append(
            f"After o and after down, {size} partial results of {self.hidden} numbers per token are summed by an "
            "all-reduce. Nothing else is exchanged."
        )
        return " ".join(words)

    def to_svg(self) -> str:
        """The picture."""
        bottom = TOP + LANE * len(self.heads)
        return card(
            "split-layer",
            bottom + 56,
            TITLE,
            self.describe(),
            label(MARGIN, 34, TITLE, size=17, weight=650, fill=INK),
            label(MARGIN, 56, "filled: what the rank holds. Columns are outputs, rows are inputs.", size=12.5),
            *self._headings(),
            *(part for rank in range(len(self.heads)) for part in self._lane(rank)),
            *self._sum(FIRST, bottom),
            *self._sum(SECOND, bottom),
            label(
                MARGIN,
                bottom + 34,
                f"An all-reduce replaces {len(self.heads)} partial results by their sum, on every rank: {self.hidden} "
                "numbers for each token. Norms and additions run on every rank.",
                size=12.5,
            ),
        )

    def __repr__(self) -> str:
        return "<SplitLayer>"

    def _channels(self, rank: int) -> range:
        size = len(self.heads)
        return range(rank * self.inner // size, (rank + 1) * self.inner // size)

    def _headings(self) -> list[str]:
        named = {INPUT: ("x", 40), QKV: ("q, k, v", SIDE), HEADS: ("attention", 120), OUT: ("o", SIDE)}
        named |= {GATE: ("gate", SIDE), UP: ("up", SIDE), SILU: ("SiLU ·", 44), DOWN: ("down", SIDE), OUTPUT: ("x", 40)}
        drawn = [
            label(x + width / 2, TOP - 26, name, size=13, weight=600, fill=INK, anchor="middle")
            for x, (name, width) in named.items()
        ]
        kinds = {QKV + SIDE / 2: "by columns", OUT + SIDE / 2: "by rows", DOWN + SIDE / 2: "by rows"}
        kinds[(GATE + UP + SIDE) / 2] = "by columns"
        return [*drawn, *(label(x, TOP - 10, name, size=11, anchor="middle") for x, name in kinds.items())]

    def _lane(self, rank: int) -> list[str]:
        y, (heads, kv_heads) = TOP + rank * LANE, self.heads[rank]
        middle = y + SIDE / 2
        in_heads = heads.start / self.num_heads, heads.stop / self.num_heads
        channels = self._channels(rank)
        in_inner = channels.start / self.inner, channels.stop / self.inner
        drawn = [
            label(MARGIN, middle + 4, f"rank {rank}", size=13, weight=600, fill=INK),
            *self._whole(INPUT, y, "whole"),
            *self._matrix(QKV, y, rank, in_heads, by_columns=True),
            *self._heads(HEADS, y, rank, heads, kv_heads),
            *self._matrix(OUT, y, rank, in_heads, by_columns=False),
            *self._matrix(GATE, y, rank, in_inner, by_columns=True),
            *self._matrix(UP, y, rank, in_inner, by_columns=True),
            label(SILU + 22, middle - 2, f"{len(channels)}", size=12, anchor="middle", fill=INK),
            label(SILU + 22, middle + 13, "channels", size=10.5, anchor="middle"),
            *self._matrix(DOWN, y, rank, in_inner, by_columns=False),
            *self._whole(OUTPUT, y, "whole"),
        ]
        arrows = ((INPUT + 40, QKV), (QKV + SIDE, HEADS), (HEADS + 120, OUT), (OUT + SIDE, FIRST), (FIRST + BAR, GATE))
        arrows += ((DOWN + SIDE, SECOND), (SECOND + BAR, OUTPUT))
        return [*drawn, *(_arrow(start + 4, end - 4, middle) for start, end in arrows)]

    def _whole(self, x: float, y: float, text: str) -> list[str]:
        return [
            rectangle(x, y + 10, 40, SIDE - 20, 3, {"fill": PAPER, "stroke": MUTED}),
            label(x + 20, y + SIDE / 2 + 4, text, size=10.5, anchor="middle", fill=INK),
        ]

    def _matrix(self, x: float, y: float, rank: int, share: tuple[float, float], by_columns: bool) -> list[str]:
        """A matrix, and the strip of it between the two shares."""
        colour, (first, last) = owner_colour(rank), share
        size = max((last - first) * SIDE, 3.0)
        at = first * SIDE
        box = (x + at, y, size, SIDE) if by_columns else (x, y + at, SIDE, size)
        about = {
            "fill": colour,
            "fill-opacity": "0.55",
            "stroke": colour,
            "data-testid": "slice",
            "data-rank": str(rank),
        }
        about["data-split"] = "columns" if by_columns else "rows"
        drawn = [
            rectangle(x, y, SIDE, SIDE, 1, {"fill": PAPER, "stroke": HAIRLINE}),
            rectangle(*box, 1, about),
        ]
        if size >= 14:
            centre = (box[0] + box[2] / 2, box[1] + box[3] / 2 + 4)
            drawn.append(label(*centre, owner_letter(rank), size=12, weight=650, fill=INK, anchor="middle"))
        return drawn

    def _heads(self, x: float, y: float, rank: int, heads: range, kv_heads: range) -> list[str]:
        colour = owner_colour(rank)
        look = {"fill": colour, "fill-opacity": "0.2", "stroke": colour, "data-testid": "heads"}
        return [
            rectangle(x, y + 6, 120, SIDE - 12, 3, look),
            label(x + 60, y + 26, f"query {_span(heads)}", size=12, family=MONO, fill=INK, anchor="middle"),
            label(x + 60, y + 44, f"KV {_span(kv_heads)}", size=12, family=MONO, fill=INK, anchor="middle"),
        ]

    def _sum(self, x: float, bottom: float) -> list[str]:
        """The bar through all lanes at which ranks wait for each other."""
        height = bottom - TOP - (LANE - SIDE) + 12
        look = {"fill": VERMILLION, "fill-opacity": "0.15", "stroke": VERMILLION, "data-testid": "all-reduce"}
        middle = (x + BAR / 2, TOP - 6 + height / 2)
        turned = {"transform": f"rotate(-90 {number(middle[0])} {number(middle[1])})"}
        text = "all-reduce" if height >= 90 else "Σ"
        return [
            rectangle(x, TOP - 6, BAR, height, 4, look),
            element("g", turned, label(middle[0], middle[1] + 5, text, size=13, weight=650, fill=INK, anchor="middle")),
        ]


def _span(numbers: range) -> str:
    return f"{numbers.start}" if len(numbers) == 1 else f"{numbers.start}-{numbers.stop - 1}"


def _arrow(start: float, end: float, y: float) -> str:
    head = f"M{number(end - 5)} {number(y - 3.5)}L{number(end)} {number(y)}L{number(end - 5)} {number(y + 3.5)}"
    way = f"M{number(start)} {number(y)}H{number(end)}{head}"
    return element("path", {"d": way, "stroke": MUTED, "fill": "none"})
