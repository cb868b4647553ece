"""A lesson as an assignment for other people's graders: nbgrader's source notebooks and otter's autograder zip."""

from __future__ import annotations

import hashlib
import hmac
import re
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from minillm.errors import ConfigError, LessonError
from minillm.extras import need
from minillm.teaching import glossary
from minillm.teaching.classroom import PUBLISHED, WHEEL
from minillm.teaching.course import Lesson, choose, read_notebook
from minillm.teaching.exercise import Exercise
from minillm.teaching.notebook import BEGIN, for_learner, read_source
from minillm.teaching.publication import read_home
from minillm.teaching.registry import of_lesson

NBGRADER_SCHEMA = 3
NBGRADER_CONFIG = """\
c = get_config()
c.CourseDirectory.course_id = "minillm"
c.ExecutePreprocessor.timeout = 600
"""
IN_ZIP = f"minillm-lessons @ file:///autograder/source/{WHEEL}"
"""The requirement of a wheel in an autograder zip, which Gradescope and otter unpack in this folder."""
IMPORT = "from minillm.teaching.assert_passes import assert_passes"


def write_nbgrader(root: Path, names: list[str] | None, target: Path, secret: bytes = b"") -> list[Path]:
    """Write `target/source/LESSON/LESSON.ipynb` for each lesson: solutions, and a test cell behind every exercise.

    nbgrader takes solutions and hidden tests out itself (`nbgrader generate_assignment`). With a `secret`, hidden tests
    try cases that the learner's own check does not have.

    Raises:
        LessonError: an unknown lesson, or one without exercises.
        ConfigError: a notebook is there already; it may have been edited. Nothing is written then.
    """
    lessons = [lesson for lesson in choose(root, names) if names is not None or _exercises(lesson)]
    paths = {lesson: target / "source" / lesson.name / f"{lesson.name}.ipynb" for lesson in lessons}
    _refuse_edited(paths.values())
    written = []
    for lesson, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_with_glossary(nbgrader_source(lesson, secret), path, lesson)
        written.append(path)
    config = target / "nbgrader_config.py"
    if not config.exists():
        config.write_text(NBGRADER_CONFIG, encoding="utf-8")
    return written


def nbgrader_source(lesson: Lesson, secret: bytes = b"") -> NotebookNode:
    """The lesson with nbgrader's metadata: each exercise's cell is a solution, behind it a locked test of one point."""
    exercises = _exercises_or_error(lesson)
    notebook, cells = read_source(lesson.source), []
    for cell in notebook.cells:
        cells.append(cell)
        exercise = next((e for e in exercises if cell.cell_type == "code" and _defines(cell.source, e)), None)
        if exercise is None:
            continue
        name = exercise.function_name
        cell.metadata["nbgrader"] = _metadata(name, solution=True)
        test = nbformat.v4.new_code_cell(_nbgrader_test(exercise, secret))
        test.id = f"{cell.id}-test"
        test.metadata["nbgrader"] = {**_metadata(f"test_{name}", solution=False), "points": 1}
        cells.append(test)
    notebook.cells = cells
    return notebook


