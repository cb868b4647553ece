"""An exam of one student as Markdown: the paper, and the key for the person who grades it."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from instructors.exam import l01_to_l03, l04_to_l05, l06_to_l09, l10_to_l11, l12_to_l17
from instructors.exam.question import TOLERANCE, Question, Variant, plain, shown, shown_answer, variant
from minillm.errors import ConfigError

LESSONS = (l01_to_l03, l04_to_l05, l06_to_l09, l10_to_l11, l12_to_l17)
NO_FILE_NAME = re.compile(r'[<>:"/\\|?*]')
"""Characters that a file's name cannot have on Windows, or anywhere."""
QUESTIONS: tuple[Question, ...] = tuple(question for part in LESSONS for question in part.QUESTIONS)


def choose(names: Iterable[str]) -> list[Question]:
    """The questions of these names (`"02.kv_bytes"`) or lessons (`"02"`, `"2"`), in the order of the lessons; without
    names all.

    Raises:
        ConfigError: no question has such a name or lesson.
    """
    names = list(names)
    for name in names:
        if not any(_is(question, name) for question in QUESTIONS):
            known = ", ".join(question.name for question in QUESTIONS)
            raise ConfigError(f"--questions {name}: there is no such question or lesson; there are: {known}")
    return [question for question in QUESTIONS if not names or any(_is(question, name) for name in names)]


def variants(questions: Sequence[Question], secret: bytes, student: str, exam: str) -> list[Variant]:
    """The questions with the numbers of `student`."""
    return [variant(question, secret, student, exam) for question in questions]


def paper(chosen: Sequence[Variant], student: str, exam: str) -> str:
    """What the student gets."""
    points = sum(one.question.minutes for one in chosen)
    head = [
        f"# {exam}: {student}",
        "",
        f"{len(chosen)} questions, {points} minutes, {points} points. A pocket calculator is allowed. The numbers are "
        "yours alone. Show how you got each answer; round to four digits.",
    ]
    for number, one in enumerate(chosen, 1):
        head += ["", f"## {number}. ({one.question.minutes} points)", "", one.text]
    return "\n".join(head) + "\n"


def key(chosen: Sequence[Variant], student: str, exam: str) -> str:
    """The answers, the reasoning, and what wrong answers reveal."""
    lines = [
        f"# {exam}: key for {student}",
        "",
        f"Computed from the student's numbers by the code named. A number that is not whole is right within "
        f"{TOLERANCE:.0%}.",
    ]
    for number, one in enumerate(chosen, 1):
        question = one.question
        code = f", `{question.exercise}`" if question.exercise else ""
        lines += ["", f"## {number}. {question.name}{code} ({question.minutes} points)", ""]
        lines += [f"- **{name}**: {shown(value)}" for name, value in one.answer.items()]
        lines += ["", question.why]
        mistakes = one.mistakes()
        if mistakes:
            lines += ["", "| answer | the student's reasoning |", "|---|---|"]
            lines += [f"| {shown_answer(answer)} | {_cell(said)} |" for answer, said in mistakes]
    return "\n".join(lines) + "\n"


def write_class(
    questions: Sequence[Question], secret: bytes, students: Sequence[str], exam: str, folder: Path
) -> list[Path]:
    """Write `papers/STUDENT.md` and `keys/STUDENT.md` for each student and `answers.csv` for all into `folder`.

    Raises:
        ConfigError: a student's name is no file name, or is there twice, in whatever case.
    """
    taken: set[str] = set()
    for student in students:
        folded = student.casefold()  # macOS and Windows take names that differ in case for one file
        if folded in taken or not student or NO_FILE_NAME.search(student):
            raise ConfigError(f"student {student!r}: names must be different and work as file names")
        taken.add(folded)
    for name in ("papers", "keys"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    written = []
    with (folder / "answers.csv").open("w", encoding="utf-8-sig", newline="") as table:  # Excel needs its mark
        rows = csv.writer(table)
        rows.writerow(["student", "question", "part", "answer"])
        for student in students:
            chosen = variants(questions, secret, student, exam)
            for name, text in (("papers", paper(chosen, student, exam)), ("keys", key(chosen, student, exam))):
                written.append(folder / name / f"{student}.md")
                written[-1].write_text(text, encoding="utf-8")
            for one in chosen:
                rows.writerows([student, one.question.name, part, plain(value)] for part, value in one.answer.items())
    return [*written, folder / "answers.csv"]


def _is(question: Question, name: str) -> bool:
    return name == question.name or (name.isdigit() and int(name) == question.lesson)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
