"""Common wrong answers, from the mistakes planted in the exercises, and what they reveal about a student's idea.

python -m instructors.mistakes              write instructors/MISTAKES.md: one or two per exercise, explained
python -m instructors.mistakes --all 02 06  print every planted mistake of these lessons
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minillm.commands.streams import check_streams
from minillm.errors import LessonError, MinillmError
from minillm.teaching.registry import every

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

FOLDER = Path(__file__).parent
SOURCE, PAGE = FOLDER / "misconceptions.toml", FOLDER / "MISTAKES.md"
BAR = "\\|"
INTRODUCTION = """\
# Common wrong answers, and what they reveal

Every exercise has planted mistakes: wrong versions that students write. The check of a notebook and `minillm grade`
name the one whose answers equal the student's; the grader's summary page counts them for a class. There are {total} of
them in {exercises} exercises. Below are the {explained} that point at an idea about the matter, and not only at a slip.
"The function …" is what the student is told. `python -m instructors.mistakes --all 06` lists all of a lesson.

This page is generated from `misconceptions.toml`; write there, and run `python -m instructors.mistakes`.
"""


@dataclass(frozen=True)
class Misconception:
    """A planted mistake, the idea behind it, how it really is, and a question for the student (or "")."""

    mistake: str
    believes: str
    fact: str
    ask: str = ""


def read(path: Path = SOURCE) -> dict[str, list[Misconception]]:
    """The misconceptions by exercise.

    Raises:
        LessonError: an exercise or a planted mistake that does not exist, or a misspelt key.
    """
    planted = {exercise: mistakes for _, exercise, mistakes in all_mistakes()}
    found: dict[str, list[Misconception]] = {}
    for exercise, table in tomllib.loads(path.read_text(encoding="utf-8")).items():
        if exercise not in planted:
            raise LessonError(f"{path.name}: there is no exercise {exercise!r}")
        for mistake, said in table.items():
            if mistake not in planted[exercise]:
                raise LessonError(f"{path.name}: {exercise} has no planted mistake {mistake!r}")
            if not {"believes", "fact"} <= set(said) <= {"believes", "fact", "ask"}:
                raise LessonError(f"{path.name}: {exercise}, {mistake!r}: write believes and fact, and perhaps ask")
            found.setdefault(exercise, []).append(Misconception(mistake, **said))
    return found


def all_mistakes() -> Iterator[tuple[int, str, list[str]]]:
    """(number of the lesson, exercise, its planted mistakes), in the order of the lessons."""
    for exercise in every():
        yield int(exercise.name[1:3]), exercise.name, [wrong.description for wrong in exercise.wrong]


def page() -> str:
    """The text of `MISTAKES.md`."""
    explained, planted = read(), list(all_mistakes())
    total = sum(len(mistakes) for _, _, mistakes in planted)
    count = sum(map(len, explained.values()))
    lines = [INTRODUCTION.format(total=f"{total:,}", exercises=len(planted), explained=count)]
    lesson = 0
    for number, exercise, _ in planted:
        if exercise not in explained:
            continue
        if number != lesson:
            header = "| exercise | the function … | the student may believe that … | in fact | ask |"
            lines += [*[""] * (lesson > 0), f"## Lesson {number}", "", header, "|---|---|---|---|---|"]
            lesson = number
        for one in explained[exercise]:
            cells = [f"`{exercise.partition('.')[2]}`", one.mistake, one.believes, one.fact, one.ask or "–"]
            lines.append(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def listing(lessons: list[str]) -> str:
    """Every planted mistake of these lessons (none: of all), as text."""
    wanted = {int(name) for name in lessons}
    lines = []
    for number, exercise, mistakes in all_mistakes():
        if not wanted or number in wanted:
            lines += [exercise, *(f"  {mistake}" for mistake in mistakes)]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or print a listing. Returns 2 if a lesson or a misconception does not exist."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m instructors.mistakes", description=__doc__, formatter_class=form)
    parser.add_argument("--all", nargs="*", metavar="LESSON", help="print every planted mistake of these lessons")
    args = parser.parse_args(arguments)
    try:
        check_streams()
        if args.all is not None:
            bad = [name for name in args.all if not name.isdigit() or not listing([name]).strip()]
            if bad:
                raise LessonError(f"--all {bad[0]}: no lesson with exercises has this number")
            print(listing(args.all), end="")
        else:
            PAGE.write_text(page(), encoding="utf-8")
            print(PAGE)
    except MinillmError as problem:
        print(f"mistakes: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
