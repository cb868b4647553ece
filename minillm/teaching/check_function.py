"""Run a function on the cases of an exercise and report the result."""

from __future__ import annotations

from minillm.teaching import crash_messages
from minillm.teaching.answer_key import AnswerKey
from minillm.teaching.attempt import Outcome, call
from minillm.teaching.exercise import Exercise, Function
from minillm.teaching.guard import ChildExit, Limits, OutOfTime, Send, can_guard, limited, run_guarded
from minillm.teaching.judge import Judge
from minillm.teaching.raised import Sort
from minillm.teaching.registry import find
from minillm.teaching.result import CheckResult

LIMITS = Limits()


def check_function(
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
    is_guarded = key.exercise.guarded and can_guard()
    check = _Check(key, function, limits.lowered() if is_guarded else limits)
    return check.result(run_guarded(check.run, check.receive, check.limits) if is_guarded else _run_here(check))


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
        self.judge = Judge(key, limits)
        self._case, self._result = 0, None

    def run(self, send: Send) -> None:
        """Try case after case. Sends the index of each, the result when the first fails, and the result at the end.

        Stops when the function is out of time or memory, or has accessed what is outside of an array.
        """
        outcomes: list[Outcome] = []
        problems: list[str] = []
        for index, case in enumerate(self.key.cases):
            send(index)
            outcome = call(self.key.exercise, self.function, case)
            outcomes.append(outcome)
            if outcome.error is not None and outcome.error.sort is Sort.STUB:
                break
            problems.append(self.judge.problem(index, outcome))
            if problems[-1] and not any(problems[:-1]):
                send(self.judge.failure(outcomes, problems))
            if outcome.error is not None and outcome.error.ends_check:
                break
        send(self.judge.result(outcomes, problems))

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
        return self.judge.died(self._case, death, crash_messages.files_of(self.function))
