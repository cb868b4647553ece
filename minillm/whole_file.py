"""Write a file all or nothing."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_whole_file(path: Path, text: str | bytes, part: Path | None = None) -> None:
    """Write `text` to `part`, by default a file beside `path`, then rename that to `path`. With `part` equal to `path`
    it is written in place.

    Raises `OSError`, which names the file, also if the disk is full; then no `part` is left.
    """
    part = part or path.with_name(f"{path.name}.part")
    data = text.encode() if isinstance(text, str) else text
    try:
        with part.open("wb") as stream:
            stream.write(data)
            if part != path:  # a device need not take it
                stream.flush()
                os.fsync(stream.fileno())
    except OSError as problem:
        if part != path:
            with suppress(OSError):
                part.unlink()
        raise OSError(problem.errno, problem.strerror or str(problem), problem.filename or str(path)) from None
    if part != path:
        part.replace(path)
