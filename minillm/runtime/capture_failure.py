"""Why a CUDA graph could not be captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class CaptureError(RuntimeError):
    """A CUDA graph could not be captured. The text is the reason, in one line."""


@contextmanager
def capture_errors(capture: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter `capture`: a `torch.cuda.graph`, or the stream on which a step warms up for one.

    Raises `CaptureError` in place of a `RuntimeError`. The end of a failed capture raises one of its own, which hides
    the error of the step: that error is the reason; if it is an interrupt, it is raised itself.
    """
    of_step: BaseException | None = None
    try:
        with capture:
            try:
                yield
            except BaseException as problem:
                of_step = problem
                raise
    except RuntimeError as problem:
        reason = of_step or problem
        if not isinstance(reason, Exception):
            raise reason from None
        line = (str(reason).splitlines() or [type(reason).__name__])[0][:200]
        raise CaptureError(line) from reason
