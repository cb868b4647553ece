"""Compare what a function did with the answers, and say what is wrong: from outcomes alone, wherever it ran."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from minillm.teaching import crash_messages
from minillm.teaching.answer_key import AnswerKey
from minillm.teaching.attempt import Outcome, difference, named_inputs
from minillm.teaching.diagnosis import likely_cause
from minillm.teaching.draw import as_html, as_text, cells_of, worth_drawing
from minillm.teaching.exercise import Exercise
from minillm.teaching.focus import focus, in_words
from minillm.teaching.guard import ChildExit, Limits
from minillm.teaching.raised import Raised, Sort
from minillm.teaching.registry import has_exercise
from minillm.teaching.result import CheckResult, Counterexample, Status
from minillm.teaching.show import brief, short, without_addresses

STUB = re.compile(r"write (\w+) (?:here|in place of)\b")
"""The beginning of a stub's message, in lessons of today and of before (`notebook._stub`)."""


class Judge:
    """Turns the outcomes of one function into a `CheckResult`. `limits`: those that the function ran under."""

    def __init__(self, key: AnswerKey, limits: Limits) -> None:
        self.key, self.limits = key, limits
        self._name, self._count = key.exercise.name, len(key.cases)

    def problem(self, index: int, outcome: Outcome) -> str:
        """Why case `index` does not pass, in one sentence; "" if it does."""
        if outcome.error is not None:
            return self._problem_of_error(outcome.error)
        wrong = difference(self.key.exercise, self.key.expected(index), outcome.value)
        if wrong is None and outcome.changed:
            return f"your function changed its input {', '.join(outcome.changed)}, which the caller still needs"
        return wrong or ""

    def result(self, outcomes: Sequence[Outcome], problems: Sequence[str] | None = None) -> CheckResult:
        """The result of a check that ended by itself. `outcomes`: of the first cases, of all unless one `ends_check` or
        is a stub; `problems`: theirs, if they are known."""
        last = outcomes[-1].error if outcomes else None
        if last is not None and last.sort is Sort.STUB:
            return CheckResult(self._name, Status.NOT_DONE, 0, self._count, note=self._note_of_stub(last.message))
        if problems is None:
            problems = [self.problem(index, outcome) for index, outcome in enumerate(outcomes)]
        if not any(problems):
            return CheckResult(self._name, Status.PASSED, self._count, self._count)
        return self.failure(outcomes, problems, likely_cause(self.key, outcomes, problems))

    def failure(self, outcomes: Sequence[Outcome], problems: Sequence[str], cause: str = "") -> CheckResult:
        """The result for outcomes with at least one problem."""
        index = next(i for i, problem in enumerate(problems) if problem)
        outcome = outcomes[index]
        shown = self._counterexample(
            index,
            got=_raised(outcome.error) if outcome.error else "",
            problem=problems[index],
            where=outcome.error.where if outcome.error else "",
            cause=cause,
        )
        if outcome.error is None:
            expected, compare = self.key.expected(index), self.key.exercise.compare
            picture, drawing = _drawn(self.key.exercise, expected, outcome.value)
            both = dict(zip(("expected", "got"), in_words(expected, outcome.value, compare), strict=True))
            shown = replace(shown, picture=picture, drawing=drawing, **both)
        return CheckResult(self._name, Status.FAILED, list(problems).count(""), self._count, counterexample=shown)

    def died(self, index: int, death: ChildExit, own: set[str]) -> CheckResult:
        """The result for a function whose process died in case `index`. `own`: the files with the learner's code."""
        shown = self._counterexample(
            index,
            got=crash_messages.got(death),
            problem=crash_messages.problem(death, self.limits),
            where=crash_messages.where(death, own),
            cause=crash_messages.cause(death),
        )
        return CheckResult(self._name, Status.FAILED, index, self._count, counterexample=shown)

    def _note_of_stub(self, message: str) -> str:
        """What is left to write, if a stub raised `message`: perhaps that of another exercise, which this one calls."""
        lesson, _, own = self._name.partition(".")
        stub = STUB.match(message)
        called = stub[1] if stub else own
        if called != own and has_exercise(f"{lesson}.{called}"):
            instead = f'call what use("{lesson}.{called}") returns'
            return f"it calls {called}, which is not written yet: write it, or {instead}"
        return message

    def _problem_of_error(self, error: Raised) -> str:
        if error.sort is Sort.TIME:
            return crash_messages.out_of_time(self.limits)
        if error.sort is Sort.MEMORY:
            return crash_messages.out_of_memory(self.limits)
        if error.sort is Sort.BOUNDS:
            return f"your function {error.message}"
        if error.sort is Sort.EXIT:
            return "your function ends the program (sys.exit, exit or quit)"
        if error.sort is Sort.PROCESSES:
            return "your function starts too many processes"
        return "your function raised an error"

    def _counterexample(self, index: int, got: str, problem: str, where: str, cause: str) -> Counterexample:
        case = self.key.cases[index]
        inputs = named_inputs(self.key.exercise, case.args)
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
        pair = exercise.draw(expected, got) if exercise.draw else focus(expected, got, exercise.compare)[1:]
        cells = [cells_of(part) for part in pair or (None, None)]
    except Exception:  # an answer that cannot be drawn must still be reported
        return "", ""
    return (as_text(*cells), as_html(*cells)) if worth_drawing(*cells) else ("", "")


def _raised(error: Raised) -> str:
    if error.sort is Sort.BOUNDS:
        return "nothing that can be trusted"
    if error.sort in (Sort.TIME, Sort.MEMORY):
        return "nothing"
    return f"{error.kind}: {without_addresses(error.message.strip() or 'no message').splitlines()[0]}"
