"""Reports: the same grades in every format, safe whatever a student wrote, and a second run grades nothing again."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path
from queue import SimpleQueue
from xml.etree import ElementTree as Xml

import pytest
from msgspec.structs import replace as with_fields

from instructors.trial.class_of_200 import ROOT
from minillm.cli import main
from minillm.errors import ConfigError, UnsupportedError
from minillm.teaching.grading import batch, grades, reports
from minillm.teaching.grading.bundle import bundle
from minillm.teaching.grading.grades import ExerciseGrade, Status, Submission
from minillm.teaching.grading.one_submission import Rules
from minillm.teaching.grading.reports import gradescope, page, summary, tables
from minillm.teaching.grading.reports.names import file_name
from minillm.teaching.guard import GIB, Limits
from minillm.teaching.registry import find
from tests.teaching import slow_tasks

NASTY = "=cmd|' /C calc'!A0 <script>alert(1)</script> & \x00\x1b[31m"


def exercise(name: str, status: Status, **more) -> ExerciseGrade:
    return ExerciseGrade(exercise=name, status=status, num_cases=5, **more)


@pytest.fixture
def graded() -> list[Submission]:
    wrong = {"problem": NASTY, "mistake": "forgets the rows", "cause": "it looks as if your function forgets the rows"}
    failed = exercise("l02.append_kv", Status.FAILED, case="one row", inputs={"x": NASTY}, **wrong)
    return [
        Submission(
            student=student,
            file=f"{student}/02.ipynb",
            key="k",
            status=Status.FAILED,
            lessons=["l02"],
            isolation="namespaces",
            exercises=[failed, exercise("l02.best_r", status, problem="slow")],
            shapes={"l02.best_r": ["a>b"] * 30},
        )
        for student, status in (("alice", Status.PASSED), ("bob", Status.TIMEOUT), (NASTY, Status.CRASHED))
    ] + [Submission(student="carol", file="carol.ipynb", key="k", status=Status.UNREADABLE, reason=NASTY)]


def test_a_spreadsheet_gets_no_formula(graded):
    rows = list(csv.DictReader(io.StringIO(tables.csv_of(graded))))
    assert [row["status"] for row in rows] == [
        "failed",
        "passed",
        "failed",
        "timeout",
        "failed",
        "crashed",
        "unreadable",
    ]
    assert [row["points"] for row in rows] == ["0", "1", "0", "0", "0", "0", "0"]
    assert not [cell for row in rows for cell in row.values() if cell[:1] in "=+-@" and cell]


def test_a_table_in_a_file_begins_with_the_mark_that_excel_needs(graded, tmp_path):
    submission = with_fields(graded[0], student="Zoë Žák")
    reports.write_all([submission], tmp_path, 0.9)
    data = (tmp_path / "grades.csv").read_bytes()
    assert data.startswith(b"\xef\xbb\xbfstudent,") and "Zoë Žák" in data.decode()


def test_json_has_everything_and_its_schema(graded, tmp_path):
    whole = json.loads(tables.json_of([each for each in graded if each.student != NASTY and not each.reason]))
    assert (whole["schema"], len(whole["submissions"])) == (grades.SCHEMA, 2)
    assert whole["submissions"][0]["exercises"][0]["status"] == "failed"


def test_junit_is_xml_with_the_right_counts(graded):
    suites = Xml.fromstring(tables.junit_of(graded).encode("utf-8", "replace"))
    counts = [tuple(suite.get(key) for key in ("tests", "failures", "errors", "skipped")) for suite in suites]
    assert counts == [("2", "1", "0", "0"), ("2", "1", "1", "0"), ("2", "1", "1", "0"), ("1", "0", "1", "0")]
    assert suites[0][0].find("failure").get("message").startswith("it looks as if")


def test_gradescope_gets_a_test_per_exercise_and_a_score_without_any(graded):
    results = json.loads(gradescope.results(graded[0]))
    assert [(test["score"], test["max_score"]) for test in results["tests"]] == [(0, 1), (1, 1)]
    assert all(test["status"] in ("passed", "failed") for test in results["tests"])
    assert json.loads(gradescope.results(graded[3]))["score"] == 0


def test_gradescope_shows_a_hidden_case_after_the_due_date_only():
    failed = [exercise(f"l02.{name}", Status.FAILED, hidden=hidden) for name, hidden in (("a", True), ("b", False))]
    submission = Submission(student="x", file="x.ipynb", key="k", status=Status.FAILED, exercises=failed)
    tests = json.loads(gradescope.results(submission))["tests"]
    assert [test["visibility"] for test in tests] == ["after_due_date", "visible"]


class _Page(HTMLParser):
    """Collects what a screen reader needs, and fails at a tag that is not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.seen, self.attributes = [], [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.attributes.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_pages_are_well_formed_readable_and_run_nothing(graded):
    pages = {submission.student: "x.html" for submission in graded}
    for text in (
        page.page_of("alice", graded[:1]),
        page.page_of(NASTY, graded[2:]),
        summary.page_of(graded, pages, reports.ISOLATION, 0.9),
    ):
        read = _Page()
        read.feed(text)
        assert read.open == []
        assert "script" not in read.seen and "<script>" not in text
        assert read.seen.count("h1") == read.seen.count("main") == 1
        assert ("html", {"lang": "en"}) in read.attributes
        assert all("scope" in found for tag, found in read.attributes if tag == "th")
        assert read.seen.count("table") == read.seen.count("caption")
        text.encode()


def test_common_mistakes_are_counted_by_student(graded):
    assert summary.common_mistakes([*graded, graded[0]]) == [("l02.append_kv", "forgets the rows", 3, True)]


def test_students_that_wrote_the_same_are_listed_as_evidence(graded):
    text = summary.page_of(graded, {s.student: "x" for s in graded}, reports.ISOLATION, 0.9)
    assert "no verdict" in text
    assert "<td>alice</td><td>bob</td><td>1.00</td>" in text


def in_one_file(student: str, trees: dict[str, list[str]], file: str = "a.py") -> Submission:
    made = {"student": student, "file": f"{student}/{file}", "key": "k", "status": Status.PASSED}
    return Submission(**made, shapes=trees)


def test_a_natural_solution_of_many_does_not_hide_the_pair_of_another_exercise():
    natural, copied = ["a>b"] * 30, ["c>d"] * 30
    students = [f"s{number:02}" for number in range(40)]
    one = {name: {"l02.append_kv": natural, "l02.best_r": [f"{name}>x"] * 30} for name in students}
    one["s38"]["l02.best_r"] = one["s39"]["l02.best_r"] = copied
    text = summary.page_of(
        [in_one_file(*each) for each in one.items()], dict.fromkeys(one, "x"), reports.ISOLATION, 0.9
    )
    pair, *others = re.findall(r'<th scope="row">(l02\.\w+)</th><td>(\w+)</td><td>(\w+)</td>', text)
    assert pair == ("l02.best_r", "s38", "s39")
    assert {name for name, *_ in others} == {"l02.append_kv"} and len(others) == summary.MAX_PAIRS
    assert f"<p>{40 * 39 // 2 - summary.MAX_PAIRS} more pairs of l02.append_kv are left out.</p>" in text


def test_another_file_does_not_take_a_student_out_of_the_comparison():
    copied, other = {"l02.best_r": ["a>b"] * 30}, {"l02.best_r": ["c>d"] * 30}
    graded = [in_one_file("ann", copied), in_one_file("bob", copied), in_one_file("bob", copied, "b.py")]
    graded += [in_one_file("bob", other, "c.py")]
    text = summary.page_of(graded, {"ann": "x", "bob": "y"}, reports.ISOLATION, 0.9)
    assert re.findall(r"<td>(\w+)</td><td>(\w+)</td><td>([\d.]+)</td>", text) == [("ann", "bob", "1.00")]


def test_an_exercise_in_two_files_of_a_student_counts_once():
    files = (("ann", Status.FAILED), ("ann", Status.PASSED), ("ann", Status.PASSED), ("bob", Status.PASSED))
    graded = [
        Submission(student=who, file=f"{n}.py", key="k", status=status, exercises=[exercise("l02.best_r", status)])
        for n, (who, status) in enumerate(files)
    ]
    rows = csv.DictReader(io.StringIO(tables.csv_of(graded)))
    assert [row["points"] for row in rows] == ["0", "1", "0", "1"]


def test_names_of_files_are_safe_and_unique():
    names = ["alice", "../../etc/passwd", "a b", "a_b", "a/b", "ä", "x" * 300, "", ".."]
    made = [file_name(name) for name in names]
    assert len(set(made)) == len(names)
    assert made[0] == "alice"
    assert all(name[0] not in "./" and "/" not in name and len(name) < 80 for name in made)


@pytest.mark.parametrize("name", ["zoë", "ana ", "@bob"])
def test_no_name_is_the_hashed_name_of_another(name: str) -> None:
    other = file_name(name)
    assert file_name(other) != other
    assert file_name(other).startswith(other)


def test_a_second_run_grades_only_what_is_new(tmp_path, capsys, monkeypatch):
    submissions, out = tmp_path / "submissions", tmp_path / "report"
    (submissions / "alice").mkdir(parents=True)
    shutil.copy(ROOT / "solutions" / "02_kv_cache.ipynb", submissions / "alice" / "mine.ipynb")
    (submissions / "bob.ipynb").write_text("{")
    (submissions / ".ipynb_checkpoints").mkdir()
    (submissions / ".ipynb_checkpoints" / "mine.ipynb").write_text("{")
    (submissions / "link.ipynb").symlink_to(submissions / "bob.ipynb")
    assert main(["grade", str(submissions), "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "3 submissions, 2 unreadable; exercises: 5 passed" in told
    assert "Isolation: " in told
    first = (out / "grades.csv").read_text()
    assert {path.name for path in out.iterdir()} >= {"index.html", "grades.json", "junit.xml", "gradescope", "students"}

    started = []
    monkeypatch.setattr(batch, "StudentProcess", lambda *args: started.append(args))
    assert main(["grade", str(submissions), "--out", str(out)]) == 0
    assert started == []
    assert (out / "grades.csv").read_text() == first


STORED = Rules(Limits(seconds=3.0, memory=GIB), wall_seconds=40.0, lessons=("l02",), secret=b"a secret of a test")
CHANGES: dict[str, dict[str, object]] = {
    "seconds": {"rules": replace(STORED, limits=Limits(seconds=4.0, memory=GIB))},
    "memory": {"rules": replace(STORED, limits=Limits(seconds=3.0, memory=2 * GIB))},
    "wall_seconds": {"rules": replace(STORED, wall_seconds=41.0)},
    "lessons": {"rules": replace(STORED, lessons=("l02", "l03"))},
    "secret": {"rules": replace(STORED, secret=b"a secret of another test")},
    "mode": {"mode": "limits"},
    "contents": {"text": "x = 2\n"},
    "version": {"version": "0.0.1"},
}


class Counted:
    """In place of graders: each file passes, and is counted."""

    def __init__(self, **grade: object) -> None:
        self.graded: list[str] = []
        self.grade = grade

    def __call__(self, tasks: list[batch.Task], rules: Rules, mode: str) -> Iterator[tuple[int, Submission]]:
        for number, file, key in tasks:
            self.graded.append(file.name)
            named = {"student": file.student, "file": file.name, "key": key}
            yield number, Submission(**named, status=Status.PASSED, **self.grade)


def test_every_rule_is_changed_here():
    assert {f.name for kind in (Rules, Limits) for f in fields(kind)} - {"limits"} <= set(CHANGES)


@pytest.mark.parametrize("change", CHANGES)
def test_a_grade_is_kept_until_something_that_it_depends_on_changes(change: str, tmp_path, monkeypatch):
    submissions, count = tmp_path / "submissions", Counted()
    submissions.mkdir()

    def run(rules: Rules = STORED, mode: str = "", text: str = "x = 1\n", version: str = batch.__version__):
        (submissions / "alice.py").write_text(text)
        monkeypatch.setattr(batch, "__version__", version)
        batch.grade_all(batch.find(submissions), tmp_path / "out", rules, mode=mode, graders=count)
        return len(count.graded)

    assert [run(), run(), run(**CHANGES[change]), run(**CHANGES[change]), run()] == [1, 1, 2, 2, 2]


def test_a_grade_that_was_interrupted_is_not_kept(tmp_path):
    """The machine may have been busy, or short of memory."""
    (tmp_path / "submissions").mkdir()
    (tmp_path / "submissions" / "alice.py").write_text("x = 1")
    files = batch.find(tmp_path / "submissions")
    for interrupted, times in ((True, 1), (True, 1), (False, 1), (False, 0)):
        count = Counted(interrupted=interrupted)
        batch.grade_all(files, tmp_path / "out", STORED, graders=count)
        assert len(count.graded) == times


@pytest.mark.skipif("sys.platform != 'linux'", reason="submissions are graded on Linux only")
def test_several_processes_give_the_grades_of_one(tmp_path):
    """Two workers, each with a process for submissions of its own."""
    wanted = find("l02.best_r")
    for student, function in (("ann", wanted.reference), ("bob", wanted.wrong[0].function)):
        (tmp_path / student).mkdir()
        (tmp_path / student / "02.py").write_text(bundle(function, "best_r"))
    files = batch.find(tmp_path)
    one, two = (batch.grade_all(files, tmp_path / f"{jobs} jobs", STORED, jobs) for jobs in (1, 2))
    without_times = [
        [(s.student, s.file, s.key, s.isolation, [with_fields(e, seconds=0.0) for e in s.exercises]) for s in each]
        for each in (one, two)
    ]
    assert without_times[0] == without_times[1]
    assert [[e.status for e in s.exercises if e.exercise == wanted.name] for s in two] == [
        [Status.PASSED],
        [Status.FAILED],
    ]


def test_after_an_interrupt_no_further_file_is_graded(tmp_path, monkeypatch):
    marks = tmp_path / "taken"
    monkeypatch.setenv(slow_tasks.TAKEN, str(marks))
    monkeypatch.setattr(batch, "_prepare", slow_tasks.prepare)
    monkeypatch.setattr(batch, "_grade_here", slow_tasks.take)
    graded = batch._graded([(number, None, "") for number in range(30)], None, 2, "")
    next(graded)
    graded.close()
    assert 1 <= len(marks.read_text()) < 20


def test_a_file_without_measure_is_unreadable_and_never_read(tmp_path, monkeypatch):
    submissions, size = tmp_path / "submissions", 1 << 40
    submissions.mkdir()
    with (submissions / "alice.ipynb").open("wb") as file:
        file.truncate(size)
    monkeypatch.setattr(batch, "StudentProcess", lambda *args: nullcontext())
    [submission] = batch.grade_all(batch.find(submissions), tmp_path / "out", Rules())
    assert submission.status is Status.UNREADABLE
    assert submission.reason == f"{size:,} bytes; the limit is {batch.MAX_FILE:,}"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "is no folder"),
        (["."], "has no file that ends in"),
        ([".", "--jobs", "0"], "at least 1"),
        ([".", "--lessons", "77"], "no such lesson with exercises"),
        ([".", "--alike", "2"], "from 0 to 1"),
        ([".", "--student", "["], "--student '[': unterminated character set"),
        ([".", "--student", r"\d+"], "put round brackets around the student's part"),
        ([".", "--secret-file", "nothing"], "nothing"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_graded(tmp_path, capsys, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert main(["grade", *arguments, "--out", "../report"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("out", ["class/submissions", "class/link", "class"])
def test_reports_are_not_written_among_the_submissions(tmp_path, monkeypatch, capsys, out):
    (tmp_path / "class" / "submissions").mkdir(parents=True)
    (tmp_path / "class" / "submissions" / "ann.py").write_text("x = 1")
    (tmp_path / "class" / "link").symlink_to("submissions")
    monkeypatch.chdir(tmp_path)
    assert main(["grade", "class/submissions", "--out", out]) == 2
    assert f"--out {out} has the submissions class/submissions in it" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "class" / "submissions").iterdir()] == ["ann.py"]


@pytest.mark.parametrize("out", ["report", "ann/report"])
def test_reports_are_not_written_into_the_submissions(tmp_path, monkeypatch, capsys, out):
    """There an interrupted run would leave a folder that the next one takes for a student."""
    (tmp_path / "ann").mkdir()
    (tmp_path / "ann" / "a.py").write_text("x = 1")
    monkeypatch.chdir(tmp_path)
    assert main(["grade", ".", "--out", out]) == 2
    assert f"--out {out} is in the submissions .; name another folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["ann", "a.py"]


CANVAS = ("doejane_123_456_02_kv_cache.ipynb", "doejane_LATE_123_789_06_paged_blocks.ipynb", "doejane_124_5_02.ipynb")


@pytest.mark.parametrize(
    ("option", "students"),
    [
        (r"[^_]+(?:_LATE)?_(\d+)_\d+_", ["123", "123", "124", "ben", "notes"]),
        (r"([^_]+)(?:_LATE)?_\d+_\d+_", ["doejane", "doejane", "doejane", "ben", "notes"]),
        (r"(?:ben|.*\.ipynb)/(x?)", [name[:-6] for name in CANVAS] + ["ben", "notes"]),
        ("", [name[:-6] for name in CANVAS] + ["ben", "notes"]),
    ],
)
def test_an_expression_takes_the_students_from_the_names_of_files(tmp_path, monkeypatch, option, students):
    for name in (*CANVAS, "ben/02.ipynb", "notes.zip"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{")
    asked = []
    monkeypatch.setattr(batch, "grade_all", lambda files, *_: asked.extend(files) or [])
    assert main(["grade", str(tmp_path), "--out", str(tmp_path.parent / "out"), "--student", option]) == 0
    assert {file.name: file.student for file in asked} == dict(
        zip((*CANVAS, "ben/02.ipynb", "notes.zip"), students, strict=True)
    )
    assert [file.name for file in asked if file.problem] == ["notes.zip"]


def test_find_takes_the_folder_or_the_file_as_the_student(tmp_path):
    for name in ("alice/a/02.ipynb", "alice/06.ipynb", "alice/notes.txt", "bob.ipynb", "carol.IPYNB"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert [(file.student, file.name) for file in batch.find(tmp_path)] == [
        ("alice", "alice/06.ipynb"),
        ("alice", "alice/a/02.ipynb"),
        ("bob", "bob.ipynb"),
        ("carol", "carol.IPYNB"),
    ]
    with pytest.raises(ConfigError):
        batch.find(tmp_path / "alice" / "none")


def test_a_student_without_a_file_to_grade_is_unreadable_and_not_left_out(tmp_path, monkeypatch):
    for name in ("ann/02.ipynb", "bob/02.ipynb.txt", "carol/hand_in.zip", "cem/.ipynb_checkpoints/02.ipynb", "dan.zip"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{")
    (tmp_path / "erin").mkdir()
    (tmp_path / "fay").symlink_to(tmp_path / "ann")
    (tmp_path / "gil").mkdir()
    (tmp_path / "gil" / "02.ipynb").symlink_to(tmp_path / "ann" / "02.ipynb")
    (tmp_path / "many").mkdir()
    for number in range(5):
        (tmp_path / "many" / f"{number}.txt").write_text("")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("")
    files = batch.find(tmp_path)
    monkeypatch.setattr(batch, "StudentProcess", lambda *args: nullcontext())
    graded = batch.grade_all([file for file in files if file.problem], tmp_path / "out", Rules())
    assert [file.student for file in files if not file.problem] == ["ann"]
    assert {each.status for each in graded} == {Status.UNREADABLE}
    none = "no .ipynb or .py file; found "
    assert {each.student: each.reason for each in graded} == {
        "bob": f"{none}02.ipynb.txt",
        "carol": f"{none}hand_in.zip",
        "cem": f"{none}nothing",
        "dan": f"{none}dan.zip",
        "erin": f"{none}nothing",
        "fay": f"{none}fay (a link, not followed)",
        "gil": f"{none}02.ipynb (a link, not followed)",
        "many": f"{none}0.txt, 1.txt, 2.txt, …",
    }


def test_the_modules_of_a_virtual_environment_are_no_submissions(tmp_path):
    for name in ("amy/02.ipynb", "amy/venv/pyvenv.cfg", "amy/venv/lib/x.py", "amy/env/site-packages/y.py", "bo/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "bo" / "pyvenv.cfg").write_text("")  # made in the folder of the hand-in
    assert [file.name for file in batch.find(tmp_path)] == ["amy/02.ipynb", "bo/b.py"]


def test_folders_behind_links_are_not_looked_into(tmp_path, monkeypatch):
    (tmp_path / "class" / "eve").mkdir(parents=True)
    (tmp_path / "class" / "eve" / "02.ipynb").write_text("")
    (tmp_path / "elsewhere" / "deeper").mkdir(parents=True)
    (tmp_path / "class" / "eve" / "x").symlink_to(tmp_path / "elsewhere")
    looked, scan = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path=".": looked.append(Path(path)) or scan(path))
    assert [file.name for file in batch.find(tmp_path / "class")] == ["eve/02.ipynb"]
    assert not [path for path in looked if "x" in path.parts or "elsewhere" in path.parts]


def test_a_file_that_cannot_be_looked_at_is_unreadable_and_stops_no_other(tmp_path, monkeypatch):
    """As in a folder that may be listed and not entered. Root may enter all."""
    for name in ("ann/closed/02.ipynb", "bob/02.ipynb"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")

    def refusing(call):
        def refuse(path, *args, **kwargs):
            if Path(path).parent.name == "closed":
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return call(path, *args, **kwargs)

        return refuse

    monkeypatch.setattr(Path, "stat", refusing(Path.stat))
    monkeypatch.setattr(Path, "open", refusing(Path.open))
    files = batch.find(tmp_path)
    assert [file.name for file in files] == ["ann/closed/02.ipynb", "bob/02.ipynb"]
    with pytest.raises(PermissionError):
        batch.read(files[0])


def test_a_lesson_that_a_student_has_handed_in_nowhere_is_not_attempted(tmp_path):
    def graders(tasks, rules, mode):
        for number, file, key in tasks:
            named = {"student": file.student, "file": file.name, "key": key}
            lessons = [] if "other" in file.name else [f"l{file.path.stem}"]
            found = [exercise(f"{name}.any", Status.FAILED) for name in lessons if name in rules.lessons]
            yield number, Submission(**named, status=Status.NOT_ATTEMPTED, lessons=lessons, exercises=found)

    for name in ("ann/02.py", "ann/06.py", "bob/02.py", "bob/other.py", "cem/09.py", "cem/other.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    rules = Rules(lessons=("l02", "l06"))
    graded = batch.grade_all(batch.find(tmp_path), tmp_path / "out", rules, graders=graders)
    assert [each.file for each in graded[:4]] == ["ann/02.py", "ann/06.py", "bob/02.py", "cem/other.py"]
    assert [(each.student, each.lessons, each.key) for each in graded[4:]] == [
        ("bob", ["l06"], ""),
        ("cem", ["l02", "l06"], ""),
    ]
    assert {grade.status for each in graded[4:] for grade in each.exercises} == {Status.NOT_ATTEMPTED}
    assert [len(each.exercises) for each in graded[4:]] == [6, 5 + 6]
    assert reports.write_all(graded, tmp_path / "out", 0.9)[0].startswith("4 submissions, 0 unreadable")
    assert "4 submissions of 3 students" in (tmp_path / "out" / "index.html").read_text()


def test_a_worker_that_can_start_no_process_says_so_as_the_result_of_its_task(monkeypatch) -> None:
    """An error of a pool's initializer would only break the pool."""

    def refuse(*_: object) -> None:
        raise UnsupportedError("not on this machine")

    monkeypatch.setattr(batch, "StudentProcess", refuse)
    monkeypatch.setattr(batch, "_grader", [])
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    slots: SimpleQueue[int] = SimpleQueue()
    slots.put(0)
    batch._prepare(slots, STORED, "")
    with pytest.raises(UnsupportedError, match="not on this machine") as raised:
        batch._grade_here((0, batch.File(Path("ann.py"), "ann.py", "ann"), "key"))
    assert str(pickle.loads(pickle.dumps(raised.value))) == "not on this machine"


def test_reports_of_submissions_that_are_gone_are_removed(graded, tmp_path):
    for folder in ("students", "gradescope"):
        (tmp_path / folder).mkdir()
    others = [tmp_path / "students" / "list.html", tmp_path / "gradescope" / "config.json"]
    for other in others:
        other.write_text("of another program")
    reports.write_all(graded[:1], tmp_path, 0.9)
    assert all(other.exists() for other in others), "these reports are the first here"
    reports.write_all(graded[1:2], tmp_path, 0.9)
    assert [path.name for path in (tmp_path / "students").iterdir()] == ["bob.html"]
    assert len(list((tmp_path / "gradescope").iterdir())) == 1


def test_what_a_function_imports_from_minillm_is_in_the_table_and_on_the_page():
    library = ["minillm.cache.prefix.root_hash", "minillm.ops.x<y"]
    passed = exercise("l06.find_prefix", Status.PASSED, library=library)
    submission = Submission(student="ann", file="ann.py", key="k", status=Status.PASSED, exercises=[passed])
    [row] = csv.DictReader(io.StringIO(tables.csv_of([submission])))
    assert row["library"] == " ".join(library)
    assert "<td>minillm.cache.prefix.root_hash, minillm.ops.x&lt;y</td>" in page.page_of("ann", [submission])


def test_a_file_for_another_lesson_is_no_error_in_junit():
    other = Submission(student="ann", file="ann/00.ipynb", key="k", status=Status.NOT_ATTEMPTED, reason="not for l02")
    [suite] = Xml.fromstring(tables.junit_of([other]))
    assert (suite.get("errors"), suite.get("skipped")) == ("0", "1")
    assert suite[0].find("skipped").get("message") == "not for l02"


@pytest.mark.skipif("sys.platform != 'linux'", reason="submissions are graded on Linux only")
@pytest.mark.parametrize("name", ["submissions", "--out", "--secret-file"])
def test_what_submissions_could_read_is_refused(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("minillm.teaching.grading.sandbox.needed", lambda package: [tmp_path / "shown"])
    for folder in ("shown", "submissions"):
        (tmp_path / folder).mkdir()
    given = {"submissions": "submissions", "--out": "report", "--secret-file": "secret.txt", name: "shown/it"}
    (tmp_path / given["--secret-file"]).write_text("a secret of a whole course")
    words = ["grade", given["submissions"], "--out", given["--out"], "--secret-file", given["--secret-file"]]
    assert main(words) == 2
    assert f"{name} shown/it is in {tmp_path / 'shown'}, which submissions may read" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()
