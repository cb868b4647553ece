"""The reports of a graded folder: for machines (JSON, CSV, JUnit, Gradescope) and for people (HTML)."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path

from minillm.teaching.grading.grades import Status, Submission
from minillm.teaching.grading.reports import gradescope, page, summary, tables
from minillm.teaching.grading.reports.names import file_name
from minillm.whole_file import write_whole_file

ISOLATION = {
    "namespaces": "Each function ran in its own namespaces: no network, its own process numbers, an empty folder to "
    "write to, another user without privileges, and no files but Python's, the system's libraries and minillm without "
    "its exercises.",
    "landlock": "Each function ran under rules that the kernel enforces (Landlock, seccomp): no sockets, and no files "
    "but Python's, the system's libraries and minillm without its exercises. It shared the process numbers of this "
    "machine.",
    "limits": "Functions ran under limits of time and memory only. This machine allows no stronger isolation: the "
    "network and files, the answers among them, could be reached by one that was written to reach them. Grade "
    "submissions that you do not trust elsewhere.",
}


def write_all(graded: Sequence[Submission], out: Path, alike: float) -> list[str]:
    """Write every report to the folder `out`; returns what to tell the user. `alike`: least similarity to list.

    The reports of an earlier run on submissions that are no longer there are removed.
    """
    names = {submission.file: file_name(submission.file) for submission in graded}
    was_written = (out / "grades.json").exists()
    write_whole_file(out / "grades.csv", tables.csv_of(graded).encode("utf-8-sig"))  # with its mark Excel reads UTF-8
    write_whole_file(out / "grades.json", tables.json_of(graded))
    write_whole_file(out / "junit.xml", tables.junit_of(graded))
    for folder in ("gradescope", "students"):
        (out / folder).mkdir(exist_ok=True)
    for submission in graded:
        write_whole_file(out / "gradescope" / f"{names[submission.file]}.json", gradescope.results(submission))
    pages = page.write_students(graded, out / "students")
    write_whole_file(out / "index.html", summary.page_of(graded, pages, ISOLATION, alike))
    if was_written:
        _remove(out / "gradescope", "*.json", {f"{name}.json" for name in names.values()})
        _remove(out / "students", "*.html", set(pages.values()))
    return _told(graded, out)


def _remove(folder: Path, pattern: str, kept: Set[str]) -> None:
    for path in folder.glob(pattern):
        if path.name not in kept:
            path.unlink()


def _told(graded: Sequence[Submission], out: Path) -> list[str]:
    counts = dict.fromkeys(Status, 0)
    for submission in graded:
        for grade in submission.exercises:
            counts[grade.status] += 1
    unreadable = sum(submission.status is Status.UNREADABLE for submission in graded)
    files = sum(bool(submission.key) for submission in graded)
    found = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)
    modes = sorted({submission.isolation for submission in graded if submission.isolation})
    return [
        f"{files} submissions, {unreadable} unreadable; exercises: {found or 'none'}",
        *(f"Isolation: {mode}. {ISOLATION[mode]}" for mode in modes),
        f"Reports: {out / 'index.html'}, grades.csv, grades.json, junit.xml, gradescope/, students/",
    ]
