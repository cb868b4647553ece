"""Reports for other programs: CSV, JSON and JUnit XML."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from xml.etree import ElementTree as Xml

import msgspec

from minillm.teaching.grading.grades import SCHEMA, ExerciseGrade, Status, Submission
from minillm.version import __version__

COLUMNS = (
    *("student", "file", "exercise", "status", "points", "passed_cases", "num_cases"),
    *("problem", "cause", "mistake", "hidden", "seconds", "library"),
)
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def csv_of(graded: Sequence[Submission]) -> str:
    """One line per exercise of every submission; a submission without exercises has one line.

    An exercise that several files of a student pass has its point in the first of these lines only.
    """
    text, passed = io.StringIO(), set()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for submission in graded:
        if not submission.exercises:
            row = [submission.student, submission.file, "", submission.status.value, 0, 0, 0, submission.reason]
            writer.writerow([_cell(each) for each in [*row, *[""] * (len(COLUMNS) - len(row))]])
        for grade in submission.exercises:
            points = int(grade.status is Status.PASSED and (submission.student, grade.exercise) not in passed)
            passed |= {(submission.student, grade.exercise)} if points else set()
            row: list[object] = [submission.student, submission.file, grade.exercise, grade.status.value, points]
            row += [grade.passed_cases, grade.num_cases, grade.problem, grade.cause, grade.mistake]
            row += ["yes" if grade.hidden else "", f"{grade.seconds:.3f}", " ".join(grade.library)]
            writer.writerow([_cell(each) for each in row])
    return text.getvalue()


def json_of(graded: Sequence[Submission]) -> bytes:
    """Everything, with the version of its schema."""
    whole = {"schema": SCHEMA, "minillm": __version__, "submissions": list(graded)}
    return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


def junit_of(graded: Sequence[Submission]) -> str:
    """JUnit XML: a suite per submission, a case per exercise. Not attempted is `skipped`; timeouts, crashes and
    unreadable files are `error`."""
    top = Xml.Element("testsuites", name="minillm grade")
    for submission in graded:
        statuses = [grade.status for grade in submission.exercises]
        unreadable = submission.status is Status.UNREADABLE
        counts = {
            "tests": len(statuses) or 1,
            "failures": statuses.count(Status.FAILED),
            "errors": statuses.count(Status.TIMEOUT) + statuses.count(Status.CRASHED) + unreadable,
            "skipped": statuses.count(Status.NOT_ATTEMPTED) + (not statuses and not unreadable),
        }
        texts = {name: str(count) for name, count in counts.items()}
        suite = Xml.SubElement(top, "testsuite", name=_xml(submission.file), **texts)
        if not statuses:
            case = Xml.SubElement(suite, "testcase", classname=_xml(submission.student), name="the file")
            tag = "error" if unreadable else "skipped"
            Xml.SubElement(case, tag, message=_xml(submission.reason), type=submission.status.value)
        for grade in submission.exercises:
            _case(suite, submission, grade)
    Xml.indent(top)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + Xml.tostring(top, encoding="unicode") + "\n"


def as_text(grade: ExerciseGrade) -> str:
    """The counterexample of an exercise in lines, for programs that show plain text."""
    rows = [("likely", grade.cause), ("wrong", grade.problem), ("the code", grade.where)]
    rows += [(f"input {name}", value) for name, value in grade.inputs.items()]
    rows += [("expected", grade.expected), ("got", grade.got), *(("note", note) for note in grade.notes)]
    first = [f"The first case that fails: {grade.case}"] if grade.case else []
    return "\n".join([*first, *(f"{heading}: {text}" for heading, text in rows if text)])


def _case(suite: Xml.Element, submission: Submission, grade: ExerciseGrade) -> None:
    who, time = _xml(submission.student), f"{grade.seconds:.3f}"
    case = Xml.SubElement(suite, "testcase", classname=who, name=grade.exercise, time=time)
    if grade.status is Status.PASSED:
        return
    tag = {Status.FAILED: "failure", Status.NOT_ATTEMPTED: "skipped"}.get(grade.status, "error")
    made = Xml.SubElement(case, tag, message=_xml(grade.cause or grade.problem), type=grade.status.value)
    made.text = _xml(as_text(grade))


def _cell(value: object) -> object:
    """A spreadsheet runs text that begins with one of these signs as a formula; an apostrophe stops it."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def _xml(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
