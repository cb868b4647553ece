"""Triton kernels in a check: whether Triton compiles or interprets them, and kernels that are made from text."""

from __future__ import annotations

import inspect
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import torch

from minillm.errors import LessonError
from minillm.ops.dispatch import has_triton
from minillm.teaching.source import compiled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where kernels run."""


class KernelError(LessonError):
    """A kernel cannot be launched, or raised an error; the message quotes the interpreter or the compiler, and names
    the line if it is known."""


def changed_kernel(right: Any, changes: Sequence[tuple[str, str]], space: Mapping[str, Any]) -> Any:
    """Return the kernel `right` with the replacements `changes` in its source; `space`: the globals of its module.

    Raises `LessonError` if an old text is not in the source, so that a planted mistake cannot drift from the kernel.
    """
    source = textwrap.dedent(inspect.getsource(right.fn))
    name = right.fn.__name__
    for old, new in changes:
        if old not in source:
            raise LessonError(f"{old!r} is not in {name}; change its planted mistakes as well")
        source = source.replace(old, new)
    return kernel_of_text(source, name, space)


def kernel_of_text(source: str, name: str, space: Mapping[str, Any]) -> Any:
    """Return the kernel `name` that `source` defines; `space`: the globals that it uses."""
    file = f"<{name} with changes, {abs(hash(source))}>"
    own = dict(space)
    with interpreting():
        exec(compiled(source, file), own)
    return own[name]


@contextmanager
def interpreting() -> Iterator[None]:
    """Without a GPU, set `TRITON_INTERPRET=1`: for the import of Triton, and while kernels run.

    The interpreter computes with NumPy, whose warnings about infinities are switched off: a GPU does not warn either.
    """
    before = os.environ.get("TRITON_INTERPRET")
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        if before is None:
            os.environ.pop("TRITON_INTERPRET", None)
        else:
            os.environ["TRITON_INTERPRET"] = before


@lru_cache(maxsize=1)
def kernel_type() -> type:
    """The type that `@triton.jit` makes here. Raises `LessonError` if Triton is missing, or was imported too early."""
    if not has_triton():
        raise LessonError("Triton is not installed; it exists for Linux and WSL (pip install triton) and on Colab")
    with interpreting():
        probe = import_module("minillm.teaching.drives.triton_probe").probe
        library = import_module("triton.language")
    if type(probe) is not type(library.sum):  # `tl.sum` is a kernel too, made when Triton was imported
        raise LessonError(
            "Triton was imported before TRITON_INTERPRET=1 was set, so it can neither compile nor interpret; restart "
            "the notebook's kernel and run it from its first cell"
        )
    return type(probe)
