"""One source per lesson, two notebooks: `solutions/NN_name.py` becomes a lesson with stubs and an executed solution.

`check` executes nothing, so it is fast. It requires that the lesson equals, byte for byte, what the source and the
recorded pictures give. The executed solution must have the source's cells, ids, tags and metadata, with every cell run,
and must name no lesson that does not exist. `minillm.teaching.rerun` checks the outputs and pictures with a fresh run.

Cells marked `nbval-ignore-output` hold measurements, so a rebuild keeps the recorded ones while the code of the lesson
is unchanged: building twice gives the same bytes.
"""

from __future__ import annotations

import ast
from pathlib import Path

from nbformat import NotebookNode
from tqdm import tqdm

from minillm.teaching.course import Lesson, Stale, choose, read_notebook, read_text
from minillm.teaching.execute import execute
from minillm.teaching.glossary import FILE as GLOSSARY
from minillm.teaching.glossary import page
from minillm.teaching.lint import cited_but_absent
from minillm.teaching.notebook import (
    PREAMBLE_TAG,
    for_learner,
    is_measured,
    read_source,
    tags_of,
    to_text,
    without_outputs,
)
from minillm.whole_file import write_whole_file


def build(root: Path, names: list[str] | None = None, check: bool = False, remeasure: bool = False) -> list[Stale]:
    """Write the notebooks of `names` (`["02_kv_cache"]` or `["02"]`; None: all), or with `check` only compare them.

    Shows a progress bar over all code cells when stderr is a terminal. With `remeasure`, the recorded measurements are
    replaced even where the code is unchanged.

    Returns:
        With `check`, every notebook that is stale or has no source any more. Else an empty list.

    Raises:
        LessonError: an unknown name, a badly written source, or a cell that fails.
    """
    root = Path(root)
    lessons = choose(root, names)
    if check:
        found = [stale for lesson in lessons for stale in _check(root, lesson)]
        return found + (_check_glossary(root) + _orphans(root) if names is None else [])
    sources = {lesson.name: read_source(lesson.source) for lesson in lessons}
    cells = sum(cell.cell_type == "code" for source in sources.values() for cell in source.cells)
    with tqdm(total=cells, unit="cell", disable=None) as progress:
        for lesson in lessons:
            progress.set_description(lesson.name)
            _build(lesson, sources[lesson.name], progress, remeasure)
    _write(root / "lessons" / GLOSSARY, _glossary(root))
    return []


def _build(lesson: Lesson, source: NotebookNode, progress: tqdm, remeasure: bool) -> None:
    solution = execute(source, lesson.source.parent, on_cell=progress.update)
    if not remeasure:
        _keep_measurements(solution, read_notebook(lesson.solution))
    learner = for_learner(solution)
    _write(lesson.solution, to_text(solution))
    _write(lesson.lesson, to_text(learner))


def _check(root: Path, lesson: Lesson) -> list[Stale]:
    fix = f"minillm build {lesson.name}"
    solution, learner = lesson.solution.relative_to(root), lesson.lesson.relative_to(root)
    recorded = read_notebook(lesson.solution)
    if recorded is None or (reason := _solution_difference(read_source(lesson.source), recorded)):
        reason = "it is missing or unreadable" if recorded is None else reason
        return [Stale(solution, reason, fix), Stale(learner, f"its pictures come from {solution}, which is stale", fix)]
    numbers = {other.number for other in choose(root)}
    if cited := cited_but_absent(recorded, numbers):
        source = lesson.source.relative_to(root)
        return [Stale(source, reason, f"{fix}, after correcting the number of the lesson") for reason in cited]
    if read_text(lesson.lesson) != to_text(for_learner(recorded)):
        return [Stale(learner, "it differs from what its source gives (building writes over it), or is missing", fix)]
    return []


def _glossary(root: Path) -> str:
    return page({lesson.number: lesson.lesson.name for lesson in choose(root)})


def _check_glossary(root: Path) -> list[Stale]:
    place = Path("lessons") / GLOSSARY
    same = read_text(root / place) == _glossary(root)
    return (
        [] if same else [Stale(place, "it differs from minillm/teaching/glossary.toml, or is missing", "minillm build")]
    )


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
    """Restore the recorded outputs of measured cells if the lesson's code is unchanged; its prose may differ, and so
    may docstrings and comments."""
    if recorded is None:
        return
    cells, before = _code_of_lesson(solution), _code_of_lesson(recorded)
    if [_without_prose(cell) for cell in cells] != [_without_prose(cell) for cell in before]:
        return
    for cell, old in zip(cells, before, strict=True):
        if is_measured(cell) and old.execution_count is not None:
            cell.outputs = old.outputs


def _without_prose(cell: NotebookNode) -> tuple[list[str], str]:
    """The tags and the code of a cell."""
    tree = ast.parse(cell.source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tags_of(cell), ast.unparse(tree)


def _code_of_lesson(notebook: NotebookNode) -> list[NotebookNode]:
    """The code cells without the generated first one."""
    return [cell for cell in notebook.cells if cell.cell_type == "code" and PREAMBLE_TAG not in tags_of(cell)]


def _orphans(root: Path) -> list[Stale]:
    notebooks = sorted([*(root / "lessons").glob("*.ipynb"), *(root / "solutions").glob("*.ipynb")])
    return [
        Stale(path.relative_to(root), f"solutions/{path.stem}.py does not exist", f"delete {path.relative_to(root)}")
        for path in notebooks
        if not (root / "solutions" / f"{path.stem}.py").exists()
    ]


def _write(path: Path, text: str) -> None:
    """Write only if the text differs, so that file watchers are not triggered."""
    if read_text(path) != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole_file(path, text)
