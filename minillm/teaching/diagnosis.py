"""Guess why a function is wrong: its signature, the exercise's own diagnosis, or a planted mistake that answers alike.

A guess must fit every case that was tried: it explains each failing case and does not apply to a passing one. If no
guess fits, a fact is reported instead: what an error says about the failing line, a property that the first failing
answer violates (`Exercise.fallback_diagnosis`), or what all wrong answers have in common. If there is no such fact
either, no cause is reported: a wrong cause would mislead the learner.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from minillm.teaching.answer_key import AnswerKey
from minillm.teaching.attempt import Outcome, difference, named_inputs
from minillm.teaching.compare import exact
from minillm.teaching.crash_messages import PAST_THE_END
from minillm.teaching.diagnosis_answers import common_fact, same_structure
from minillm.teaching.exercise import Attempt, Diagnose, Exercise
from minillm.teaching.raised import Raised, Sort

LOOKS_AS_IF = "it looks as if your function "
"""Before the description of a planted mistake."""


def likely_cause(key: AnswerKey, outcomes: Sequence[Outcome], problems: Sequence[str]) -> str:
    """The likely cause in one sentence, or "". `outcomes` and `problems` ("" for right): of the cases tried so far."""
    failed = next(index for index, problem in enumerate(problems) if problem)
    first = outcomes[failed]
    if first.error is not None and first.error.mismatch:
        return first.error.mismatch
    return (
        _own_diagnosis(key, outcomes, problems)
        or _planted_mistake(key, outcomes, problems)
        or _by_error(first.error)
        or ("" if first.error is not None else _fact(key, outcomes, problems, failed))
    )


def _fact(key: AnswerKey, outcomes: Sequence[Outcome], problems: Sequence[str], failed: int) -> str:
    """What is known of wrong answers where the first case that fails, `failed`, has one and no error.

    The exercise is not asked about an answer of another type that holds as many numbers: it would blame the shape or
    the numbers.
    """
    other_type = _is_of_another_type(key.expected(failed), outcomes[failed].value, problems[failed])
    fallback = None if other_type else key.exercise.fallback_diagnosis
    return (
        _by_changed_input(outcomes[failed], problems[failed])
        or _by_unchanged_input(key, outcomes, problems)
        or _run_diagnosis(key, fallback, failed, outcomes[failed])
        or _by_common_fact(key, outcomes, problems)
    )


def _is_of_another_type(expected: object, got: object, problem: str) -> bool:
    """Whether the problem is a type, of the answer or of a part of it, and nothing is missing or too much."""
    try:
        return problem.startswith("type") and same_structure(expected, got)
    except Exception:  # an answer that cannot be read must still be reported
        return False


def _own_diagnosis(key: AnswerKey, outcomes: Sequence[Outcome], problems: Sequence[str]) -> str:
    """The result of the exercise's `diagnose`, if it is the same (but for numbers) for all failing cases, and none for
    the passing ones."""
    if key.exercise.diagnose is None:
        return ""
    causes: list[str] = []
    for index, (outcome, problem) in enumerate(zip(outcomes, problems, strict=True)):
        cause = _run_diagnosis(key, key.exercise.diagnose, index, outcome)
        if bool(cause) != bool(problem):
            return ""
        causes += [cause] if cause else []
    return causes[0] if len({re.sub(r"\d+", "", cause) for cause in causes}) == 1 else ""


def _run_diagnosis(key: AnswerKey, diagnose: Diagnose | None, index: int, outcome: Outcome) -> str:
    if outcome.error is not None or diagnose is None:
        return ""
    try:
        return diagnose(Attempt(key.cases[index], key.expected(index), outcome.value)) or ""
    except Exception:  # an answer that `diagnose` fails on must still be reported
        return ""


def _planted_mistake(key: AnswerKey, outcomes: Sequence[Outcome], problems: Sequence[str]) -> str:
    """The first planted mistake with the same outcome as the learner's function in every case.

    None if every answer is NaN throughout: many mistakes give that.
    """
    if all(problems) and all(_all_nan(outcome.value) for outcome in outcomes):
        return ""
    for number, wrong in enumerate(key.exercise.wrong):
        tried = enumerate(zip(outcomes, problems, strict=True))
        if all(_agrees(key, key.planted(number, index), index, *case) for index, case in tried):
            return LOOKS_AS_IF + wrong.description
    return ""


def _agrees(key: AnswerKey, planted: Outcome, index: int, learner: Outcome, problem: str) -> bool:
    if not problem:
        return planted.error is None and not planted.changed and not _differs(key, key.expected(index), planted.value)
    return alike(key.exercise, planted, learner)


def _all_nan(value: object) -> bool:
    """Whether a float, a tensor, or every part of an answer is NaN throughout."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple):
        return bool(value) and all(map(_all_nan, value))
    if isinstance(value, Tensor):
        return (
            value.layout is torch.strided
            and value.is_floating_point()
            and value.numel() > 0
            and bool(value.isnan().all())
        )
    return isinstance(value, float) and math.isnan(value)


