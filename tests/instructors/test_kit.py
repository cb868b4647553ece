"""The instructor's pages are those of the lessons, and refuse what the lessons do not have."""

from __future__ import annotations

import dataclasses
import io
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from instructors import lesson_plan, mistakes, pictures, syllabus
from instructors.exam.paper import choose
from instructors.lesson_plan import read_plans
from instructors.trial import class_of_200
from minillm.errors import LessonError

ROOT = Path(__file__).parents[2]
KIT = ROOT / "instructors"


def test_the_tables_of_the_syllabus_are_those_of_the_lessons() -> None:
    assert syllabus.main(["--check"]) == 0, "run: python -m instructors.syllabus"


def test_a_stale_table_is_found(tmp_path, monkeypatch, capsys) -> None:
    page = tmp_path / "SYLLABUS.md"
    page.write_text(syllabus.PAGE.read_text(encoding="utf-8").replace("| 02 | The KV cache | 1 |", "| 02 | KV | 1 |"))
    monkeypatch.setattr(syllabus, "PAGE", page)
    assert syllabus.main(["--check"]) == 1
    assert "stale" in capsys.readouterr().err
    assert syllabus.main([]) == 0 and syllabus.main(["--check"]) == 0


def test_a_trial_deletes_no_submissions_of_a_course(tmp_path, monkeypatch) -> None:
    (tmp_path / "submissions").mkdir()
    monkeypatch.setattr(class_of_200, "run", lambda *given: pytest.fail("it ran"))
    monkeypatch.setattr(sys, "argv", ["class_of_200", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit):
        class_of_200.main()
    assert [path.name for path in tmp_path.iterdir()] == ["submissions"]


def test_minutes_follow_from_the_counts(monkeypatch) -> None:
    plan = dataclasses.replace(read_plans()[2], words=300, cells=10, exercises={"one": 4, "two": 10})
    assert plan.minutes(()) == 15  # 2 + 10, rounded up to a multiple of 5
    assert plan.minutes(("one",)) == 25  # 5 + 4 · 1.5 more
    assert plan.minutes() == 45
    monkeypatch.setattr(lesson_plan, "WORDS_PER_MINUTE", 10)
    assert plan.minutes(()) == 40
    with pytest.raises(LessonError, match="no exercise 'three'; it has one, two"):
        plan.minutes(("three",))


def test_prerequisites_are_those_that_the_lessons_name() -> None:
    plans = read_plans()
    assert plans[9].needs == (4, 6, 8) and plans[10].needs == (1, 2) and plans[15].needs
    assert all(needed < number for number, plan in plans.items() for needed in plan.needs)


def test_a_course_that_teaches_in_the_wrong_order_or_too_much_is_refused() -> None:
    plans = read_plans()
    session = syllabus.Session("Monday", ((7, None), (6, None)))
    with pytest.raises(LessonError, match="Monday: lesson 7 needs lesson 6"):
        syllabus.course_table(syllabus.Course((session,), 400), plans)
    with pytest.raises(LessonError, match="a session has 60"):
        syllabus.course_table(syllabus.Course((session,), 60), plans)


def test_a_refused_course_is_told_in_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setitem(syllabus.COURSES, "day", dataclasses.replace(syllabus.COURSES["day"], minutes=1))
    before = syllabus.PAGE.read_bytes()
    assert syllabus.main([]) == 2
    told = capsys.readouterr().err
    assert told.startswith("syllabus: morning 1 takes ") and told.count("\n") == 1
    assert syllabus.PAGE.read_bytes() == before


def test_every_lesson_is_in_the_term_and_the_midterm_takes_what_the_page_says() -> None:
    lessons = [lesson for session in syllabus.COURSES["term"].sessions for lesson, _ in session.parts]
    assert lessons == sorted(read_plans())
    text = syllabus.PAGE.read_text(encoding="utf-8")
    said = re.search(r"A midterm of (\d+) minutes", text)
    asked = re.search(r"--questions (.+)", text)
    assert sum(question.minutes for question in choose(asked[1].split())) == int(said[1])


def test_the_page_of_mistakes_is_that_of_its_source() -> None:
    assert mistakes.PAGE.read_text(encoding="utf-8") == mistakes.page(), "run: python -m instructors.mistakes"


def test_every_exercise_has_a_mistake_that_is_explained() -> None:
    explained = mistakes.read()
    assert [exercise for _, exercise, _ in mistakes.all_mistakes() if exercise not in explained] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('["l02.append_kw"]\n"x" = {believes = "a", fact = "b"}', "no exercise 'l02.append_kw'"),
        ('["l02.append_kv"]\n"flies" = {believes = "a", fact = "b"}', "no planted mistake 'flies'"),
        ('["l02.append_kv"]\n"returns only the new rows" = {believes = "a"}', "write believes and fact"),
    ],
)
def test_an_explanation_of_nothing_is_refused(tmp_path, text: str, message: str) -> None:
    file = tmp_path / "misconceptions.toml"
    file.write_text(text)
    with pytest.raises(LessonError, match=message):
        mistakes.read(file)


def test_a_lesson_lists_all_its_mistakes(capsys) -> None:
    assert mistakes.main(["--all", "02"]) == 0
    listed = capsys.readouterr().out
    assert "  counts the keys and forgets the values\n" in listed and "l02.best_r\n" in listed and "l03." not in listed
    assert mistakes.main(["--all", "77"]) == 2


def test_a_listing_goes_to_a_file_that_is_not_utf_8(monkeypatch) -> None:
    """As on Windows, where a file that stdout is sent to is not."""
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert mistakes.main(["--all"]) == 0
    sys.stdout.flush()
    listed = written.getvalue().decode()
    assert listed == mistakes.listing([]) and not listed.isascii()


def test_pictures_are_files_that_can_be_shown(tmp_path, capsys) -> None:
    assert pictures.main([str(tmp_path), "00", "06"]) == 0
    files = sorted(tmp_path.glob("*.svg"))
    assert {path.name[:2] for path in files} == {"00", "06"} and len(files) > 6
    for path in files:
        assert ElementTree.parse(path).getroot().tag == f"{{{pictures.SVG}}}svg"
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert all(f'src="{path.name}"' in page for path in files) and 'alt=""' not in page
    first = [path.read_text(encoding="utf-8") for path in files if path.stem in ("00_tour-1", "00_tour-2")]
    assert "KV cache pages" in first[0] and "Token acceptance" in first[1], "a replay's pictures are two files"
    assert pictures.main([str(tmp_path), "77"]) == 2
    assert "no lesson is called '77'" in capsys.readouterr().err


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in KIT.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
