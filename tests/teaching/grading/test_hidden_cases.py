"""Hidden cases: the same for the same student, others for another, valid for every student, and they catch a table."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from minillm.errors import ConfigError, LessonError
from minillm.teaching import variants
from minillm.teaching.answer_key import AnswerKey
from minillm.teaching.attempt import call
from minillm.teaching.check_function import check_function
from minillm.teaching.compare import exact
from minillm.teaching.exercise import Exercise, Function
from minillm.teaching.grading.grades import Status
from minillm.teaching.grading.hidden_cases import NUM_HIDDEN, hidden_cases, makers, read_secret
from minillm.teaching.grading.messages import Answered, Found, Loaded
from minillm.teaching.grading.one_function import RunJob
from minillm.teaching.grading.one_submission import Grader, Rules
from minillm.teaching.grading.student_process import Told
from minillm.teaching.grading.values import encode
from minillm.teaching.registry import every, find

ALL = every()
SECRET = b"a secret of a test"
SLOW = ("l08", "l09", "l15")


def values_of(exercise: Exercise, student: str, secret: bytes = SECRET) -> list[tuple[object, ...]]:
    return [case.args for case in hidden_cases(AnswerKey(exercise), secret, student)]


def test_every_exercise_has_a_maker_and_every_maker_an_exercise():
    assert {exercise.name for exercise in ALL} == set(makers())


def test_the_makers_of_a_new_lesson_are_found_and_a_missing_one_is_an_error(tmp_path, monkeypatch):
    made = "MAKERS = {'l98.best_r': lambda draw: Case('', (draw.int(0, 0), 1, 2, 3))}"
    (tmp_path / "l98_new.py").write_text(f"from minillm.teaching.exercise import Case\n\n{made}\n")
    monkeypatch.setattr(variants, "__path__", [*variants.__path__, str(tmp_path)])
    makers.cache_clear()
    try:
        new = replace(find("l02.best_r"), name="l98.best_r")
        assert [case.args for case in hidden_cases(AnswerKey(new), SECRET, "ann")] == [(0, 1, 2, 3)] * NUM_HIDDEN
        other = replace(new, name="l98.other")
        assert hidden_cases(AnswerKey(other), b"", "ann") == ()
        with pytest.raises(LessonError, match=r"l98\.other has no maker of hidden cases"):
            hidden_cases(AnswerKey(other), SECRET, "ann")
    finally:
        makers.cache_clear()
        sys.modules.pop(f"{variants.__name__}.l98_new", None)


@pytest.mark.parametrize("exercise", ALL, ids=lambda exercise: exercise.name)
def test_cases_are_valid_and_differ_between_students_and_secrets(exercise: Exercise):
    students = [f"student {n}" for n in range(2 if exercise.name.startswith(SLOW) else 12)]
    drawn = [values_of(exercise, student) for student in students]
    assert all(len(cases) == NUM_HIDDEN for cases in drawn)
    assert exact(drawn[0], values_of(exercise, students[0])) is None
    assert any(exact(drawn[0], other) for other in drawn[1:])
    assert any(exact(drawn[n], values_of(exercise, students[n], SECRET[::-1])) for n in range(2))
    for student in students:
        for case in hidden_cases(AnswerKey(exercise), SECRET, student):
            outcome = call(exercise, exercise.reference, case)
            assert outcome.error is None, f"{student}, {case.label}: {outcome.error}"
            assert outcome.changed == (), case.label


def test_the_hidden_times_of_a_run_begin_anywhere():
    begins = {marks[0] for student in ("alice", "bob") for (marks,) in values_of(find("l15.attribute"), student)}
    assert len({seconds for seconds, _ in begins}) > 3
    assert len({name for _, name in begins}) == 2


def test_no_secret_no_hidden_cases():
    assert hidden_cases(AnswerKey(find("l02.best_r")), b"", "alice") == ()


def test_a_function_that_knows_the_visible_answers_fails_on_a_hidden_case():
    exercise = find("l02.next_capacity")
    visible = AnswerKey(exercise)
    table = {case.args: visible.expected(index) for index, case in enumerate(visible.cases)}

    def cheats(capacity, past, num_new, every):
        return table.get((capacity, past, num_new, every), (0, 0))

    assert check_function(exercise, cheats).passed
    key = AnswerKey(exercise, visible, hidden_cases(visible, SECRET, "alice"))
    result = check_function(exercise, cheats, key=key)
    assert not result.passed
    assert result.counterexample.label.startswith("hidden case")


class Obliging:
    """In place of a submission's process: answers every case rightly, or as `function` does."""

    mode = ""

    def __init__(self, function: Function | None = None) -> None:
        self.function = function

    def run(self, job: RunJob, wall_seconds: float, memory: int) -> Told:
        right = next(each for each in ALL if each.function_name == job.name).reference
        answers = [encode(call(job.interface, self.function or right, case).value) for case in job.cases]
        return Told([Found("written"), Loaded([]), *[Answered(n, v, None, []) for n, v in enumerate(answers)]])


def test_the_answers_to_visible_cases_are_computed_once_for_a_class(monkeypatch):
    exercise, called = find("l02.next_capacity"), []

    def counting(of, function, case):
        called.append(case.label)
        return call(of, function, case)

    monkeypatch.setattr("minillm.teaching.answer_key.call", counting)
    grader = Grader(Obliging(), Rules(secret=SECRET))
    for student in ("alice", "bob", "carol"):
        assert grader._exercise(exercise, [], student, {}).status is Status.PASSED
    visible = [case.label for case in exercise.all_cases()]
    assert [label for label in called if not label.startswith("hidden case")] == visible
    assert len(called) == len(visible) + 3 * NUM_HIDDEN


def test_the_answers_of_planted_mistakes_to_visible_cases_are_computed_once_for_a_class(monkeypatch):
    exercise, called = find("l02.next_capacity"), []

    def counting(of, function, case):
        called.append((function, case.label))
        return call(of, function, case)

    monkeypatch.setattr("minillm.teaching.answer_key.call", counting)
    grader = Grader(Obliging(lambda *numbers: (0, 0)), Rules(secret=SECRET))
    for student in ("alice", "bob"):
        assert grader._exercise(exercise, [], student, {}).status is Status.FAILED
    visible = [each for each in called if not each[1].startswith("hidden case")]
    assert {function for function, _ in visible} == {exercise.reference, *(each.function for each in exercise.wrong)}
    assert len(visible) == len(set(visible))


def test_a_short_secret_is_refused(tmp_path):
    (tmp_path / "secret").write_text("short\n")
    with pytest.raises(ConfigError, match="at least 16"):
        read_secret(tmp_path / "secret")
    (tmp_path / "secret").write_bytes(b"0123456789abcdef\n")
    assert read_secret(tmp_path / "secret") == b"0123456789abcdef"
