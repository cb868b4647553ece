"""What a lesson prints and draws, beside what its solution recorded; for pytest's nbval.

nbval compares nothing in a notebook without outputs, and of a live picture it keeps the first frame. But in a lesson
that nobody solved, `use` takes the reference wherever an exercise is missing, so every cell shows what it shows in the
solution, except for the exercises and their checks. One run of the lesson therefore tests both notebooks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbval.plugin import coalesce_streams

from minillm.errors import LessonError
from minillm.teaching.compare_outputs import difference
from minillm.teaching.course import read_notebook
from minillm.teaching.execute import stable_outputs
from minillm.teaching.notebook import PREAMBLE_TAG, is_measured, tags_of

_CHECK = re.compile(r"^(check|hint)\(")
_NOTICE = re.compile(r"^Using the reference for .*\n?", re.MULTILINE)
_SHOWN = ("stream", "display_data", "execute_result", "update_display_data", "clear_output")


class LessonOutputs:
    """The outputs of `lesson` as its cells run, and those that `solution` recorded.

    Code cells are counted from 0, as nbval counts them.
    """

    def __init__(self, lesson: NotebookNode, solution: NotebookNode) -> None:
        self._client = NotebookClient(nbformat.from_dict(lesson))
        self._cells = [(place, cell) for place, cell in enumerate(self._client.nb.cells) if cell.cell_type == "code"]
        self._recorded = [cell for cell in solution.cells if cell.cell_type == "code"]
        self._names: dict[str, str] = {}
        self._recorded_names: dict[str, str] = {}
        self._running = 0

    @classmethod
    def beside(cls, lesson: Path) -> LessonOutputs:
        """Of the file `lessons/NAME.ipynb` and of `solutions/NAME.ipynb`.

        Raises `LessonError` if one of them is missing or no notebook.
        """
        files = (lesson, lesson.parent.parent / "solutions" / lesson.name)
        found = [read_notebook(path) for path in files]
        for path, notebook in zip(files, found, strict=True):
            if notebook is None:
                raise LessonError(f"{path} is missing or no notebook")
        return cls(*found)

    def listening(self, get_message: Callable[..., Mapping[str, Any]]) -> Callable[..., Mapping[str, Any]]:
        """`get_message`, which returns the kernel's next message, with each message also kept here."""

        def get_and_keep(*arguments: Any, **options: Any) -> Mapping[str, Any]:
            message = get_message(*arguments, **options)
            if message["msg_type"] in _SHOWN:
                place, cell = self._cells[self._running]
                self._client.process_message(dict(message), cell, place)
            return message

        return get_and_keep

    def begin(self, index: int) -> None:
        """The messages from here on are those of code cell `index`."""
        self._running = index
        self._client.clear_before_next_output = False  # as nbclient sets it before each cell

    def difference(self, index: int) -> str:
        """The first counted difference between code cell `index` and the solution's; "" if there is none or the cell
        is an exercise, a check or a hint."""
        (_, cell), recorded = self._cells[index], self._recorded[index]
        outputs = coalesce_streams([output for output in cell.outputs if output.get("name") != "stderr"])
        for output in outputs:
            if "text" in output:
                output.text = _NOTICE.sub("", output.text)
        fresh = stable_outputs([output for output in outputs if output.get("text") != ""], self._names)
        expected = stable_outputs(recorded.outputs, self._recorded_names)
        if cell.source != recorded.source or _CHECK.match(cell.source) or PREAMBLE_TAG in tags_of(cell):
            return ""
        return difference(expected, fresh, is_measured(cell))
