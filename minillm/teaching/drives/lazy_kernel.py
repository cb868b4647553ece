"""The kernels of lessons 8 and 9: references and planted mistakes as `LazyKernel`, and how any kernel is launched.

Importing a kernel imports Triton, and Triton decides on import whether it compiles or interprets.
"""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

from minillm.teaching.drives.kernel_source import source_of, stub_message
from minillm.teaching.drives.triton_kernels import KernelError, changed_kernel, interpreting, kernel_type
from minillm.teaching.exercise import WrongVersion
from minillm.teaching.source import Edits


class LazyKernel:
    """The kernel `name` of a lesson, from `minillm.teaching.exercises._l08_kernels` if the lesson is `l08`.

    It is launched like a kernel: `kernel[grid](…)`. `changes`: replacements `(right, wrong)` in its source, which make
    it a planted mistake. So the mistake cannot drift from the rest of the kernel.
    """

    def __init__(self, lesson: str, name: str, *changes: tuple[str, str]) -> None:
        self.lesson, self.__name__, self.changes = lesson, name, changes

    @cached_property
    def kernel(self) -> Any:
        """The Triton kernel. Raises `LessonError` if `changes` name text that is not in its source."""
        kernel_type()
        with interpreting():
            module = import_module(f"minillm.teaching.exercises._{self.lesson}_kernels")
        right = getattr(module, self.__name__)
        return changed_kernel(right, self.changes, vars(module)) if self.changes else right

    @cached_property
    def fn(self) -> Callable[..., Any]:
        """The Python function under `@triton.jit`."""
        return self.kernel.fn  # type: ignore[no-any-return]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.fn)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return self.kernel[grid]  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Raise `KernelError`: a kernel is launched with a grid."""
        raise KernelError(f"a kernel is launched with a grid: {self.__name__}[grid](…)")


def resolve(function: Any) -> Any:
    """The Triton kernel of `function`: that of a `LazyKernel`, or `function` itself. (A compiled kernel of Triton has
    an attribute `kernel`, too.)"""
    return function.kernel if isinstance(function, LazyKernel) else function


def accepted(function: Any) -> Any:
    """The Triton kernel of `function`, which is a learner's kernel or a `LazyKernel`.

    Raises:
        NotImplementedError: it is a stub.
        KernelError: it is not a kernel, or none that Triton runs here.
        LessonError: Triton cannot run.
    """
    kernel = resolve(function)
    if (stub := stub_message(source_of(kernel))) is not None:
        raise NotImplementedError(stub)
    name = getattr(getattr(kernel, "fn", kernel), "__name__", "this")
    if not hasattr(kernel, "fn"):
        raise KernelError(f"{name} is not a kernel: put @triton.jit on the line above its def")
    if type(kernel) is not kernel_type():
        raise KernelError(
            f"{name} is not a kernel that Triton runs here: put @triton.jit alone above its def, and run the notebook "
            "from the top"
        )
    return kernel


def run_once(kernel: Any, grid: tuple[int, ...], args: Sequence[Any], sizes: Mapping[str, int]) -> None:
    """Launch an `accepted` kernel on `args`, with `sizes` as its `tl.constexpr`. Raises `KernelError` if it raises."""
    with interpreting(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, about NaN
        try:
            kernel[grid](*args, **sizes)
        except Exception as error:
            raise KernelError(_in_words(error, kernel.fn.__name__)) from error


def wrong_kernel(
    lesson: str, kernel: str, description: str, *changes: tuple[str, str], expected_message: str = ""
) -> WrongVersion:
    """A planted mistake: the kernel of a lesson with `changes` in its source."""
    return WrongVersion(description, LazyKernel(lesson, kernel, *changes), expected_message)


def wrong_kernels(lesson: str, kernel: str, edits: Edits) -> tuple[WrongVersion, ...]:
    """A planted mistake for each of `edits`."""
    return tuple(wrong_kernel(lesson, kernel, description, edit) for description, edit in edits.items())


def _in_words(error: BaseException, name: str) -> str:
    """The error of the kernel `name` in one line, with the last line of the kernel in its traceback."""
    own: list[traceback.FrameSummary] = []
    while True:
        own += [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == name and frame.line]
        if error.__cause__ is None:
            break
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    where = f" (in the line `{own[-1].line}`)" if own else ""
    return f"{type(error).__name__}: {lines[-1]}{where}"
