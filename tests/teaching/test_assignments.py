"""A lesson in other people's graders: nbgrader and otter really grade it, where they are installed."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import nbformat
import pytest

from minillm.cli import main
from minillm.errors import ConfigError
from minillm.teaching.assert_passes import assert_passes
from minillm.teaching.assignments import nbgrader_source, otter_test, write_nbgrader, write_otter
from minillm.teaching.classroom import WHEEL
from minillm.teaching.course import choose
from minillm.teaching.registry import find

ROOT = Path(__file__).parents[2]
SECRET = b"a secret of a test"
LESSON = '''\
# %% [markdown]
# # Two exercises of lesson 2

# %%
import math


# %%
def offset_mask(num_new, past):
    """Which key each new token may see."""
    ### BEGIN SOLUTION
    import torch

    return torch.arange(past + num_new)[None, :] <= past + torch.arange(num_new)[:, None]
    ### END SOLUTION


# %%
def best_r(num_tokens, copy_cost, pad_cost, allocation_cost):
    """The r for which the cost is smallest."""
    ### BEGIN SOLUTION
    if pad_cost == 0:
        return float(num_tokens)
    best = math.sqrt((num_tokens * copy_cost + 2 * allocation_cost) / pad_cost)
    return min(max(best, 1.0), float(num_tokens))
    ### END SOLUTION
'''
needs = {
    name: pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("nbgrader", "otter")
}


@pytest.fixture
def course(tmp_path: Path, monkeypatch) -> Path:
    """A course of one short lesson with two of the exercises of lesson 2."""
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions" / "02_short.py").write_text(LESSON)
    two = [find("l02.offset_mask"), find("l02.best_r")]
    monkeypatch.setattr("minillm.teaching.assignments.of_lesson", lambda lesson: two)
    return tmp_path


def run(*command: str, cwd: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # nbgrader calls alembic
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "JUPYTER_PLATFORM_DIRS": "0"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_assert_passes_says_what_the_learner_is_told():
    exercise = find("l02.best_r")

    def best_r(*args):
        return exercise.reference(*args)

    assert_passes("l02.best_r", best_r, "ab" * 16)
    with pytest.raises(AssertionError, match=r"l02\.best_r: this is the reference"):
        assert_passes("l02.best_r", exercise.reference)
    with pytest.raises(AssertionError, match=r"FAIL \d+/8  l02.best_r"):
        assert_passes("l02.best_r", exercise.wrong[0].function)


def test_every_exercise_becomes_a_solution_cell_and_a_locked_test_of_one_point():
    for lesson in choose(ROOT, ["02"]):
        notebook = nbgrader_source(lesson, SECRET)
    nbformat.validate(notebook)
    marked = [cell for cell in notebook.cells if "nbgrader" in cell.metadata]
    assert [cell.metadata.nbgrader.grade_id for cell in marked[:4]] == [
        *("append_kv", "test_append_kv"),
        *("offset_mask", "test_offset_mask"),
    ]
    assert len(marked) == 2 * 5
    assert all("### BEGIN SOLUTION" in cell.source for cell in marked[::2])
    assert all("### BEGIN HIDDEN TESTS" in cell.source for cell in marked[1::2])
    assert [cell.metadata.nbgrader.points for cell in marked[1::2]] == [1] * 5


def test_hidden_cases_need_a_secret(course):
    [lesson] = choose(course)
    assert "HIDDEN" not in nbformat.writes(nbgrader_source(lesson))
    assert "'hidden': True" not in otter_test(find("l02.best_r"))


def test_an_otter_test_is_python_with_both_kinds_of_cases():
    space: dict = {}
    exec(otter_test(find("l02.best_r"), SECRET), space)
    cases = space["test"]["suites"][0]["cases"]
    assert [case["hidden"] for case in cases] == [False, True]
    for case in cases:
        ast.parse(case["code"].replace(">>> ", ""))


def test_without_otter_the_command_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "otter", None)
    assert main(["build", "--root", str(ROOT), "--otter", str(tmp_path), "02"]) == 2
    assert 'pip install "minillm-lessons[graders]"' in capsys.readouterr().err


def test_a_notebook_that_may_have_been_edited_is_not_overwritten(course):
    (course / "solutions" / "03_other.py").write_text(LESSON)
    [source] = write_nbgrader(course, ["02"], course / "course")
    source.write_text("my words")
    with pytest.raises(ConfigError, match=r"02_short\.ipynb exists and may have been edited; remove it"):
        write_nbgrader(course, None, course / "course")
    assert source.read_text() == "my words" and len(list((course / "course").rglob("*.ipynb"))) == 1
    write_nbgrader(course, ["03"], course / "course")


def otter_without_environment(tests_dir: str, output_path: str, requirements: str, **options: object) -> None:
    """In place of `otter.generate.main`, for what our own code gives it."""
    with zipfile.ZipFile(output_path, "w") as zipped:
        zipped.write(requirements, "requirements.txt")


def test_the_zip_installs_the_published_package_or_the_wheel_in_it(course, monkeypatch):
    """As it is unpacked in /autograder/source, by Gradescope and by otter."""
    stand_in = types.SimpleNamespace(main=otter_without_environment, __spec__=None)
    monkeypatch.setitem(sys.modules, "otter", types.ModuleType("otter"))
    monkeypatch.setitem(sys.modules, "otter.generate", stand_in)
    monkeypatch.setattr("minillm.teaching.assignments.need", lambda *_: None)
    with pytest.raises(ConfigError, match=f"run `make dist`, because the zip needs .*{WHEEL}"):
        write_otter(course, None, course / "course")
    assert not (course / "course").exists()
    (course / "dist").mkdir()
    (course / "dist" / WHEEL).write_bytes(b"wheel")
    table = '[tool.minillm]\nrepository = "https://example.org/llm"\ntag = "v7"\n'
    for pyproject, package, files in (
        ("", f"minillm-lessons @ file:///autograder/source/{WHEEL}", ["requirements.txt", WHEEL]),
        (table, "minillm-lessons @ git+https://example.org/llm@v7", ["requirements.txt"]),
    ):
        (course / "pyproject.toml").write_text(pyproject)
        [place] = write_otter(course, None, course / f"course {package[-2:]}")
        with zipfile.ZipFile(place) as zipped:
            assert zipped.read("requirements.txt").decode() == f"{package}\n"
            assert zipped.namelist() == files
        (place.parent / "02_short.ipynb").write_text("my words")
        with pytest.raises(ConfigError, match=r"02_short\.ipynb exists and may have been edited; remove it"):
            write_otter(course, None, place.parents[1])
        assert (place.parent / "02_short.ipynb").read_text() == "my words"


@needs["nbgrader"]
def test_nbgrader_accepts_releases_and_grades_the_lesson(course):
    [source] = write_nbgrader(course, None, course / "course", SECRET)
    jupyter = [sys.executable, "-m", "nbgrader"]
    root = course / "course"
    told = run(*jupyter, "validate", str(source), cwd=root)
    assert "Success" in told, told
    run(*jupyter, "generate_assignment", "02_short", "--create", cwd=root)
    released = root / "release" / "02_short" / "02_short.ipynb"
    assert "BEGIN" not in released.read_text() and "sqrt" not in released.read_text()
    wrong = source.read_text().replace("(num_tokens * copy_cost +", "(num_tokens * copy_cost -")
    for student, text in (("alice", source.read_text()), ("bob", wrong), ("carol", released.read_text())):
        folder = root / "submitted" / student / "02_short"
        folder.mkdir(parents=True)
        (folder / "02_short.ipynb").write_text(text)
    run(*jupyter, "autograde", "02_short", cwd=root)
    code = (
        "import json\n"
        "from nbgrader.api import Gradebook\n"
        "with Gradebook('sqlite:///gradebook.db') as book:\n"
        "    scores = {s.student_id: s.score for s in book.assignment_submissions('02_short')}\n"
        "print(json.dumps(scores))\n"
    )
    assert json.loads(run(sys.executable, "-c", code, cwd=root).splitlines()[-1]) == {
        "alice": 2.0,
        "bob": 1.0,
        "carol": 0.0,
    }


@needs["otter"]
def test_otter_runs_its_own_zip_on_right_and_wrong_notebooks(course):
    (course / "dist").mkdir()
    (course / "dist" / WHEEL).write_bytes(b"wheel")  # for other machines
    [place] = write_otter(course, None, course / "course", SECRET)
    [lesson] = choose(course)
    right = nbformat.writes(nbgrader_source(lesson)).replace("assert_passes", "print")
    wrong = right.replace("(num_tokens * copy_cost +", "(num_tokens * copy_cost -")
    for text, score in ((right, 2.0), (wrong, 1.0)):
        folder = course / f"score {score}"
        folder.mkdir()
        (folder / "02_short.ipynb").write_text(text)
        shutil.copy(place, folder / "autograder.zip")
        run(sys.executable, "-m", "otter", "run", "-a", "autograder.zip", "--no-logo", "02_short.ipynb", cwd=folder)
        tests = json.loads((folder / "results.json").read_text())["tests"]
        assert sum(test.get("score", 0) for test in tests) == pytest.approx(score), tests
