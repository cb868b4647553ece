"""What a learner reads after running a check."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch

from minillm.errors import LessonError
from minillm.teaching.check_function import check_function
from minillm.teaching.compare import close, values_match
from minillm.teaching.exercise import Case, Exercise, WrongVersion
from minillm.teaching.result import Status
from minillm.teaching.show import brief, short


def test_right_answer_passes_every_case(append_exercise):
    result = check_function(append_exercise, lambda cache, new: torch.vstack((cache, new)))
    assert result.passed
    assert str(result) == "PASS 2/2  l90.append_rows"


def test_counterexample_shows_inputs_expected_got_and_the_planted_mistake(append_exercise):
    text = str(check_function(append_exercise, lambda cache, new: new.clone()))
    assert text.splitlines()[:2] == ["FAIL 1/2  l90.append_rows", "The first case that fails: two rows after three"]
    for part in (
        "input cache  float32 tensor [3, 2]:",
        "[4., 5.]",
        "expected     float32 tensor [5, 2]:",
        "shape: [2, 2] instead of [5, 2]",
        "it looks as if your function forgets the rows that were there before",
        'hint("l90.append_rows", 1)',
    ):
        assert part in text


def test_mistakes_with_equal_shapes_are_told_apart_by_their_values(append_exercise):
    text = str(check_function(append_exercise, lambda cache, new: torch.vstack((new, cache))))
    assert "values: 10 of 10 differ, the first at [0, 0]: 7.5 instead of 0" in text
    assert "puts the new rows in front" in text
    assert "forgets" not in text


def test_a_mistake_nobody_planted_is_not_blamed_on_a_planted_one(append_exercise):
    everywhere = check_function(append_exercise, lambda cache, new: torch.cat([cache, new]) + 1)
    only_on_the_second_case = check_function(append_exercise, lambda cache, new: torch.cat([cache, new]) + len(cache))
    assert "it looks as if" not in str(everywhere)
    assert "it looks as if" not in str(only_on_the_second_case)


def test_stub_is_not_done_yet_and_not_an_error(append_exercise):
    def stub(cache, new):
        raise NotImplementedError("write append_rows in place of each NotImplementedError, then run its check")

    result = check_function(append_exercise, stub)
    assert result.status is Status.NOT_DONE
    assert "NOT DONE YET  l90.append_rows: write append_rows in place of each NotImplementedError" in str(result)
    assert "FAIL" not in str(result)


def test_a_stub_of_another_exercise_is_named_if_the_answer_calls_it():
    def accept_rule(p, q, x):
        raise NotImplementedError("write accept_rule in place of each NotImplementedError, then run its check")

    def verify_chain(drafts, p, q, uniforms):
        return [int(accept_rule(p[:-1], q, torch.tensor(drafts))[0])]

    result = check_function("l10.verify_chain", verify_chain)
    assert result.status is Status.NOT_DONE
    assert 'l10.verify_chain: it calls accept_rule, which is not written yet: write it, or call what use("l10.' in str(
        result
    )
    assert "l10.accept_rule: write accept_rule in place of" in str(check_function("l10.accept_rule", accept_rule))


def test_an_answer_that_cannot_be_printed_is_reported_as_any_other(append_exercise):
    text = str(check_function(append_exercise, lambda cache, new: torch.cat([cache, new]).to_sparse()))
    assert "layout: torch.sparse_coo instead of torch.strided" in text
    assert "got          float32 sparse tensor [1, 2]" in text


def test_an_array_whose_strides_are_negative_is_compared_and_shown():
    backwards = np.flip(np.arange(3))
    assert values_match(np.array([2, 1, 0]), backwards) is None
    assert short(backwards) == f"{backwards.dtype} array [3]: [2, 1, 0]"
    assert short([np.int64(3), np.float64(0.5)]) == "[3, 0.5]"


def test_an_operator_missing_in_torch_is_an_error_and_not_a_stub(append_exercise):
    def unlucky(cache, new):
        return torch.ops.aten.add.out(cache.to("meta").to_sparse(), new)

    result = check_function(append_exercise, unlucky)
    assert result.status is Status.FAILED


def test_exception_is_shown_with_the_learners_own_line_not_the_libraries(append_exercise):
    def helper(new):
        return torch.cat([new, "text"])  # the culprit

    def crashes(cache, new):
        return helper(new)

    text = str(check_function(append_exercise, crashes))
    assert "got          TypeError" in text
    assert "in helper: return torch.cat" in text


def test_wrong_parameters_are_named(append_exercise):
    text = str(check_function(append_exercise, lambda cache: cache))
    assert "your function takes (cache), but it is called with (cache, new)" in text


def test_wrong_parameters_are_named_under_a_drive_too(append_exercise):
    driven = dataclasses.replace(append_exercise, run_case=lambda function, cache, new: function(cache, new))
    text = str(check_function(driven, lambda cache: cache))
    assert "your function takes (cache), but it is called with (cache, new)" in text


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda cache, new: None, "None instead of float32 tensor [1, 2]: is a `return` missing?"),
        (lambda cache, new: [cache, new], "type: list of 2 instead of float32 tensor [1, 2]"),
        (lambda cache, new: torch.cat([cache, new]).T, "shape: [2, 1] instead of [1, 2]"),
        (lambda cache, new: torch.cat([cache, new]).double(), "dtype: torch.float64 instead of torch.float32"),
        (lambda cache, new: torch.cat([cache, new]) / 0, "2 of 2 differ, the first at [0, 0]: inf instead of 1"),
    ],
)
def test_gravest_difference_comes_first(append_exercise, answer, says):
    assert says in str(check_function(append_exercise, answer))


def test_changing_an_input_is_a_mistake_even_when_the_answer_is_right(append_exercise):
    def careless(cache, new):
        answer = torch.cat([cache, new])
        new.zero_()
        return answer

    text = str(check_function(append_exercise, careless))
    assert "your function changed its input new, which the caller still needs" in text


def test_in_place_parameter_may_change_and_its_contents_are_compared():
    def write_row(buffer, row):
        buffer[0] = row

    exercise = Exercise(
        name="l90.write_row",
        reference=write_row,
        cases=[Case("a row", (torch.zeros(2, 2), torch.ones(2)))],
        hints=("a", "b", "c", "d"),
        wrong=(),
        in_place=("buffer",),
    )
    assert check_function(exercise, write_row).passed
    text = str(check_function(exercise, lambda buffer, row: None))
    assert "at ['buffer after the call']: 2 of 4 differ" in text


def test_drive_lets_a_class_be_an_exercise():
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def add(self) -> int:
            self.count += 1
            return self.count

    class Stuck(Counter):
        def add(self) -> int:
            return 1

    exercise = Exercise(
        name="l90.Counter",
        reference=Counter,
        cases=[Case("three calls", (3,))],
        hints=("a", "b", "c", "d"),
        wrong=(WrongVersion("does not count on", Stuck),),
        run_case=lambda make, times: [counter.add() for counter in [make()] for _ in range(times)],
    )
    assert check_function(exercise, Counter).passed
    text = str(check_function(exercise, Stuck))
    assert "input times  3" in text
    assert "value at [1]: 1 instead of 2" in text
    assert "does not count on" in text


def test_random_draws_are_the_same_for_learner_and_reference_and_leave_the_notebooks_generator_alone():
    exercise = Exercise("l90.draw", lambda n: torch.rand(n), [Case("two", (2,))], ("a", "b", "c", "d"), ())
    reports = []
    for seed in (7, 8):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        assert check_function(exercise, lambda n: torch.rand(n)).passed
        reports.append(str(check_function(exercise, lambda n: 1 - torch.rand(n))))
        assert torch.equal(before, torch.get_rng_state())
    assert reports[0] == reports[1]


def test_a_generator_passed_in_may_advance():
    exercise = Exercise(
        name="l90.draw",
        reference=lambda n, generator: torch.rand(n, generator=generator),
        cases=[Case("two", (2, torch.Generator().manual_seed(3)))],
        hints=("a", "b", "c", "d"),
        wrong=(),
    )
    assert check_function(exercise, lambda n, generator: torch.rand(n, generator=generator)).passed
    assert not check_function(exercise, lambda n, generator: torch.rand(n)).passed


def test_own_diagnosis_comes_before_planted_mistakes_and_may_not_crash_the_check(append_exercise):
    def too_few(attempt):
        return f"only {len(attempt.got)} rows came back" if len(attempt.got) < len(attempt.expected) else None

    told = dataclasses.replace(append_exercise, diagnose=too_few)
    assert "only 2 rows came back" in str(check_function(told, lambda cache, new: new))
    assert "type: int instead of" in str(check_function(told, lambda cache, new: 5))


def test_own_diagnosis_that_also_accuses_a_right_answer_or_changes_its_mind_is_not_believed(append_exercise):
    plain = dataclasses.replace(append_exercise, wrong=())
    accuses_all = dataclasses.replace(plain, diagnose=lambda attempt: "you forgot the cache")
    assert "forgot the cache" not in str(check_function(accuses_all, lambda cache, new: new))
    by_length = dataclasses.replace(
        plain, diagnose=lambda attempt: "began early" if len(attempt.got) == 1 else "began late"
    )
    assert "began" not in str(check_function(by_length, lambda cache, new: new + 1))


def test_a_planted_mistake_that_differs_in_another_case_is_not_named(append_exercise):
    def twice_the_last(cache, new):  # as the planted one on the case of five rows, not on the empty cache
        return new if len(cache) else torch.cat([new, new])

    text = str(check_function(append_exercise, twice_the_last))
    assert "FAIL 0/2" in text
    assert "it looks as if" not in text


def test_comparison_that_trips_over_an_odd_answer_names_the_types(append_exercise):
    picky = dataclasses.replace(append_exercise, compare=lambda expected, got: None if got.shape else "no shape")
    assert "int cannot be compared with float32 tensor [1, 2]" in str(check_function(picky, lambda cache, new: 5))


def test_report_is_the_same_on_every_run_and_holds_no_address(append_exercise):
    def answer(cache, new):
        return object()

    first, second = check_function(append_exercise, answer), check_function(append_exercise, answer)
    assert str(first) == str(second)
    assert first._repr_html_() == second._repr_html_()
    assert "0x" not in str(first)


def test_html_escapes_what_learners_return(append_exercise):
    page = check_function(append_exercise, lambda cache, new: "<script>alert(1)</script>")._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert 'role="status"' in page

    def stub(cache, new):
        raise NotImplementedError("<script>alert(1)</script>")

    assert "<script>" not in check_function(append_exercise, stub)._repr_html_()


def test_the_cause_comes_first_then_what_is_wrong_then_the_numbers(append_exercise):
    text = str(check_function(append_exercise, lambda cache, new: new))
    order = [text.index(word) for word in ("likely", "wrong", "input cache", "expected", "got")]
    assert order == sorted(order)
    page = check_function(append_exercise, lambda cache, new: new)._repr_html_()
    assert page.index("likely") < page.index("wrong") < page.index("expected")


def test_large_inputs_are_told_by_shape_and_range(append_exercise):
    cache = torch.linspace(-1.5, 2.5, 200_000).view(500, 400)
    cache[0, :3] = torch.tensor([float("nan"), float("nan"), -float("inf")])
    wide = dataclasses.replace(append_exercise, cases=[Case("wide", (cache, torch.ones(1, 400)))])
    text = str(check_function(wide, lambda cache, new: new))
    assert "input cache  float32 tensor [500, 400]: -1.5 to 2.5, 2 × NaN, 1 × -inf" in text
    assert len(text.splitlines()) < 12


def test_of_a_large_answer_only_the_neighbourhood_of_the_first_difference_is_shown():
    def spoil(x):
        out = x.clone()
        out[1, 7, 20] += 5
        return out

    exercise = Exercise(
        "l90.same",
        lambda x: x.clone(),
        [Case("large", (torch.arange(2000.0).view(2, 20, 50),))],
        ("a", "b", "c", "d"),
        (),
    )
    text = str(check_function(exercise, spoil))
    assert "around the first that differs, [1, 5:10, 18:23]" in text
    assert "1375." in text and "1370." in text
    assert len(text.splitlines()) < 20


def test_inside_a_dict_only_the_entry_that_differs_is_shown(append_exercise):
    def both(cache, new):
        return {"fine": torch.zeros(40, 40), "spoilt": [torch.ones(2), torch.cat([cache, new])]}

    exercise = dataclasses.replace(append_exercise, reference=both)
    text = str(check_function(exercise, lambda cache, new: both(cache, new) | {"spoilt": [torch.ones(2), new * 2]}))
    assert "at ['spoilt'][1]: float32 tensor" in text
    assert "fine" not in text


@pytest.mark.parametrize(
    ("expected", "got", "says"),
    [
        (3, 3.0, "type: float instead of int"),
        (100_000, 100_001, "value: 100001 instead of 100000"),
        (True, 1, "type: int instead of bool"),
        ([1, (2, 3)], [1, (2, 4)], "value at [1][1]: 4 instead of 3"),
        ({"a": 1}, {"b": 1}, "keys: ['b'] instead of ['a']"),
        ((1, 2), (1, 2, 3), "length: 3 instead of 2"),
        (np.zeros(2), np.ones(2), "values: 2 of 2 differ"),
        (float("inf"), 1e30, "value: 1e+30 instead of inf"),
        ("ab", "ac", "value: 'ac' instead of 'ab'"),
    ],
)
def test_differences_inside_plain_values_are_located(expected, got, says):
    assert says in values_match(expected, got)


class Work(NamedTuple):
    """A learner's own tuple."""

    rows: int
    pairs: int


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (1.0, 1),
        (1.0, 1.00001),
        (float("nan"), float("nan")),
        ({"a": [torch.ones(1)]}, {"a": [torch.ones(1)]}),
        ((3, 6), Work(3, 6)),
    ],
)
def test_equal_enough_values_match(expected, got):
    assert values_match(expected, got) is None


