"""The text so far, coloured by the origin of each token: lines of monospaced text in SVG."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby, islice

from minillm.trace.acceptance_state import Token
from minillm.viz.draw.colours import TEXT_ON_PAPER
from minillm.viz.draw.glyphs import NEWLINE, cells
from minillm.viz.draw.svg import MONO, MONO_EM, Attributes, characters, element, number

Piece = tuple[str, str]
"""One or more characters, and their origin: a key of `STYLES`."""

FONT_SIZE = 13.5
LINE_HEIGHT = 19
"""Pixels."""
STYLES: dict[str, Attributes] = {
    "prompt": {},
    "sampled": {},
    "accepted": {},
    "recovered": {"font-weight": 700, "text-decoration": "underline"},
    "bonus": {"font-weight": 700, "font-style": "italic"},
}


def style(origin: str) -> Attributes:
    """Colour and second cue (bold, underline, italic) of text of this origin."""
    return {"fill": TEXT_ON_PAPER[origin], **STYLES[origin]}


def draw_text(prompt: str, tokens: Sequence[Token], x: float, y: float, width: float, max_lines: int) -> list[str]:
    """The last `max_lines` lines of prompt and tokens, one `text` element each, the first baseline at `y`."""
    columns = int(width / (FONT_SIZE * MONO_EM)) - 1
    # Only the tail is shown, so it is read from its end; laying out the whole context would be slow.
    of_tokens = ((char, token.origin) for token in reversed(tokens) for char in reversed(token.text))
    backwards = chain(of_tokens, ((char, "prompt") for char in reversed(prompt)))
    lines = _lines(list(islice(backwards, columns * (max_lines + 1)))[::-1], columns)[-max_lines:]
    return [_line(line, x, y + i * LINE_HEIGHT) for i, line in enumerate(lines)]


def _lines(pieces: Sequence[Piece], columns: int) -> list[list[Piece]]:
    lines: list[list[Piece]] = [[]]
    used = 0
    for char, origin in pieces:
        width = cells(char)
        if used + width > columns:
            lines.append([])
            used = 0
        lines[-1].append((NEWLINE if char == "\n" else char, origin))
        used = columns if char == "\n" else used + width
    return lines


def _line(line: Sequence[Piece], x: float, y: float) -> str:
    runs = ((origin, "".join(char for char, _ in run)) for origin, run in groupby(line, key=lambda piece: piece[1]))
    test_id = {"data-testid": "text"}
    spans = [
        element("tspan", {**test_id, "data-state": origin, **style(origin)}, characters(text)) for origin, text in runs
    ]
    return element("text", {"x": number(x), "y": number(y), "font-family": MONO, "font-size": FONT_SIZE}, *spans)
