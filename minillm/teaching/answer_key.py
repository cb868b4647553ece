"""What an exercise's reference and its planted mistakes answer, each worked out once, when it is first asked for."""

from __future__ import annotations

from minillm.teaching.exercise import Exercise
from minillm.teaching.trial import Outcome, call


class AnswerKey:
    """The cases of `exercise`, freshly made, with the answers to them."""

    def __init__(self, exercise: Exercise) -> None:
        self.exercise = exercise
        self.cases = exercise.all_cases()
        self._expected: dict[int, object] = {}
        self._planted: dict[tuple[int, int], Outcome] = {}

    def expected(self, index: int) -> object:
        """What the reference answers to case `index`. Raises what it raises: then the exercise is wrong."""
        if index not in self._expected:
            outcome = call(self.exercise, self.exercise.reference, self.cases[index])
            if outcome.error is not None:
                raise outcome.error
            self._expected[index] = outcome.value
        return self._expected[index]

    def planted(self, number: int, index: int) -> Outcome:
        """What the wrong version `number` does with case `index`."""
        if (number, index) not in self._planted:
            wrong = self.exercise.wrong[number]
            self._planted[number, index] = call(self.exercise, wrong.function, self.cases[index])
        return self._planted[number, index]

    def fill(self) -> None:
        """Work out every answer, so that forked processes need not."""
        for index in range(len(self.cases)):
            self.expected(index)
            for number in range(len(self.exercise.wrong)):
                self.planted(number, index)
