"""What a lesson takes and what it needs, counted from its source: words, cells, exercises, lines of their solutions.

The minutes are an estimate from counts, with the rates below. They were not measured on students. Change the rates to
those of your class; every table follows.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from minillm.errors import LessonError
from minillm.teaching.course import Lesson, choose
from minillm.teaching.notebook import BEGIN, END, PREAMBLE_TAG, read_source, tags_of
from minillm.teaching.registry import of_lesson

ROOT = Path(__file__).resolve().parents[1]
WORDS_PER_MINUTE = 150
"""Of technical text with formulas, by readers whose first language it may not be."""
MINUTES_PER_CELL = 1.0
"""To run a cell and look at what it shows."""
MINUTES_PER_EXERCISE = 5.0
"""To understand the task, and to read the checker's report once or twice."""
MINUTES_PER_LINE = 1.5
"""Of the solution."""
STEP = 5
"""Minutes are rounded up to a multiple of this."""
UNSAID: dict[int, tuple[int, ...]] = {15: (3, 5, 6, 11)}
"""What a lesson needs without a sentence "You need …" in its introduction."""
_SOLUTION = re.compile(rf"{BEGIN}\n(.*?)\n\s*{END}", re.DOTALL)
_NEED = re.compile(r"You need (.*?)\.(?:\s|$)", re.DOTALL)


@dataclass(frozen=True)
class Plan:
    """One lesson. `exercises`: lines of the solution by the exercise's name; `needs`: numbers of lessons."""

    name: str
    title: str
    words: int
    cells: int
    exercises: dict[str, int]
    needs: tuple[int, ...]

    @property
    def number(self) -> int:
        """2 for `02_kv_cache`."""
        return int(self.name[:2])

    def minutes(self, chosen: tuple[str, ...] | None = None) -> int:
        """Minutes with these exercises (None: all); the others are left to the reference.

        Raises:
            LessonError: the lesson has no such exercise.
        """
        names = tuple(self.exercises) if chosen is None else chosen
        if unknown := sorted(set(names) - set(self.exercises)):
            raise LessonError(f"lesson {self.name} has no exercise {unknown[0]!r}; it has {', '.join(self.exercises)}")
        spent = self.words / WORDS_PER_MINUTE + self.cells * MINUTES_PER_CELL
        spent += sum(MINUTES_PER_EXERCISE + MINUTES_PER_LINE * self.exercises[name] for name in names)
        return math.ceil(spent / STEP) * STEP


def read_plans(root: Path = ROOT) -> dict[int, Plan]:
    """The plan of every lesson by its number."""
    return {lesson.number: _plan(lesson) for lesson in choose(root)}


def _plan(lesson: Lesson) -> Plan:
    cells = read_source(lesson.source).cells
    text = [cell.source for cell in cells if cell.cell_type == "markdown"]
    code = [cell for cell in cells if cell.cell_type == "code" and PREAMBLE_TAG not in tags_of(cell)]
    names = [exercise.function_name for exercise in of_lesson(f"l{lesson.number:02}")]
    lines = {name: _solution_lines(lesson, name, [cell.source for cell in code]) for name in names}
    title = text[0].partition("\n")[0].lstrip("# ").partition(". ")[2]
    found = _NEED.search(text[0])
    stated = {int(n) for n in re.findall(r"lesson (\d+)", found[1])} if found else set()
    needs = sorted(stated | set(UNSAID.get(lesson.number, ())))
    return Plan(lesson.name, title, sum(len(part.split()) for part in text), len(code), lines, tuple(needs))


def _solution_lines(lesson: Lesson, function: str, cells: list[str]) -> int:
    for source in cells:
        if re.search(rf"^def {function}\(", source, re.MULTILINE) and (region := _SOLUTION.search(source)):
            return len(region[1].splitlines())
    raise LessonError(f"lesson {lesson.name} has no cell with the solution of {function}")
