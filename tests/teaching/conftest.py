"""A small exercise and a small lesson about it, for the tests of the teaching machinery."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import nbformat
import pytest
import torch
from nbformat import NotebookNode

from minillm.ops.dispatch import has_triton
from minillm.teaching.build import build
from minillm.teaching.drives.triton_kernels import kernel_type
from minillm.teaching.execute import execute
from minillm.teaching.exercise import Case, Exercise, WrongVersion
from minillm.teaching.notebook import read_source

HERE = Path(__file__).parent
if has_triton():
    kernel_type()  # imports Triton with its interpreter; transformers, which some test may import first, would without


def append_rows(cache, new):
    return torch.cat([cache, new])


@pytest.fixture
def append_exercise() -> Exercise:
    return Exercise(
        name="l90.append_rows",
        reference=append_rows,
        cases=lambda: [
            Case("one row into an empty cache", (torch.zeros(0, 2), torch.ones(1, 2))),
            Case("two rows after three", (torch.arange(6.0).reshape(3, 2), torch.tensor([[7.5, 8.0], [9.0, 9.5]]))),
        ],
        hints=("Both belong in the answer.", "Look at torch.cat.", "torch.cat([…])", "return torch.cat([cache, new])"),
        wrong=(
            WrongVersion("forgets the rows that were there before", lambda cache, new: new),
            WrongVersion("puts the new rows in front", lambda cache, new: torch.cat([new, cache])),
        ),
    )


@pytest.fixture(scope="session")
def sample_course(tmp_path_factory) -> Path:
    """A folder with solutions/90_sample.py, built once; tests that change it work on a copy."""
    root = tmp_path_factory.mktemp("course")
    (root / "solutions").mkdir()
    shutil.copy(HERE / "sample_lesson.py", root / "solutions" / "90_sample.py")
    build(root)
    return root


@pytest.fixture
def course(sample_course, tmp_path) -> Path:
    return Path(shutil.copytree(sample_course, tmp_path / "course"))


@pytest.fixture(scope="session")
def second_run(sample_course) -> NotebookNode:
    """The sample lesson, run once more as `minillm build --check --run` does."""
    source = sample_course / "solutions" / "90_sample.py"
    return execute(read_source(source), source.parent, recording=False)


@pytest.fixture
def no_kernel(monkeypatch, second_run) -> None:
    """Wherever a lesson would be run, its cells get the outputs of `second_run`: for tests of what comes of a run."""

    def carried(solution: NotebookNode, *_: object, **__: object) -> NotebookNode:
        notebook = nbformat.from_dict(solution)
        for cell, ran in zip(notebook.cells, second_run.cells, strict=True):
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = copy.deepcopy(ran.outputs), ran.execution_count
        return notebook

    monkeypatch.setattr("minillm.teaching.build.execute", carried)
    monkeypatch.setattr("minillm.teaching.rerun.execute", carried)
