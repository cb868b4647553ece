"""The last hint is the whole solution: put under the signature, it passes the check."""

from __future__ import annotations

import inspect
import textwrap

import pytest

from minillm.teaching.check_function import check_function
from minillm.teaching.exercise import Exercise
from minillm.teaching.registry import exercises_of, module_names

LESSONS = ("l04", "l05", "l06", "l07", "l10", "l17")
WITH_BODIES = [exercise for module in module_names() if module.startswith(LESSONS) for exercise in exercises_of(module)]


@pytest.mark.parametrize("exercise", WITH_BODIES, ids=lambda exercise: exercise.name)
def test_last_hint_passes_the_check(exercise: Exercise):
    assert len(exercise.hints) == 4
    parameters = ", ".join(inspect.signature(exercise.reference).parameters)
    written = f"def answer({parameters}):\n{textwrap.indent(exercise.hints[-1].strip(), '    ')}"
    namespace = dict(exercise.reference.__globals__)
    exec(written, namespace)
    assert check_function(exercise, namespace["answer"]).passed
