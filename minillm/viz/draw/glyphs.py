"""Make token text visible and measure its width: whitespace, control characters and wide characters.

Widths are in cells: one cell is one column of a monospaced font or of a terminal.
"""

from __future__ import annotations

import re
import unicodedata

SPACE, NEWLINE, TAB, ELLIPSIS, UNPRINTABLE = "·", "⏎", "⇥", "…", "\ufffd"
PLACEHOLDER = "\ue000"
"""A private-use character that pictures use internally; `printable` removes it from shown text."""
LONG_RUN = 4
"""More spaces than this in a row are counted instead of drawn: `·×8`."""

_INVISIBLE = frozenset("\u00ad\u061c\u180e\u200b\u200e\u200f\ufeff") | {
    chr(code) for code in (*range(0x2028, 0x202F), *range(0x2060, 0x2070))
}
"""Characters without a width, separators of lines and paragraphs, controls of direction; but not the joiners U+200C and
U+200D, which emoji and some scripts need."""


def visible(text: str) -> str:
    """`text` with every space as ·, newline as ⏎ and unprintable character as a sign; long runs of spaces as `·×8`."""
    return re.sub(" +", _spaces, "".join(map(printable, text)))


def _spaces(run: re.Match[str]) -> str:
    length = len(run[0])
    return SPACE * length if length <= LONG_RUN else f"{SPACE}×{length}"


def one_line(text: str) -> str:
    """`text` on one line: line ends and controls as signs, runs of spaces as one."""
    return " ".join("".join(map(printable, text.replace("\t", " "))).split())


def beginning(text: str, max_cells: int) -> str:
    """The beginning of `visible(text)`, at most `max_cells` columns. A long text is not read to its end."""
    head = text[: 20 * max_cells]
    return shorten(visible(head) + (ELLIPSIS if len(head) < len(text) else ""), max_cells)


def printable(char: str) -> str:
    """`char`, or a replacement that XML and terminals can show: control characters become their symbol (U+2400 block),
    other forbidden or invisible characters U+FFFD."""
    if char == "\n":
        return NEWLINE
    if char == "\t":
        return TAB
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    forbidden = 0x80 <= code < 0xA0 or 0xD800 <= code < 0xE000 or code & 0xFFFE == 0xFFFE
    return UNPRINTABLE if forbidden or char == PLACEHOLDER or char in _INVISIBLE else char


def cells(text: str) -> int:
    """Columns that `text` takes in a monospaced font."""
    return sum(_char_cells(char) for char in text)


def shorten(text: str, max_cells: int) -> str:
    """`text` cut to at most `max_cells` columns, ending in … if something was cut."""
    if cells(text) <= max_cells:
        return text
    kept, width = [], cells(ELLIPSIS)
    for char in text:
        width += _char_cells(char)
        if width > max_cells:
            break
        kept.append(char)
    return "".join(kept) + ELLIPSIS


def _char_cells(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return int(char in _INVISIBLE)  # `printable` makes it a sign
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
