"""Guess why a function is wrong: its signature, the exercise's own diagnosis, or a planted mistake that acts alike."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from minillm.teaching.exercise import Attempt, Case, Diagnose, Exercise, Function
from minillm.teaching.trial import Outcome, call, difference


def likely_cause(
    exercise: Exercise, function: Function, cases: Sequence[Case], outcomes: Sequence[Outcome], failed: int
) -> str:
    """One sentence on case number `failed`, or "" when nothing is known.

    The exercise's own diagnosis comes first. A planted mistake is named if it answers every case as the learner did.
    Where none does, `exercise.otherwise` says what it can.
    """
    case, outcome = cases[failed], outcomes[failed]
    if isinstance(outcome.error, TypeError) and (mismatch := _signature_mismatch(exercise, function)):
        return mismatch
    if outcome.error is None and (cause := _ask(exercise, exercise.diagnose, case, outcome)):
        return cause
    for wrong in exercise.wrong:
        answers = (call(exercise, wrong.function, c) for c in cases)
        if all(_alike(exercise, planted, own) for planted, own in zip(answers, outcomes, strict=True)):
            return f"it looks as if your function {wrong.mistake}"
    return _ask(exercise, exercise.otherwise, case, outcome) if outcome.error is None else ""


def _ask(exercise: Exercise, diagnose: Diagnose | None, case: Case, outcome: Outcome) -> str:
    if diagnose is None:
        return ""
    expected = call(exercise, exercise.reference, case).value
    try:
        return diagnose(Attempt(case, expected, outcome.value)) or ""
    except Exception:  # an answer too odd for the diagnosis must still be reported
        return ""


def _alike(exercise: Exercise, planted: Outcome, learner: Outcome) -> bool:
    if planted.error is not None or learner.error is not None:
        return type(planted.error) is type(learner.error)
    return planted.changed == learner.changed and difference(exercise, planted.value, learner.value) is None


def _signature_mismatch(exercise: Exercise, function: Function) -> str:
    """Whether the learner's function cannot be called with the reference's parameters."""
    asked = inspect.signature(exercise.reference).parameters.values()
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature
        return ""
    try:
        signature.bind(
            *[p.name for p in asked if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)],
            **{p.name: None for p in asked if p.kind is p.KEYWORD_ONLY},
        )
    except TypeError:
        names = ", ".join(parameter.name for parameter in asked)
        return f"your function takes ({', '.join(signature.parameters)}), but it is called with ({names})"
    return ""
