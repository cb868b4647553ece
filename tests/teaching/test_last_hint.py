"""The last hint is the whole solution: put under the signature, it passes the check, also as a notebook shows it."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numba import njit
from numba.core.dispatcher import Dispatcher

from minillm.ops.cpu.compiled import OPTIONS
from minillm.teaching.check_function import check_function
from minillm.teaching.drives.lazy_kernel import LazyKernel
from minillm.teaching.drives.triton_kernels import kernel_of_text
from minillm.teaching.exercise import Exercise
from minillm.teaching.hint_text import Hint
from minillm.teaching.registry import every

ROOT = Path(__file__).parents[2]
ALL = every()


@pytest.mark.parametrize("exercise", ALL, ids=lambda exercise: exercise.name)
def test_last_hint_passes_the_check(exercise: Exercise):
    assert len(exercise.hints) == 4
    result = check_function(exercise, _written(exercise, _code_in_a_notebook(exercise.hints[-1])))
    assert result.passed, str(result)


def _written(exercise: Exercise, code: str) -> Any:
    """The function with `code` under its signature; a kernel is compiled as the reference is."""
    reference = exercise.reference
    if isinstance(reference, LazyKernel):
        return kernel_of_text(_kernel_with(reference.fn, code), exercise.function_name, reference.fn.__globals__)
    compiled = isinstance(reference, Dispatcher)
    parameters = ", ".join(inspect.signature(reference).parameters)
    namespace = dict((reference.py_func if compiled else reference).__globals__) | _given(exercise)
    exec(f"def answer({parameters}):\n{textwrap.indent(code, '    ')}", namespace)
    return njit(**OPTIONS)(namespace["answer"]) if compiled else namespace["answer"]


def _given(exercise: Exercise) -> dict[str, Any]:
    """What a notebook defines in front of a function, and the reference has inside."""
    if exercise.name != "l15.attribute":
        return {}
    cells = ast.parse((ROOT / "solutions" / "15_under_100_ms.py").read_text(encoding="utf-8")).body
    [table] = [c for c in cells if isinstance(c, ast.Assign) and ast.unparse(c.targets[0]) == "PART_OF"]
    return {"PART_OF": ast.literal_eval(table.value)}


def _kernel_with(right: Callable[..., Any], code: str) -> str:
    """The source of a Triton kernel with `code` in place of what a learner writes. The lines before the first line of
    `code`, those after its last, and the loop that a hint leaves out are given in the notebook."""
    source = textwrap.dedent(inspect.getsource(right))
    [function] = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef) and ast.get_docstring(function)
    top = function.body[1].lineno - 1
    [loop] = [step for step in function.body if isinstance(step, ast.For)] or [None]
    lines = source.splitlines()
    stripped, hint = [line.strip() for line in lines], code.splitlines()
    first = stripped.index(hint[0], top) if hint[0] in stripped[top:] else top
    last = stripped.index(hint[-1], first)
    indent = lines[first][: len(lines[first]) - len(stripped[first])]
    new = textwrap.indent(code, indent).splitlines()
    if loop is not None and f"{indent}… the loop …" in new:
        at = new.index(f"{indent}… the loop …")
        new[at : at + 1] = lines[loop.lineno - 1 : loop.end_lineno]
    return "\n".join([*lines[:first], *new, *lines[last + 1 :]]) + "\n"


@pytest.mark.parametrize("exercise", ALL, ids=lambda exercise: exercise.name)
def test_a_notebook_shows_every_line_of_a_last_hint_as_it_is_written(exercise: Exercise):
    lines = exercise.hints[-1].strip().splitlines()
    shown = _code_in_a_notebook(exercise.hints[-1]).splitlines()
    assert shown == lines or (shown == lines[1:] and lines[0].startswith("The whole of it"))


def _code_in_a_notebook(text: str) -> str:
    """The code that a notebook shows for the text of a hint: in a block, or in one line of Markdown."""
    shown = Hint("Hint 4", text)._repr_markdown_()
    block = re.search(r"```python\n(.*)\n```$", shown, re.DOTALL)
    return block[1] if block else re.sub(r"\\(.)", r"\1", shown.partition(": ")[2])
