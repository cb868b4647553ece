"""`torch.compile` with a fallback to the eager function. Compiled training is about twice as fast."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from minillm.errors import TrainingError, first_line

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def has_compiler() -> bool:
    """Whether this machine has a C++ compiler, which `torch.compile` needs for a CPU and also for a GPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX"), "c++", "g++", "clang++", "cl") if name)


class Compiled(Generic[Arguments, Result]):
    """`function`, compiled for each new shape at its first call. If compilation fails, it runs eagerly from then on.

    An error in `function` itself is raised again by the eager call that follows, so no error is hidden. PyTorch
    compiles the backward pass later, when it first runs: use `backward`.
    """

    def __init__(self, function: Callable[Arguments, Result]) -> None:
        self.eager = function
        self.fast: Callable[Arguments, Result] | None = None
        if has_compiler():
            self.fast = torch.compile(function, dynamic=False)
        else:
            _notice("no C++ compiler was found")

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Call the function."""
        if self.fast is not None:
            try:
                return self.fast(*args, **kwargs)
            except torch._dynamo.exc.TorchDynamoException as problem:
                self.fast = None
                _notice(f"torch.compile failed ({type(problem).__name__})")
        return self.eager(*args, **kwargs)


def backward(loss: Tensor) -> None:
    """Run `loss.backward()`. Raises `TrainingError` if PyTorch cannot compile the backward pass of a `Compiled`."""
    try:
        loss.backward()
    except RuntimeError as problem:
        if not isinstance(problem, torch._dynamo.exc.TorchDynamoException):
            raise
        raise TrainingError(
            f"torch.compile failed in the backward pass ({first_line(problem)}); set TORCH_COMPILE_DISABLE=1 to "
            "train uncompiled, about half as fast"
        ) from problem


def _notice(reason: str) -> None:
    tqdm.write(f"training runs uncompiled, about half as fast: {reason}")
