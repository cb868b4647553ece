"""Messages as bytes through a pipe, each after its length in four bytes. The reader need not trust the writer."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

MAX_FRAME = 80 << 20
"""Bytes of one message: the largest answer of a submission (`grading.values.MAX_BYTES`) and what is told with it."""
_HEAD = struct.Struct("!I")


class BrokenMessageError(ValueError):
    """The writer sent a malformed message, or more than the reader accepts."""


def write_frame(descriptor: int, data: bytes) -> None:
    """Write one message to a file descriptor."""
    view = memoryview(_HEAD.pack(len(data)) + data)
    while view:
        view = view[os.write(descriptor, view) :]


class Frames:
    """Collects bytes and gives out the messages in them. It never waits for the rest of a message."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete now. Raises `BrokenMessageError` at one that is too long."""
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._buffer)
            if size > MAX_FRAME:
                raise BrokenMessageError(f"a message of {size:,} bytes; the limit is {MAX_FRAME:,}")
            if len(self._buffer) < _HEAD.size + size:
                break
            frame = bytes(self._buffer[_HEAD.size : _HEAD.size + size])
            del self._buffer[: _HEAD.size + size]
            yield frame