def alike(exercise: Exercise, one: Outcome, other: Outcome) -> bool:
    """Whether two calls had the same outcome: the same value and changed inputs, or the same error and message."""
    if one.error is not None or other.error is not None:
        return _shown(one.error) == _shown(other.error)
    return one.changed == other.changed and difference(exercise, one.value, other.value) is None


def _differs(key: AnswerKey, expected: object, got: object) -> bool:
    return difference(key.exercise, expected, got) is not None


def _shown(error: Raised | None) -> tuple[str, str]:
    """The kind, and the message's first line without the line of code that it may quote at its end and without quoted
    names."""
    if error is None:
        return "", ""
    lines = error.message.strip().splitlines() or [""]
    return error.kind, re.sub(r" \(in the line `.*`\)$|'\w+'", "", lines[0])


def _by_error(error: Raised | None) -> str:
    """The cause that the error itself shows."""
    if error is None:
        return ""
    if error.sort is Sort.BOUNDS:
        return _out_of_bounds(error.message)
    if error.sort is Sort.MEMORY:
        return "something grows without end, or has one dimension too many"
    return error.cause


def _out_of_bounds(message: str) -> str:
    if "overwrote" in message:
        return "an input is overwritten: does the store use the result's pointer, and does it stop at the result's end?"
    if "before its first" in message:
        return "an index lies before the beginning of an array: is something subtracted that should be added?"
    return PAST_THE_END


def _by_changed_input(outcome: Outcome, problem: str) -> str:
    """The cause if the answer is right and fails only because an input was changed."""
    if "changed its input" not in problem:
        return ""
    return f"the answer is right here, but your function writes into {' and '.join(outcome.changed)}: work on a copy"


def _by_unchanged_input(key: AnswerKey, outcomes: Sequence[Outcome], problems: Sequence[str]) -> str:
    """The cause if an input that must be changed in place never is in the cases that fail."""
    failed = [index for index, problem in enumerate(problems) if problem]
    if any(outcomes[index].error is not None for index in failed):
        return ""
    for name in key.exercise.in_place:
        part = f"{name} after the call"
        before = [named_inputs(key.exercise, key.cases[index].args)[name] for index in failed]
        pairs = [(key.expected(index)[part], outcomes[index].value[part]) for index in failed]  # type: ignore[index]
        if all(exact(b, got) is None and exact(b, e) for b, (e, got) in zip(before, pairs, strict=True)):
            return f"{name} must be changed in place, and is not (`{name} = …` leaves the caller's as it was)"
    return ""


def _by_common_fact(key: AnswerKey, outcomes: Sequence[Outcome], problems: Sequence[str]) -> str:
    """A property that all wrong answers share."""
    pairs = [
        (key.expected(index), outcome.value)
        for index, (outcome, problem) in enumerate(zip(outcomes, problems, strict=True))
        if problem and outcome.error is None
    ]
    try:
        return common_fact(pairs, key.exercise.parts, compare=key.exercise.compare)
    except Exception:  # answers that cannot be compared must still be reported
        return ""
