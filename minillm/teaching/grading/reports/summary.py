"""The page of the whole class: results by exercise, common mistakes, submissions, functions that are alike."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from minillm.teaching.grading.grades import Status, Submission
from minillm.teaching.grading.reports.page import document, said, table
from minillm.teaching.grading.similarity import alike as alike_pairs

MAX_ROWS = 200
"""Of the common mistakes."""
MAX_PAIRS = 50
"""Of each exercise, that are alike."""
SHOWN = (Status.PASSED, Status.FAILED, Status.NOT_ATTEMPTED, Status.TIMEOUT, Status.CRASHED)


def page_of(
    graded: Sequence[Submission], pages: Mapping[str, str], isolation: Mapping[str, str], least_alike: float
) -> str:
    """The summary. `pages`: file name of each student's page; `least_alike`: similarity from which pairs are listed."""
    modes = sorted({submission.isolation for submission in graded if submission.isolation})
    parts = [f"<p>{sum(bool(s.key) for s in graded)} submissions of {len(pages)} students.</p>"]
    parts += [f"<p>{escape(isolation[mode])}</p>" for mode in modes]
    parts += [_by_exercise(graded), _mistakes(graded), _submissions(graded, pages), _alike(graded, least_alike)]
    return document("Results of the class", "\n".join(parts))


def common_mistakes(graded: Sequence[Submission]) -> list[tuple[str, str, int, bool]]:
    """(exercise, cause, students, whether it is a planted mistake), the most frequent first. A student counts once."""
    seen = {
        (submission.student, grade.exercise, re.sub(r"\d+", "…", grade.mistake or grade.cause), bool(grade.mistake))
        for submission in graded
        for grade in submission.exercises
        if grade.mistake or grade.cause
    }
    counted = Counter((exercise, cause, planted) for _, exercise, cause, planted in seen)
    found = [(exercise, cause, count, planted) for (exercise, cause, planted), count in counted.items()]
    return sorted(found, key=lambda row: (-row[2], row[0], row[1]))


def _by_exercise(graded: Sequence[Submission]) -> str:
    counts: dict[str, Counter[Status]] = {}
    for submission in graded:
        for grade in submission.exercises:
            counts.setdefault(grade.exercise, Counter())[grade.status] += 1
    rows = [[escape(name), *(str(counts[name][status]) for status in SHOWN)] for name in sorted(counts)]
    return "<h2>By exercise</h2>\n" + table("Submissions by status", ("exercise", *(s.value for s in SHOWN)), rows)


def _mistakes(graded: Sequence[Submission]) -> str:
    found = common_mistakes(graded)[:MAX_ROWS]
    if not found:
        return "<h2>Common mistakes</h2>\n<p>None was recognised.</p>"
    rows = [
        [escape(exercise), escape(f"the function {cause}" if planted else cause), str(count)]
        for exercise, cause, count, planted in found
    ]
    return "<h2>Common mistakes</h2>\n" + table("Likely causes, by students", ("exercise", "cause", "students"), rows)


def _submissions(graded: Sequence[Submission], pages: Mapping[str, str]) -> str:
    rows = [
        [
            f'<a href="students/{escape(pages[s.student])}">{escape(s.student)}</a>',
            escape(s.file),
            said(s.status),
            f"{s.points} of {len(s.exercises)}",
            escape(s.reason),
        ]
        for s in graded
    ]
    head = ("student", "file", "status", "points", "remark")
    return "<h2>Submissions</h2>\n" + table("All submissions", head, rows)


def _alike(graded: Sequence[Submission], least: float) -> str:
    """The pairs of each exercise, those of the exercise with the fewest first: a natural solution has many."""
    names = sorted({name for submission in graded for name in submission.shapes})
    pairs = {
        name: alike_pairs([(s.student, s.shapes[name]) for s in graded if name in s.shapes], least) for name in names
    }
    fewest_first = sorted((name for name in names if pairs[name]), key=lambda name: len(pairs[name]))
    rows = [
        [escape(name), escape(one), escape(other), f"{share:.2f}"]
        for name in fewest_first
        for one, other, share in pairs[name][:MAX_PAIRS]
    ]
    intro = (
        "<p>Pairs whose syntax trees, without names, texts and numbers, share most of their parts. Short functions "
        "with one natural solution are alike in every class: this is a reason to read both, and no verdict.</p>"
    )
    if not rows:
        return f"<h2>Alike</h2>\n{intro}\n<p>No pair reaches {least:g}.</p>"
    more = [
        f"<p>{len(pairs[name]) - MAX_PAIRS} more pairs of {escape(name)} are left out.</p>"
        for name in fewest_first
        if len(pairs[name]) > MAX_PAIRS
    ]
    shown = table("Pairs", ("exercise", "student", "student", "share in common"), rows)
    return "\n".join(["<h2>Alike</h2>", intro, shown, *more])
