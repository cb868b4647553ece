"""The last hint is the whole solution: put under the signature, it passes the check, also as a notebook shows it."""

from __future__ import annotations

import inspect
import re
import textwrap

import pytest

from minillm.teaching.check_function import check_function
from minillm.teaching.exercise import Exercise
from minillm.teaching.hint_text import Hint
from minillm.teaching.registry import exercises_of, module_names

LESSONS = ("l04", "l05", "l06", "l07", "l10", "l17")
ALL = [exercise for module in module_names() for exercise in exercises_of(module)]
WITH_BODIES = [exercise for exercise in ALL if exercise.name.startswith(LESSONS)]


@pytest.mark.parametrize("exercise", WITH_BODIES, ids=lambda exercise: exercise.name)
def test_last_hint_passes_the_check(exercise: Exercise):
    assert len(exercise.hints) == 4
    parameters = ", ".join(inspect.signature(exercise.reference).parameters)
    written = f"def answer({parameters}):\n{textwrap.indent(_code_in_a_notebook(exercise.hints[-1]), '    ')}"
    namespace = dict(exercise.reference.__globals__)
    exec(written, namespace)
    assert check_function(exercise, namespace["answer"]).passed


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
