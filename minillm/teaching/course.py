"""The lessons of a repository clone, the files of each, and their lookup by name."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from minillm.errors import LessonError


@dataclass(frozen=True)
class Stale:
    """A file that does not match its source."""

    path: Path
    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}. Run: {self.fix}"


@dataclass(frozen=True)
class Lesson:
    """The three files of a lesson."""

    source: Path
    solution: Path
    lesson: Path

    @property
    def name(self) -> str:
        """`02_kv_cache`."""
        return self.source.stem

    @property
    def number(self) -> int:
        """2."""
        return int(self.name.partition("_")[0])


def choose(root: Path, names: list[str] | None = None) -> list[Lesson]:
    """The lessons `names` (`["02_kv_cache"]` or `["02"]`; None: all) of the clone `root`.

    Raises:
        LessonError: no lesson has that name (the message lists similar ones), or there is none at all.
    """
    every = [
        Lesson(source, source.with_suffix(".ipynb"), root / "lessons" / f"{source.stem}.ipynb")
        for source in sorted((root / "solutions").glob("[0-9][0-9]_*.py"))
    ]
    if not every:
        raise LessonError(f"{root / 'solutions'} has no lesson")
    if names is None:
        return every
    return [_named(every, name) for name in names]


def read_notebook(path: Path) -> NotebookNode | None:
    """The notebook in the file, or None if the file is missing or holds no notebook of format 4."""
    text = read_text(path)
    try:
        notebook = None if text is None else nbformat.reads(text, as_version=nbformat.NO_CONVERT)
    except (ValueError, TypeError, AttributeError, nbformat.ValidationError):  # what nbformat raises for other JSON
        return None
    return notebook if notebook is not None and "cells" in notebook else None


def read_text(path: Path) -> str | None:
    """The file's text, or None if there is no file, or it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8") if path.exists() else None
    except UnicodeDecodeError:
        return None


def _named(every: list[Lesson], name: str) -> Lesson:
    wanted = Path(name).stem
    for lesson in every:
        if wanted in (lesson.name, lesson.name.partition("_")[0]):
            return lesson
    known = [lesson.name for lesson in every]
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.4) or known
    raise LessonError(f"no lesson is called {name!r}; there are: {', '.join(near) or 'none'}")
