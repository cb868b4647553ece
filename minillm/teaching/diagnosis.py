"""Guess why a function is wrong: its signature, the exercise's own diagnosis, or a planted mistake that acts alike.

A guess must fit every case that was tried: it explains each one that fails, and has nothing to say against those that
pass. If none does, a fact is told, which is no guess: what an error says of the failing line, a property that the first
failing answer breaks (`Exercise.otherwise`), or what all wrong answers have in common. If there is none, nothing is
said: a wrong cause sends the learner the wrong way.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence

from minillm.teaching.accident import PAST_THE_END
from minillm.teaching.answer_key import AnswerKey
from minillm.teaching.diagnosis_answers import common_fact
from minillm.teaching.diagnosis_errors import cause_of_error
from minillm.teaching.exercise import Attempt, Diagnose, Exercise, Function
from minillm.teaching.fence import OutOfBoundsError
from minillm.teaching.trial import Outcome, difference, out_of_memory


def likely_cause(key: AnswerKey, function: Function, outcomes: Sequence[Outcome], problems: Sequence[str]) -> str:
    """One sentence, or "" when nothing is known. `outcomes` and `problems` ("" for right) of the cases tried so far."""
    failed = next(index for index, problem in enumerate(problems) if problem)
    first = outcomes[failed]
    if isinstance(first.error, TypeError) and (mismatch := _signature_mismatch(key.exercise, function)):
        return mismatch
    return (
        _own_diagnosis(key, outcomes, problems)
        or _planted_mistake(key, outcomes, problems)
        or _by_error(first, function)
        or _by_changed_input(outcomes, problems)
        or _said(key, key.exercise.otherwise, failed, first)
        or _by_common_fact(key, outcomes, problems)
    )


def _own_diagnosis(key: AnswerKey, outcomes: Sequence[Outcome], problems: Sequence[str]) -> str:
    """What the exercise's `diagnose` says, if of all failing cases it says the same and of the others nothing."""
    if key.exercise.diagnose is None:
        return ""
    said: list[str] = []
    for index, (outcome, problem) in enumerate(zip(outcomes, problems, strict=True)):
        text = _said(key, key.exercise.diagnose, index, outcome)
        if bool(text) != bool(problem):
            return ""
        said += [text] if text else []
    return said[0] if len({re.sub(r"\d+", "", text) for text in said}) == 1 else ""


def _said(key: AnswerKey, diagnose: Diagnose | None, index: int, outcome: Outcome) -> str:
    if outcome.error is not None or diagnose is None:
        return ""
    try:
        return diagnose(Attempt(key.cases[index], key.expected(index), outcome.value)) or ""
    except Exception:  # an answer too odd for the diagnosis must still be reported
        return ""


def _planted_mistake(key: AnswerKey, outcomes: Sequence[Outcome], problems: Sequence[str]) -> str:
    """The first planted mistake that does what the learner's function does, in every case."""
    for number, wrong in enumerate(key.exercise.wrong):
        tried = enumerate(zip(outcomes, problems, strict=True))
        if all(_agrees(key, key.planted(number, index), index, *case) for index, case in tried):
            return f"it looks as if your function {wrong.mistake}"
    return ""


def _agrees(key: AnswerKey, planted: Outcome, index: int, learner: Outcome, problem: str) -> bool:
    if not problem:
        return planted.error is None and not planted.changed and not _differs(key, key.expected(index), planted.value)
    return alike(key.exercise, planted, learner)


def alike(exercise: Exercise, one: Outcome, other: Outcome) -> bool:
    """Whether two calls did the same: the same value, the same inputs changed, or the same error in the same words."""
    if one.error is not None or other.error is not None:
        return type(one.error) is type(other.error) and _words(one.error) == _words(other.error)
    return one.changed == other.changed and difference(exercise, one.value, other.value) is None


def _differs(key: AnswerKey, expected: object, got: object) -> bool:
    return difference(key.exercise, expected, got) is not None


def _words(error: BaseException | None) -> str:
    """The message, without the line of code that it may quote at its end and without the learner's names."""
    lines = str(error).strip().splitlines() or [""]
    return re.sub(r" \(in the line `.*`\)$|'\w+'", "", lines[0])


def _by_error(first: Outcome, function: Function) -> str:
    """What the error alone tells."""
    if isinstance(first.error, OutOfBoundsError):
        return _out_of_bounds(str(first.error))
    if out_of_memory(first.error):
        return "something grows without an end, or has one dimension too many"
    space = getattr(inspect.unwrap(function), "__globals__", None)
    return cause_of_error(first.error, lambda frame: frame.f_globals is space)


def _out_of_bounds(message: str) -> str:
    if "overwrote" in message:
        return (
            "numbers of an input are overwritten: does the store have the pointer of the result, and does it end there?"
        )
    if "before its first" in message:
        return "an index lies before the beginning of an array: is something subtracted that should be added?"
    return PAST_THE_END


def _by_changed_input(outcomes: Sequence[Outcome], problems: Sequence[str]) -> str:
    """Whether right answers fail only because an input was written to."""
    changed = {outcome.changed for outcome, problem in zip(outcomes, problems, strict=True) if problem}
    if len(changed) != 1 or not all("changed its input" in problem for problem in problems if problem):
        return ""
    [names] = changed
    return f"the answer is right, but your function writes into {' and '.join(names)}: work on a copy"


def _by_common_fact(key: AnswerKey, outcomes: Sequence[Outcome], problems: Sequence[str]) -> str:
    """What all answers that are wrong have in common, besides being wrong."""
    pairs = [
        (key.expected(index), outcome.value)
        for index, (outcome, problem) in enumerate(zip(outcomes, problems, strict=True))
        if problem and outcome.error is None
    ]
    try:
        return common_fact(pairs, key.exercise.parts)
    except Exception:  # answers too odd to be compared must still be reported
        return ""


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
