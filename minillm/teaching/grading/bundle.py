"""The source of a function with everything that it needs, as a student would have typed it into a cell.

References and planted mistakes of the exercises are functions: edits of a reference, lambdas, closures, kernels. A
notebook needs their text.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minillm.teaching.grading.program import global_names
from minillm.teaching.source import plain_function

ANSWERS = "minillm.teaching.exercises."
PLAIN = (int, float, complex, str, bytes, bool, type(None))


class NotBundled(ValueError):
    """A function has no text of its own, or needs a value that has none."""


def bundle(function: Any, name: str, reserved: Collection[str] = ()) -> str:
    """The cell that defines `function` under `name`. `reserved`: names that no helper may have, of other exercises.

    Raises:
        NotBundled: it cannot be written as a cell.
    """
    parts: dict[str, str] = {}
    _add(_plain(function), name, parts, top=name)
    for other in reserved:
        if other != name and other in parts:
            parts = {key: _with_other_name(text, other) for key, text in parts.items()}
    return "from __future__ import annotations\n\n" + "\n\n".join(parts.values()) + "\n"


def _with_other_name(text: str, name: str) -> str:
    """`text` with `right_NAME` for `NAME`; an import keeps what it imports."""
    where = rf"(?<= as ){name}$" if text.startswith("from ") else rf"(?<![.\w]){name}\b"
    return re.sub(where, f"right_{name}", text)


def _plain(function: Any) -> Any:
    return plain_function(getattr(function, "kernel", function))  # lessons 08 and 09 make a kernel when asked


def _add(function: Any, name: str, parts: dict[str, str], top: str) -> None:
    if not isinstance(function, types.FunctionType):
        raise NotBundled(f"{type(function).__name__} has no source")
    closure = inspect.getclosurevars(function).nonlocals
    other = _plain({**function.__globals__, **closure}.get(top))
    right = f"right_{top}"
    calls_right = other is not None and other is not function and top in _names_of(function)
    text = _lambda(function, name) if function.__name__ == "<lambda>" else _renamed(function, name)
    parts[name] = ""  # its place: what it needs comes before it
    if calls_right:  # a mistake that calls the reference, which has the same name
        text = re.sub(rf"(?<!def )\b{top}\b(?! = lambda)", right, text)
        if right not in parts:
            _add(other, right, parts, top=right)
    for needed in sorted(_names(text)):
        if needed in (name, right, function.__name__) or needed in parts:
            continue
        if needed in closure:
            _add_value(closure[needed], needed, parts, top)
        elif needed in function.__globals__:
            _add_value(function.__globals__[needed], needed, parts, top)
        elif not hasattr(builtins, needed):
            raise NotBundled(f"{needed} is nowhere")
    del parts[name]
    parts[name] = text


def _add_value(value: Any, name: str, parts: dict[str, str], top: str) -> None:
    plain = _plain(value)
    home = getattr(plain, "__module__", None) or ""
    if isinstance(value, types.ModuleType):
        parts[name] = f"import {value.__name__} as {name}"
    elif isinstance(plain, types.FunctionType) and (home.startswith(ANSWERS) or "<locals>" in plain.__qualname__):
        _add(plain, name, parts, top)
    elif isinstance(value, torch.dtype):
        parts[name] = f"import torch\n{name} = {value}"
    elif isinstance(value, torch.Tensor):
        parts[name] = f"import torch\n{name} = torch.tensor({value.tolist()}, dtype={value.dtype})"
    elif _is_plain(value):
        parts[name] = f"inf = float('inf')\n{name} = {value!r}" if "inf" in repr(value) else f"{name} = {value!r}"
    elif isinstance(value, np.generic):
        parts[name] = f"import numpy\n{name} = numpy.{value.dtype}({value.item()!r})"
    elif found := _importable(value, name):
        parts[name] = found
    elif home and getattr(sys.modules.get(home), getattr(value, "__name__", ""), None) is value:
        if home.startswith(ANSWERS):
            raise NotBundled(f"{name} is defined beside the answers")
        parts[name] = f"from {home} import {value.__name__} as {name}"
    else:
        raise NotBundled(f"{name} is a {type(value).__name__}")


def _importable(value: Any, name: str) -> str:
    """The import of a value that some module of the engine has under this name; "" if none has."""
    for module in [m for m in sorted(sys.modules) if m.startswith("minillm.") and not m.startswith("minillm.teaching")]:
        if vars(sys.modules[module]).get(name) is value:
            return f"from {module} import {name} as {name}"
    return ""


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return type(value) in PLAIN


def _renamed(function: types.FunctionType, name: str) -> str:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError) as problem:
        raise NotBundled(str(problem)) from None
    [node] = [node for node in tree.body if isinstance(node, ast.FunctionDef)] or [None]
    if node is None:
        raise NotBundled("no def")
    for call in ast.walk(node):
        if isinstance(call, ast.Name) and call.id == node.name:
            call.id = name
    node.name = name
    return ast.unparse(node)


def _lambda(function: types.FunctionType, name: str) -> str:
    """`name = lambda …`, found in its file by line and code."""
    file = Path(function.__code__.co_filename)
    if not file.exists():
        raise NotBundled("a lambda without a file")
    mine, found = function.__code__, []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Lambda) and node.lineno == mine.co_firstlineno:
            codes = compile(ast.Expression(node), "x", "eval").co_consts
            made = next(code for code in codes if isinstance(code, types.CodeType))
            if (made.co_consts, made.co_varnames) == (mine.co_consts, mine.co_varnames):
                found.append(node)
    if len(found) != 1:
        raise NotBundled(f"{len(found)} lambdas fit")
    return f"{name} = {ast.unparse(found[0])}"


def _names_of(function: types.FunctionType) -> set[str]:
    return {*global_names(function.__code__), *function.__code__.co_freevars}


def _names(text: str) -> set[str]:
    code = compile("from __future__ import annotations\n" + text, "x", "exec")
    return {name for name in global_names(code) if not name.startswith("__")}