def test_tolerance_can_be_chosen():
    assert close(rtol=0.1, atol=0.0)(1.0, 1.05) is None
    assert close(rtol=0.01, atol=0.0)(1.0, 1.05) is not None


def test_a_learners_own_dataclass_stands_in_for_the_references():
    reference = dataclasses.make_dataclass("Draft", ["tokens"])
    learner = dataclasses.make_dataclass("Draft", ["tokens"])
    assert values_match(reference(torch.ones(2)), learner(torch.ones(2))) is None
    assert "at .tokens" in values_match(reference(torch.ones(2)), learner(torch.zeros(2)))


def test_badly_written_exercises_are_refused(append_exercise):
    with pytest.raises(LessonError, match="lesson, dot, function name"):
        dataclasses.replace(append_exercise, name="append_rows")
    with pytest.raises(LessonError, match="it needs 4"):
        dataclasses.replace(append_exercise, hints=("one",))
    with pytest.raises(LessonError, match="in_place names"):
        dataclasses.replace(append_exercise, in_place=("cash",))


def test_values_are_shown_without_what_goes_without_saying():
    @dataclasses.dataclass
    class Config:
        heads: int
        theta: float = 10_000.0
        layers: list[int] = dataclasses.field(default_factory=list)

    assert short(Config(heads=2)) == "Config(heads=2)"
    assert short(Config(heads=2, theta=5.0, layers=[1])) == "Config(heads=2, theta=5, layers=[1])"
    assert short({"keys": "k" * 40, "values": "v" * 40}).count("\n") == 1
    assert short(list(range(20))).endswith("11, …]")
    assert short((1,)) == "(1,)"
    assert short(torch.tensor(2.5)) == "float32 tensor []: 2.5"


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        ([1e-20], "1e-20"),
        ([0.9, 0.0, -1e-6], "[   0.9,      0, -1e-06]"),
        ([0.00123, -0.0007891], "[   0.00123, -0.0007891]"),
        ([0.5, 0.0007891], "[0.5   , 0.0008]"),
        ([0.0, torch.nan], "[ 0., nan]"),
        ([0.0, 0.0], "[0., 0.]"),
    ],
)
def test_small_numbers_are_not_shown_as_zeros(numbers: list[float], shown: str):
    assert brief(torch.tensor(numbers)) == f"float32 tensor [{len(numbers)}]: {shown}"


def test_what_no_planted_mistake_explains_may_still_break_a_property(append_exercise):
    told = dataclasses.replace(append_exercise, fallback_diagnosis=lambda attempt: f"returns {len(attempt.got)} rows")
    assert "returns 7 rows" in str(check_function(told, lambda cache, new: torch.zeros(7, 2)))
    planted = append_exercise.wrong[0]
    assert planted.description in str(check_function(told, planted.function))


def test_a_planted_mistake_is_not_named_if_the_learner_answers_another_case_differently(append_exercise):
    planted = append_exercise.wrong[0]

    def only_once(cache: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return planted.function(cache, new) if len(cache) == 3 else new.new_zeros(0, 2)

    assert planted.description not in str(check_function(append_exercise, only_once))
