"""When copying and computing ran: a row per way to get a cache, with a lane for the link and one for the processor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minillm.errors import ConfigError
from minillm.viz.draw.colours import BLUE, GREEN, HAIRLINE, INK, ORANGE, PURPLE, YELLOW, ink_on
from minillm.viz.draw.output import Picture
from minillm.viz.draw.svg import MARGIN, RIGHT, card, element, fit_words, label, number, rectangle
from minillm.viz.timeline.axis import milliseconds_axis, ms_text

PARTS = {
    "activations": (ORANGE, "A"),
    "keys and values": (BLUE, "KV"),
    "recompute": (GREEN, "R"),
    "rotate": (PURPLE, "θ"),
    "prefill": (YELLOW, "P"),
}
"""What a bar may show: its colour, and the letters inside it."""
LANES = ("link", "compute")
TOP, ROW, LANE, BAR = 110, 84, 27, 21
LEFT, END = 270, RIGHT - 100


@dataclass(frozen=True)
class TimedPart:
    """`name` (of `PARTS`) ran on `lane` (of `LANES`) from `start` to `end` seconds."""

    lane: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class TransferRow:
    """One way to get keys and values of a text; it ends when its last part ends."""

    name: str
    parts: Sequence[TimedPart]
    note: str = ""
    """A few words below the name."""

    @property
    def seconds(self) -> float:
        """Until everything is there."""
        return max((part.end for part in self.parts), default=0.0)


@dataclass(frozen=True)
class TransferTimeline(Picture):
    """Rows over one axis of time.

    Raises `ConfigError` for no rows or an empty one, an unknown part or lane, or a part that ends before it starts.
    """

    title: str
    rows: Sequence[TransferRow]
    subtitle: str = ""

    def __post_init__(self) -> None:
        if not self.rows or not all(row.seconds > 0 for row in self.rows):
            raise ConfigError("a timeline needs at least one row, and each row a part that takes time")
        for row in self.rows:
            for part in row.parts:
                if part.name not in PARTS or part.lane not in LANES:
                    raise ConfigError(
                        f"{row.name!r} has {part.name!r} on {part.lane!r}; the parts are {', '.join(PARTS)}, the lanes "
                        f"{' and '.join(LANES)}"
                    )
                if not 0 <= part.start <= part.end:
                    raise ConfigError(
                        f"{row.name!r}: {part.name} runs from {part.start} to {part.end} s; give 0 ≤ start ≤ end"
                    )

    def describe(self) -> str:
        """The picture in words."""
        words = [f"{self.title}."]
        for row in self.rows:
            parts = ", ".join(
                f"{part.name} on the {part.lane} lane from {ms_text(part.start)} to {ms_text(part.end)}"
                for part in row.parts
            )
            words.append(f"{row.name}: {ms_text(row.seconds)} ({parts}).")
        return " ".join(words)

    def to_svg(self) -> str:
        """The picture."""
        longest = max(row.seconds for row in self.rows)
        scale = (END - LEFT) / longest
        bottom = TOP + ROW * len(self.rows) - 14
        return card(
            "transfer-timeline",
            bottom + 52,
            self.title,
            self.describe(),
            label(MARGIN, 34, fit_words(self.title, RIGHT - MARGIN, 17), size=17, weight=650, fill=INK),
            label(MARGIN, 56, fit_words(self.subtitle, RIGHT - MARGIN, 12.5), size=12.5),
            *self._legend(),
            *(self._row(row, TOP + i * ROW, scale) for i, row in enumerate(self.rows)),
            *milliseconds_axis(LEFT, END, scale, bottom, max_ticks=9, smallest_step=0.001),
        )

    def __repr__(self) -> str:
        return "<TransferTimeline>"

    def _legend(self) -> list[str]:
        used, parts, x = {part.name for row in self.rows for part in row.parts}, [], float(LEFT)
        for name, (colour, letters) in PARTS.items():
            if name in used:
                parts += _box(x, 70, 26, 16, colour, letters)
                parts.append(label(x + 33, 82.5, name, size=12.5, fill=INK))
                x += 33 + 7.4 * len(name) + 24
        return parts

    def _row(self, row: TransferRow, top: float, scale: float) -> str:
        parts = [
            label(MARGIN, top + 15, fit_words(row.name, LEFT - 80 - MARGIN, 13), size=13, weight=600, fill=INK),
            label(MARGIN, top + 34, fit_words(row.note, LEFT - 80 - MARGIN, 11.5), size=11.5) if row.note else "",
            label(END + 12, top + LANE + 4, ms_text(row.seconds), size=14, weight=650, fill=INK),
        ]
        for i, lane in enumerate(LANES):
            y = top + i * LANE
            parts.append(label(LEFT - 12, y + 15, lane, size=11.5, anchor="end"))
            parts.append(element("path", {"d": f"M{LEFT} {number(y + BAR)}H{END}", "stroke": HAIRLINE}))
            parts += [self._bar(part, y, scale) for part in row.parts if part.lane == lane]
        return element("g", {"data-testid": "transfer", "data-row": row.name}, *parts)

    def _bar(self, part: TimedPart, y: float, scale: float) -> str:
        colour, letters = PARTS[part.name]
        about = {"data-testid": "part", "data-part": part.name, "data-lane": part.lane}
        width = (part.end - part.start) * scale
        return element("g", about, *_box(LEFT + part.start * scale, y, width, BAR, colour, letters))


def _box(x: float, y: float, width: float, height: float, colour: str, letters: str) -> list[str]:
    """A bar with its letters, where they fit."""
    drawn = [rectangle(x, y, width, height, min(2.0, width / 2), {"fill": colour})]
    if width >= 9 * len(letters) + 4:
        ink = ink_on(colour)
        drawn.append(label(x + width / 2, y + height / 2 + 4, letters, size=11, weight=650, fill=ink, anchor="middle"))
    return drawn
