"""The answers of an exercise's reference and of its planted mistakes; each is computed once, on first use."""

from __future__ import annotations

from collections.abc import Sequence

from minillm.errors import LessonError
from minillm.teaching.attempt import Outcome, call
from minillm.teaching.exercise import Case, Exercise


class AnswerKey:
    """New cases of `exercise`, and the answers to them.

    With `known`, its cases, followed by `more` cases; the answers to the first are computed and kept there.
    """

    def __init__(self, exercise: Exercise, known: AnswerKey | None = None, more: Sequence[Case] = ()) -> None:
        self.exercise, self._known = exercise, known
        self.cases = (*(known.cases if known else exercise.all_cases()), *more)
        self._expected: dict[int, object] = {}
        self._planted: dict[tuple[int, int], Outcome] = {}

    def expected(self, index: int) -> object:
        """The reference's answer to case `index`. Raises what the reference raises: then the exercise is wrong."""
        if self._known and index < len(self._known.cases):
            return self._known.expected(index)
        if index not in self._expected:
            outcome = call(self.exercise, self.exercise.reference, self.cases[index])
            if outcome.error is not None:
                raise outcome.error.exception or LessonError(outcome.error.message)
            self._expected[index] = outcome.value
        return self._expected[index]

    def planted(self, number: int, index: int) -> Outcome:
        """The outcome of wrong version `number` on case `index`."""
        if self._known and index < len(self._known.cases):
            return self._known.planted(number, index)
        if (number, index) not in self._planted:
            wrong = self.exercise.wrong[number]
            self._planted[number, index] = call(self.exercise, wrong.function, self.cases[index])
        return self._planted[number, index]

    def fill(self) -> None:
        """Compute every answer, so that forked processes need not."""
        for index in range(len(self.cases)):
            self.expected(index)
            for number in range(len(self.exercise.wrong)):
                self.planted(number, index)
