"""Guess why a function is wrong: its signature, the exercise's own diagnosis, or a planted mistake that acts alike."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from minillm.teaching.exercise import Attempt, Case, Exercise, Function
from minillm.teaching.trial import Outcome, call, difference


def likely_cause(
    exercise: Exercise, function: Function, cases: Sequence[Case], outcomes: Sequence[Outcome], failed: int
) -> str:
    """One sentence on case number `failed`, or "" when nothing is known.

    A planted mistake is named if it answers the failing case as the learner did; of several, the one that agrees with
    the learner on the most cases.
    """
    case, outcome = cases[failed], outcomes[failed]
    if isinstance(outcome.error, TypeError) and (mismatch := _signature_mismatch(exercise, function)):
        return mismatch
    if outcome.error is None and (cause := _own_diagnosis(exercise, case, outcome)):
        return cause
    best, most = "", 0
    for wrong in exercise.wrong:
        alike = [_alike(exercise, call(exercise, wrong.function, c), o) for c, o in zip(cases, outcomes, strict=True)]
        if alike[failed] and sum(alike) > most:
            best, most = f"it looks as if your function {wrong.mistake}", sum(alike)
    return best


def _own_diagnosis(exercise: Exercise, case: Case, outcome: Outcome) -> str:
    if exercise.diagnose is None:
        return ""
    expected = call(exercise, exercise.reference, case).value
    try:
        return exercise.diagnose(Attempt(case, expected, outcome.value)) or ""
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
