"""Grading by the workers of a pool gives the grades of `minillm grade`. Without Ray."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from minillm.cluster.grading import SLOTS, SubmissionTask, free_slot, graders_of
from minillm.cluster.worker_pool import TasksGivenUpError
from minillm.teaching.grading import batch
from minillm.teaching.grading.grades import Status, Submission
from minillm.teaching.grading.one_submission import Rules
from minillm.teaching.guard import GIB, Limits
from tests.cluster.this_process import ThisProcess

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="submissions are graded on Linux only")
RIGHT = "def bytes_per_token(layers, kv_heads, head_dim, bytes_per_value):\n    return 2\n"
RULES = Rules(limits=Limits(seconds=3.0, memory=GIB), wall_seconds=40.0, lessons=("l02",))


@pytest.fixture
def submissions(tmp_path: Path) -> Path:
    folder = tmp_path / "submissions"
    for student, text in (("ann", RIGHT), ("bob", "not python at all"), ("cem", "")):
        (folder / student).mkdir(parents=True)
        (folder / student / "02.py").write_text(text)
    return folder


def test_the_grades_are_those_of_one_machine_and_are_kept(submissions: Path, tmp_path: Path) -> None:
    files = batch.find(submissions)
    here = batch.grade_all(files, tmp_path / "here", RULES)
    there = batch.grade_all(files, tmp_path / "there", RULES, graders=graders_of(ThisProcess()))
    for one, other in zip(here, there, strict=True):
        without_times = [[replace(grade, seconds=0.0) for grade in each.exercises] for each in (one, other)]
        assert without_times[0] == without_times[1]
        assert (one.status, one.student, one.key) == (other.status, other.student, other.key)

    class Nobody:
        def map(self, make: object, tasks: list[object]) -> list[object]:
            assert tasks == []
            return []

    again = batch.grade_all(files, tmp_path / "there", RULES, graders=graders_of(Nobody()))
    assert again == there
    with pytest.raises(AssertionError):  # isolated otherwise, they are graded again
        batch.grade_all(files, tmp_path / "there", RULES, mode="limits", graders=graders_of(Nobody()))


def test_a_file_that_cannot_be_read_does_not_stop_the_others(submissions: Path) -> None:
    files = [(number, file, "key") for number, file in enumerate(batch.find(submissions))]
    files[1][1].path.unlink()
    graded = dict(graders_of(ThisProcess())(files, RULES, ""))
    assert set(graded) == {0, 1, 2}
    assert graded[1].status is Status.UNREADABLE and "No such file" in graded[1].reason
    assert graded[0].status is not Status.UNREADABLE


def test_a_submission_that_ends_every_worker_is_interrupted_and_stops_no_report(
    submissions: Path, tmp_path: Path
) -> None:
    class Losing:
        def map(self, make: object, tasks: list[SubmissionTask]) -> Iterator[tuple[int, Submission]]:
            for number in (0, 2):
                task = tasks[number]
                yield number, Submission(student=task.student, file=task.file, key=task.key, status=Status.PASSED)
            raise TasksGivenUpError("1 of 3 tasks", [1])

    graded = batch.grade_all(batch.find(submissions), tmp_path, RULES, graders=graders_of(Losing()))
    files = [each for each in graded if each.key]
    assert [each.student for each in files] == ["ann", "bob", "cem"]
    assert [(each.status, each.interrupted) for each in files][1] == (Status.UNREADABLE, True)
    assert "3 workers that graded it were lost" in files[1].reason


def test_a_slot_that_another_user_has_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"minillm-grade-slot-{SLOTS[0]}.lock").mkdir()  # cannot be opened to write, not even by root
    slot, lock = free_slot()
    lock.close()
    assert slot == SLOTS[1]


def test_a_link_in_the_place_of_a_slot_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "grades").write_text("mine")
    for slot, kind in zip(SLOTS, ("symlink_to", "hardlink_to"), strict=False):
        getattr(tmp_path / f"minillm-grade-slot-{slot}.lock", kind)(tmp_path / "grades")
    slot, lock = free_slot()
    lock.close()
    assert slot == SLOTS[1]  # the first is passed over
    assert (tmp_path / "grades").read_text() == "mine"


def test_workers_of_one_machine_have_slots_of_their_own() -> None:
    first, first_lock = free_slot()
    second, second_lock = free_slot()
    assert first != second and {first, second} <= set(SLOTS)
    first_lock.close()
    third, third_lock = free_slot()
    assert third == first
    second_lock.close()
    third_lock.close()
