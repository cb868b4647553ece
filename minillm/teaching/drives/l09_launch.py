"""How lesson 09 refers to its kernels by name, plants mistakes in them, and launches a learner's kernel.

Every tensor is surrounded by poison. The kernels are in `_l09_kernels`, which is imported only when one of them is
launched: that imports Triton, and Triton decides on import whether it compiles or interprets.
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

from minillm.teaching.drives.kernel_source import source_of, stub_message
from minillm.teaching.drives.triton_kernels import KernelError, changed_kernel, interpreting, kernel_type
from minillm.teaching.drives.undefined_lanes import check_undefined, with_undefined_lanes
from minillm.teaching.drives.wall import check_between_walls
from minillm.teaching.exercise import Function
from minillm.teaching.fence import Fences

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class KernelByName:
    """A kernel of `_l09_kernels`, or a planted mistake made from one; imported or compiled at its first use.

    `changes`: replacements `(right, wrong)` in its source, so a planted mistake cannot drift from the rest of the
    kernel. It is launched like a kernel: `kernel[grid](...)`.
    """

    def __init__(self, name: str, *changes: tuple[str, str]) -> None:
        self.__name__ = name
        self.changes = changes

    @cached_property
    def fn(self) -> Function:
        """The Python function under `@triton.jit`."""
        return self.kernel.fn

    @cached_property
    def kernel(self) -> Any:
        """The Triton kernel. Raises `LessonError` if `changes` name text that is not in its source."""
        right = getattr(_kernels(), self.__name__)
        return changed_kernel(right, self.changes, vars(_kernels())) if self.changes else right

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.fn)

    def __getitem__(self, grid: tuple[int, ...]) -> Function:
        return self.kernel[grid]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Raise `KernelError`: a kernel is launched with a grid."""
        raise KernelError(f"a kernel is launched with a grid: {self.__name__}[grid](...)")


def _kernels() -> Any:
    """The module of the reference kernels, which only the references and the planted mistakes need."""
    kernel_type()
    with interpreting():
        return import_module("minillm.teaching.exercises._l09_kernels")


def resolve(function: Any) -> Any:
    """The Triton kernel of `function`: that of a `KernelByName`, or `function` itself. (A compiled kernel of Triton has
    an attribute `kernel`, too.)"""
    return function.kernel if isinstance(function, KernelByName) else function


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: int) -> None:
    """Launch a learner's kernel on `args`, which are on the GPU if there is one.

    Raises `NotImplementedError` for a stub, and `KernelError` if it is not a kernel or raises an error.
    """
    kernel = resolve(kernel)
    plain = getattr(kernel, "fn", kernel)
    name = getattr(plain, "__name__", "this")
    if (stub := stub_message(source_of(kernel))) is not None:
        raise NotImplementedError(stub)
    if not hasattr(kernel, "fn"):
        raise KernelError(f"{name} is not a kernel: put @triton.jit on the line above its def")
    if type(kernel) is not kernel_type():
        raise KernelError("TRITON_INTERPRET=1 was not set when this kernel was defined; run the notebook from the top")
    failure = ""
    with interpreting(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, about NaN
        try:
            kernel[grid](*args, **constants)
        except Exception as error:
            failure = _in_words(error, name)
    if failure:
        raise KernelError(failure)


def run_fenced(
    kernel: Any,
    grid: tuple[int, ...],
    inputs: Mapping[str, tuple[Tensor, float | None]],
    results: Mapping[str, tuple[int, ...]],
    numbers: Sequence[Any] = (),
    against_wall: bool = False,
    **constants: int,
) -> dict[str, Tensor]:
    """Launch on copies that are surrounded by poison; return the results by name.

    `inputs`: tensors, each with the poison around it (None: NaN). `results`: shapes of the float32 results, which are
    the next arguments and hold NaN until they are written. With `against_wall` the kernel runs twice more, on tensors
    that end where their memory ends, and on tensors that begin where it begins. Raises `OutOfBoundsError` if the kernel
    wrote outside a result or accessed a wall, and `KernelError` if the result depends on a masked lane that was loaded
    without `other`.
    """
    fences = Fences(DEVICE)
    given = [fences.input(name, x.contiguous(), poison=poison) for name, (x, poison) in inputs.items()]
    made = [fences.output(name, shape, torch.float32) for name, shape in results.items()]
    launch(kernel, grid, *given, *made, *numbers, **constants)
    fences.check()
    for load, variant in with_undefined_lanes(resolve(kernel)):
        again = Fences(DEVICE)
        same = [again.input(name, x.contiguous(), poison=poison) for name, (x, poison) in inputs.items()]
        others = [again.output(name, shape, torch.float32) for name, shape in results.items()]
        launch(variant, grid, *same, *others, *numbers, **constants)
        check_undefined(load, zip(made, others, strict=True))
    if against_wall:
        check_between_walls(
            [*inputs, *results],
            lambda wall: [wall(x) for x in (*given, *made)],
            lambda copies: launch(kernel, grid, *copies, *numbers, **constants),
        )
    return {name: x.cpu().clone() for name, x in zip(results, made, strict=True)}


def remembering(run_case: Function) -> Function:
    """`run_case` with a memo: a `KernelByName` runs once per case, because interpreting it takes 10 ms each time."""
    answers: dict[tuple[object, ...], Any] = {}

    @wraps(run_case)
    def run(kernel: Function, *inputs: Any) -> Any:
        if not isinstance(kernel, KernelByName):
            return run_case(kernel, *inputs)
        key = id(kernel), *(repr(x.tolist() if isinstance(x, Tensor) else x) for x in inputs)
        if key not in answers:
            answers[key] = run_case(kernel, *inputs)
        return deepcopy(answers[key])

    return run


def _in_words(error: BaseException, name: str) -> str:
    """The error of a kernel, with the last line of the kernel in its traceback."""
    own: list[traceback.FrameSummary] = []
    while True:
        own += [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == name and frame.line]
        if error.__cause__ is None:
            break
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    where = f" (in the line `{own[-1].line}`)" if own else ""
    return f"{type(error).__name__}: {lines[-1]}{where}"
