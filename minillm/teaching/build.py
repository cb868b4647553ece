"""One source per lesson, two notebooks: `solutions/NN_name.py` becomes a lesson with stubs and an executed solution.

What `check` compares, and why it is fast: it executes nothing. The lesson must equal, byte for byte, what the source
and the recorded pictures give. The executed solution must have the source's cells, ids, tags and metadata, with every
cell run; its outputs are held to a fresh run by `pytest --nbval solutions/`, except those of cells marked
`nbval-ignore-output`. Those hold measurements, so a rebuild keeps the recorded ones while the source is unchanged:
building twice gives the same bytes.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from tqdm import tqdm

from minillm.errors import LessonError
from minillm.teaching.execute import execute
from minillm.teaching.notebook import for_learner, is_measured, read_source, to_text, without_outputs


@dataclass(frozen=True)
class Stale:
    """A notebook that is not what its source gives."""

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


def build(root: Path, names: list[str] | None = None, check: bool = False, remeasure: bool = False) -> list[Stale]:
    """Write the notebooks of `names` (`["02_kv_cache"]` or `["02"]`; None: all), or with `check` only compare them.

    Shows a progress bar over all code cells when stderr is a terminal. With `remeasure`, the recorded measurements are
    replaced even where the source is unchanged.

    Returns:
        With `check`, every notebook that is stale or has no source any more. Else an empty list.

    Raises:
        LessonError: an unknown name, a badly written source, or a cell that fails.
    """
    root = Path(root)
    lessons = _choose(root, names)
    if check:
        found = [stale for lesson in lessons for stale in _check(root, lesson)]
        return found + (_orphans(root) if names is None else [])
    sources = {lesson.name: read_source(lesson.source) for lesson in lessons}
    cells = sum(cell.cell_type == "code" for source in sources.values() for cell in source.cells)
    with tqdm(total=cells, unit="cell", disable=None) as progress:
        for lesson in lessons:
            progress.set_description(lesson.name)
            _build(lesson, sources[lesson.name], progress, remeasure)
    return []


def _build(lesson: Lesson, source: NotebookNode, progress: tqdm, remeasure: bool) -> None:
    solution = execute(source, lesson.source.parent, on_cell=progress.update)
    if not remeasure:
        _keep_measurements(solution, _read(lesson.solution))
    learner = for_learner(solution)
    _write(lesson.solution, to_text(solution))
    _write(lesson.lesson, to_text(learner))


def _check(root: Path, lesson: Lesson) -> list[Stale]:
    fix = f"minillm build {lesson.name}"
    solution, learner = lesson.solution.relative_to(root), lesson.lesson.relative_to(root)
    recorded = _read(lesson.solution)
    if recorded is None or (reason := _solution_difference(read_source(lesson.source), recorded)):
        reason = "it is missing or unreadable" if recorded is None else reason
        return [Stale(solution, reason, fix), Stale(learner, f"its pictures come from {solution}, which is stale", fix)]
    if _read_text(lesson.lesson) != to_text(for_learner(recorded)):
        return [Stale(learner, "it differs from what its source gives, or is missing", fix)]
    return []


def _solution_difference(source: NotebookNode, recorded: NotebookNode) -> str:
    """Why a recorded solution is stale, or ""."""
    if without_outputs(recorded) != source:
        pairs = zip(source.cells, recorded.cells, strict=False)
        number = next((n for n, (ours, theirs) in enumerate(pairs, 1) if ours.source != theirs.source), 0)
        return f"cell {number} differs from its source" if number else "its cells or metadata differ from its source"
    for number, cell in enumerate(recorded.cells, 1):
        if cell.cell_type == "code" and cell.execution_count is None:
            return f"cell {number} was never executed"
    return ""


def _keep_measurements(solution: NotebookNode, recorded: NotebookNode | None) -> None:
    """Put the recorded outputs back into measured cells, if they come from this very source."""
    if recorded is None or without_outputs(recorded) != without_outputs(solution):
        return
    for cell, before in zip(solution.cells, recorded.cells, strict=True):
        if cell.cell_type == "code" and is_measured(cell) and before.execution_count is not None:
            cell.outputs = before.outputs


def _choose(root: Path, names: list[str] | None) -> list[Lesson]:
    every = [
        Lesson(source, source.with_suffix(".ipynb"), root / "lessons" / f"{source.stem}.ipynb")
        for source in sorted((root / "solutions").glob("[0-9][0-9]_*.py"))
    ]
    if names is None:
        return every
    return [_named(every, name) for name in names]


def _named(every: list[Lesson], name: str) -> Lesson:
    wanted = Path(name).stem
    for lesson in every:
        if wanted in (lesson.name, lesson.name.partition("_")[0]):
            return lesson
    known = [lesson.name for lesson in every]
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.4) or known
    raise LessonError(f"no lesson is called {name!r}; there are: {', '.join(near) or 'none'}")


def _orphans(root: Path) -> list[Stale]:
    notebooks = sorted([*(root / "lessons").glob("*.ipynb"), *(root / "solutions").glob("*.ipynb")])
    return [
        Stale(path.relative_to(root), f"solutions/{path.stem}.py does not exist", f"delete {path.relative_to(root)}")
        for path in notebooks
        if not (root / "solutions" / f"{path.stem}.py").exists()
    ]


def _read(path: Path) -> NotebookNode | None:
    """The notebook as it is in the file, or None if there is none that can be read."""
    text = _read_text(path)
    try:
        return None if text is None else nbformat.reads(text, as_version=nbformat.NO_CONVERT)
    except (nbformat.reader.NotJSONError, nbformat.ValidationError):
        return None


def _read_text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def _write(path: Path, text: str) -> None:
    """Write only what changed, so that tools watching the files stay quiet."""
    if _read_text(path) != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
