"""What rank 0 sends to the worker processes through their standard input, and what they answer, as frames of bytes.

A frame is its length in four bytes, then the message in MessagePack. The end of the stream is the order to end.
"""

from __future__ import annotations

from typing import IO

import msgspec
from msgspec import Struct

from minillm.batch import Segment


class Setup(Struct, tag=True, frozen=True):
    """The first message: what to load."""

    folder: str
    rank: int
    size: int
    device: str
    dtype: str
    kv_cache_dtype: str
    kv_cache_options: dict[str, int]
    block_size: int
    num_threads: int


class Allocate(Struct, tag=True, frozen=True):
    """The second: allocate a cache of this size."""

    num_blocks: int


class Connect(Struct, tag=True, frozen=True):
    """The third: connect to the other ranks."""

    port: int
    """Of rank 0's `TCPStore` on this machine."""


class Run(Struct, tag=True, frozen=True):
    """Run a forward."""

    segments: list[Segment]


class CopyBlocks(Struct, tag=True, frozen=True):
    """Copy blocks of the cache: (source, target)."""

    pairs: list[tuple[int, int]]


class Ready(Struct, tag=True, frozen=True):
    """A worker's answer to `Setup` and to `Allocate`."""


class Failed(Struct, tag=True, frozen=True):
    """What a worker sends before it ends by an error."""

    reason: str


Message = Setup | Allocate | Connect | Run | CopyBlocks | Ready | Failed
_DECODER = msgspec.msgpack.Decoder(Message)


def frame(message: Message) -> bytes:
    """The bytes to write."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


def receive(stream: IO[bytes]) -> Message | None:
    """Wait for the next message; None if the stream has ended."""
    length = stream.read(4)
    if len(length) < 4:
        return None
    body = stream.read(int.from_bytes(length, "little"))
    return _DECODER.decode(body) if len(body) == int.from_bytes(length, "little") else None
