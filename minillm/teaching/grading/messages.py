"""What the process of a submission tells the grader: a few message types, checked when they are read.

They say what was found and what each call did; never whether it is right. A submission can forge all but the first
message of a job, which is sent before any of its code runs. To forge an answer it would have to know the right one. But
what is measured beside a call is only as true as the process that measures it: the inputs that changed, how large
tensors were, how often a model ran, and what a kernel has read and written.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from minillm.teaching.grading.values import MAX_ITEMS, num_items
from minillm.teaching.guard import ChildExit
from minillm.teaching.pipe_messages import BrokenMessageError, Frames

MAX_BYTES = 128 << 20
"""Of all messages of one job, as is `MAX_ITEMS`. The right answers to all cases of an exercise have some kilobytes and
hundreds of items; the grader keeps what it gets in memory."""


class Found(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """What the notebook holds under the function's name. `state`: "written", "stub", "imported", "missing" or
    "broken". `note`: more about it, or "". `library`: what it imports from minillm."""

    state: str
    note: str = ""
    library: list[str] = []


class Loaded(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The function was defined."""

    notes: list[str]


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


RUNNER_FAILED = "a failure of its runner"
"""`ChildExit.raised` where our own code failed, or the function broke it."""


class Ended(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The process of the submission has ended. `death`: how, if it had not finished."""

    death: ChildExit | None = None


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


class Messages:
    """Collects the bytes of one job and gives out the messages in them."""

    def __init__(self) -> None:
        self._frames = Frames()
        self._bytes = self._items = 0

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete now. Raises `BrokenMessageError` for malformed ones, and for too many."""
        self._bytes += len(data)
        if self._bytes > MAX_BYTES:
            raise BrokenMessageError(f"more than {MAX_BYTES >> 20} MiB")
        for frame in self._frames.feed(data):
            self._count(frame)
            try:
                message = _decoder.decode(frame)
            except msgspec.MsgspecError:
                raise BrokenMessageError("a malformed message") from None
            if isinstance(message, Answered):
                self._count(message.value)
            yield message

    def _count(self, data: bytes) -> None:
        self._items += num_items(data)
        if self._items > MAX_ITEMS:
            raise BrokenMessageError(f"more than {MAX_ITEMS:,} values")
