"""A failed capture tells what failed in it: not what its end says of it, and not what was being handled around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from minillm.runtime.cuda_graphs import CaptureError, capture_errors


@contextmanager
def capture(fails_at: str) -> Iterator[None]:
    """As `torch.cuda.graph`: it may fail when it begins, and the end of one whose step has failed may, too."""
    if fails_at == "begin":
        raise RuntimeError("operation not permitted\nmore")
    try:
        yield
    finally:
        if fails_at == "end":
            raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize("handled", [KeyboardInterrupt(), KeyError("key")], ids=repr)
@pytest.mark.parametrize(
    ("fails_at", "of_step", "reason"),
    [
        ("begin", None, "operation not permitted"),
        ("end", None, "operation failed due to a previous error during capture"),
        ("end", RuntimeError("item waits for the device"), "item waits for the device"),
        ("end", AssertionError(), "AssertionError"),
        ("never", RuntimeError("out of memory"), "out of memory"),
    ],
)
def test_the_reason_is_the_error_of_the_step_whatever_was_handled_before(
    handled: BaseException, fails_at: str, of_step: Exception | None, reason: str
) -> None:
    def step() -> None:
        if of_step is not None:
            raise of_step

    try:
        raise handled
    except type(handled):
        with pytest.raises(CaptureError) as caught, capture_errors(capture(fails_at)):
            step()
    assert str(caught.value) == reason
    assert of_step is None or caught.value.__cause__ is of_step


def test_an_interrupt_stays_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt), capture_errors(capture("end")):
        raise KeyboardInterrupt


def test_an_error_that_the_capture_did_not_notice_stays_itself() -> None:
    with pytest.raises(KeyError), capture_errors(nullcontext()):
        raise KeyError("key")
