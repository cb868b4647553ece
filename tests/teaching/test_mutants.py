"""The tool that tests the checkers makes the mistakes that learners make, and shows which of them no case catches."""

from __future__ import annotations

import ast
import json

import pytest
import torch

from minillm.cli import main
from minillm.errors import LessonError
from minillm.teaching import mutants
from minillm.teaching.answer_key import AnswerKey
from minillm.teaching.drives.lazy_kernel import LazyKernel
from minillm.teaching.exercise import Case, Exercise, WrongVersion
from minillm.teaching.mutant_report import summary
from minillm.teaching.mutate import build, mutants_of
from minillm.teaching.registry import exercises_of, module_names
from tests.teaching import slow_tasks


def clip_rows(x: torch.Tensor, limit: int = 2) -> torch.Tensor:
    """Rows of x, from the first, no number above `limit`."""
    total = 0
    for row in x:
        if total < limit and row is not None:
            total += 1
    return torch.minimum(x[:total], torch.ones(1) * limit).abs()


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, step: int) -> int:
        self.count += step
        return self.count


def test_the_mistakes_learners_make_are_among_the_mutants():
    found = {mutant.description for mutant in mutants_of(clip_rows)}
    for expected in (
        "if total < limit and row is not None: [total < limit -> total <= limit]",
        "if total < limit and row is not None: [total < limit and row is not None -> total < limit or row is not None]",
        "total += 1 [-> total -= 1]",
        "total += 1 [-> total = 1]",
        "total += 1 [-> nothing]",
        "for row in x: [-> nothing]",
        "total = 0 [0 -> 1]",
        "return torch.minimum(x[:total], torch.ones(1) * limit).abs() [:total -> :total - 1]",
        "return torch.minimum(x[:total], torch.ones(1) * limit).abs() [torch.minimum -> torch.maximum]",
        "return torch.minimum(x[:total], torch.ones(1) * limit).abs() [torch.ones(1) * limit -> torch.ones(1)]",
        "return torch.minimum(x[:total], torch.ones(1) * limit).abs() "
        "[torch.minimum(x[:total], torch.ones(1) * limit).abs() -> torch.minimum(x[:total], torch.ones(1) * limit)]",
    ):
        assert expected in found, expected


def test_every_mutant_is_valid_python_unlike_the_function_and_unlike_the_others():
    spoilt = mutants_of(clip_rows)
    assert len({ast.dump(ast.parse(mutant.source)) for mutant in spoilt}) == len(spoilt)
    assert len({mutant.description for mutant in spoilt}) == len(spoilt)
    assert spoilt == mutants_of(clip_rows)


def test_a_mutant_sees_what_the_function_sees():
    less = next(m for m in mutants_of(clip_rows) if m.description == "total = 0 [0 -> 1]")
    assert build(less, clip_rows)(torch.full((3, 1), 5.0)).tolist() == [[2.0], [2.0]]
    assert clip_rows(torch.full((3, 1), 5.0)).tolist() == [[2.0], [2.0]]


def test_classes_and_triton_kernels_can_be_spoilt_too():
    lost = next(m for m in mutants_of(Counter) if m.description == "self.count += step [-> nothing]")
    counter = build(lost, Counter)()
    assert counter.add(3) == 0
    kernel = LazyKernel("l08", "copy_kernel")
    assert any("[column < columns -> column <= columns]" in m.description for m in mutants_of(kernel))


@pytest.mark.parametrize("module", module_names())
def test_every_reference_solution_can_be_spoilt(module: str):
    for exercise in exercises_of(module):
        assert len(mutants_of(exercise.reference)) >= 5, exercise.name


def largest(numbers: list[int], at_least: int) -> int:
    best = at_least
    for number in numbers:
        if number > best:
            best = number
    return best


