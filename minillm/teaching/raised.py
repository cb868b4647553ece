"""What is known of an exception that a function raised, as text: it can be explained and shown in another process."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from minillm.teaching import crash_messages
from minillm.teaching.diagnosis_errors import cause_of_error
from minillm.teaching.exercise import Function
from minillm.teaching.fence import OutOfBoundsError
from minillm.teaching.guard import OutOfTime


class Sort(Enum):
    """What an exception means for a check."""

    ERROR = "an error of the function"
    STUB = "the function is not written yet"
    TIME = "out of time"
    MEMORY = "out of memory"
    BOUNDS = "an access outside of an array"
    EXIT = "the function ends the program"
    PROCESSES = "too many processes"


@dataclass(frozen=True)
class Raised:
    """One exception.

    `kind`: the name of its class. `where`: the deepest line of the learner's own code; `cause`: what the error itself
    shows; `mismatch`: how the parameters differ from the wanted ones. Each may be "". `exception` is None if it was
    raised in another process.
    """

    kind: str
    message: str
    sort: Sort = Sort.ERROR
    where: str = ""
    cause: str = ""
    mismatch: str = ""
    exception: BaseException | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, error: BaseException, function: Function, wanted: Callable[[], inspect.Signature]) -> Raised:
        """What is known of `error`, which `function` raised; `wanted()`: the signature that the exercise asks for."""
        own = _globals_of(function)
        mismatch = _signature_mismatch(function, wanted()) if isinstance(error, TypeError) else ""
        sort = _sort(error)
        where, cause = _line_of(own, error), cause_of_error(error, lambda frame: frame.f_globals is own)
        if sort is Sort.MEMORY:
            traceback.clear_frames(error.__traceback__)  # the frames hold what filled the memory
        return cls(type(error).__name__, str(error), sort, where, cause, mismatch, error)

    @property
    def ends_check(self) -> bool:
        """Whether no further case is tried: the function has used up time or memory, or has overwritten memory."""
        return self.sort in (Sort.TIME, Sort.MEMORY, Sort.BOUNDS)


def out_of_memory(error: BaseException | None) -> bool:
    """Whether Python, NumPy or torch failed to allocate memory."""
    return isinstance(error, MemoryError) or "DefaultCPUAllocator: " in str(error)  # its next words vary by system


def _sort(error: BaseException) -> Sort:
    if isinstance(error, OutOfTime):
        return Sort.TIME
    if out_of_memory(error):
        return Sort.MEMORY
    if isinstance(error, OutOfBoundsError):
        return Sort.BOUNDS
    if isinstance(error, SystemExit):
        return Sort.EXIT
    return Sort.STUB if _is_stub(error) else Sort.ERROR


def _is_stub(error: BaseException) -> bool:
    """Whether a Python line raised `NotImplementedError`; torch raises the same type when an operator is missing."""
    if not isinstance(error, NotImplementedError):
        return False
    line = traceback.extract_tb(error.__traceback__)[-1].line
    return not line or "NotImplementedError" in line


def _line_of(own: dict[str, object] | None, error: BaseException) -> str:
    """The deepest line of the traceback in code whose globals are `own`."""
    mine = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_globals is own]
    if not mine:
        return ""
    frame, line = mine[-1]
    return crash_messages.line_in_words(frame.f_code.co_filename, line, frame.f_code.co_name)


def _globals_of(function: Function) -> dict[str, object] | None:
    plain = inspect.unwrap(function)
    if hasattr(plain, "__globals__"):
        return plain.__globals__
    module = sys.modules.get(getattr(plain, "__module__", None) or "")
    return vars(module) if module else None


def _signature_mismatch(function: Function, wanted: inspect.Signature) -> str:
    """The cause if the function cannot be called with the wanted parameters; else ""."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # no function, or a builtin without a signature
        return ""
    parameters = wanted.parameters.values()
    try:
        signature.bind(
            *[p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)],
            **{p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY},
        )
    except TypeError:
        names = ", ".join(parameter.name for parameter in parameters)
        return f"your function takes ({', '.join(signature.parameters)}), but it is called with ({names})"
    return ""
