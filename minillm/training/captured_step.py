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
    it cannot be captured, it runs uncaptured from then on; with `capture=False` it always does.
    """

    def __init__(self, step: Step, device: torch.device, capture: bool = True) -> None:
        self.step, self.device = step, device
        self._seen: set[torch.Size] = set()
        self._captured: dict[torch.Size, _Captured] = {}
        self._can_capture = capture

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run the step on a batch in any memory. Returns the loss, on the GPU."""
        shape = inputs.shape
        if shape in self._seen and shape not in self._captured and self._can_capture:
            self._capture(inputs, targets)
        if shape not in self._captured:
            self._seen.add(shape)
            return self._uncaptured(inputs.to(self.device), targets.to(self.device))
        captured = self._captured[shape]
        captured.inputs.copy_(inputs)
        captured.targets.copy_(targets)
        captured.graph.replay()
        return captured.loss

    def _uncaptured(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run the step as it is, on another stream than the default one, as it must be before a capture."""
        stream, current = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            loss = self.step(inputs, targets)
        current.wait_stream(stream)
        return loss

    def _capture(self, inputs: Tensor, targets: Tensor) -> None:
        graph, mine, theirs = torch.cuda.CUDAGraph(), inputs.to(self.device), targets.to(self.device)
        try:
            with torch.cuda.graph(graph):  # records the kernels, runs none
                loss = self.step(mine, theirs)
        except RuntimeError as problem:
            self._can_capture = False
            tqdm.write(f"training runs without CUDA graphs, several times slower: {str(problem).splitlines()[0][:200]}")
            return
        self._captured[inputs.shape] = _Captured(graph, mine, theirs, loss)
