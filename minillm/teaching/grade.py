"""Run a function on the cases of an exercise and report the result."""

from __future__ import annotations

import inspect
import sys
import traceback
from dataclasses import replace

from minillm.teaching import crash_messages
from minillm.teaching.answer_key import AnswerKey
from minillm.teaching.attempt import Outcome, call, difference, named_inputs, out_of_memory
from minillm.teaching.diagnosis import likely_cause
from minillm.teaching.draw import as_html, as_text, cells_of, worth_drawing
from minillm.teaching.exercise import Exercise, Function
from minillm.teaching.fence import OutOfBoundsError
from minillm.teaching.focus import focus, in_words
from minillm.teaching.guard import ChildExit, Limits, OutOfTime, Send, can_guard, limited, run_guarded
from minillm.teaching.registry import find
from minillm.teaching.result import CheckResult, Counterexample, Status
from minillm.teaching.show import brief, short, without_addresses

LIMITS = Limits()


def grade(
    exercise: Exercise | str, function: Function, limits: Limits = LIMITS, key: AnswerKey | None = None
) -> CheckResult:
    """Run `function` on every case and compare with the reference; the first case that fails is the counterexample.

    `function` is any callable. An exception becomes part of the result; so does a crash, an endless loop or a memory
    blow-up, if the exercise is `guarded` and the system allows it. `key`: answers that were computed before.

    Raises:
        UnknownExerciseError: no exercise has this name.
    """
    key = key or AnswerKey(find(exercise))
    key.expected(0)  # here and not in the child, so that its imports and compiled code are kept
    check = _Check(key, function, limits)
    if key.exercise.guarded and can_guard():
        return check.result(run_guarded(check.run, check.receive, limits))
    return check.result(_run_here(check))


def _run_here(check: _Check) -> ChildExit | None:
    try:
        with limited(check.limits.seconds):
            check.run(check.receive)
    except OutOfTime:  # outside of the learner's function: in a comparison, or in a generator that `run_case` reads
        return ChildExit(out_of_time=True)
    return None


