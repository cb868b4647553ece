"""Which grades may be others in another run: those of jobs that were ended from outside, by the clock or by a fault."""

from __future__ import annotations

import os

import pytest

from minillm.teaching.grading.grades import Status, Submission
from minillm.teaching.grading.messages import (
    Answered,
    Began,
    Cells,
    Ended,
    Found,
    Loaded,
    Message,
    Messages,
    Unreadable,
)
from minillm.teaching.grading.one_function import Job, ReadJob, RunJob, fault
from minillm.teaching.grading.one_submission import Grader, Rules
from minillm.teaching.grading.student_process import Told
from minillm.teaching.grading.values import encode
from minillm.teaching.guard import ChildExit


def of_a_failed_runner() -> Message:
    """What a runner sends when it fails."""
    reader, writer = os.pipe()
    fault(writer, "MemoryError")
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        [message] = Messages().feed(file.read())
    return message


BEGAN: list[Message] = [Found("written"), Loaded([]), Began(0)]
FINISHED, KILLED = Ended(), Ended(ChildExit(signal_number=9))
WRONG = Answered(0, encode("no answer to this case"), None, [])
RUNS: dict[str, tuple[Told, Status, bool]] = {
    "over the wall time": (Told(BEGAN, "time: it did not end within 60 s"), Status.TIMEOUT, True),
    "the template ended": (Told([], "process: the template has ended"), Status.CRASHED, True),
    "too much memory": (Told(BEGAN, "memory: more than 4 GiB"), Status.CRASHED, False),
    "too many processes": (Told(BEGAN, "processes: more than 24"), Status.CRASHED, False),
    "too many messages": (Told(BEGAN, "messages: more than 128 MiB"), Status.CRASHED, False),
    "the runner was killed": (Told(BEGAN), Status.CRASHED, True),
    "the runner was killed at once": (Told([]), Status.CRASHED, True),
    "the runner failed": (Told([*BEGAN, of_a_failed_runner()]), Status.CRASHED, True),
    "the function was killed": (Told([*BEGAN, KILLED]), Status.CRASHED, True),
    "out of processor time": (
        Told([*BEGAN, Ended(ChildExit(signal_number=9, out_of_time=True))]),
        Status.TIMEOUT,
        False,
    ),
    "waited too long": (
        Told([*BEGAN, Ended(ChildExit(signal_number=9, idle_timeout=True))]),
        Status.TIMEOUT,
        False,
    ),
    "a segmentation fault": (Told([*BEGAN, Ended(ChildExit(signal_number=11))]), Status.CRASHED, False),
    "exits": (Told([*BEGAN, Ended(ChildExit(exit_code=3))]), Status.CRASHED, False),
    "no answers": (Told([*BEGAN, FINISHED]), Status.CRASHED, False),
    "wrong before it was killed": (Told([*BEGAN, WRONG, KILLED]), Status.FAILED, False),
    "not written": (Told([Found("stub"), FINISHED]), Status.NOT_ATTEMPTED, False),
}
CELLS = Cells(sources=[], functions=["best_r"], broken=[], lesson="02", shapes={})


class Telling:
    """In place of a submission's process: tells what a real one would."""

    mode = "limits"

    def __init__(self, read: Told, run: Told) -> None:
        self.of_jobs: dict[type[Job], Told] = {ReadJob: read, RunJob: run}

    def run(self, job: Job, wall_seconds: float, memory: int) -> Told:
        return self.of_jobs[type(job)]


def graded(read: Told, run: Told) -> Submission:
    return Grader(Telling(read, run), Rules(lessons=("l02",))).grade(b"", "alice", "02.ipynb", "key")


@pytest.mark.parametrize("name", RUNS)
def test_an_exercise_is_interrupted_if_its_function_need_not_be_the_cause(name: str) -> None:
    told, status, interrupted = RUNS[name]
    submission = graded(Told([CELLS]), told)
    assert {(grade.status, grade.interrupted) for grade in submission.exercises} == {(status, interrupted)}
    assert submission.interrupted is interrupted


@pytest.mark.parametrize(
    ("read", "interrupted"),
    [
        (Told([], "time: it did not end within 60 s"), True),
        (Told([], "process: the template has ended"), True),
        (Told([]), True),
        (Told([of_a_failed_runner()]), True),
        (Told([], "memory: more than 1 GiB"), False),
        (Told([Unreadable("it is not JSON")]), False),
    ],
    ids=["over the wall time", "the template ended", "killed", "failed", "too much memory", "no notebook"],
)
def test_a_file_whose_reading_was_interrupted_is_unreadable_for_now(read: Told, interrupted: bool) -> None:
    submission = graded(read, Told([]))
    assert (submission.status, submission.interrupted) == (Status.UNREADABLE, interrupted)
