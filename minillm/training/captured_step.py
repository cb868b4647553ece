"""Training steps on a GPU as CUDA graphs: one launch for all kernels of a step.

Launched one by one, the kernels of a small model take longer to start than to run: a step of the bundled target took
20 ms on an H100, of which its kernels ran for 6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from minillm.runtime.cuda_graphs import CAPTURING, CaptureError, capture_errors

Step = Callable[[Tensor, Tensor], Tensor]
"""`step(inputs, targets)`: one update of all parameters. Returns the loss before it, a tensor of no dimensions."""


@dataclass(frozen=True)
class _Captured:
    """A graph with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    targets: Tensor
    loss: Tensor


class CapturedStep:
    """`step`, captured for each shape of its batch: the first call of a shape runs it, the second one captures it.

    The step must read nothing that changes but tensors that keep their place, such as parameters and learning rates. If
    it cannot be captured for some shape, it runs uncaptured from then on, for all shapes; with `capture=False` it
    always does.
    """

    def __init__(self, step: Step, device: torch.device, capture: bool = True) -> None:
        self.step, self.device = step, device
        self.stream = torch.cuda.Stream(device)
        """Where steps run uncaptured and are captured: PyTorch keeps free memory and cuBLAS's workspace per stream."""
        self._seen: set[torch.Size] = set()
        self.captured: dict[torch.Size, _Captured] = {}
        """The captured steps, by the shape of their batch."""
        self._can_capture = capture

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run the step on a batch in any memory. Returns the loss, on the GPU."""
        shape = inputs.shape
        with torch.cuda.device(self.device):  # a capture records the launches on the current device
            if shape in self._seen and shape not in self.captured and self._can_capture:
                self._capture(inputs, targets)
            if shape not in self.captured:
                self._seen.add(shape)
                return self._uncaptured(inputs.to(self.device), targets.to(self.device))
            captured = self.captured[shape]
            captured.inputs.copy_(inputs)
            captured.targets.copy_(targets)
            captured.graph.replay()
            return captured.loss

    def _uncaptured(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run the step as it is, on another stream than the default one, as it must be before a capture."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            loss = self.step(inputs, targets)
        current.wait_stream(self.stream)
        return loss

    def _capture(self, inputs: Tensor, targets: Tensor) -> None:
        graph, mine, theirs = torch.cuda.CUDAGraph(), inputs.to(self.device), targets.to(self.device)
        current = torch.cuda.current_stream(self.device)
        try:
            # Records the kernels, runs none.
            with CAPTURING, capture_errors(torch.cuda.graph(graph, stream=self.stream)):
                loss = self.step(mine, theirs)
        except CaptureError as problem:
            self._can_capture = False
            self.captured.clear()  # if memory was short, the uncaptured step needs that of the graphs
            tqdm.write(f"training runs without CUDA graphs, several times slower: {problem}")
            return
        finally:
            torch.cuda.set_stream(current)  # after an error, `torch.cuda.graph` leaves its own stream in place
        self.captured[inputs.shape] = _Captured(graph, mine, theirs, loss)
