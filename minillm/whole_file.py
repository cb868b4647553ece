"""Write a file all or nothing."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4


@contextmanager
def replacing(path: Path, part: Path | None = None) -> Iterator[Path]:
    """The path of a file to write: `part`, by default another `NAME.….new` beside `path` for each writer. At the end of
    the block it is synced to the disk and takes the place of `path`; until then, and if the block fails, the old file
    stays. No `part` is left.
    """
    part = part or path.with_name(f"{path.name}.{uuid4().hex}.new")
    try:
        yield part
        with part.open("rb+") as stream:  # Windows syncs only what is open for writing
            os.fsync(stream.fileno())
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink()


def write_whole_file(path: Path, text: str | bytes, part: Path | None = None) -> None:
    """Write `text` to `part` (see `replacing`), then rename that to `path`. With `part` equal to `path` that is written
    in place.

    Raises `OSError`, which names the file, also if the disk is full; then no `part` is left.
    """
    data = text.encode() if isinstance(text, str) else text
    try:
        if part == path:  # it may be a device, which need not take a sync
            path.write_bytes(data)
        else:
            with replacing(path, part) as fresh:
                fresh.write_bytes(data)
    except OSError as problem:
        if problem.filename:
            raise
        raise OSError(problem.errno, problem.strerror or str(problem), str(path)) from None


def check_writable(folder: Path) -> None:
    """Raise `OSError` if no file can be created in the folder."""
    with tempfile.TemporaryFile(dir=folder):
        pass