def write_otter(root: Path, names: list[str] | None, target: Path, secret: bytes = b"") -> list[Path]:
    """Write `target/LESSON/LESSON.ipynb`, the learner's notebook, and `target/LESSON/autograder.zip`, made by otter.

    Raises:
        LessonError: an unknown lesson, or one without exercises.
        ConfigError: the clone `root` is not published, and `make dist` has not written its wheel, which the zip needs;
            or a notebook is there already, which may have been edited. Nothing is written then.
        UnsupportedError: otter-grader is not installed.
    """
    need("graders", "otter")
    from otter.generate import main as generate

    home, wheel = read_home(root), root / "dist" / WHEEL
    if not home.repository and not wheel.exists():
        raise ConfigError(f"the lessons are not published: run `make dist`, because the zip needs {wheel}")
    package = PUBLISHED.format(repository=home.repository, tag=home.tag) if home.repository else IN_ZIP
    lessons = [lesson for lesson in choose(root, names) if names is not None or _exercises(lesson)]
    paths = {lesson: target / lesson.name / f"{lesson.name}.ipynb" for lesson in lessons}
    _refuse_edited(paths.values())
    written = []
    for lesson, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        exercises = _exercises_or_error(lesson)
        with tempfile.TemporaryDirectory() as tests:
            for exercise in exercises:
                text = otter_test(exercise, secret)
                (Path(tests) / f"{exercise.function_name}.py").write_text(text, encoding="utf-8")
            requirements = Path(tests) / "requirements.txt"
            requirements.write_text(f"{package}\n", encoding="utf-8")
            place = path.with_name("autograder.zip")
            generate(
                tests_dir=tests,
                output_path=str(place),
                requirements=str(requirements),
                no_config=True,
                no_environment=True,
            )
            if not home.repository:
                with zipfile.ZipFile(place, "a") as zipped:
                    zipped.write(wheel, WHEEL)
        written.append(place)
        solved = read_notebook(lesson.solution) or read_source(lesson.source)
        _write_with_glossary(for_learner(solved), path, lesson)
    return written


def _refuse_edited(paths: Iterable[Path]) -> None:
    """Raise `ConfigError` if one of the notebooks is there already."""
    if there := [path for path in paths if path.exists()]:
        raise ConfigError(f"{there[0]} exists and may have been edited; remove it, or name other lessons or a folder")


def _write_with_glossary(notebook: NotebookNode, path: Path, lesson: Lesson) -> None:
    """Write a notebook, and beside it the glossary, to which it has links."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = cell.source.replace("](../lessons/glossary.md", "](glossary.md")
    path.write_text(nbformat.writes(notebook), encoding="utf-8")
    (path.parent / "glossary.md").write_text(glossary.page({lesson.number: path.name}), encoding="utf-8")


def otter_test(exercise: Exercise, secret: bytes = b"") -> str:
    """A test of one point in otter's format: the visible cases, and with a `secret` the hidden ones."""
    calls = [(f"assert_passes({exercise.name!r}, {exercise.function_name})", False)]
    if secret:
        seed = _seed(exercise, secret)
        calls.append((f"assert_passes({exercise.name!r}, {exercise.function_name}, {seed!r})", True))
    cases = [{"code": f">>> {IMPORT}\n>>> {call}\n", "hidden": hidden, "locked": False} for call, hidden in calls]
    suite = {"cases": cases, "scored": True, "setup": "", "teardown": "", "type": "doctest"}
    test = {"name": exercise.function_name, "points": 1, "all_or_nothing": True, "suites": [suite]}
    return f"OK_FORMAT = True\n\ntest = {test!r}\n"


def _nbgrader_test(exercise: Exercise, secret: bytes) -> str:
    call = f"assert_passes({exercise.name!r}, {exercise.function_name}"
    lines = [IMPORT, "", f"{call})"]
    if secret:
        lines += ["### BEGIN HIDDEN TESTS", f"{call}, {_seed(exercise, secret)!r})", "### END HIDDEN TESTS"]
    return "\n".join(lines)


def _metadata(grade_id: str, solution: bool) -> dict[str, object]:
    return {
        "schema_version": NBGRADER_SCHEMA,
        "grade_id": grade_id,
        "cell_type": "code",
        "solution": solution,
        "grade": not solution,
        "locked": not solution,
        "task": False,
    }


def _seed(exercise: Exercise, secret: bytes) -> str:
    return hmac.new(secret, exercise.name.encode(), hashlib.sha256).hexdigest()


def _defines(source: str, exercise: Exercise) -> bool:
    return BEGIN in source and re.search(rf"^def {exercise.function_name}\(", source, re.MULTILINE) is not None


def _exercises(lesson: Lesson) -> list[Exercise]:
    return of_lesson(f"l{lesson.number:02}")


def _exercises_or_error(lesson: Lesson) -> list[Exercise]:
    found = _exercises(lesson)
    if not found:
        raise LessonError(f"lesson {lesson.name} has no exercises to grade")
    return found
