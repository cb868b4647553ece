"""The last hint of an exercise: its reference, as the body of the function to write."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable


def body(reference: Callable[..., object]) -> str:
    """The lines of a function below its docstring, on lines of their own, without indentation."""
    source = textwrap.dedent(inspect.getsource(reference))
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    first = function.body[1] if ast.get_docstring(function) else function.body[0]
    return "\n" + textwrap.dedent("\n".join(source.splitlines()[first.lineno - 1 :]))
