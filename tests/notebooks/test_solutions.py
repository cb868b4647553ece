"""What the solutions say, tested without running them twice: every cell but an exercise runs in the lesson, with the
option `--like-solutions` (see conftest.py). Here are the exercises; and, as a long test, whole solutions run again."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from minillm import cli
from minillm.teaching.course import Lesson, choose, read_notebook
from minillm.teaching.grading.grades import Status
from minillm.teaching.grading.one_submission import Grader, Rules
from minillm.teaching.grading.student_process import StudentProcess
from minillm.teaching.registry import of_lesson

ROOT = Path(__file__).parents[2]
LESSONS = choose(ROOT)
CHECK = re.compile(r'^check\("(\w+\.\w+)"')

every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=[lesson.name for lesson in LESSONS])


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with StudentProcess(0, "") as process:
        yield Grader(process, Rules())


@every_lesson
def test_a_solution_solves_its_exercises(lesson: Lesson, grader: Grader) -> None:
    graded = grader.grade(lesson.solution.read_bytes(), "reference", lesson.solution.name, "")
    wanted = {exercise.name for exercise in of_lesson(f"l{lesson.name[:2]}")}
    assert {grade.exercise for grade in graded.exercises if grade.status is Status.PASSED} == wanted, graded


@every_lesson
def test_a_solution_records_that_every_check_passes(lesson: Lesson) -> None:
    recorded = {}
    for cell in read_notebook(lesson.solution).cells:
        if cell.cell_type == "code" and (found := CHECK.match(cell.source)):
            recorded[found[1]] = "".join(output.get("data", {}).get("text/plain", "") for output in cell.outputs)
    exercises = of_lesson(f"l{lesson.name[:2]}")
    assert set(recorded) == {exercise.name for exercise in exercises}
    for exercise in exercises:
        cases = len(exercise.all_cases())
        assert f"PASS {cases}/{cases}" in recorded[exercise.name]


@every_lesson
def test_a_cell_that_checks_does_nothing_else(lesson: Lesson) -> None:
    """With MINILLM_STRICT=1 a check that does not pass is an error, and only that cell should be red."""
    for cell in read_notebook(lesson.lesson).cells:
        if cell.cell_type == "code" and CHECK.match(cell.source):
            assert len(ast.parse(cell.source).body) == 1, cell.source


def _with_device(options: Iterable[tuple[object, ast.expr]], known: set[str]) -> bool:
    """Whether options contain a device, by name or in an unpacked dictionary (which has None for a name)."""
    return any(
        name == "device" or (name is None and isinstance(value, ast.Name) and value.id in known)
        for name, value in options
    )


@pytest.mark.parametrize(
    "lesson", [one for one in LESSONS if one.number not in (0, 7, 8, 9)], ids=lambda lesson: lesson.name
)
def test_engines_that_call_a_learners_function_are_on_the_cpu(lesson: Lesson) -> None:
    """No exercise asks for a device. (Lessons 0 and 7 hand no tensors to such a function; 8 and 9 have `DEVICE`.)"""
    known: set[str] = set()
    for node in ast.walk(ast.parse(lesson.source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            names = [getattr(key, "value", None) for key in node.value.keys]
            if _with_device(zip(names, node.value.values, strict=True), known):
                known.update(target.id for target in node.targets if isinstance(target, ast.Name))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "LLM":
            assert _with_device([(word.arg, word.value) for word in node.keywords], known), ast.unparse(node)


@pytest.mark.long
@pytest.mark.timeout(1200)
@every_lesson
def test_a_solution_gives_its_recorded_outputs(lesson: Lesson, capsys: pytest.CaptureFixture[str]) -> None:
    failed = cli.main(["build", "--check", "--run", lesson.name, "--root", str(ROOT)])
    assert not failed, capsys.readouterr().err
