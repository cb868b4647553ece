"""Sections of the README as pages of the book: how to read the engine, and what was measured."""

from __future__ import annotations

import re
from pathlib import Path

from minillm.book.source_pages import SourcePages
from minillm.errors import LessonError

PAGES = {"Read the engine": "engine.md", "How it is tested": "tested.md", "Measured here": "measured.md"}
"""Heading of a section → the page."""
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")


def write_readme_pages(root: Path, pages: Path, source_pages: SourcePages) -> None:
    """Write the pages of `PAGES`. Raises `LessonError` if README.md lacks one of the sections."""
    readme = (root / "README.md").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part.partition("\n")[2] for part in re.split(r"^## ", readme, flags=re.M)[1:]}
    for heading, file in PAGES.items():
        if heading not in sections:
            raise LessonError(f"README.md has no section {heading!r}; the book's page {file} is made of it")
        body = re.sub(r"^###", "##", sections[heading], flags=re.M)
        body = _LINK.sub(r"\1", body)  # other files of the repository are not in the book
        (pages / file).write_text(f"# {heading}\n{source_pages.linked_text(body, depth=0)}", encoding="utf-8")
