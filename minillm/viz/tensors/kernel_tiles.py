"""Which program writes which element: a tensor, coloured by the programs of a kernel, with the masked lanes.

`find_writers` finds the writer of each element by experiment: it launches the kernel with a grid of one program, then
of two, and so on. The elements that are new after a launch were written by the added program. This needs only public
features of Triton, and works for any kernel whose programs write different elements, whether right or wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.viz.draw.colours import DISCARDED, INK, MUTED, PAPER, VERMILLION, ink_on, owner_colour
from minillm.viz.draw.output import Picture
from minillm.viz.draw.svg import (
    MARGIN,
    MONO,
    RIGHT,
    SANS_EM,
    Attributes,
    card,
    element,
    hatch,
    hatched,
    label,
    number,
    rectangle,
)

NAMES_WIDTH = 64
TOP = 108
ROW = 30
NO_PROGRAM = -1
MAX_LANES = 64
"""The most columns of lanes that fit side by side."""


@dataclass(frozen=True)
class KernelTiles(Picture):
    """A tensor of `shape`, and the lanes of the programs that cover it. Displays itself.

    Raises `ConfigError` if there are more than 64 columns of lanes, if `owners` is smaller than `shape` or has rows of
    different lengths, or if a size is below 1.
    """

    owners: Sequence[Sequence[int]]
    """For each row and column of lanes, the number of the program that wrote there, or -1. Larger than `shape` where
    the last tiles extend beyond the tensor."""
    shape: tuple[int, int]
    """Rows and columns of the tensor."""
    tile: tuple[int, int]
    """Rows and columns of one program's lanes."""
    title: str = "Which program touches which element"

    def __post_init__(self) -> None:
        rows, columns = len(self.owners), len(self.owners[0]) if self.owners else 0
        if min(*self.shape, *self.tile) < 1 or any(len(row) != columns for row in self.owners):
            raise ConfigError(
                f"a tensor of {self.shape} in tiles of {self.tile}, rows of {sorted(set(map(len, self.owners)))} "
                "lanes: sizes must be at least 1, and rows equally long"
            )
        if columns > MAX_LANES:
            raise ConfigError(f"{columns} columns of lanes are too many to see; draw at most {MAX_LANES}")
        if rows < self.shape[0] or columns < self.shape[1]:
            raise ConfigError(f"owners for {rows} × {columns} numbers do not cover a tensor of {self.shape}")

    def state(self, row: int, column: int) -> str:
        """`written`, `missed` (not written), or, beyond the tensor, `masked` (not written) or `outside` (written)."""
        inside = row < self.shape[0] and column < self.shape[1]
        if self.owners[row][column] == NO_PROGRAM:
            return "missed" if inside else "masked"
        return "written" if inside else "outside"

    @property
    def counts(self) -> dict[str, int]:
        """How many lanes are in each state."""
        found = dict.fromkeys(("written", "masked", "missed", "outside"), 0)
        for row in range(len(self.owners)):
            for column in range(len(self.owners[0])):
                found[self.state(row, column)] += 1
        return found

    @property
    def num_programs(self) -> int:
        """The tiles that cover the tensor, which is the number of programs launched."""
        (rows, columns), (high, wide) = self.shape, self.tile
        return -(-rows // high) * -(-columns // wide)

    def describe(self) -> str:
        """The picture in words."""
        (rows, columns), (high, wide) = self.shape, self.tile
        lanes = f"{high} × {wide} lanes" if high > 1 else f"{wide} lanes"
        facts = [f"{rows} × {columns} numbers", f"{self.num_programs} programs of {lanes}"]
        words = {"written": "written", "masked": "masked", "missed": "never written", "outside": "beyond the tensor"}
        facts += [f"{n} {words[state]}" for state, n in self.counts.items() if n or state in ("written", "masked")]
        return ", ".join(facts) + "."

    def to_svg(self) -> str:
        """The picture: a cell per lane with its program's number, masked lanes hatched, the tensor framed."""
        left = MARGIN + NAMES_WIDTH
        pitch = min(40.0, (RIGHT - left) / len(self.owners[0]))
        rows, columns = range(len(self.owners)), range(len(self.owners[0]))
        bottom = TOP + ROW * len(self.owners)
        marks = [i for i in columns if i % self.tile[1] == 0 or i == self.shape[1] - 1]
        return card(
            "kernel-tiles",
            bottom + 58,
            self.title,
            self.describe(),
            element("defs", {}, hatch("idle", DISCARDED)),
            label(MARGIN, 36, self.title, size=17, weight=650, fill=INK),
            label(MARGIN, 60, self.describe().rstrip("."), size=13),
            *(label(left + (i + 0.5) * pitch, TOP - 10, str(i), size=11, anchor="middle", family=MONO) for i in marks),
            *(self._row(row, left, pitch) for row in rows),
            *self._frame(left, pitch),
            self._legend(bottom + 34),
        )

    def __repr__(self) -> str:
        return "<KernelTiles>"

    def _row(self, row: int, left: float, pitch: float) -> str:
        y = TOP + row * ROW
        name = f"row {row}" if row < self.shape[0] else "no row"
        cells = [self._cell(row, column, left + column * pitch, y, pitch) for column in range(len(self.owners[0]))]
        return element("g", {}, label(left - 10, y + 19, name, size=12, anchor="end", family=MONO), *cells)

    def _cell(self, row: int, column: int, x: float, y: float, pitch: float) -> str:
        """A lane: coloured, hatched, hollow, or crossed out."""
        program, state = self.owners[row][column], self.state(row, column)
        look: dict[str, str | float | None] = {"data-testid": "lane", "data-state": state}
        if state == "written":
            look |= {"fill": owner_colour(program), "data-program": str(program)}
        elif state == "outside":
            look |= {"fill": PAPER, "stroke": VERMILLION, "stroke-width": 2, "data-program": str(program)}
        elif state == "masked":
            look |= {"fill": hatched("idle")}
        else:
            look |= {"fill": PAPER, "stroke": VERMILLION, "stroke-dasharray": "3 3"}
        box = rectangle(x + 1, y + 2, pitch - 3, ROW - 5, 3, look)
        if program == NO_PROGRAM:
            return box
        text, ink = (f"✗{program}", VERMILLION) if state == "outside" else (str(program), ink_on(owner_colour(program)))
        size = 12 if pitch > 24 else 9
        return box + label(x + pitch / 2 - 0.5, y + 19, text, size=size, fill=ink, anchor="middle", family=MONO)

    def _frame(self, left: float, pitch: float) -> list[str]:
        """The border of the tensor, and dashed lines between tiles."""
        (rows, columns), (high, wide) = self.shape, self.tile
        look = {"fill": "none", "stroke": INK, "stroke-width": 1.5, "data-testid": "tensor"}
        frame = rectangle(left - 2, TOP - 1, columns * pitch + 3, rows * ROW + 1, 4, look)
        across, down = len(self.owners[0]), len(self.owners)
        cuts = [
            f"M{number(left + i * pitch - 0.5)} {TOP - 4}V{TOP + down * ROW + 4}" for i in range(wide, across, wide)
        ]
        if high > 1:
            right = number(left + across * pitch + 4)
            cuts += [f"M{number(left - 4)} {TOP + i * ROW - 0.5}H{right}" for i in range(high, down, high)]
        if not cuts:
            return [frame]
        return [
            frame,
            element("path", {"d": "".join(cuts), "stroke": MUTED, "stroke-dasharray": "4 3", "fill": "none"}),
        ]

    def _legend(self, y: float) -> str:
        """The meaning of the cells; missing and forbidden writes only if there are any."""
        counts, x = self.counts, float(MARGIN)
        entries: list[tuple[str, Attributes]] = [
            ("number and colour: the program that wrote here", {"fill": owner_colour(0)})
        ]
        if counts["masked"]:
            entries.append(("masked lane: stores nothing", {"fill": hatched("idle")}))
        if counts["missed"]:
            entries.append(("never written", {"fill": PAPER, "stroke": VERMILLION, "stroke-dasharray": "3 3"}))
        if counts["outside"]:
            entries.append(("✗ written beyond the tensor", {"fill": PAPER, "stroke": VERMILLION, "stroke-width": 2}))
        parts = []
        for text, look in entries:
            parts.append(rectangle(x, y - 11, 18, 14, 3, look) + label(x + 26, y, text, size=12.5))
            x += 26 + SANS_EM * 12.5 * len(text) + 28
        return element("g", {"data-testid": "legend"}, *parts)


Launch = Callable[[tuple[int, int], Tensor], object]


def find_writers(
    launch: Launch,
    shape: tuple[int, int],
    tile: tuple[int, int],
    title: str = KernelTiles.title,
    dtype: torch.dtype = torch.float32,
    gaps: bool = True,
) -> KernelTiles:
    """Find out which program of a kernel writes where, by launching it with grids that grow by one program.

    `launch(grid, out)` launches the kernel with that grid (tiles down, tiles across) and writes into `out`, a tensor of
    `shape` full of NaN. The kernel must not write NaN. With `gaps`, the row stride of `out` is padded to whole tiles:
    the kernel must use `out.stride(0)`, and a write beyond the end of a row is visible. Without gaps (for kernels that
    expect contiguous rows) such a write lands in the next row.
    """
    (rows, columns), (high, wide) = shape, tile
    grid = -(-rows // high), -(-columns // wide)
    down, across = grid[0] * high, grid[1] * wide
    stride = across if gaps else columns
    device = "cuda" if torch.cuda.is_available() else "cpu"
    buffer = torch.full((down * stride + across,), float("nan"), dtype=dtype, device=device)
    owners = torch.full((down, across), NO_PROGRAM)
    for program in range(grid[0] * grid[1]):
        i, j = divmod(program, grid[1])
        launch((i + 1, j + 1), buffer.as_strided(shape, (stride, 1)))
        written = ~buffer.isnan().cpu()
        seen = torch.zeros(down, across, dtype=torch.bool)
        whole = columns if not gaps else across
        seen[:, :whole] = written[: down * stride].view(down, stride)[:, :whole]
        owners[seen & (owners == NO_PROGRAM)] = program
    return KernelTiles(owners.tolist(), shape, tile, title)
