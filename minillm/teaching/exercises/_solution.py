"""The last hint of an exercise: the body of its reference function."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable


def body(reference: Callable[..., object]) -> str:
    """Return the lines of a function after its docstring, unindented, with a line break in front."""
    source = textwrap.dedent(inspect.getsource(reference))
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    first = function.body[1] if ast.get_docstring(function) else function.body[0]
    return "\n" + textwrap.dedent("\n".join(source.splitlines()[first.lineno - 1 :]))
