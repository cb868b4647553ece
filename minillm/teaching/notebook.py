"""Turn a lesson's source into notebook cells, and cells into bytes that are the same on every run. Executes nothing."""

from __future__ import annotations

import ast
import base64
import hashlib
import html
import re
from collections.abc import Mapping
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

from minillm.errors import LessonError
from minillm.teaching.glossary import FILE as GLOSSARY
from minillm.teaching.lint import refuse_dead_links, refuse_measured_claims
from minillm.teaching.publication import read_home

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
EXPECTED_TAG = "expected"
IGNORE_TAG = "nbval-ignore-output"
IGNORE_COMMENT = re.compile(r"^\s*#\s*NBVAL_IGNORE_OUTPUT\s*$", re.MULTILINE | re.IGNORECASE)
PREAMBLE_TAG = "minillm-preamble"
_FROM_SOLUTIONS = f"../lessons/{GLOSSARY}"
"""The link from a solution to the glossary, which is in the folder of the lessons."""
MAX_PICTURE_BYTES = 100_000
"""Limit for one expected picture; learners download every lesson with its pictures."""


def read_source(path: Path) -> NotebookNode:
    """The notebook of a py:percent file: with the generated first code cell, ids and metadata, without outputs.

    Raises:
        LessonError: the file has no title cell, a badly placed solution region, an expected picture without a
            description, a measured claim in a cell that is compared, or a link to nothing. Such errors are found before
            any cell runs.
    """
    root = path.parent.parent
    home = read_home(root)
    text = path.read_text(encoding="utf-8")
    parsed = jupytext.reads(text, fmt="py:percent")
    if not parsed.cells or parsed.cells[0].cell_type != "markdown":
        raise LessonError(f"{path.name}: the first cell must be markdown with the lesson's title")
    preamble = nbformat.v4.new_code_cell(home.first_cell, metadata={"tags": [PREAMBLE_TAG, IGNORE_TAG]})
    cells = [parsed.cells[0], preamble, *parsed.cells[1:]]
    for number, cell in enumerate(cells):
        cell.id = f"{path.stem}-{number:03d}"
        # jupytext stores the blank lines between cells here, for writing the source back; this build never does.
        cell.metadata.pop("lines_to_next_cell", None)
        where = f"{path.stem}, cell {number + 1}"
        if cell.cell_type == "markdown":
            refuse_dead_links(cell.source, where, path.parent)
            cell.source = cell.source.replace(f"]({GLOSSARY}", f"]({_FROM_SOLUTIONS}")
            continue
        without_solutions(cell.source, where)
        if not is_measured(cell):
            refuse_measured_claims(cell.source, where)
        if EXPECTED_TAG in tags_of(cell) and not cell.metadata.get("alt"):
            raise LessonError(f'{where}: tagged "{EXPECTED_TAG}" but without alt="…", which describes the picture')
    if badges := home.badges(path.stem, binder=(root / "binder").is_dir()):
        cells[0].source = f"{badges}\n\n{cells[0].source}"
    origin = {"lesson": path.stem, "source_sha256": hashlib.sha256(text.encode()).hexdigest()}
    return _notebook(cells, origin)


def for_learner(solution: NotebookNode) -> NotebookNode:
    """The learner's notebook: stubs, no outputs, and the expected pictures that the executed `solution` shows.

    Raises:
        LessonError: the reference run shows no picture where one is expected, or a very large one.
    """
    cells = []
    for number, cell in enumerate(solution.cells):
        where = f"{solution.metadata.minillm.lesson}, cell {number + 1}"
        learner_cell = nbformat.from_dict(cell)
        if cell.cell_type == "code":
            learner_cell = nbformat.from_dict({**cell, "outputs": [], "execution_count": None})
            learner_cell.source = without_solutions(cell.source, where)
        else:
            learner_cell.source = cell.source.replace(f"]({_FROM_SOLUTIONS}", f"]({GLOSSARY}")
        cells.append(learner_cell)
        if EXPECTED_TAG in tags_of(cell):
            cells.append(_expected_picture(cell, where))
    return _notebook(cells, {"lesson": solution.metadata.minillm.lesson})


def without_outputs(notebook: NotebookNode) -> NotebookNode:
    """A copy without outputs and execution counts."""
    bare = nbformat.from_dict(notebook)
    bare.cells = [
        nbformat.from_dict({**cell, "outputs": [], "execution_count": None}) if cell.cell_type == "code" else cell
        for cell in notebook.cells
    ]
    return bare


