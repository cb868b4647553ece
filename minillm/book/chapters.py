"""The solved lessons as chapters: the notebooks with links that hold inside the book, and the glossary."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from minillm.errors import LessonError
from minillm.teaching import glossary
from minillm.teaching.course import Lesson, read_notebook
from minillm.teaching.publication import Home

PREAMBLE = "minillm-preamble"
"""The tag of the generated first cell, which installs minillm on Colab and checks the machine."""
INDEX = """\
# Lessons

Each asks one question, has you build the answer, and measures it. Here the exercises are solved.

```{{toctree}}
:maxdepth: 1

{names}
```
"""
_GLOSSARY_LINK = re.compile(r"\]\((?:\.\./lessons/)?glossary\.md(#[\w-]+)?\)")
_ENTRY = re.compile(r'^### <a id="[\w-]+"></a>', re.MULTILINE)
_LESSON_LINK = re.compile(r"\]\((\d\d_\w+)\.ipynb\)")


def read_chapters(lessons: Sequence[Lesson]) -> list[tuple[Lesson, NotebookNode]]:
    """Every lesson with its solved notebook. Raises `LessonError` if a lesson has none."""
    found = [(lesson, read_notebook(lesson.solution)) for lesson in lessons]
    for lesson, notebook in found:
        if notebook is None:
            raise LessonError(f"{lesson.solution} is missing or unreadable; run: minillm build {lesson.number:02}")
    return found


def write_chapters(chapters: Sequence[tuple[Lesson, NotebookNode]], folder: Path, home: Home) -> None:
    """Write the notebook of every lesson, and a page that lists them, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    names = "\n".join(lesson.name for lesson, _ in chapters)
    (folder / "index.md").write_text(INDEX.format(names=names), encoding="utf-8")
    for lesson, notebook in chapters:
        nbformat.write(chapter(notebook, home.badges(lesson.name, binder=True)), folder / lesson.solution.name)


def chapter(notebook: NotebookNode, badges: str = "") -> NotebookNode:
    """The notebook as a page: without its first code cell, with `badges` under the title and the book's links."""
    cells = [cell for cell in notebook.cells if PREAMBLE not in cell.metadata.get("tags", [])]
    for cell in cells:
        if cell.cell_type == "markdown":
            cell.source = _GLOSSARY_LINK.sub(lambda m: f"](../glossary.md{m[1] or ''})", cell.source)
    if badges:
        title, _, rest = cells[0].source.partition("\n")
        cells[0].source = f"{title}\n\n{badges}\n{rest}"
    notebook.cells = cells
    return notebook


def write_glossary(lessons: Sequence[Lesson], file: Path) -> None:
    """Write the glossary with links to the chapters."""
    text = glossary.page({lesson.number: lesson.solution.name for lesson in lessons})
    text = _ENTRY.sub("## ", text)  # MyST makes the same anchors of the headings
    file.write_text(_LESSON_LINK.sub(r"](lessons/\1.ipynb)", text), encoding="utf-8")
