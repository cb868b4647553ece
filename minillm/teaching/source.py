"""The source text of a reference: edit it to plant a mistake, or show it as the last hint."""

from __future__ import annotations
import __future__

import inspect
import linecache
import textwrap
import zlib
from collections.abc import Mapping
from types import CodeType
from typing import Any

from minillm.errors import LessonError
from minillm.teaching.exercise import Function, WrongVersion

Edits = Mapping[str, tuple[str, str]]
"""Planted mistakes, each one edit of a right answer: {what it does wrong: (right, wrong)}."""


def edited(reference: Function, *edits: tuple[str, str]) -> Function:
    """`reference` with each `(old, new)` replaced in its body: a mistake is written as its difference from the answer.

        edited(causal_attention, (".triu(1)", ".triu(2)"))  # attends to one token too many

    The result has the globals of `reference`, so `reference` must be defined at the top level of a module.

    Raises:
        LessonError: `old` does not occur exactly once, so the edit would do nothing or too much.
    """
    head, quotes, body = inspect.getsource(reference).rpartition('"""')  # the docstring stays as it is
    for old, new in edits:
        found = body.count(old)
        if found != 1:
            raise LessonError(f"{reference.__name__}: {old!r} occurs {found} times; an edit needs exactly one")
        body = body.replace(old, new)
    text = head + quotes + body
    file = f"<{reference.__name__} with a mistake, {zlib.crc32(text.encode()):08x}>"
    made: dict[str, Function] = {}
    exec(compiled(text, file), reference.__globals__, made)
    return made[reference.__name__]


def compiled(text: str, file: str) -> CodeType:
    """The compiled text, whose lines `inspect.getsource`, Triton and tracebacks find under the name `file`."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return compile(text, file, "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True)


def plain_function(function: Any) -> Any:
    """The Python function (or class) under a Triton kernel or a numba function."""
    return inspect.unwrap(getattr(function, "py_func", getattr(function, "fn", function)))


def wrong_versions(reference: Function, edits: Edits) -> tuple[WrongVersion, ...]:
    """A planted mistake for each of `edits`, made from `reference`."""
    return tuple(WrongVersion(mistake, edited(reference, edit)) for mistake, edit in edits.items())


def body_of(reference: Function) -> str:
    """The lines of a function after its docstring, without indentation, to be shown as a hint."""
    lines = inspect.getsource(reference).split('"""')[-1].strip("\n")
    return "\n" + textwrap.dedent(lines).rstrip()
