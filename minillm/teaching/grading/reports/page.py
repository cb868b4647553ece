"""A page per student. Readable without colours, without a mouse and by a screen reader; no script, nothing loaded."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from minillm.teaching.grading.grades import ExerciseGrade, Status, Submission
from minillm.teaching.grading.reports.names import file_name
from minillm.whole_file import write_whole_file

STYLE = """
:root { color-scheme: light dark; }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0 1rem; }
th, td { border: 1px solid #888; padding: .25rem .6rem; text-align: left; vertical-align: top; }
td.n { text-align: right; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
section { border-left: 6px solid #888; padding-left: 1rem; margin: 1.5rem 0; }
.skip { position: absolute; left: -100rem; } .skip:focus { position: static; }
"""
MARKS = {
    Status.PASSED: "✓",
    Status.FAILED: "✗",
    Status.NOT_ATTEMPTED: "–",
    Status.TIMEOUT: "⏱",
    Status.CRASHED: "!",
    Status.UNREADABLE: "?",
}


def document(title: str, body: str) -> str:
    """A whole page with one main heading."""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f'<style>{STYLE}</style>\n</head>\n<body>\n<a class="skip" href="#main">Skip to the content</a>\n'
        f'<main id="main">\n<h1>{escape(title)}</h1>\n{body}\n</main>\n</body>\n</html>\n'
    )


def write_students(graded: Sequence[Submission], folder: Path) -> dict[str, str]:
    """Write a page for each student; returns their file names."""
    by_student: dict[str, list[Submission]] = {}
    for submission in graded:
        by_student.setdefault(submission.student, []).append(submission)
    pages = {student: f"{file_name(student)}.html" for student in by_student}
    for student, submissions in by_student.items():
        write_whole_file(folder / pages[student], page_of(student, submissions))
    return pages


def page_of(student: str, submissions: Sequence[Submission]) -> str:
    """The page of one student: for every file a table of its exercises, then what is wrong with each."""
    return document(f"Results of {student}", "\n".join(map(_file, submissions)))


def said(status: Status) -> str:
    """The status with its mark, which is hidden from screen readers."""
    return f'<span aria-hidden="true">{MARKS[status]}</span> {status.value}'


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of HTML cells; the first of each row is its heading."""
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = [
        f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in rest) + "</tr>"
        for first, *rest in rows
    ]
    return (
        f"<table>\n<caption>{escape(caption)}</caption>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n"
        + "\n".join(lines)
        + "\n</tbody>\n</table>"
    )


def _file(submission: Submission) -> str:
    parts = [f"<h2>{escape(submission.file)}</h2>"]
    if submission.reason:
        parts.append(f"<p>{said(submission.status)}: {escape(submission.reason)}</p>")
    if submission.exercises:
        points = f"{submission.points} of {len(submission.exercises)} exercises passed"
        rows = [
            [
                escape(grade.exercise),
                said(grade.status),
                f"{grade.passed_cases} of {grade.num_cases}",
                escape(", ".join(grade.library)),
            ]
            for grade in submission.exercises
        ]
        parts.append(table(points, ("exercise", "status", "cases passed", "imports from minillm"), rows))
    parts += [f"<p>{escape(note)}</p>" for note in submission.notes]
    parts += [_exercise(grade) for grade in submission.exercises if grade.status is not Status.PASSED]
    return "\n".join(parts)


def _exercise(grade: ExerciseGrade) -> str:
    rows = [("likely cause", grade.cause), ("what is wrong", grade.problem), ("your code", grade.where)]
    rows += [(f"input {name}", value) for name, value in grade.inputs.items()]
    rows += [("expected", grade.expected), ("got", grade.got), *(("note", note) for note in grade.notes)]
    shown = [[escape(heading), f"<pre>{escape(text)}</pre>"] for heading, text in rows if text]
    case = f"The first case that fails: {grade.case}" if grade.case else "Why"
    return (
        f"<section>\n<h3>{escape(grade.exercise)}: {said(grade.status)}</h3>\n"
        + table(case, ("", ""), shown).replace(
            '<thead><tr><th scope="col"></th><th scope="col"></th></tr></thead>\n', ""
        )
        + "\n</section>"
    )
