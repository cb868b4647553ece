"""Grading a class on a cluster: `minillm grade` with the submissions spread over the workers.

This process reads the submissions, writes the results and the reports; a worker gets the bytes of one file at a time
and needs none of these folders. Submissions are isolated on the worker's machine as they are here.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from minillm.cluster.worker_pool import MAX_LOSSES, Pool, TasksGivenUpError
from minillm.errors import UnsupportedError
from minillm.teaching.grading.batch import Graders, Task, grading_environment, read, unreadable
from minillm.teaching.grading.grades import Status, Submission
from minillm.teaching.grading.one_submission import Grader, Rules
from minillm.teaching.grading.student_process import StudentProcess

LOST = f"{MAX_LOSSES} workers that graded it were lost: look into Ray's logs, then grade it again"
SLOTS = range(64, 320)
"""Slots of workers; `minillm grade` on the same machine counts its own from 0."""


@dataclass(frozen=True)
class SubmissionTask:
    """A submission on its way to a worker."""

    data: bytes
    student: str
    file: str
    key: str


class GradingWorker:
    """A grader with its process for submissions."""

    def __init__(self, rules: Rules, mode: str) -> None:
        import torch

        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        self._open = ExitStack()
        self._open.enter_context(grading_environment())
        slot, lock = free_slot()
        self._open.enter_context(lock)
        self.grader = Grader(self._open.enter_context(StudentProcess(slot, mode)), rules)

    def run(self, task: SubmissionTask) -> Submission:
        """The grades of one submission."""
        return self.grader.grade(task.data, task.student, task.file, task.key)

    def close(self) -> None:
        """End the process for submissions."""
        self._open.close()


def free_slot() -> tuple[int, IO[bytes]]:
    """A slot that no other worker on this machine has, and the lock that keeps it until it is closed.

    Raises `UnsupportedError` if all are taken, or if this is not Linux.
    """
    try:
        import fcntl
    except ImportError:
        raise UnsupportedError("submissions are graded on Linux only (a container or WSL will do)") from None
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)  # in /tmp anybody may have put a link there
    for slot in SLOTS:
        file = Path(tempfile.gettempdir()) / f"minillm-grade-slot-{slot}.lock"
        try:
            lock = os.fdopen(os.open(file, flags, 0o600), "rb", buffering=0)
        except OSError:
            continue  # another user's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            continue
        return slot, lock
    raise UnsupportedError(f"{len(SLOTS)} workers grade on this machine already; use fewer")


def graders_of(pool: Pool) -> Graders:
    """Who grades for `minillm.teaching.grading.batch.grade_all`: the workers of `pool`."""

    def grade(tasks: list[Task], rules: Rules, mode: str) -> Iterator[tuple[int, Submission]]:
        found: list[tuple[int, SubmissionTask]] = []
        for number, file, key in tasks:
            try:
                found.append((number, SubmissionTask(read(file), file.student, file.name, key)))
            except OSError as problem:
                yield number, unreadable(file, key, problem)
        try:
            for index, submission in pool.map(partial(GradingWorker, rules, mode), [task for _, task in found]):
                yield found[index][0], submission
        except TasksGivenUpError as problem:  # no submission may keep the others' reports from being written
            for number, task in (found[index] for index in problem.numbers):
                made = {"student": task.student, "file": task.file, "key": task.key}
                yield number, Submission(**made, status=Status.UNREADABLE, reason=LOST, interrupted=True)

    return grade
