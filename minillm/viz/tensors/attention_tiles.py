"""Which program of a paged attention kernel loads which block of which request, and in which turn of its loop.

A turn is one iteration of the loop over blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minillm.errors import ConfigError
from minillm.viz.draw.colours import CACHED, HAIRLINE, INK, MUTED, PAPER, ink_on, owner_colour, owner_letter
from minillm.viz.draw.output import Picture
from minillm.viz.draw.plural import plural
from minillm.viz.draw.svg import (
    MARGIN,
    MONO,
    RIGHT,
    card,
    element,
    hatch,
    hatched,
    label,
    mono_width,
    number,
    rectangle,
)

NAMES_WIDTH, TURNS_WIDTH = 150, 92
TOP, ROW, CELL, GAP = 118, 34, 28, 12
WIDEST = 76.0


@dataclass(frozen=True)
class Program:
    """One program of the kernel: it handles one KV head of a request and a part of the request's blocks."""

    request: int
    kv_head: int
    part: int
    blocks: range
    """Logical blocks that it loads, in order: one per turn of its loop. Empty if its part has none."""


@dataclass(frozen=True)
class AttentionTiles(Picture):
    """The tiles of one decode step: requests of `seq_lens` tokens, located through `block_tables`.

    The blocks of a request are split into `parts`: each has ⌈blocks / parts⌉ of them until none is left. Raises
    `ConfigError` for a block table that is missing or too short for its request, and for counts below 1.
    """

    seq_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    block_size: int
    num_kv_heads: int = 1
    parts: int = 1

    def __post_init__(self) -> None:
        if min(self.block_size, self.num_kv_heads, self.parts, len(self.seq_lens), *self.seq_lens) < 1:
            raise ConfigError("lengths, block size, KV heads, parts and requests must all be at least 1")
        if len(self.block_tables) != len(self.seq_lens):
            raise ConfigError(
                f"{len(self.block_tables)} block tables for {len(self.seq_lens)} requests; give each request one"
            )
        for request, table in enumerate(self.block_tables):
            if len(table) < self.num_blocks(request):
                raise ConfigError(
                    f"request {owner_letter(request)} has {self.seq_lens[request]} tokens, which need "
                    f"{self.num_blocks(request)} blocks of {self.block_size}; its table has {len(table)}"
                )

    def num_blocks(self, request: int) -> int:
        """Blocks that hold the request's tokens."""
        return -(-self.seq_lens[request] // self.block_size)

    def programs(self) -> list[Program]:
        """All programs of the grid, by request, KV head and part."""
        found = []
        for request in range(len(self.seq_lens)):
            blocks = self.num_blocks(request)
            size = -(-blocks // self.parts)
            for kv_head in range(self.num_kv_heads):
                for part in range(self.parts):
                    walked = range(min(part * size, blocks), min((part + 1) * size, blocks))
                    found.append(Program(request, kv_head, part, walked))
        return found

    @property
    def num_tiles(self) -> int:
        """Blocks loaded by all programs together."""
        return sum(len(program.blocks) for program in self.programs())

    @property
    def longest(self) -> int:
        """Turns of the longest program: the length of the step if every program has a processor of its own."""
        return max(len(program.blocks) for program in self.programs())

    @property
    def masked(self) -> int:
        """Rows of loaded blocks that hold no token, summed over all tiles."""
        lanes = sum(self.num_blocks(r) * self.block_size - length for r, length in enumerate(self.seq_lens))
        return lanes * self.num_kv_heads

    def to_svg(self) -> str:
        """The picture: a row per program, a column per logical block; a tile shows the physical block and the turn."""
        programs = self.programs()
        left = MARGIN + NAMES_WIDTH
        columns = max(self.num_blocks(r) for r in range(len(self.seq_lens)))
        pitch = min(WIDEST, (RIGHT - left - TURNS_WIDTH) / columns)
        rows, y = [], float(TOP)
        for i, program in enumerate(programs):
            y += GAP if i and program.request != programs[i - 1].request else 0
            rows.append(self._row(program, left, y, pitch, columns))
            y += ROW
        longest = plural(self.longest, "turn")
        facts = f"{len(programs)} programs · {self.num_tiles} tiles · the longest program takes {longest}"
        return card(
            "attention-tiles",
            y + 16,
            "Tiles of a paged attention kernel",
            self.describe(),
            element("defs", {}, hatch("masked", CACHED, spacing=4)),
            label(MARGIN, 36, "Tiles per program", size=17, weight=650, fill=INK),
            label(224, 36, facts, size=13),
            *self._legend(),
            *(self._key(j, left, pitch) for j in range(0, columns, self._every(pitch, columns))),
            label(left + columns * pitch + 8, 108, "turns", size=11.5),
            *rows,
        )

    def describe(self) -> str:
        """The picture in words."""
        lines = [
            f"{len(self.programs())} programs load {self.num_tiles} tiles of {self.block_size} keys; "
            f"{self.masked} of the rows are masked. The longest program takes {plural(self.longest, 'turn')}."
        ]
        for request, length in enumerate(self.seq_lens):
            blocks = ", ".join(map(str, self.block_tables[request][: self.num_blocks(request)]))
            lines.append(f"Request {owner_letter(request)}: {length} tokens in blocks {blocks}.")
        return " ".join(lines)

    def __repr__(self) -> str:
        return "<AttentionTiles>"

    def _legend(self) -> list[str]:
        colour = owner_colour(0)
        shown = [
            ({"fill": colour}, "loaded: the physical block, and in which turn"),
            ({"fill": hatched("masked"), "stroke": HAIRLINE}, "masked: no token there"),
        ]
        if self.parts > 1:
            shown.append(({"fill": PAPER, "stroke": MUTED, "stroke-dasharray": "3 2"}, "read by another program"))
        parts, x = [], float(MARGIN)
        for look, text in shown:
            parts += [rectangle(x, 56, 16, 12, 2, look), label(x + 24, 66, text, size=12, fill=INK)]
            x += 54 + 6.4 * len(text)
        return parts

    def _every(self, pitch: float, columns: int) -> int:
        """Every so many columns there is room for the first key of the column."""
        return math.ceil((mono_width(str((columns - 1) * self.block_size), 10.5) + 2) / pitch)

    def _key(self, j: int, left: float, pitch: float) -> str:
        first = j * self.block_size
        text = f"{first}–{first + self.block_size - 1}" if pitch > 44 else f"{first}"
        return label(left + (j + 0.5) * pitch - 2, 108, text, size=10.5, anchor="middle", family=MONO)

    def _row(self, program: Program, left: float, y: float, pitch: float, columns: int) -> str:
        name = f"{owner_letter(program.request)} · KV head {program.kv_head}"
        name += f" · part {program.part}" if self.parts > 1 else ""
        tiles = [
            self._tile(program, j, left + j * pitch, y, pitch - min(4, pitch / 4))
            for j in range(self.num_blocks(program.request))
        ]
        turns = label(left + columns * pitch + 8, y + 19, str(len(program.blocks)), size=12.5, fill=INK, weight=600)
        beside = 30 + 8 * max(0, len(str(self.longest)) - 2)
        bar = rectangle(
            left + columns * pitch + beside, y + 9, 50 * len(program.blocks) / self.longest, 10, 2, {"fill": INK}
        )
        look = {"data-testid": "program", "data-turns": str(len(program.blocks))}
        return element(
            "g",
            look,
            label(left - 12, y + 19, name, size=12, fill=INK, anchor="end"),
            *tiles,
            turns,
            bar if program.blocks else "",
        )

    def _tile(self, program: Program, j: int, x: float, y: float, width: float) -> str:
        """A block of the request: filled as far as it holds tokens if this program loads it, else hollow."""
        marks = {"data-testid": "tile", "data-block": str(self.block_tables[program.request][j])}
        if j not in program.blocks:
            look = {"fill": PAPER, "stroke": MUTED, "stroke-opacity": ".5", "stroke-dasharray": "3 2"}
            return element("g", {**marks, "data-state": "other"}, rectangle(x, y, width, CELL, 3, look))
        colour = owner_colour(program.request)
        filled = min(self.block_size, self.seq_lens[program.request] - j * self.block_size) / self.block_size
        back = rectangle(x, y, width, CELL, 3, {"fill": hatched("masked"), "stroke": HAIRLINE}) if filled < 1 else ""
        front = rectangle(x, y, width * filled, CELL, 3, {"fill": colour})
        wide = width * filled > 40
        ink = ink_on(colour) if wide else INK
        turn, block = program.blocks.index(j) + 1, self.block_tables[program.request][j]
        text = f"{block} · t{turn}" if width > 44 else f"{block}"
        plate = 0.62 * 11 * len(text)
        fits = width > 44 or plate <= width
        centre = x + (width * filled if wide else width) / 2
        paper = rectangle(centre - plate / 2 - 2, y + 6, plate + 4, 16, 3, {"fill": PAPER}) if not wide else ""
        words = label(centre, y + 18, text, size=11, fill=ink, anchor="middle", family=MONO, weight=600)
        state = {
            "data-state": "walked" if filled == 1 else "last",
            "data-turn": str(turn),
            "data-filled": number(filled),
        }
        return element("g", {**marks, **state}, back, front, *((paper, words) if fits else ()))
