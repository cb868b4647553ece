"""Try a function on the cases of an exercise and say what came of it. Looks at nothing but its two arguments."""

from __future__ import annotations

import inspect
import sys
import traceback
from types import FrameType

from minillm.teaching.diagnosis import likely_cause
from minillm.teaching.exercise import Exercise, Function
from minillm.teaching.registry import find
from minillm.teaching.result import CheckResult, Counterexample, Status
from minillm.teaching.show import short, without_addresses
from minillm.teaching.trial import Outcome, call, difference, named_inputs


def grade(exercise: Exercise | str, function: Function) -> CheckResult:
    """Run `function` on every case and compare with the reference; the first case that fails is the counterexample.

    `function` is anything callable. What it raises (`Exception`s, so not the stop button) becomes part of the result.

    Raises:
        UnknownExerciseError: no exercise has this name.
    """
    exercise = find(exercise)
    cases = exercise.all_cases()
    outcomes = [call(exercise, function, case) for case in cases]
    for outcome in outcomes:
        if _is_stub(function, outcome.error):
            return CheckResult(exercise.name, Status.NOT_DONE, 0, len(cases), note=str(outcome.error))
    expected = [_must_answer(exercise, call(exercise, exercise.reference, case)) for case in cases]
    problems = [_problem(exercise, right, outcome) for right, outcome in zip(expected, outcomes, strict=True)]
    passed = problems.count("")
    if passed == len(cases):
        return CheckResult(exercise.name, Status.PASSED, passed, passed)
    failed = next(index for index, problem in enumerate(problems) if problem)
    case, outcome = cases[failed], outcomes[failed]
    shown = Counterexample(
        label=case.label,
        inputs={name: short(value) for name, value in named_inputs(exercise, case.args, case.kwargs).items()},
        expected=short(expected[failed]),
        got=_raised(outcome.error) if outcome.error else short(outcome.value),
        problem=problems[failed],
        where=_line_of(function, outcome.error),
        cause=likely_cause(exercise, function, cases, outcomes, failed),
    )
    return CheckResult(exercise.name, Status.FAILED, passed, len(cases), counterexample=shown)


def _must_answer(exercise: Exercise, outcome: Outcome) -> object:
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


def _problem(exercise: Exercise, expected: object, outcome: Outcome) -> str:
    """Why a case does not pass, in one sentence; "" if it does."""
    if outcome.error is not None:
        return "your function raised an error"
    wrong = difference(exercise, expected, outcome.value)
    if wrong is None and outcome.changed:
        return f"your function changed its input {', '.join(outcome.changed)}, which the caller still needs"
    return wrong or ""


def _raised(error: Exception) -> str:
    return f"{type(error).__name__}: {without_addresses(str(error).strip() or 'no message').splitlines()[0]}"


def _is_stub(function: Function, error: Exception | None) -> bool:
    """`raise NotImplementedError` written out in Python; torch raises the same type when an operator is missing."""
    if not isinstance(error, NotImplementedError):
        return False
    line = traceback.extract_tb(error.__traceback__)[-1].line
    return not line or "NotImplementedError" in line


def _line_of(function: Function, error: Exception | None) -> str:
    """The deepest line of the learner's own code in the traceback: code that shares the globals of `function`."""
    if error is None:
        return ""
    own = _globals_of(function)
    mine = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_globals is own]
    return _line(*mine[-1]) if mine else ""


def _globals_of(function: Function) -> dict[str, object] | None:
    plain = inspect.unwrap(function)
    if hasattr(plain, "__globals__"):
        return plain.__globals__
    module = sys.modules.get(getattr(plain, "__module__", None) or "")
    return vars(module) if module else None


def _line(frame: FrameType, number: int) -> str:
    code = frame.f_code
    text = traceback.FrameSummary(code.co_filename, number, code.co_name).line
    return f"line {number}, in {code.co_name}: {text}"
