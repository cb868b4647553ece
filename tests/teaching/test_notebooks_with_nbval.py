"""The commands a course runs: nbval over lessons, over solutions, and over what a learner hands in."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat

import minillm

ROOT = Path(minillm.__file__).parents[1]
SANITIZE = ROOT / "tests" / "notebooks" / "sanitize.cfg"
STUB = 'raise NotImplementedError("write double in place of each NotImplementedError, then run its check")'


def nbval(course: Path, *arguments: str, strict: bool = False) -> tuple[bool, str]:
    """(green, output) of pytest in a process of its own, with the project's conftest."""
    shutil.copy(ROOT / "conftest.py", course)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MINILLM_STRICT": str(int(strict)), "COLUMNS": "200"}
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", "-c", os.devnull]
    run = subprocess.run(
        [*command, f"--rootdir={course}", *arguments], cwd=course, env=environment, capture_output=True, text=True
    )
    assert run.returncode in (0, 1), run.stdout + run.stderr
    return run.returncode == 0, run.stdout


def cell_with(notebook: nbformat.NotebookNode, part: str) -> nbformat.NotebookNode:
    return next(cell for cell in notebook.cells if part in cell.source)


def solve_and_rearrange(notebook: nbformat.NotebookNode) -> None:
    """Solve the exercise, and do to the cells what learners do: split, copy, add, lose the metadata."""
    work = cell_with(notebook, STUB)
    work.source = work.source.replace(STUB, "return [twice(n) for n in numbers]")
    helper = nbformat.v4.new_code_cell("def twice(n):\n    return n + n")
    at = notebook.cells.index(work)
    notebook.cells[at:at] = [nbformat.v4.new_markdown_cell("My notes"), helper]
    notebook.cells.append(copy.deepcopy(cell_with(notebook, "check(EXERCISE)")))
    for number, cell in enumerate(notebook.cells):
        cell.metadata.clear()
        cell.id = f"mine-{number}"


def append_copy(notebook: nbformat.NotebookNode, part: str, recorded: str, other: str) -> None:
    """Behind all cells, copy the one with `part`, as if it had recorded `other`. Where nothing is recorded, copy it."""
    cell = copy.deepcopy(cell_with(notebook, part))
    changed = json.dumps(cell.outputs).replace(json.dumps(recorded)[1:-1], json.dumps(other)[1:-1])
    assert not cell.outputs or json.loads(changed) != cell.outputs
    cell.outputs = [nbformat.from_dict(output) for output in json.loads(changed)]
    cell.id = f"copy-{len(notebook.cells)}"
    notebook.cells.append(cell)


def test_fresh_lesson_shows_what_its_solution_recorded_and_a_stale_frame_or_print_makes_only_its_own_cell_red(course):
    """The frame is the last of a live picture, which nbval itself does not see."""
    for folder in ("lessons", "solutions"):
        path = course / folder / "90_sample.ipynb"
        notebook = nbformat.read(path, as_version=4)
        append_copy(notebook, "display_id", "Bars of [2, 6]", "Bars of [2, 7]")
        append_copy(notebook, "loading", "loading 100%", "loading 99%")
        nbformat.write(notebook, path)
    green, output = nbval(course, "--nbval-lax", "--like-solutions", "lessons")
    assert not green
    assert "2 failed, 9 passed" in output
    assert all(f"90_sample.ipynb::Cell {copied}" in output for copied in (9, 10))
    assert "unlike the solution: 'Bars of [2, 7]' is recorded, 'Bars of [2, 6]' is computed" in output


def test_solution_repeats_its_outputs_and_a_changed_one_makes_only_its_own_cell_red(course):
    """A changed text does; a changed picture does not, for pictures are not compared."""
    path = course / "solutions" / "90_sample.ipynb"
    notebook = nbformat.read(path, as_version=4)
    append_copy(notebook, "check(EXERCISE)", "PASS 2/2", "PASS 5/5")
    append_copy(notebook, "display_id", 'width="60"', 'width="61"')
    nbformat.write(notebook, path)
    green, output = nbval(course, "--nbval", f"--nbval-sanitize-with={SANITIZE}", "solutions")
    assert not green
    assert "1 failed, 10 passed" in output
    assert "90_sample.ipynb::Cell 9" in output


def test_under_strict_the_unsolved_exercise_is_red_and_the_solved_one_green_whatever_became_of_the_cells(course):
    for learner, change in {"alice": solve_and_rearrange, "bob": lambda notebook: None}.items():
        notebook = nbformat.read(course / "lessons" / "90_sample.ipynb", as_version=4)
        change(notebook)
        (course / "handed_in" / learner).mkdir(parents=True)
        nbformat.write(notebook, course / "handed_in" / learner / "90_sample.ipynb")
    green, output = nbval(course, "--nbval-lax", "handed_in", strict=True)
    assert not green
    assert "1 failed, 19 passed" in output
    assert "bob/90_sample.ipynb::Cell 4" in output
    assert "NOT DONE YET" in output
