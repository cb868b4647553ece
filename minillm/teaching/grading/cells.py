"""The code cells of a submitted notebook, read with little trust: only `cell_type` and `source` count."""

from __future__ import annotations

import ast
import json
import re
import tokenize
from contextlib import suppress
from typing import Any, NamedTuple

MAX_FILE = 50 << 20
"""Bytes of a submission."""
_RUN_IN_PLACE = ("%%time", "%%timeit", "%%capture", "%%prun")
"""Cell magics whose cell is Python."""
_OF_IPYTHON = re.compile(r"([ \t]*)(%{1,2}[A-Za-z]|!|\?|[\w.*]+\?{1,2}[ \t]*$|[\w., ]+=[ \t]*(?:!|%[A-Za-z]))")
"""A magic, a shell line, what one of them returns (`files = !ls`), or a question (`name?`). A line of Python may also
end in `?`, in a comment."""
_TIMED = re.compile(r"[ \t]*%time[ \t]+")
"""The magic whose line is a statement of the notebook: `%time table = build()`."""
_PERCENT = re.compile(r"^#[ \t]?%%.*$", re.MULTILINE)


class UnreadableError(ValueError):
    """A file is no notebook; the message says why."""


class Cell(NamedTuple):
    """A code cell. `number` counts the cells of all kinds from 1, as a reader does."""

    number: int
    source: str


def read(data: bytes, name: str) -> list[Cell]:
    """The code cells of the file `name` (`.ipynb`, or a Python file with or without `# %%` marks).

    Raises:
        UnreadableError: the file is too large, no UTF-8, no JSON, or no notebook.
    """
    if len(data) > MAX_FILE:
        raise UnreadableError(f"{len(data):,} bytes; the limit is {MAX_FILE:,}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise UnreadableError(f"not UTF-8: {problem.reason} at byte {problem.start}") from None
    if name.lower().endswith(".py"):
        text = _unix(text)
        return [Cell(number, part) for number, part in enumerate(_PERCENT.split(text), 1)]
    try:
        notebook = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise UnreadableError(f"not JSON: {problem}") from None
    return _cells(notebook)


def lesson_in_metadata(data: bytes) -> str:
    """The lesson that the notebook's own metadata names (`02_kv_cache`), or ""."""
    try:
        found = json.loads(data)["metadata"]["minillm"]["lesson"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""


def python_of(source: str) -> str:
    """The source without IPython's magics and shell lines; line numbers stay the same."""
    first = source.lstrip().partition("\n")[0].strip()
    if first.startswith("%%") and first.split()[0] not in _RUN_IN_PLACE:
        return ""
    lines, at = source.split("\n"), 0
    while at < len(lines):
        magic, end = _OF_IPYTHON.match(lines[at]), at + 1
        if magic is None:
            at = _end_of_statement(lines, at)
            continue
        while end < len(lines) and lines[end - 1].endswith("\\"):
            end += 1
        lines[at:end] = _without_magic(lines[at:end], magic[1])
        at = end
    return "\n".join(lines)


def _without_magic(lines: list[str], indent: str) -> list[str]:
    """As many lines without IPython: `pass`, or the statement behind `%time`."""
    timed = _TIMED.match(lines[0])
    if timed is not None:
        statement = [lines[0][timed.end() :], *lines[1:]]
        with suppress(SyntaxError, ValueError):
            ast.parse("\n".join(statement))
            return [indent + statement[0], *lines[1:]]
    return [f"{indent}pass", *[""] * (len(lines) - 1)]


def _end_of_statement(lines: list[str], start: int) -> int:
    """The number of the line after the Python statement, or the empty line or comment, that begins in line `start`: a
    line inside of brackets or of a string is no magic, however it begins."""
    if lines[start].lstrip()[:1] in ("", "#"):
        return start + 1
    rest = (f"{lines[number]}\n" for number in range(start, len(lines)))
    try:
        ends = (t.end[0] for t in tokenize.generate_tokens(lambda: next(rest, "")) if t.type == tokenize.NEWLINE)
        return start + next(ends, 1)
    except (tokenize.TokenError, SyntaxError):  # not Python, whatever follows
        return len(lines)


def _unix(text: str) -> str:
    """The text without the carriage returns of Windows line ends."""
    return text.replace("\r\n", "\n")


def _cells(notebook: Any) -> list[Cell]:
    if not isinstance(notebook, dict):
        raise UnreadableError(f"a notebook is a JSON object, this is a {type(notebook).__name__}")
    sheets = notebook.get("worksheets")
    cells = sheets[0].get("cells") if isinstance(sheets, list) and sheets and isinstance(sheets[0], dict) else None
    cells = notebook.get("cells", cells)
    if not isinstance(cells, list):
        raise UnreadableError("a notebook has a list 'cells', this has none")
    found = []
    for number, cell in enumerate(cells, 1):
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            source = cell.get("source", cell.get("input", ""))
            lines = source if isinstance(source, list) else [source]
            text = "".join(line for line in lines if isinstance(line, str))
            whole = text.encode("utf-8", "replace").decode()  # JSON may hold half a surrogate pair
            found.append(Cell(number, _unix(whole)))
    return found
