"""How lesson 09 names its kernels, plants mistakes in them, and launches a kernel that it does not trust.

Every tensor stands in poison. The kernels are in `_l09_kernels`, which is imported when one of them is launched and
not before, because that imports Triton, and Triton decides on import whether it compiles or interprets.
"""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cached_property, wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from minillm.errors import LessonError
from minillm.ops.dispatch import has_triton
from minillm.teaching.exercise import Function
from minillm.teaching.exercises._l08_launch import changed_kernel, interpreting
from minillm.teaching.exercises._wall import check_against_walls, has_walls, walled
from minillm.teaching.fence import Fences

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class KernelFailed(LessonError):
    """A kernel cannot be launched, or stopped with an error; names its line where that is known."""


class KernelByName:
    """A kernel of `_l09_kernels`, perhaps with other words in its source; made when it is first used.

    A planted mistake is a line or two of `changes`, from what is right to what is wrong, so it cannot drift from the
    rest of the kernel. Launched as a kernel is: `kernel[grid](...)`.
    """

    def __init__(self, name: str, *changes: tuple[str, str]) -> None:
        self.__name__ = name
        self.changes = changes

    @cached_property
    def fn(self) -> Function:
        """The Python function that the kernel is made from."""
        return self.kernel.fn

    @cached_property
    def kernel(self) -> Any:
        """What Triton makes of it. Raises `LessonError` if a line to change is not there."""
        right = getattr(_kernels(), self.__name__)
        return changed_kernel(right, self.changes, vars(_kernels())) if self.changes else right

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.fn)

    def __getitem__(self, grid: tuple[int, ...]) -> Function:
        return self.kernel[grid]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Raises `KernelFailed`: a kernel has a grid."""
        raise KernelFailed(f"a kernel is launched with a grid: {self.__name__}[grid](...)")


def _kernels() -> Any:
    """The module of kernels. Raises `LessonError` where there is no Triton, or one that was imported too early."""
    if not has_triton():
        raise LessonError("Triton is not installed; it exists for Linux and WSL (pip install triton) and on Colab")
    with interpreting():
        kernels, library = import_module("minillm.teaching.exercises._l09_kernels"), import_module("triton.language")
    if type(kernels.decode_kernel) is not type(library.sum):  # which is a kernel too, made when Triton was imported
        raise LessonError(
            "Triton was imported before TRITON_INTERPRET=1 was set, and can now neither compile nor interpret; restart "
            "the notebook's kernel and run it from its first cell"
        )
    return kernels


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: int) -> None:
    """Run a learner's kernel on `args`, which are on the GPU if there is one.

    Raises `NotImplementedError` for a stub, `KernelFailed` for what is no kernel or stops with an error.
    """
    kernel = getattr(kernel, "kernel", kernel)
    plain = getattr(kernel, "fn", kernel)
    name = getattr(plain, "__name__", "this")
    if "raise NotImplementedError" in _source_of(plain):
        raise NotImplementedError(f"write {name} here, then run its check")
    if not hasattr(kernel, "fn"):
        raise KernelFailed(f"{name} is no kernel: put @triton.jit on the line above its def")
    if type(kernel) is not type(_kernels().decode_kernel):
        raise KernelFailed("TRITON_INTERPRET=1 was not set when this kernel was defined; run the notebook from the top")
    failure = ""
    with interpreting(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, about NaN
        try:
            kernel[grid](*args, **constants)
        except Exception as error:
            failure = _in_words(error, name)
    if failure:
        raise KernelFailed(failure)


def run_fenced(
    kernel: Any,
    grid: tuple[int, ...],
    inputs: Mapping[str, tuple[Tensor, float | None]],
    results: Mapping[str, tuple[int, ...]],
    numbers: Sequence[Any] = (),
    wall: bool = False,
    **constants: int,
) -> dict[str, Tensor]:
    """Launch on copies that stand in poison; the results by name.

    `inputs`: tensors, each with the poison around it (None: NaN). `results`: shapes of float32 tensors that follow
    them, NaN until they are written. With `wall` the kernel runs once more, on tensors that end where memory ends.
    Raises `OutOfBoundsError` if the kernel wrote beyond a result, or touched a wall.
    """
    fences = Fences(DEVICE)
    given = [fences.input(name, x.contiguous(), poison=poison) for name, (x, poison) in inputs.items()]
    made = [fences.output(name, shape, torch.float32) for name, shape in results.items()]
    launch(kernel, grid, *given, *made, *numbers, **constants)
    fences.check()
    if wall and has_walls():
        copies = [walled(x) for x in (*given, *made)]
        check_against_walls(lambda: launch(kernel, grid, *copies, *numbers, **constants))
    return {name: x.cpu().clone() for name, x in zip(results, made, strict=True)}


def remembering(drive: Function) -> Function:
    """`drive`, but a kernel of ours that has answered a case before is not interpreted again: it takes 10 ms a time."""
    answers: dict[tuple[object, ...], Any] = {}

    @wraps(drive)
    def run(kernel: Function, *inputs: Any) -> Any:
        if not isinstance(kernel, KernelByName):
            return drive(kernel, *inputs)
        key = id(kernel), *(repr(x.tolist() if isinstance(x, Tensor) else x) for x in inputs)
        if key not in answers:
            answers[key] = drive(kernel, *inputs)
        return deepcopy(answers[key])

    return run


def _source_of(function: Function) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def _in_words(error: BaseException, name: str) -> str:
    """What stopped the kernel, and the last of its own lines that Python saw."""
    own: list[traceback.FrameSummary] = []
    while True:
        own += [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == name and frame.line]
        if error.__cause__ is None:
            break
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    where = f" (in the line `{own[-1].line}`)" if own else ""
    return f"{type(error).__name__}: {lines[-1]}{where}"
