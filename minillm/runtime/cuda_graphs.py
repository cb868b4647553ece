"""Recording CUDA graphs, and why one could not be recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from minillm.errors import first_line

WARM_UPS = 2
"""Runs before a capture. The first compiles kernels and allocates workspaces, which a capture must not do."""

CAPTURING = threading.Lock()
"""Held during a capture, because PyTorch allows only one at a time in a process: it begins with a wait for the whole
device, which CUDA refuses while another thread captures, and both captures fail."""

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Record the launches of a function; returns a function that replays them."""


class CudaCapture:
    """Records CUDA graphs, all on one side stream and with one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> Replay:
        """See `Capture`. Warms up on the stream that records, because cuBLAS workspaces belong to a stream.

        Waits while another thread captures. Other threads may launch kernels and allocate memory meanwhile, but must
        not wait for the whole device (`torch.cuda.synchronize`). Raises `CaptureError`.
        """
        current = torch.cuda.current_stream()
        try:
            self.stream.wait_stream(current)
            with capture_errors(torch.cuda.stream(self.stream)):
                for _ in range(WARM_UPS):
                    function()
            current.wait_stream(self.stream)
            graph = torch.cuda.CUDAGraph()
            recording = torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local")
            with CAPTURING, capture_errors(recording):
                function()
        finally:
            torch.cuda.set_stream(current)  # after an error, `torch.cuda.graph` leaves its own stream in place
        return graph.replay


class CaptureError(RuntimeError):
    """A CUDA graph could not be captured. The text is the reason, in one line."""


@contextmanager
def capture_errors(capture: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter `capture`: a `torch.cuda.graph`, or the stream on which a step warms up for one.

    Raises `CaptureError` in place of a `RuntimeError`. The end of a failed capture raises one of its own, which hides
    the error of the step: that error is the reason; if it is an interrupt, it is raised itself.
    """
    reason: BaseException | None = None
    try:
        with capture:
            try:
                yield
            except BaseException as problem:
                reason = problem
                raise
    except RuntimeError as problem:
        reason = reason or problem
        if not isinstance(reason, Exception):
            raise reason from None
        raise CaptureError(first_line(reason)) from reason
    finally:
        reason = None  # else its traceback and this frame keep each other, and the tensors of the step, in memory
