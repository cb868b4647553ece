"""A question of an exam: how its numbers are drawn, its text, and the code that computes the answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minillm.teaching.registry import find
from minillm.teaching.variants.random_numbers import Draw

Numbers = dict[str, Any]
Answer = dict[str, Any]
"""Names of the parts of an answer, in the order asked, with their values."""
TOLERANCE = 0.01
"""Relative. An answer that is not a whole number is right within this."""


@dataclass(frozen=True)
class Question:
    """One question.

    Args:
        name: `"02.kv_bytes"`: the lesson, a dot, a word.
        minutes: what a student needs with a pocket calculator; also its points.
        text: Markdown; `{name}` stands for a number.
        draw: the numbers of one student. Valid whatever is drawn, and without ties.
        answer: `answer(function, **numbers)`. `function` is the engine's code or the reference of an exercise.
        function: what `answer` gets; by default the reference of `exercise`.
        exercise: the exercise whose planted mistakes give the wrong answers of the key.
        why: the reasoning that a full answer shows, for the key.
    """

    name: str
    minutes: int
    text: str
    draw: Callable[[Draw], Numbers]
    answer: Callable[..., Answer]
    why: str
    exercise: str = ""
    function: Callable[..., Any] | None = None

    @property
    def lesson(self) -> int:
        """2 for `"02.kv_bytes"`."""
        return int(self.name.partition(".")[0])

    @property
    def code(self) -> Callable[..., Any] | None:
        """The function that computes the right answer; None if `answer` needs none."""
        if self.function is not None or not self.exercise:
            return self.function
        return find(self.exercise).reference


@dataclass(frozen=True)
class Variant:
    """A question with the numbers of one student."""

    question: Question
    numbers: Numbers

    @property
    def text(self) -> str:
        """What the student reads."""
        return self.question.text.format(**{name: shown(value) for name, value in self.numbers.items()})

    @property
    def answer(self) -> Answer:
        """The right answer."""
        return self.question.answer(self.question.code, **self.numbers)

    def mistakes(self) -> list[tuple[Answer, str]]:
        """The answers of the planted mistakes of the question's exercise that are not right and differ from each other,
        each with the mistakes that give it. A mistake that gives no answer for these numbers is left out."""
        if not self.question.exercise:
            return []
        right, found = self.answer, {}
        for wrong in find(self.question.exercise).wrong:
            try:
                answer = self.question.answer(wrong.function, **self.numbers)
            except Exception:
                continue
            if not is_right(answer, right):
                found.setdefault(shown_answer(answer), (answer, []))[1].append(wrong.description)
        return [(answer, "; or: ".join(descriptions)) for answer, descriptions in found.values()]


def variant(question: Question, secret: bytes, student: str, exam: str) -> Variant:
    """The question as `student` gets it in `exam`: the numbers depend on these and on the secret only."""
    return Variant(question, question.draw(Draw(secret, student, f"exam {exam} {question.name}")))


def plain(value: object) -> str:
    """`shown` without commas between thousands, for a program that reads a number."""
    return shown(value).replace(",", "") if isinstance(value, (int, float)) else shown(value)


def shown(value: object) -> str:
    """A number, or a list of them, as a student reads it and writes it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        if math.isinf(value):
            return "never"
        return f"{value:,.0f}" if value.is_integer() and 10_000 <= abs(value) < 10**9 else f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        items = [f"({shown(item)})" if isinstance(item, (list, tuple)) else shown(item) for item in value]
        return ", ".join(items) or "none"
    return str(value)


def shown_answer(answer: Answer) -> str:
    """`bytes per token: 131,072; GiB: 0.5`."""
    return "; ".join(f"{name}: {shown(value)}" for name, value in answer.items())


def is_right(answer: object, right: object) -> bool:
    """Whether an answer, or a part of one, is right: numbers that are not whole within `TOLERANCE`."""
    if isinstance(right, dict) and isinstance(answer, dict):
        return all(is_right(answer.get(name), value) for name, value in right.items())
    if isinstance(right, (list, tuple)) and isinstance(answer, (list, tuple)):
        return len(answer) == len(right) and all(map(is_right, answer, right))
    if isinstance(right, float) and isinstance(answer, (int, float)):
        return math.isclose(answer, right, rel_tol=TOLERANCE, abs_tol=1e-4)
    return answer == right