def exercise_with(*cases: Case) -> Exercise:
    return Exercise(
        name="l90.largest",
        reference=largest,
        cases=cases,
        hints=("a", "b", "c", "d"),
        wrong=(WrongVersion("forgets the limit", lambda numbers, at_least: max(numbers)),),
    )


def survivors(exercise: Exercise) -> set[str]:
    key = AnswerKey(exercise)
    results = [mutants._try_mutant(key, mutant) for mutant in mutants_of(exercise.reference)]
    return {result.description for result in results if result.survived}


STOPS = "for number in numbers: [-> for number in numbers:]"
EQUAL = "if number > best: [number > best -> number >= best]"


def test_a_missing_case_shows_as_a_survivor_and_the_case_removes_it():
    weak = exercise_with(Case("the first is the largest", ([5, 1], 2)))
    strong = exercise_with(
        Case("the first is the largest", ([5, 1], 2)), Case("the last is", ([3, 5], 2)), Case("none is", ([1], 2))
    )
    assert STOPS in survivors(weak)
    assert survivors(strong) == {EQUAL}  # of equals it does not matter which


def test_a_planted_mistake_counts_as_named_only_by_its_own_name():
    key = AnswerKey(exercise_with(Case("none is", ([1], 2))))
    result = mutants._try_planted(key, 0)
    assert (result.caught, result.cause, result.planted) == (True, "forgets the limit", True)


def test_a_declared_equivalent_is_no_survivor_and_one_that_is_gone_is_reported(monkeypatch):
    exercise = exercise_with(Case("the last is", ([3, 5], 2)), Case("none is", ([1], 2)), Case("first", ([5, 1], 2)))
    monkeypatch.setattr(mutants, "equivalents", lambda name: {EQUAL: "equals are equal", "no such line": "was removed"})
    key = AnswerKey(exercise)
    results = [mutants._try_mutant(key, mutant) for mutant in mutants_of(largest)]
    assert [result.equivalent for result in results if not result.caught] == ["equals are equal"]
    assert mutants._stale([exercise], results) == (("l90.largest", "no such line"),)
    report = mutants.Report(tuple(results), ())
    assert "1 declared equivalent, 0 survived" in summary(report)


def test_names_choose_lessons_or_exercises_and_an_unknown_one_is_refused():
    assert {e.name.partition(".")[0] for e in mutants._chosen(["07", "l02"])} == {"l02", "l07"}
    assert [e.name for e in mutants._chosen(["l07.admit"])] == ["l07.admit"]
    with pytest.raises(LessonError, match="no exercise matches '77'"):
        mutants._chosen(["77"])


def test_after_an_interrupt_no_further_mutant_is_tried(tmp_path, monkeypatch):
    def interrupted(done, total):
        yield next(iter(done))
        raise KeyboardInterrupt

    marks = tmp_path / "taken"
    monkeypatch.setenv(slow_tasks.TAKEN, str(marks))
    monkeypatch.setattr(mutants, "_prepare", slow_tasks.prepare)
    monkeypatch.setattr(mutants, "_try_some", slow_tasks.take)
    monkeypatch.setattr(mutants, "_count", lambda exercise: 30)
    monkeypatch.setattr(mutants, "CHUNK", 1)
    with pytest.raises(KeyboardInterrupt):
        mutants.run(["l03.attainable"], jobs=2, progress=interrupted)
    assert 1 <= len(marks.read_text()) < 20


def test_the_command_reports_as_a_table_and_as_json(tmp_path, capsys):
    file = tmp_path / "mutants.json"
    code = main(["build", "--mutants", "l03.attainable", "--jobs", "1", "--report", str(file)])
    results = json.loads(file.read_text())["results"]
    out = capsys.readouterr().out
    assert "l03.attainable" in out
    assert f"{sum(not r['description'].startswith('planted: ') for r in results)} mutants of 1 reference" in out
    assert code == int(any(not r["caught"] and not r["equivalent"] for r in results))
    assert all(r["caught"] for r in results if r["description"].startswith("planted: "))
