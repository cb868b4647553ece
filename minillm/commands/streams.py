"""Handle standard streams that are closed or full, or whose encoding is not UTF-8."""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
from contextlib import suppress
from typing import TextIO

from minillm.errors import ConfigError


def check_streams() -> None:
    """Make files and pipes UTF-8, and terminals show `?` for what they cannot encode.

    `PYTHONIOENCODING` overrides the first. Raises `ConfigError` if stdout is closed.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - it stays open to the end
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
        raise ConfigError("standard output is closed; send it to a file, or to /dev/null")
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        chosen = stream.isatty() or "PYTHONIOENCODING" in os.environ
        if not chosen and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(encoding="utf-8")
        if stream is not sys.stdin and stream.errors in ("strict", "surrogateescape", "backslashreplace"):
            stream.reconfigure(errors="replace")


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
        watched.register(stream, select.POLLOUT)  # macOS reports nothing of a file that is asked for nothing
    except (OSError, ValueError):
        return False  # a stream of Python's own
    return any(found & (select.POLLERR | select.POLLHUP) for _, found in watched.poll(0))
