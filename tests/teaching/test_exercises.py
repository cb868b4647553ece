"""Every exercise of every lesson is held to the same promises."""

from __future__ import annotations

import itertools

import pytest
import torch

from minillm.teaching.attempt import call, named_inputs
from minillm.teaching.check_function import check_function
from minillm.teaching.compare import exact
from minillm.teaching.diagnosis import alike
from minillm.teaching.drives.lazy_kernel import LazyKernel
from minillm.teaching.exercise import Exercise
from minillm.teaching.registry import every, find
from minillm.teaching.result import Status
from tests.teaching.answers import key_of

ALL = every()
every_exercise = pytest.mark.parametrize("exercise", ALL, ids=lambda exercise: exercise.name)
every_wrong_version = pytest.mark.parametrize(
    ("exercise", "wrong"),
    [pytest.param(e, w, id=f"{e.name}-{w.description}") for e in ALL for w in e.wrong],
)


def test_names_are_unique_and_found():
    assert len({exercise.name for exercise in ALL}) == len(ALL) > 0
    for exercise in ALL:
        assert find(exercise.name) is exercise


@every_exercise
def test_reference_passes_with_at_least_two_cases(exercise: Exercise):
    result = check_function(exercise, exercise.reference, key=key_of(exercise.name))
    assert result.passed, str(result)
    assert result.num_cases >= 2


@every_exercise
def test_stub_is_not_done_yet(exercise: Exercise):
    def stub(*args, **kwargs):
        raise NotImplementedError("write it here")

    result = check_function(exercise, stub, key=key_of(exercise.name))
    assert result.status is Status.NOT_DONE, str(result)


@every_exercise
def test_function_without_a_return_fails(exercise: Exercise):
    result = check_function(exercise, lambda *args, **kwargs: None, key=key_of(exercise.name))
    assert result.status is Status.FAILED


@every_exercise
def test_has_two_wrong_versions_and_different_hints(exercise: Exercise):
    assert len(exercise.wrong) >= 2
    assert len({hint.strip() for hint in exercise.hints if hint.strip()}) == len(exercise.hints)


def interpret_once(exercise: Exercise, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreting a kernel takes long: let a check take the answers of a wrong version from its planted mistake."""
    key = key_of(exercise.name)
    if isinstance(exercise.wrong[number].function, LazyKernel):
        places = {id(case): place for place, case in enumerate(key.cases)}
        monkeypatch.setattr(
            "minillm.teaching.check_function.call",
            lambda exercise, function, case: key.planted(number, places[id(case)]),
        )


@every_wrong_version
def test_wrong_version_fails_and_the_message_names_the_mistake(exercise: Exercise, wrong, monkeypatch):
    key = key_of(exercise.name)
    interpret_once(exercise, exercise.wrong.index(wrong), monkeypatch)
    result = check_function(exercise, wrong.function, key=key)
    assert result.status is Status.FAILED
    assert (wrong.expected_message or wrong.description) in str(result), str(result)
    assert "NameError" not in str(result), "the planted mistake itself cannot run"
    if exercise.name.startswith("l01."):
        assert len(str(result)) < 1200, "the first counterexamples are short enough to redo by hand"


@every_exercise
def test_some_case_tells_every_two_wrong_versions_apart(exercise: Exercise):
    key = key_of(exercise.name)
    same = [
        f"add a case that tells {one.description!r} from {other.description!r}"
        for (i, one), (j, other) in itertools.combinations(enumerate(exercise.wrong), 2)
        if all(alike(exercise, key.planted(i, case), key.planted(j, case)) for case in range(len(key.cases)))
    ]
    assert not same, "; ".join(same)


@every_exercise
def test_reference_changes_no_input_and_repeats_itself(exercise: Exercise):
    for case, again in zip(exercise.all_cases(), exercise.all_cases(), strict=True):
        first, second = call(exercise, exercise.reference, case), call(exercise, exercise.reference, case)
        assert first.error is None
        assert first.changed == ()
        assert exact(first.value, second.value) is None, f"{case.label}: two calls differ"
        before = named_inputs(exercise, again.args)
        assert exact(before, named_inputs(exercise, case.args)) is None, f"{case.label}: cases differ"


@every_exercise
def test_making_the_cases_leaves_the_random_numbers_of_the_notebook_alone(exercise: Exercise):
    before = torch.get_rng_state()
    exercise.all_cases()
    assert torch.equal(torch.get_rng_state(), before)


@every_exercise
def test_report_of_a_failure_is_the_same_twice(exercise: Exercise, monkeypatch):
    answer = exercise.wrong[0].function
    key = key_of(exercise.name)
    interpret_once(exercise, 0, monkeypatch)
    assert str(check_function(exercise, answer, key=key)) == str(check_function(exercise, answer, key=key))
