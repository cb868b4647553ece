"""The test that other graders run: one call that raises `AssertionError` with the whole report."""

from __future__ import annotations

from minillm.teaching.answer_key import AnswerKey
from minillm.teaching.check_function import check_function
from minillm.teaching.exercise import Function
from minillm.teaching.grading.hidden_cases import hidden_cases
from minillm.teaching.registry import find
from minillm.teaching.session import THE_REFERENCE


def assert_passes(name: str, function: Function, seed: str = "") -> None:
    """Check `function` against the exercise `name`; with a `seed` (hexadecimal), against its hidden cases too.

    Unlike `minillm grade`, this runs where the answers can be imported.

    Raises:
        AssertionError: it does not pass, or is the reference; the message is the learner's report.
        UnknownExerciseError: no exercise has this name.
    """
    visible = AnswerKey(find(name))
    if function is visible.exercise.reference:
        raise AssertionError(f"{name}: {THE_REFERENCE}")
    hidden = hidden_cases(visible, bytes.fromhex(seed), "class")
    result = check_function(visible.exercise, function, key=AnswerKey(visible.exercise, visible, hidden))
    if not result.passed:
        raise AssertionError(str(result))
