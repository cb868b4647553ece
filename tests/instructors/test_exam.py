"""Exams: every answer is computed again by brute force, and papers and keys say what they must."""

from __future__ import annotations

import csv
import io
import itertools
import math
import sys
from typing import Any

import pytest

from instructors.exam.__main__ import main
from instructors.exam.paper import QUESTIONS, choose, key, paper, variants, write_class
from instructors.exam.question import Answer, Question, shown, variant
from minillm.errors import ConfigError
from minillm.teaching.registry import exercises_of, module_names
from tests.instructors.brute_force import BRUTE

SECRET = b"a secret of this course"
STUDENTS = [f"student {number}" for number in range(12)]


def differs(right: Any, brute: Any) -> bool:
    """Whether two values are not the same: numbers within 0.2 %, which rounding to four digits may cost."""
    if isinstance(right, str):
        return right != brute
    if isinstance(right, list):
        return len(right) != len(brute) or any(itertools.starmap(differs, zip(right, brute, strict=True)))
    return not math.isclose(right, brute, rel_tol=2e-3, abs_tol=1e-4)


def wrong_parts(right: Answer, brute: Answer) -> list[str]:
    assert list(right) == list(brute)
    return [name for name in right if differs(right[name], brute[name])]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.name)
def test_the_answer_is_that_of_brute_force(question: Question) -> None:
    for student in STUDENTS:
        drawn = variant(question, SECRET, student, "exam")
        assert wrong_parts(drawn.answer, BRUTE[question.name](**drawn.numbers)) == [], (student, drawn.numbers)


@pytest.mark.parametrize("question", [q for q in QUESTIONS if q.exercise], ids=lambda question: question.name)
def test_brute_force_tells_every_answer_of_a_planted_mistake_from_the_right_one(question: Question) -> None:
    """So a wrong key cannot pass the test above; and the key of every such question names mistakes."""
    drawn = variant(question, SECRET, "alice", "exam")
    brute, mistakes = BRUTE[question.name](**drawn.numbers), drawn.mistakes()
    assert mistakes
    assert all(_is_caught(answer, brute) for answer, _ in mistakes)


def _is_caught(answer: Answer, brute: Answer) -> bool:
    try:
        return list(answer) != list(brute) or bool(wrong_parts(answer, brute))
    except TypeError:  # another type, such as a tensor or None
        return True


def test_there_are_questions_on_every_lesson_with_exercises() -> None:
    lessons = {int(name[1:3]) for name in module_names()}
    assert len(QUESTIONS) >= 20 and {question.lesson for question in QUESTIONS} == lessons
    names = {exercise.name for module in module_names() for exercise in exercises_of(module)}
    assert {question.exercise for question in QUESTIONS} - {""} <= names


def test_numbers_depend_on_student_exam_and_secret_and_on_nothing_else() -> None:
    def numbers(secret: bytes, student: str, exam: str) -> str:
        return paper(variants(QUESTIONS, secret, student, exam), "x", "y")

    alice = numbers(SECRET, "alice", "midterm")
    assert alice == numbers(SECRET, "alice", "midterm")
    others = {
        numbers(SECRET, "bob", "midterm"),
        numbers(SECRET, "alice", "final"),
        numbers(SECRET * 2, "alice", "midterm"),
    }
    assert len({alice, *others}) == 4


def test_a_paper_has_the_numbers_and_not_the_answers() -> None:
    chosen = variants(choose(["02.kv_bytes", "14"]), SECRET, "alice", "exam")
    assert [one.question.name for one in chosen] == ["02.kv_bytes", "14.load", "14.split"]
    text, answers = paper(chosen, "alice", "exam"), key(chosen, "alice", "exam")
    assert "{" not in text and all(shown(value) in text for value in chosen[0].numbers.values())
    assert f"**bytes per token**: {shown(chosen[0].answer['bytes per token'])}" in answers
    assert "counts the keys and forgets the values" in answers
    assert shown(chosen[0].answer["bytes per token"]) not in text and "counts the keys" not in text


def test_a_class_gets_papers_keys_and_a_table(tmp_path, capsys) -> None:
    secret, students, out = tmp_path / "secret", tmp_path / "students", tmp_path / "out"
    secret.write_bytes(SECRET)
    students.write_text("alice\n\nbob\n")
    arguments = ["--secret-file", str(secret), "--questions", "07.batching"]
    assert main([*arguments, "--class", str(students), "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out / "answers.csv")
    assert {path.name for path in out.rglob("*.md")} == {"alice.md", "bob.md"}
    assert (out / "answers.csv").read_bytes().startswith(b"\xef\xbb\xbf"), "Excel reads UTF-8 only with this mark"
    with (out / "answers.csv").open(encoding="utf-8-sig") as table:
        rows = list(csv.DictReader(table))
    assert [(row["student"], row["part"]) for row in rows] == list(
        itertools.product(["alice", "bob"], ["static", "continuous"])
    )
    assert main([*arguments, "--student", "alice"]) == 0
    assert capsys.readouterr().out == (out / "papers" / "alice.md").read_text(encoding="utf-8")


def test_a_paper_goes_to_a_file_that_is_not_utf_8(tmp_path, monkeypatch) -> None:
    """As on Windows, where a file that stdout is sent to is not."""
    (tmp_path / "secret").write_bytes(SECRET)
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="cp1252"))
    assert main(["--secret-file", str(tmp_path / "secret"), "--student", "Ζωή", "--questions", "07.batching"]) == 0
    sys.stdout.flush()
    assert written.getvalue().decode().startswith("# exam: Ζωή")


def test_a_list_of_a_spreadsheet_is_read_or_refused(tmp_path, capsys) -> None:
    """Some write a byte order mark; it is no part of the first name."""
    secret, students = tmp_path / "secret", tmp_path / "students.txt"
    secret.write_bytes(SECRET)
    arguments = ["--secret-file", str(secret), "--questions", "07.batching", "--class", str(students), "--out"]
    students.write_text("alice\r\nbob\r\n", encoding="utf-8-sig")
    assert main([*arguments, str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").rglob("*.md")} == {"alice.md", "bob.md"}
    students.write_text("alice\n", encoding="utf-16")
    assert main([*arguments, str(tmp_path / "none")]) == 2
    assert "students.txt is not UTF-8 (invalid start byte); save it as UTF-8" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("students", [["kim", "Kim"], ["a:b"], ["a/b"], [""]], ids=str)
def test_names_that_are_no_files_of_their_own_on_every_system_are_refused(students, tmp_path) -> None:
    with pytest.raises(ConfigError, match=f"student {students[-1]!r}: names must be different and work as file names"):
        write_class(choose(["07.batching"]), SECRET, students, "exam", tmp_path)
    assert not any(tmp_path.iterdir())


def test_wrong_options_say_what_is_wrong(tmp_path, capsys) -> None:
    with pytest.raises(ConfigError, match=r"--questions 99: .*02\.kv_bytes"):
        choose(["99"])
    short = tmp_path / "short"
    short.write_text("guess")
    assert main(["--secret-file", str(short), "--student", "alice"]) == 2
    assert "at least 16" in capsys.readouterr().err
    assert main(["--student", "alice"]) == 2
    assert "--secret-file" in capsys.readouterr().err
    for ignored in (["--student", "alice", "--out", str(tmp_path / "out")], ["--class", str(short), "--key"]):
        assert main(["--secret-file", str(short), *ignored]) == 2
        assert f"{ignored[2]} is not used with {ignored[0]}" in capsys.readouterr().err
