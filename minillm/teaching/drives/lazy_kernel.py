"""`LazyKernel`: a reference kernel of a lesson, or a planted mistake made from one, imported at its first use.

Importing a kernel imports Triton, and Triton decides on import whether it compiles or interprets.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from typing import Any

from minillm.teaching.drives.triton_kernels import KernelError, changed_kernel, interpreting, kernel_type


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


def error_in_words(error: BaseException, name: str) -> str:
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
