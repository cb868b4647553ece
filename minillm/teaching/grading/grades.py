"""The result of grading: per exercise and per submission, as data that is written to and read from JSON."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import msgspec

from minillm.whole_file import write_whole_file

SCHEMA = 1
"""Raised when a field is removed or changes its meaning; new fields do not raise it."""


class Status(str, Enum):
    """How one exercise of a submission ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_ATTEMPTED = "not attempted"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    UNREADABLE = "unreadable"


class ExerciseGrade(msgspec.Struct, kw_only=True, frozen=True):
    """One exercise of one submission. Every text may come from the submission: escape it before you show it."""

    exercise: str
    status: Status
    passed_cases: int = 0
    num_cases: int = 0
    case: str = ""
    """The first case that fails, in words."""
    hidden: bool = False
    """Whether that case is not among those the notebook's own check tries."""
    inputs: dict[str, str] = {}
    expected: str = ""
    got: str = ""
    problem: str = ""
    where: str = ""
    cause: str = ""
    """The likely cause, in words."""
    mistake: str = ""
    """The planted mistake that answers alike; "" if none does."""
    notes: list[str] = []
    library: list[str] = []
    """What the function imports from minillm: it may be all of the answer."""
    seconds: float = 0.0
    """Wall-clock time."""
    interrupted: bool = False
    """Whether its process ended for a reason that the function need not have given: it was killed, its runner failed,
    or it was still running after `Rules.wall_seconds`."""


class Submission(msgspec.Struct, kw_only=True, frozen=True):
    """One graded file."""

    student: str
    file: str
    """Path below the folder of submissions."""
    key: str
    """Hash of the file's bytes and of everything else that the grades depend on; "" if there is no file, for lessons
    that a student has not handed in."""
    status: Status
    """`UNREADABLE`, `PASSED` if all exercises passed, `NOT_ATTEMPTED` if none was attempted, else `FAILED`."""
    reason: str = ""
    """Why it is unreadable, or what else went wrong with the whole file."""
    lessons: list[str] = []
    """Those it is graded on; if it has no exercises, those it holds, none of which was asked for."""
    exercises: list[ExerciseGrade] = []
    notes: list[str] = []
    isolation: str = ""
    """How its process was isolated: one of `student_process.MODES`."""
    shapes: dict[str, list[str]] = {}
    """Normalised syntax trees of the exercises' functions, for `similarity`."""
    interrupted: bool = False
    """Whether reading the file or one of the exercises was interrupted (`ExerciseGrade.interrupted`). On another run
    the result may be another, so the file is then graded again."""
    schema: int = SCHEMA

    @property
    def points(self) -> int:
        """One per passed exercise."""
        return sum(grade.status is Status.PASSED for grade in self.exercises)


def overall(grades: list[ExerciseGrade]) -> Status:
    """The status of a submission with these exercises."""
    found = {grade.status for grade in grades}
    if found == {Status.PASSED}:
        return Status.PASSED
    return Status.NOT_ATTEMPTED if found <= {Status.NOT_ATTEMPTED} else Status.FAILED


def write(path: Path, submission: Submission) -> None:
    """Write the file."""
    write_whole_file(path, msgspec.json.format(msgspec.json.encode(submission), indent=1))


def read(path: Path) -> Submission | None:
    """The submission in the file; None if there is none, or one of another schema."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Submission)
    except (OSError, msgspec.MsgspecError):
        return None
    return found if found.schema == SCHEMA else None
