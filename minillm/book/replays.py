"""Replays that play: the saved notebooks have only their still pictures, so the lessons that show one run again."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from nbformat import NotebookNode
from tqdm.auto import tqdm

from minillm.teaching.course import Lesson
from minillm.teaching.execute import execute
from minillm.teaching.notebook import read_source

PLACE = "minillm-replay-place"
"""The class of the element around a replay."""
SCRIPT = "<script>"


def has_replay(notebook: NotebookNode) -> bool:
    """Whether a cell shows a replay."""
    return any(PLACE in html for _, _, html in _pictures(notebook))


def add_replays(notebooks: Sequence[tuple[Lesson, NotebookNode]], jobs: int) -> None:
    """Run every lesson that shows a replay, `jobs` at a time, and put the playing ones into the saved notebooks.

    Raises `LessonError` if a cell of a lesson fails.
    """
    showing = [(lesson, notebook, read_source(lesson.source)) for lesson, notebook in notebooks if has_replay(notebook)]
    cells = sum(cell.cell_type == "code" for _, _, source in showing for cell in source.cells)
    with tqdm(total=cells, unit="cell", disable=None) as progress, ThreadPoolExecutor(jobs) as pool:

        def run(one: tuple[Lesson, NotebookNode, NotebookNode]) -> None:
            lesson, saved, source = one
            fresh = execute(source, lesson.source.parent, on_cell=progress.update, recording=False, scripts=True)
            take_scripts(saved, fresh)

        list(pool.map(run, showing))


def take_scripts(saved: NotebookNode, fresh: NotebookNode) -> None:
    """Put the replays of `fresh`, a run of the same notebook with scripts, in the place of the stills of `saved`."""
    playing = {(cell, output): html for cell, output, html in _pictures(fresh) if PLACE in html and SCRIPT in html}
    for (cell, output), html in playing.items():
        outputs = saved.cells[cell].outputs
        if output < len(outputs) and PLACE in outputs[output].get("data", {}).get("text/html", ""):
            outputs[output].data["text/html"] = html


def _pictures(notebook: NotebookNode) -> list[tuple[int, int, str]]:
    """Index of the cell, index of the output, HTML."""
    return [
        (i, k, output.data["text/html"])
        for i, cell in enumerate(notebook.cells)
        for k, output in enumerate(cell.get("outputs", ()))
        if "text/html" in output.get("data", {})
    ]
