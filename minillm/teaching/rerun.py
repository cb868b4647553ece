"""Run the solutions again and compare their counted outputs with the recorded ones: `minillm build --check --run`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from nbformat import NotebookNode
from tqdm import tqdm

from minillm.errors import LessonError
from minillm.teaching.compare_outputs import difference
from minillm.teaching.course import Lesson, Stale, choose, read_notebook
from minillm.teaching.execute import execute
from minillm.teaching.notebook import is_measured, read_source


def rerun(root: Path, names: list[str] | None = None, jobs: int = 1) -> list[Stale]:
    """Every cell of `names` (None: all lessons) whose recorded outputs differ from those of a fresh run.

    `jobs` lessons run at a time, each in a kernel of its own. Writes nothing. Each lesson should have passed
    `build(check=True)`; lessons without a readable solution are skipped, because that check reports them.

    Raises:
        LessonError: an unknown name or a badly written source.
    """
    root = Path(root)
    recorded = [(lesson, read_notebook(lesson.solution)) for lesson in choose(root, names)]
    runs = [(lesson, notebook, read_source(lesson.source)) for lesson, notebook in recorded if notebook is not None]
    cells = sum(cell.cell_type == "code" for _, _, source in runs for cell in source.cells)
    with tqdm(total=cells, unit="cell", disable=None) as progress, ThreadPoolExecutor(max_workers=jobs) as pool:
        found = pool.map(lambda run: _rerun(root, *run, progress=progress), runs)
        return [stale for stales in found for stale in stales]


def _rerun(root: Path, lesson: Lesson, recorded: NotebookNode, source: NotebookNode, progress: tqdm) -> list[Stale]:
    stale = partial(Stale, lesson.solution.relative_to(root), fix=f"minillm build {lesson.name}")
    try:
        fresh = execute(source, lesson.source.parent, on_cell=progress.update, recording=False)
    except LessonError as problem:
        return [stale(reason=f"it does not run: {problem}")]
    return [stale(reason=reason) for reason in _differences(recorded, fresh)]


def _differences(recorded: NotebookNode, fresh: NotebookNode) -> list[str]:
    if len(recorded.cells) != len(fresh.cells):
        return [f"it has {len(recorded.cells)} cells, its source gives {len(fresh.cells)}"]
    found = []
    for number, (before, after) in enumerate(zip(recorded.cells, fresh.cells, strict=True), 1):
        if after.cell_type == "code":
            reason = difference(before.get("outputs", []), after.outputs, is_measured(after))
            found += [f"cell {number}, run again: {reason}"] if reason else []
    return found
