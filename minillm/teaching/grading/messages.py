"""What the process of a submission tells the grader: a few message types, checked when they are read.

They say what was found and what each call did; never whether it is right. A submission can forge them, and gains
nothing: it would have to know the answers.
"""

from __future__ import annotations

import struct

import msgspec

MAX_FRAME = 80 << 20
_HEAD = struct.Struct("!I")


class Found(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """What the notebook holds under the function's name. `state`: "written", "stub", "imported", "missing" or
    "broken"."""

    state: str
    note: str = ""


class Loaded(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The function was defined. `library`: what it imports from minillm."""

    notes: list[str]
    library: list[str]


class NotLoaded(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The statement that defines the function raised."""

    problem: str


class Began(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """Case `index` has begun."""

    index: int


class Error(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of `minillm.teaching.raised.Raised`."""

    kind: str
    message: str
    sort: str
    where: str
    cause: str
    mismatch: str


class Answered(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The outcome of case `index`. `value`: bytes of `minillm.teaching.grading.values`."""

    index: int
    value: bytes
    error: Error | None
    changed: list[str]


class Ended(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The process of the submission has ended: by itself, or as the fields of `guard.ChildExit` say."""

    finished: bool
    signal_number: int = 0
    exit_code: int = 0
    idle_timeout: bool = False
    out_of_time: bool = False
    raised: str = ""
    library_message: str = ""
    lines: list[tuple[str, int, str]] = []


class Cells(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The code cells of a file, and what can be told without running any: the names of functions, of stubs, broken
    cells, the lesson in the metadata, and a fingerprint of each function's syntax tree."""

    sources: list[tuple[int, str]]
    functions: list[str]
    broken: list[str]
    lesson: str
    shapes: dict[str, list[str]]


class Unreadable(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The file is no notebook."""

    reason: str


Message = Found | Loaded | NotLoaded | Began | Answered | Ended | Cells | Unreadable
_decoder = msgspec.msgpack.Decoder(Message)
pack = msgspec.msgpack.Encoder().encode


def framed(data: bytes) -> bytes:
    """`data` after its length."""
    return _HEAD.pack(len(data)) + data


class Frames:
    """Collects bytes and gives out the messages in them.

    Raises:
        ValueError: the bytes are no messages.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete now."""
        self._buffer += data
        found: list[Message] = []
        while len(self._buffer) >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._buffer)
            if size > MAX_FRAME:
                raise ValueError(f"a message of {size:,} bytes")
            if len(self._buffer) < _HEAD.size + size:
                break
            found.append(_decoder.decode(bytes(self._buffer[_HEAD.size : _HEAD.size + size])))
            del self._buffer[: _HEAD.size + size]
        return found
