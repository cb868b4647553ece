"""The signs of the terminal pictures: one for every state, so that colour is never the only cue."""

from __future__ import annotations

from dataclasses import dataclass

from minillm.trace.page import SlotState
from minillm.viz.draw.glyphs import cells


@dataclass(frozen=True)
class Glyphs:
    """One set of signs."""

    slots: dict[SlotState, str]
    signs: dict[str, str]
    """By verdict or origin of a token."""
    bar: str
    dot: str


UNICODE = Glyphs(
    slots={"written": "█", "fresh": "▓", "rolled_back": "╳", "empty": "·", "cached": "░", "free": "─"},
    signs={"accepted": "✓", "rejected": "✗", "discarded": "·", "recovered": "↻", "bonus": "★", "sampled": "●"},
    bar="│",
    dot=" · ",
)
ASCII = Glyphs(
    slots={"written": "#", "fresh": "+", "rolled_back": "x", "empty": ".", "cached": "%", "free": "-"},
    signs={"accepted": "=", "rejected": "x", "discarded": ".", "recovered": ">", "bonus": "*", "sampled": "o"},
    bar="|",
    dot=", ",
)


def glyphs(*, ascii_only: bool) -> Glyphs:
    """The signs that the terminal's encoding can show."""
    return ASCII if ascii_only else UNICODE


_ASCII_REPLACEMENTS = str.maketrans({"·": ".", "…": "~", "⏎": "$", "⇥": ">", "×": "x", "–": "-", "“": '"', "”": '"'})


def plain(text: str, *, ascii_only: bool) -> str:
    """`text` with ASCII replacements of the same width if the terminal shows only ASCII."""
    if not ascii_only:
        return text
    return "".join(char if char.isascii() else "?" * cells(char) for char in text.translate(_ASCII_REPLACEMENTS))