def to_text(notebook: NotebookNode) -> str:
    """The file's contents: sorted keys, one space of indentation, a newline at the end.

    Raises:
        LessonError: the notebook does not follow the format.
    """
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as problem:
        raise LessonError(
            f"lesson {notebook.metadata.minillm.lesson} is no valid notebook: {problem.message}"
        ) from None
    return nbformat.writes(notebook, version=4).rstrip("\n") + "\n"


def tags_of(cell: NotebookNode) -> list[str]:
    """The tags of a cell."""
    return list(cell.metadata.get("tags", []))


def is_measured(cell: NotebookNode) -> bool:
    """Whether the cell's outputs may differ from run to run, by tag or by comment, as nbval reads them."""
    return IGNORE_TAG in tags_of(cell) or bool(IGNORE_COMMENT.search(cell.source))


def without_solutions(source: str, where: str = "cell") -> str:
    """`source` with each solution region replaced by `raise NotImplementedError(...)` at the region's indentation.

    Raises:
        LessonError: a region is not closed, not opened, or not inside a function (there it would stop Run All); or what
            remains is not valid Python.
    """
    if BEGIN not in source and END not in source:
        return source
    kept: list[str] = []
    inside = False
    for line in source.splitlines():
        if line.strip() == BEGIN:
            if inside:
                raise LessonError(f"{where}: a second '{BEGIN}' before '{END}'")
            kept.append(_stub(kept, indent=line[: len(line) - len(line.lstrip())], where=where))
            inside = True
        elif line.strip() == END:
            if not inside:
                raise LessonError(f"{where}: '{END}' without '{BEGIN}'")
            inside = False
        elif not inside:
            kept.append(line)
    if inside:
        raise LessonError(f"{where}: '{BEGIN}' is never closed by '{END}'")
    text = "\n".join(kept)
    if not re.search(r"^\s*[%!]", text, re.MULTILINE):  # notebook magics are not Python
        try:
            ast.parse(text)
        except SyntaxError as problem:
            raise LessonError(f"{where}: without its solution, line {problem.lineno}: {problem.msg}") from None
    return text


def _stub(lines_above: list[str], indent: str, where: str) -> str:
    for line in reversed(lines_above):
        definition = re.match(r"(\s*)(?:async\s+)?def\s+(\w+)", line)
        if definition and len(definition[1]) < len(indent):
            message = f"write {definition[2]} in place of each NotImplementedError, then run its check"
            return f'{indent}raise NotImplementedError("{message}")'
    raise LessonError(f"{where}: '{BEGIN}' must be indented inside a function, so that an unsolved cell still runs")


def _expected_picture(cell: NotebookNode, where: str) -> NotebookNode:
    picture = _svg_of(cell)
    if picture is None:
        raise LessonError(f'{where}: tagged "{EXPECTED_TAG}" but the reference run shows no SVG there')
    data = picture.encode()
    if len(data) > MAX_PICTURE_BYTES:
        raise LessonError(f"{where}: the expected picture has {len(data):,} bytes; the limit is {MAX_PICTURE_BYTES:,}")
    source = f"data:image/svg+xml;base64,{base64.b64encode(data).decode()}"
    body = (
        f'**Expected picture**, drawn by the reference:\n\n<img alt="{html.escape(cell.metadata.alt)}" src="{source}">'
    )
    expected = nbformat.v4.new_markdown_cell(body, metadata={"tags": ["expected-picture"]})
    expected.id = f"{cell.id}-expected"
    return expected


def _svg_of(cell: NotebookNode) -> str | None:
    """The last SVG that the cell shows, as a standalone document; None if it shows none."""
    found = None
    for output in cell.get("outputs", []):
        data: Mapping[str, str] = output.get("data", {})
        if "image/svg+xml" in data:
            found = data["image/svg+xml"]
        elif inline := re.findall(r"<svg\b.*?</svg>", data.get("text/html", ""), re.DOTALL):
            found = inline[-1]
    if found is None or 'xmlns="' in found.partition(">")[0]:
        return found
    return found.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)


def _notebook(cells: list[NotebookNode], origin: dict[str, str]) -> NotebookNode:
    """A notebook whose metadata has no versions: the file must not depend on the Python that built it."""
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "minillm": origin,
    }
    return nbformat.from_dict({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})
