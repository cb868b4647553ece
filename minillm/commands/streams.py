"""Handle standard streams that are closed or full, or whose encoding lacks ✓, γ and é."""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
import unicodedata
from contextlib import suppress
from typing import TextIO

from minillm.errors import ConfigError

REPLACEMENTS = {
    "✓": "+", "✗": "x", "╳": "x", "×": "x", "·": ".", "…": "~", "⏎": "$", "⇥": ">", "↻": ">", "★": "*", "●": "o",
    "–": "-", "—": "-", "−": "-", "“": '"', "”": '"', "‘": "'", "’": "'", "→": ">", "←": "<", "↑": "^", "↓": "v",
    "≤": "<", "≥": ">", "≈": "~", "α": "a", "β": "b", "γ": "g", "σ": "s", "τ": "t", "χ": "x", "µ": "u", "μ": "u",
    "─": "-", "━": "-", "│": "|", "┃": "|", "█": "#", "▓": "+", "░": "%", "ß": "s", "ø": "o", "æ": "a", "ł": "l",
}  # fmt: skip
"""Each stand-in is one character, so that columns stay aligned."""
HANDLER = "minillm-stand-ins"


def check_streams() -> None:
    """Make both streams replace characters that they cannot encode. Raises `ConfigError` if stdout is closed."""
    codecs.register_error(HANDLER, _with_stand_ins)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - it stays open to the end
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
        raise ConfigError("standard output is closed; send it to a file, or to /dev/null")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape", "backslashreplace"):
            stream.reconfigure(errors=HANDLER)


def close_quietly(stream: TextIO) -> None:
    """Flush the stream. If that fails, discard its buffer and everything written to it later."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def reader_has_left(stream: TextIO) -> bool:
    """Whether the stream is a pipe that nobody reads any more. Another flush need not fail: the write that failed may
    have left nothing to write. On Windows, which has no `poll`, always True."""
    if not hasattr(select, "poll"):
        return True
    watched = select.poll()
    try:
        watched.register(stream, 0)  # errors are reported without being asked for
    except (OSError, ValueError):
        return False  # a stream of Python's own
    return bool(watched.poll(0))


def _with_stand_ins(problem: UnicodeError) -> tuple[str, int]:
    """Replace characters that cannot be encoded: a similar character, the letter without its accent, or `?`."""
    if not isinstance(problem, UnicodeEncodeError):
        raise problem
    unencodable = problem.object[problem.start : problem.end]
    return "".join(map(_stand_in, unencodable)), problem.end


def _stand_in(character: str) -> str:
    found = REPLACEMENTS.get(character) or unicodedata.normalize("NFKD", character)[:1]
    return found if found.isascii() else "?"
