"""A hint, as Markdown in notebooks and as plain text elsewhere.

Authors write prose with `code` in backticks, *emphasis* in stars, and blocks of code between lines of three backticks.
A hint of several lines without such a block is code; if its first line begins with a capital letter and ends with a
colon, that line is prose. Nothing else is markup: the stars of `x**2`, a `<` or a `$` outside of backticks are shown as
they are written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CODE = re.compile(r"(```.*?```|`[^`\n]+`)", re.DOTALL)
EMPHASIS = re.compile(r"(?<![\w*])\*(\w(?:[^*\n]*\w)?)\*(?![\w*])")
LINES = re.compile(r"([A-Z][^\n]*:(?=\n)|)\n*(.*?)\n*", re.DOTALL)
"""The prose of a hint of several lines, which may be empty, and its code."""
SPECIAL = re.compile(r"([\\`*_{}\[\]<>$#|~])")


@dataclass(frozen=True)
class Hint:
    """One hint under its heading; `repr` is the plain text."""

    heading: str
    text: str

    def __repr__(self) -> str:
        parts = [part if i % 2 else EMPHASIS.sub(r"\1", part) for i, part in enumerate(CODE.split(self.text))]
        return f"{self.heading}: {''.join(parts)}"

    def _repr_markdown_(self) -> str:
        prose, code = self.text, ""
        if "\n" in self.text and "```" not in self.text:  # Markdown would join the lines and drop their indentation
            prose, code = LINES.fullmatch(self.text).groups()
        parts = [part if i % 2 else _escaped(part) for i, part in enumerate(CODE.split(prose))]
        shown = f"**{_escaped(self.heading)}**: {''.join(parts)}".rstrip()
        return f"{shown}\n\n```python\n{code}\n```" if code else shown


def _escaped(prose: str) -> str:
    pieces = EMPHASIS.split(prose)  # every second piece was between stars
    marked = [SPECIAL.sub(r"\\\1", piece) for piece in pieces]
    return "".join(f"*{piece}*" if i % 2 else piece for i, piece in enumerate(marked))