class _Check:
    """One check: `run` tries the cases, perhaps in a child process, and sends messages; `receive` and `result` turn
    these messages into a `CheckResult`."""

    def __init__(self, key: AnswerKey, function: Function, limits: Limits) -> None:
        self.key, self.function, self.limits = key, function, limits
        self._case, self._result = 0, None

    def run(self, send: Send) -> None:
        """Try case after case. Sends the index of each, the result when the first fails, and the result at the end.

        Stops when the function is out of time or memory, or wrote beyond an array.
        """
        outcomes: list[Outcome] = []
        problems: list[str] = []
        for index, case in enumerate(self.key.cases):
            send(index)
            outcome = call(self.key.exercise, self.function, case)
            if _is_stub(self.function, outcome.error):
                return send(CheckResult(self._name, Status.NOT_DONE, 0, self._count, note=str(outcome.error)))
            outcomes.append(outcome)
            problems.append(self._problem(index, outcome))
            if problems[-1] and not any(problems[:-1]):
                send(self._failure(outcomes, problems, ""))
            if isinstance(outcome.error, (OutOfTime, OutOfBoundsError)) or out_of_memory(outcome.error):
                break
        if not any(problems):
            return send(CheckResult(self._name, Status.PASSED, self._count, self._count))
        send(self._failure(outcomes, problems, likely_cause(self.key, self.function, outcomes, problems)))

    def receive(self, message: object) -> None:
        """Store a message of `run`."""
        if isinstance(message, CheckResult):
            self._result = message
        else:
            self._case = message

    def result(self, death: ChildExit | None) -> CheckResult:
        """The result that `run` sent; if the process died before that, its death is the failure."""
        if self._result is not None:
            return self._result
        assert death is not None, "a check that has finished has sent its result"
        shown = self._counterexample(
            self._case,
            got=crash_messages.got(death),
            problem=crash_messages.problem(death, self.limits),
            where=crash_messages.where(death, self.function),
            cause=crash_messages.cause(death),
        )
        return CheckResult(self._name, Status.FAILED, self._case, self._count, counterexample=shown)

    @property
    def _name(self) -> str:
        return self.key.exercise.name

    @property
    def _count(self) -> int:
        return len(self.key.cases)

    def _problem(self, index: int, outcome: Outcome) -> str:
        """Why a case does not pass, in one sentence; "" if it does."""
        if outcome.error is not None:
            return self._problem_of_error(outcome.error)
        wrong = difference(self.key.exercise, self.key.expected(index), outcome.value)
        if wrong is None and outcome.changed:
            return f"your function changed its input {', '.join(outcome.changed)}, which the caller still needs"
        return wrong or ""

    def _problem_of_error(self, error: BaseException) -> str:
        if isinstance(error, OutOfTime):
            return crash_messages.out_of_time(self.limits)
        if out_of_memory(error):
            return crash_messages.out_of_memory(self.limits)
        if isinstance(error, OutOfBoundsError):
            return f"your function {error}"
        if isinstance(error, SystemExit):
            return "your function ends the program (sys.exit, exit or quit)"
        return "your function raised an error"

    def _failure(self, outcomes: list[Outcome], problems: list[str], cause: str) -> CheckResult:
        index = next(i for i, problem in enumerate(problems) if problem)
        outcome = outcomes[index]
        shown = self._counterexample(
            index,
            got=_raised(outcome.error) if outcome.error else "",
            problem=problems[index],
            where=_line_of(self.function, outcome.error),
            cause=cause,
        )
        if outcome.error is None:
            expected = self.key.expected(index)
            picture, drawing = _drawn(self.key.exercise, expected, outcome.value)
            both = dict(zip(("expected", "got"), in_words(expected, outcome.value), strict=True))
            shown = replace(shown, picture=picture, drawing=drawing, **both)
        return CheckResult(self._name, Status.FAILED, problems.count(""), self._count, counterexample=shown)

    def _counterexample(self, index: int, got: str, problem: str, where: str, cause: str) -> Counterexample:
        case = self.key.cases[index]
        inputs = named_inputs(self.key.exercise, case.args, case.kwargs)
        return Counterexample(
            label=case.label,
            inputs={name: brief(value) for name, value in inputs.items()},
            expected=short(self.key.expected(index)),
            got=got,
            problem=problem,
            where=where,
            cause=cause,
        )


def _drawn(exercise: Exercise, expected: object, got: object) -> tuple[str, str]:
    """Expected and got as a picture, in text and in HTML; two empty texts if there is nothing to draw."""
    try:
        pair = exercise.draw(expected, got) if exercise.draw else focus(expected, got)[1:]
    except Exception:  # an answer that cannot be drawn must still be reported
        return "", ""
    cells = [cells_of(part) for part in pair or (None, None)]
    return (as_text(*cells), as_html(*cells)) if worth_drawing(*cells) else ("", "")


def _raised(error: BaseException) -> str:
    if isinstance(error, OutOfBoundsError):
        return "nothing that can be trusted"
    if isinstance(error, OutOfTime) or out_of_memory(error):
        return "nothing"
    return f"{type(error).__name__}: {without_addresses(str(error).strip() or 'no message').splitlines()[0]}"


def _is_stub(function: Function, error: BaseException | None) -> bool:
    """Whether a Python line raised `NotImplementedError`; torch raises the same type when an operator is missing."""
    if not isinstance(error, NotImplementedError):
        return False
    line = traceback.extract_tb(error.__traceback__)[-1].line
    return not line or "NotImplementedError" in line


def _line_of(function: Function, error: BaseException | None) -> str:
    """The deepest line of the learner's own code in the traceback: code that shares the globals of `function`."""
    if error is None:
        return ""
    own = _globals_of(function)
    mine = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_globals is own]
    if not mine:
        return ""
    frame, line = mine[-1]
    return crash_messages.line_in_words(frame.f_code.co_filename, line, frame.f_code.co_name)


def _globals_of(function: Function) -> dict[str, object] | None:
    plain = inspect.unwrap(function)
    if hasattr(plain, "__globals__"):
        return plain.__globals__
    module = sys.modules.get(getattr(plain, "__module__", None) or "")
    return vars(module) if module else None
