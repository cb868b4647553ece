"""Run a solution in a fresh kernel and keep the outputs that say the same on every run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

import minillm
from minillm.errors import LessonError
from minillm.teaching.claim import RECORDING_VARIABLE
from minillm.teaching.notebook import PREAMBLE_TAG, tags_of

CELL_TIMEOUT_S = 300
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_SCRIPT = re.compile(r"<script>.*?</script>", re.DOTALL)
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,}")
_UUID = re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b")


def execute(
    solution: NotebookNode, folder: Path, on_cell: Callable[[], None] = lambda: None, recording: bool = True
) -> NotebookNode:
    """A copy of `solution` with outputs, run in `folder` and strictly: a check that does not pass is an error.

    With `recording`, so is a measured claim that does not hold. `on_cell` is called after each code cell. Of a picture
    that was updated, the last frame stays; widgets leave the text or picture beside them; stderr and the generated
    cell's findings about this machine are not kept.

    Raises:
        LessonError: a cell failed, took over 300 s, or killed the kernel; names the lesson, the cell and the error.
    """
    notebook = nbformat.from_dict(solution)
    running = 0

    def remember(cell: NotebookNode, cell_index: int) -> None:
        nonlocal running
        running = cell_index

    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        extra_arguments=["--IPKernelApp.log_level=40"],  # the kernel's advice on transports is not about the lesson
        on_cell_execute=remember,
        on_cell_executed=lambda cell, cell_index, execute_reply: on_cell(),
    )
    try:
        client.execute(env=_environment(recording))
    except CellExecutionError as problem:
        raise LessonError(_where(notebook, running) + f"{problem.ename}: {problem.evalue}") from None
    except CellTimeoutError:
        raise LessonError(_where(notebook, running) + f"took over {CELL_TIMEOUT_S} s") from None
    except DeadKernelError:
        raise LessonError(_where(notebook, running) + "the kernel died (out of memory?)") from None
    return _settled(notebook, solution)


def _environment(recording: bool) -> dict[str, str]:
    """This process's, with the very `minillm` that is building and strict checks; `recording` holds measured claims."""
    package = str(Path(minillm.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "MINILLM_STRICT": "1", RECORDING_VARIABLE: str(int(recording))}


def _where(notebook: NotebookNode, index: int) -> str:
    first_line = notebook.cells[index].source.strip().partition("\n")[0]
    return f"lesson {notebook.metadata.minillm.lesson}, cell {index + 1} ({first_line!r}): "


def _settled(executed: NotebookNode, solution: NotebookNode) -> NotebookNode:
    notebook = nbformat.from_dict({**solution, "cells": []})
    names: dict[str, str] = {}
    for before, cell in zip(solution.cells, executed.cells, strict=True):
        settled = nbformat.from_dict(before)
        if cell.cell_type == "code":
            kept = [] if PREAMBLE_TAG in tags_of(cell) else cell.outputs
            settled.execution_count = cell.execution_count
            settled.outputs = [_settled_output(output, names) for output in kept if output.get("name") != "stderr"]
        notebook.cells.append(settled)
    return notebook


def _settled_output(output: NotebookNode, names: dict[str, str]) -> NotebookNode:
    """Without widget views, scripts (of replays: their still picture stays) and addresses.

    UUIDs become numbers in the order in which they appear in the notebook."""
    settled = nbformat.from_dict(output)
    if "text" in settled:
        settled.text = _settled_text(settled.text, names)
    if "data" in settled:
        data = {kind: value for kind, value in settled.data.items() if kind != WIDGET_VIEW}
        if "text/html" in data:
            data["text/html"] = _SCRIPT.sub("", data["text/html"])
        settled.data = {k: _settled_text(v, names) if isinstance(v, str) else v for k, v in data.items()}
    return settled


def _settled_text(text: str, names: dict[str, str]) -> str:
    def numbered(match: re.Match[str]) -> str:
        return names.setdefault(match[0], f"00000000-0000-4000-8000-{len(names):012d}")

    return _UUID.sub(numbered, _ADDRESS.sub("at 0x0", text))
