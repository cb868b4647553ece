"""What a capture does without a GPU: it tells what failed in it, and waits for that of another thread."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

from minillm.runtime.cuda_graphs import CaptureError, CudaCapture, capture_errors
from minillm.training.captured_step import CapturedStep


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


@pytest.mark.parametrize("fails_at", ["end", "never"])
def test_a_failed_capture_keeps_no_tensor_of_its_step(fails_at: str) -> None:
    """Without waiting for a garbage collection: if memory was short, the step that follows needs theirs."""
    made: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        activations = torch.zeros(1)
        made.append(weakref.ref(activations))
        raise RuntimeError("out of memory")

    try:
        with capture_errors(capture(fails_at)):
            step()
    except CaptureError:
        pass
    assert made[0]() is None


def test_an_interrupt_stays_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt), capture_errors(capture("end")):
        raise KeyboardInterrupt


def test_an_error_that_the_capture_did_not_notice_stays_itself() -> None:
    with pytest.raises(KeyError), capture_errors(nullcontext()):
        raise KeyError("key")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-ins for CUDA's graphs. The beginning and the end of each capture are added to the list."""
    log: list[str] = []

    @contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        if log[-1:] == ["begins"]:  # as CUDA answers to `torch.cuda.synchronize`, with which a capture begins
            raise RuntimeError("operation not permitted when stream is capturing")
        log.append("begins")
        yield
        log.append("ends")

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, nullcontext)
    return log


def of_a_step(function: Callable[[], None]) -> None:
    CudaCapture(torch.device("cpu"))(function)


def of_training(function: Callable[[], None]) -> None:
    step = CapturedStep(lambda inputs, targets: function() or inputs, torch.device("cpu"))
    for _ in range(2):  # the second call captures
        step(torch.ones(1), torch.ones(1))
    assert step.captured


@pytest.mark.parametrize("first", [of_a_step, of_training])
@pytest.mark.parametrize("second", [of_a_step, of_training])
def test_a_capture_waits_for_that_of_another_thread(
    captures: list[str], first: Callable[[Callable[[], None]], None], second: Callable[[Callable[[], None]], None]
) -> None:
    done: list[str] = []
    other = Thread(target=lambda: done.append(second(lambda: None) or "second"))

    def function() -> None:
        if captures == ["begins"]:
            other.start()
            other.join(0.2)

    first(function)
    other.join()
    assert captures == ["begins", "ends"] * 2 and done == ["second"]
