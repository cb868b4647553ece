"""Run a solution in a fresh kernel and keep the outputs that are the same on every run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
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
    solution: NotebookNode,
    folder: Path,
    on_cell: Callable[[], None] = lambda: None,
    recording: bool = True,
    scripts: bool = False,
) -> NotebookNode:
    """A copy of `solution` with outputs, run in `folder` in strict mode: a check that does not pass is an error.

    With `recording`, a measured claim that does not hold is an error too. `on_cell` is called after each code cell. Of
    an updated picture, the last frame is kept. Of a widget, only its text or picture is kept. stderr and the output of
    the generated first cell, which describes this machine, are dropped. With `scripts`, replays keep the script that
    plays them; else only their still picture is kept.

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
    return _stable_notebook(notebook, solution, scripts)


def _environment(recording: bool) -> dict[str, str]:
    """This process's environment, with the same `minillm` and strict checks; `recording` enforces measured claims."""
    package = str(Path(minillm.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "MINILLM_STRICT": "1", RECORDING_VARIABLE: str(int(recording))}


def _where(notebook: NotebookNode, index: int) -> str:
    first_line = notebook.cells[index].source.strip().partition("\n")[0]
    return f"lesson {notebook.metadata.minillm.lesson}, cell {index + 1} ({first_line!r}): "


def _stable_notebook(executed: NotebookNode, solution: NotebookNode, scripts: bool) -> NotebookNode:
    notebook = nbformat.from_dict({**solution, "cells": []})
    names: dict[str, str] = {}
    for before, cell in zip(solution.cells, executed.cells, strict=True):
        stable = nbformat.from_dict(before)
        if cell.cell_type == "code":
            kept = [] if PREAMBLE_TAG in tags_of(cell) else cell.outputs
            stable.execution_count = cell.execution_count
            kept = [output for output in kept if output.get("name") != "stderr"]
            stable.outputs = stable_outputs(kept, names, scripts)
        notebook.cells.append(stable)
    return notebook


def stable_outputs(outputs: Sequence[NotebookNode], names: dict[str, str], scripts: bool = False) -> list[NotebookNode]:
    """The part of `outputs` that is the same on every run. `names`: of the notebook's UUIDs; new ones are added."""
    return [_stable_output(output, names, scripts) for output in outputs]


def _stable_output(output: NotebookNode, names: dict[str, str], scripts: bool) -> NotebookNode:
    """The output without widget views and addresses, and unless `scripts`, without scripts.

    UUIDs become numbers in the order in which they appear in the notebook."""
    stable = nbformat.from_dict(output)
    if "text" in stable:
        stable.text = _stable_text(stable.text, names)
    if "data" in stable:
        data = {kind: value for kind, value in stable.data.items() if kind != WIDGET_VIEW}
        if "text/html" in data and not scripts:
            data["text/html"] = _SCRIPT.sub("", data["text/html"])
        stable.data = {k: _stable_text(v, names) if isinstance(v, str) else v for k, v in data.items()}
    return stable


def _stable_text(text: str, names: dict[str, str]) -> str:
    def numbered(match: re.Match[str]) -> str:
        return names.setdefault(match[0], f"00000000-0000-4000-8000-{len(names):012d}")

    return _UUID.sub(numbered, _ADDRESS.sub("at 0x0", text))
