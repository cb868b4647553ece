"""Write the tables of instructors/SYLLABUS.md: the lessons, and courses of a day, a week and a term.

    python -m instructors.syllabus           write the tables between the markers
    python -m instructors.syllabus --check   exit 1 if they are not those of the lessons

The text between the tables is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from instructors.lesson_plan import Plan, read_plans
from minillm.errors import LessonError, MinillmError

PAGE = Path(__file__).with_name("SYLLABUS.md")
Part = tuple[int, "tuple[str, ...] | None"]
"""A lesson, and the exercises that are done in the session (None: all)."""


@dataclass(frozen=True)
class Session:
    """Lessons of one session of a course."""

    name: str
    parts: tuple[Part, ...]
    remark: str = ""


@dataclass(frozen=True)
class Course:
    """Sessions of at most `minutes` each. `assumes`: lessons whose contents the participants know already."""

    sessions: tuple[Session, ...]
    minutes: int
    assumes: tuple[int, ...] = ()


def _all(*lessons: int) -> tuple[Part, ...]:
    return tuple((lesson, None) for lesson in lessons)


COURSES = {
    "day": Course(
        (
            Session(
                "morning 1", ((0, None), (2, ("append_kv", "kv_bytes_per_token"))), "what a cache is, and its bytes"
            ),
            Session("morning 2", ((6, ("slot_mapping", "find_prefix")),), "blocks, tables, sharing"),
            Session("afternoon 1", ((7, ("static_steps", "share_budget")),), "who runs in the next step"),
            Session("afternoon 2", ((10, ("accept_rule", "residual")),), "why speculation is exact"),
        ),
        minutes=120,
        assumes=(1,),
    ),
    "week": Course(
        (
            Session("Monday", _all(0, 1, 2), "one request"),
            Session("Tuesday", _all(3, 4, 5), "bytes"),
            Session("Wednesday", _all(6, 7, 8), "many requests; first kernels"),
            Session("Thursday", _all(10, 11, 12), "speculation"),
            Session("Friday", _all(13, 14, 15), "the cache, smaller and elsewhere; capstone"),
        ),
        minutes=360,
    ),
    "term": Course(
        (
            Session("week 1", _all(0, 1)),
            Session("week 2", _all(2)),
            Session("week 3", _all(3)),
            Session("week 4", _all(4)),
            Session("week 5", _all(5)),
            Session("week 6", _all(6)),
            Session("week 7", _all(7), "and the midterm, lessons 1 to 6"),
            Session("week 8", _all(8)),
            Session("week 9", _all(9)),
            Session("week 10", _all(10)),
            Session("week 11", _all(11)),
            Session("week 12", _all(12)),
            Session("week 13", _all(13)),
            Session("week 14", _all(14)),
            Session("week 15", _all(15), "and the final, lessons 7 to 14"),
            Session("week 16", _all(16), "where to go on"),
            Session("week 17", _all(17), "an appendix; as a reserve, or for projects"),
        ),
        minutes=180,
    ),
}


def course_table(course: Course, plans: dict[int, Plan]) -> str:
    """The sessions of a course as a Markdown table, with minutes.

    Raises:
        LessonError: a session is too long, or comes before what it needs.
    """
    known, total = set(course.assumes), 0
    lines = ["| session | lessons and exercises | minutes | |", "|---|---|---:|---|"]
    for session in course.sessions:
        minutes = sum(plans[lesson].minutes(chosen) for lesson, chosen in session.parts)
        if minutes > course.minutes:
            raise LessonError(f"{session.name} takes {minutes} minutes; a session has {course.minutes}")
        cells = []
        for lesson, chosen in session.parts:
            if missing := set(plans[lesson].needs) - known:
                raise LessonError(f"{session.name}: lesson {lesson} needs lesson {min(missing)}, which comes later")
            known.add(lesson)
            some = "" if chosen is None else f" ({', '.join(f'`{name}`' for name in chosen)})"
            cells.append(f"{lesson}. {plans[lesson].title}{some}")
        total += minutes
        lines.append(f"| {session.name} | {'; '.join(cells)} | {minutes} | {session.remark} |")
    return "\n".join([*lines, f"| in all | | {total} | {total / 60:.1f} hours |"])


def lesson_table(plans: dict[int, Plan]) -> str:
    """Every lesson: what it needs, its exercises, its minutes with and without them."""
    lines = ["| | lesson | needs | exercises | minutes | without exercises |", "|---|---|---|---|---:|---:|"]
    for plan in plans.values():
        needs = ", ".join(map(str, plan.needs)) or "–"
        exercises = ", ".join(f"`{name}`" for name in plan.exercises) or "–"
        row = [f"{plan.number:02}", plan.title, needs, exercises, str(plan.minutes()), str(plan.minutes(()))]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def updated(text: str, plans: dict[int, Plan]) -> str:
    """`text` with new tables between its markers.

    Raises:
        LessonError: the markers of a table are missing.
    """
    tables = {"lessons": lesson_table(plans)}
    tables |= {name: course_table(course, plans) for name, course in COURSES.items()}
    for name, table in tables.items():
        begin, end = f"<!-- {name}: generated -->", "<!-- end -->"
        pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise LessonError(f"SYLLABUS.md must have one table between {begin} and {end}")
        text = pattern.sub(lambda _, made=f"{begin}\n{table}\n{end}": made, text)
    return text


def main(arguments: list[str] | None = None) -> int:
    """Write the tables, or compare them. Returns 1 if they are stale, 2 if a course is refused."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m instructors.syllabus", description=__doc__, formatter_class=form)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(arguments)
    old = PAGE.read_text(encoding="utf-8")
    try:
        new = updated(old, read_plans())
    except MinillmError as problem:
        print(f"syllabus: {problem}", file=sys.stderr)
        return 2
    if args.check:
        if new != old:
            print(f"{PAGE.name} is stale; run: python -m instructors.syllabus", file=sys.stderr)
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
