"""Standard output and standard error as they are found: closed, full, or with an encoding that lacks ✓, γ and é."""

from __future__ import annotations

import codecs
import io
import os
import sys
import unicodedata
from contextlib import suppress
from typing import TextIO

from minillm.errors import ConfigError

STAND_INS = {
    "✓": "+", "✗": "x", "╳": "x", "×": "x", "·": ".", "…": "~", "⏎": "$", "⇥": ">", "↻": ">", "★": "*", "●": "o",
    "–": "-", "—": "-", "−": "-", "“": '"', "”": '"', "‘": "'", "’": "'", "→": ">", "←": "<", "↑": "^", "↓": "v",
    "≤": "<", "≥": ">", "≈": "~", "α": "a", "β": "b", "γ": "g", "σ": "s", "τ": "t", "χ": "x", "µ": "u", "μ": "u",
    "─": "-", "━": "-", "│": "|", "┃": "|", "█": "#", "▓": "+", "░": "%", "ß": "s", "ø": "o", "æ": "a", "ł": "l",
}  # fmt: skip
"""One sign for one, so that columns stay in line."""
HANDLER = "minillm-stand-ins"


def check_streams() -> None:
    """Make both streams write what their encoding can show. Raises `ConfigError` if standard output is closed."""
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
    """Write what is left if that can be done, and drop it and all that follows if not."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _with_stand_ins(problem: UnicodeError) -> tuple[str, int]:
    """What stands for the characters that cannot be encoded: a like sign, the letter without its accent, or `?`."""
    if not isinstance(problem, UnicodeEncodeError):
        raise problem
    lacking = problem.object[problem.start : problem.end]
    return "".join(map(_stand_in, lacking)), problem.end


def _stand_in(character: str) -> str:
    found = STAND_INS.get(character) or unicodedata.normalize("NFKD", character)[:1]
    return found if found.isascii() else "?"
