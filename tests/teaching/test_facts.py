"""What is said of an answer that no planted mistake explains is a fact: about the error, or about all wrong answers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from minillm.sampling import sample
from minillm.teaching.answer_key import AnswerKey
from minillm.teaching.check_function import check_function
from minillm.teaching.compare import close
from minillm.teaching.diagnosis_answers import common_fact
from minillm.teaching.diagnosis_errors import cause_of_error
from minillm.teaching.diagnosis_tensors import about_tensors
from minillm.teaching.drives.l17 import LargestTensor
from minillm.teaching.exercise import Case, Exercise, WrongVersion
from minillm.teaching.exercises.l01_decoding import sample_next, total_work
from minillm.teaching.exercises.l06_paged_blocks import find_prefix
from minillm.teaching.exercises.l10_speculative_decoding import verify_chain
from minillm.teaching.fence import OutOfBoundsError
from minillm.teaching.source import edited


def said_of(function: Callable[[], object]) -> str:
    """What is said of the error that `function` raises."""
    try:
        function()
    except Exception as error:
        return cause_of_error(error, lambda frame: frame.f_globals is globals())
    raise AssertionError("this must raise")


def _late_name() -> None:
    if not bool:
        late = 1
    print(late)


ROWS, EMPTY = [1, 2, 3], []
THREE, FOUR = torch.zeros(3), torch.zeros(4)
MASK = torch.ones(2, 4, dtype=torch.bool).tril(2)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: ROWS[3], "(ROWS[3]: index 3, of 3 entries)"),
        (lambda: EMPTY[-1], "(EMPTY[-1]: index -1, of 0 entries)"),
        (lambda: max(EMPTY[:1]), "max of no values (EMPTY[:1] is empty)"),
        (lambda: 1 / len(EMPTY), "divided by 0"),
        (lambda: 1 / (ROWS[0] - 1), "divided by 0 in this case (ROWS[0] - 1)"),
        (_late_name, "late has no value yet"),
        (lambda: next(n for n in [1] if n > 2), "next found nothing"),
        (lambda: torch.ones(2, 2).argsort(1, descending=True, stable=True), "argsort with stable=True takes its dim"),
        (lambda: eval("misspelt"), "misspelt is not defined: is it misspelt, is its import missing"),
        (lambda: 1 if THREE > 0 else 0, "there are several: choose number by number with torch.where"),
        (lambda: np.zeros(2) > 0 or 1, "there are several: choose number by number with torch.where"),
        (lambda: THREE + FOUR, "3 and 4 entries in dimension 0"),
        (lambda: THREE.__setitem__(slice(0, 2), FOUR), "values of shape [4] do not fit into shape [2]"),
        (lambda: torch.zeros(2, 3) @ torch.zeros(2, 3), "2×3 times 2×3"),
        (lambda: THREE.amax(1), "dimension 1 does not exist: the tensor has 1"),
        (lambda: ROWS[: 3 / 2], "a slice begins or ends at a value that is no int"),
        (lambda: THREE.unflatten(0, (2, 2)), "dimension 0 has 3 entries, which cannot be split into [2, 2]"),
        (lambda: ROWS + 1, "+ is not defined for a value of type list and one of type int"),
        (lambda: THREE.masked_fill(0.0, THREE > 0), "masked_fill does not take (float, Tensor)"),
        (lambda: {"a": 1}["b"], "the key is not in the dict"),
        (lambda: list(zip(ROWS, EMPTY, strict=True)), "number 2 is shorter than number 1"),
        (lambda: (1, 2)[2], "an index is past the end of a tuple"),
        (lambda: range(2)[2], "an index is past the end of a range"),
        (lambda: WrongVersion("adds nothing"), "WrongVersion.__init__ is called without 'function'"),
        (lambda: Case("one row", (), rows=1), "Case.__init__ has no argument called rows"),
        (lambda: torch.cat([torch.zeros(2, 3), torch.zeros(2, 4)]), "where one has 3 entries and another 4"),
        (lambda: THREE.add_(torch.zeros(2, 3)), "values of shape [2, 3] do not fit into a result of shape [3]"),
        (lambda: EMPTY**2, "** or pow() is not defined for a value of type list and one of type int"),
        (lambda: torch.zeros(6).view(4, 2), "a tensor of 6 numbers cannot have the shape [4, 2]"),
    ],
)
def test_an_error_is_told_in_terms_of_the_line(function: Callable[[], object], words: str):
    assert words in said_of(function)


def test_an_error_in_a_function_of_the_lesson_names_this_function():
    """The learner's line has no `zip`."""
    said = said_of(lambda: sample(torch.ones(1, 3), [0.5, 0.5]))
    assert said.startswith("in sample(), which this line calls: the lists in zip have different lengths")


def test_a_hook_that_watches_tensors_is_not_what_the_line_calls():
    with LargestTensor():
        assert said_of(lambda: torch.zeros(2, 3) @ torch.zeros(2, 3)).startswith("2×3 times 2×3")


def test_an_index_is_looked_up_only_where_that_changes_nothing():
    taken = list(ROWS)
    assert said_of(lambda: EMPTY[taken.pop()]) == "an index is past the end of a list"
    assert taken == [1, 2]


def test_an_error_of_an_unknown_kind_gets_no_cause():
    assert said_of(lambda: (_ for _ in ()).throw(RuntimeError("something else"))) == ""


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("ValueError: arange's range must be a power of 2 (in the line `tl.arange(1, 4)`)", "2, 4, 8"),
        ("ValueError: Unsupported ptr type <['4'], int32> in `tl.load` (in the line `x`)", "tl.load is given numbers"),
        (
            "InterpreterError: ValueError(\"axis 1 out of bounds for shape ['constexpr[4]']\") (in the line `x`)",
            "a block of shape [4] has no axis 1",
        ),
        (
            "IncompatibleTypeErrorImpl: invalid operands of type pointer<fp32> and triton.language.float32",
            "a pointer is combined with a float",
        ),
        (
            "ValueError: Cannot make_shape_compatible: incompatible dimensions at index 1: 4 and 2 (in the line `x`)",
            "blocks with 4 and 2 entries along axis 1 are combined",
        ),
        ("ValueError: arange's arguments must be of type tl.constexpr (in the line `x`)", "takes constants only"),
        ("TypeError: 'int' object is not iterable (in the line `x = x_ptr[0]`)", "tl.load(pointer + …) reads memory"),
        ("TypeError: only 0-dimensional arrays can be converted to Python scalars (in the line `x`)", "take blocks"),
        (
            "TypeError: exp(): argument 'input' (position 1) must be Tensor, not tensor (in the line `x`)",
            "use one of tl",
        ),
        (
            "TypeError: didn't match because some of the arguments have invalid types: (!tensor!) (in the line `x`)",
            "use one of tl",
        ),
        ("TypeError: unsupported operand type(s) for ** or pow(): 'tensor' and 'int' (in the line `x`)", "x * x is"),
    ],
)
def test_what_triton_says_of_a_kernel_is_told_too(message: str, words: str):
    assert words in cause_of_error(ValueError(message), lambda frame: False)


RIGHT = torch.tensor([[1.0, 2.0, 4.0], [3.0, 5.0, 9.0]])


@pytest.mark.parametrize(
    ("got", "words"),
    [
        (RIGHT.T, "is transposed"),
        (RIGHT.flip(-1), "reverse order along the last dimension"),
        (RIGHT * 3, "is 3 times what it should be"),
        (RIGHT - 2, "differs by -2 everywhere"),
        (-RIGHT, "opposite sign"),
        (1 / RIGHT, "inverse"),
        (RIGHT * 1.0005, "right to about one part in a thousand, and no better"),
        (RIGHT.int(), "the right numbers as int32 instead of float32"),
        (RIGHT * torch.tensor([[2.0], [3.0]]), "a factor that each row"),
        (RIGHT.index_fill(0, torch.tensor(1), 7.0), "wrong only in its last row"),
        (RIGHT[:, :2], "another length along the second dimension: [2, 2] instead of [2, 3]"),
        (RIGHT.flatten(), "the right numbers in another shape"),
        (RIGHT.index_fill(0, torch.tensor(1), torch.nan), "has NaN"),
        (RIGHT.index_fill(0, torch.tensor(1), -torch.inf), "has -inf: the logarithm of 0 or the maximum of nothing"),
        (torch.tensor([[1.0, torch.inf, 4.0], [3.0, -torch.inf, 9.0]]), "has infinities: something is divided by 0"),
        (torch.tensor([[1.0, 3.0, 8.0], [2.0, 2.0, 3.0]]), ""),
    ],
)
def test_what_a_wrong_tensor_has_in_common_with_the_right_one(got: torch.Tensor, words: str):
    said = about_tensors([(RIGHT, got)])
    assert words in said and bool(words) == bool(said)


def test_a_fact_must_hold_for_every_wrong_answer():
    other = torch.tensor([[7.0, 1.0, 2.0], [0.5, 4.0, 2.0]])
    assert "3 times" in about_tensors([(RIGHT, RIGHT * 3), (other, other * 3)])
    assert "3 times" not in about_tensors([(RIGHT, RIGHT * 3), (other, other * 2)])


def test_a_factor_of_one_is_not_named_as_the_mistake():
    rounded = torch.tensor([[1000.0, 2000.0], [500.0, 4000.0]])
    overflown = torch.full_like(rounded, torch.inf)
    assert about_tensors([(RIGHT, RIGHT * 1.0005), (rounded, overflown)]) == ""
    assert "one factor for the whole answer" not in about_tensors([(RIGHT, RIGHT * 1.0005), (rounded, rounded * 3)])


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([([1, 2, 3], [1, 2])], "lacks its last entry"),
        ([([1, 2, 3], [2, 3])], "lacks its first entry"),
        ([([1, 2, 3], [1, 2, 3, 4])], "one entry too many at its end"),
        ([([1, 2, 3], [3, 2, 1])], "in reverse order"),
        ([([1, 5, 3], [2, 6, 4])], "every entry 1 too large"),
        ([([1, 2, 3], [1, 2, 7])], "wrong only in its last entry"),
        ([([1, 2], []), ([4], [])], "is empty"),
        ([(3, 4), (9, 10)], "always 1 too large"),
        ([(3, 6), (9, 18)], "always 2 times"),
        ([(3, 3.5)], "is a float"),
        ([(False, True), (False, True)], ""),
        ([(True, False), (True, False)], ""),
        ([(True, 1), (False, 0)], "is a number, where a bool is wanted: write True or False"),
        ([(True, 1.0)], "is a number, where a bool is wanted"),
        ([(3, True), (9, True)], "is a bool, where a number is wanted"),
        ([(3, np.int64(4)), (9, np.int64(10))], "always 1 too large"),
        ([(0.5, np.float64(1.5)), (2.0, np.float64(3.0))], "always 1 too large"),
        ([(2, np.float64(2.0))], "is of type float64 instead of int"),
        ([([2, 3], [2.0, 3.0])], "has entries of type float, where int is wanted: convert with int(…)"),
        ([([0, 1], [0, torch.tensor(1)])], "has entries of type Tensor, where int is wanted: convert with int(…)"),
        ([([1, 2], [1, None])], "has entries of type NoneType, where int is wanted"),
        ([([0.5, 1.0], [1, np.float64(2.0)])], ""),
        ([([], [3, 4])], "should be empty"),
        ([([1], None)], "is None"),
        ([(MASK, MASK.T)], "is transposed"),
        ([(MASK, MASK.int())], "the right numbers as int32 instead of bool"),
        ([((1, [2, 3]), (1, [2])), ((5, [4, 3]), (5, [4]))], "`table` lacks its last entry; everything else is right"),
        ([({"free": [1], "counts": [0]}, {"free": [1], "counts": [0, 0]})], "`counts` has one entry too many"),
        ([([1, 2, 3], [1, 9, 8]), ([4, 5], [7, 1])], ""),
    ],
)
def test_what_wrong_answers_have_in_common_with_the_right_ones(pairs: list[tuple[object, object]], words: str):
    said = common_fact(pairs, ("index", "table"))
    assert words in said and bool(words) == bool(said)


def test_a_fact_about_a_part_needs_that_part_to_be_wrong_in_every_answer():
    both, second = (([1, 2], 3), ([1], 4)), (([1, 2], 5), ([1, 2], 7))
    assert "lacks its last entry" in common_fact([both], ("table", "index"))
    assert common_fact([both, second], ("table", "index")) == "`index` is too large in every case that fails"


TINY = torch.tensor([[1.0, 2.5], [3.0, 4.0]]) * 1e-20


@pytest.mark.parametrize(
    ("got", "words"), [(TINY * 3, "is 3 times"), (TINY**2 * 1e15, ""), (TINY + 1e-20 * torch.eye(2), "")]
)
def test_very_small_numbers_are_not_taken_for_zeros(got: torch.Tensor, words: str):
    """`1e-5` beside numbers of this size is no rounding error."""
    said = common_fact([((TINY, 1), (got, 1))], ("scale", "n"), compare=close(1e-4, 0.0))
    assert said.startswith(f"`scale` {words or 'is wrong'}") and said.endswith("; everything else is right")


def test_a_condition_that_a_drive_tested_is_no_part_of_the_answer():
    def split_unevenly(parts: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return sum(part @ weight[:, r :: len(parts)].T for r, part in enumerate(parts)) + bias

    def not_split(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        return (x @ weight.T + bias).chunk(size, 1)[rank]

    shown = [
        check_function("l16.row_parallel", split_unevenly).counterexample,
        check_function("l16.column_parallel", not_split).counterexample,
    ]
    assert shown[0].cause == "" and "nothing is split" in shown[1].cause
    assert all(text.startswith("float32 tensor [") for one in shown for text in (one.expected, one.got))
    right = {"returned": [1, 2], "in parts": True}
    assert common_fact([(right, {"returned": [1], "in parts": True})]).startswith("the answer lacks its last entry")
    assert common_fact([(right, {"returned": [1, 2], "in parts": False})]) == ""


def total(numbers: list[int]) -> int:
    return sum(numbers)


def clears(numbers: list[int]) -> int:
    answer = sum(numbers)
    numbers.clear()
    return answer


def clears_long_lists(numbers: list[int]) -> int:
    return clears(numbers) if len(numbers) > 1 else 0


@pytest.mark.parametrize("answer", [clears, clears_long_lists])
def test_an_input_that_was_written_to_is_named(answer: Callable[[list[int]], int]):
    """It is, even if other answers are wrong; the exercise is not asked about the right one."""
    wrong = (WrongVersion("a", lambda numbers: 0), WrongVersion("b", len))
    cases = [Case("two", ([3, 4],)), Case("one", ([5],))]
    exercise = Exercise(
        "l90.total", total, cases, ("a", "b", "c", "d"), wrong, fallback_diagnosis=lambda attempt: "wrong"
    )
    shown = check_function(exercise, answer, key=AnswerKey(exercise)).counterexample
    assert shown.cause == "the answer is right here, but your function writes into numbers: work on a copy"


def test_of_an_answer_of_another_type_its_type_is_told_and_not_what_the_exercise_says_of_wrong_numbers():
    exercise = Exercise(
        "l90.counts",
        lambda numbers: (sum(numbers), len(numbers)),
        [Case("two", ([3, 4],)), Case("one", ([5],))],
        ("a", "b", "c", "d"),
        (),
        fallback_diagnosis=lambda attempt: "the sum is wrong",
    )
    key = AnswerKey(exercise)

    def cause(answer: Callable[[list[int]], object]) -> str:
        return check_function(exercise, answer, key=key).counterexample.cause

    assert cause(lambda numbers: [sum(numbers), len(numbers)]) == "the answer is of type list instead of tuple"
    assert cause(lambda numbers: (sum(numbers), float(len(numbers)))).startswith("the second value is a float")
    assert cause(lambda numbers: (torch.tensor(sum(numbers)), len(numbers))) == (
        "the first value is of type Tensor instead of int; everything else is right"
    )
    assert cause(lambda numbers: sum(numbers)) == "the sum is wrong"
    assert cause(lambda numbers: (0, 0)) == "the sum is wrong"


@pytest.mark.parametrize(
    ("name", "answer", "cause"),
    [
        (
            "l03.requests_that_fit",
            lambda memory, weights, per_token, tokens: max(0, np.floor((memory - weights) / (per_token * tokens))),
            "the answer is of type float64 instead of int",
        ),
        ("l01.total_work", lambda prompt, new: list(total_work(prompt, new)), "is of type list instead of tuple"),
        ("l01.total_work", lambda prompt, new: (np.int64(7), np.int64(9)), "returns both numbers wrong"),
        (
            "l01.sample_next",
            lambda logits, uniform, temperature, *kept: (
                sample_next(logits, uniform, temperature, *kept) if temperature else None
            ),
            "your function returns None for some of these uniforms",
        ),
        (
            "l06.find_prefix",
            lambda *given: tuple(find_prefix(*given)),
            "the answer is of type tuple instead of list",
        ),
        (
            "l10.verify_chain",
            edited(verify_chain, ("int(sample(last, uniforms[-1:]))", "sample(last, uniforms[-1:])")),
            "the answer has entries of type Tensor, where int is wanted: convert with int(…)",
        ),
    ],
)
def test_in_the_lessons_too(name: str, answer: Callable[..., object], cause: str):
    assert cause in check_function(name, answer).counterexample.cause


def reads_one() -> torch.Tensor:
    return torch.zeros(1)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("overwrote 4 numbers of its input q", "an input is overwritten"),
        ("wrote 2 numbers outside of out, the first 2 before its first", "before the beginning of an array"),
        ("wrote 2 numbers outside of out, the first 1 after its last", "past the end of an array"),
    ],
)
def test_a_store_outside_the_result_is_told_by_where_it_went(said: str, words: str):
    def strays() -> torch.Tensor:
        raise OutOfBoundsError(said)

    wrong = (WrongVersion("a", lambda: torch.ones(1)), WrongVersion("b", lambda: torch.ones(2)))
    exercise = Exercise("l90.reads_one", reads_one, [Case("one", ()), Case("again", ())], ("a", "b", "c", "d"), wrong)
    assert words in check_function(exercise, strays, key=AnswerKey(exercise)).counterexample.cause


def test_answers_that_are_nan_throughout_fit_many_mistakes_so_none_is_named():
    """A kernel that stores nothing looked as if it divided by a factor."""
    wrong = (WrongVersion("divides 0 by 0", lambda x: x * torch.nan), WrongVersion("adds one", lambda x: x + 1))
    cases = [Case("two ones", (torch.ones(2),)), Case("a two", (torch.tensor([2.0]),))]
    exercise = Exercise("l90.same", lambda x: x.clone(), cases, ("a", "b", "c", "d"), wrong)
    key = AnswerKey(exercise)

    def cause(answer: Callable[[torch.Tensor], torch.Tensor]) -> str:
        return check_function(exercise, answer, key=key).counterexample.cause

    assert cause(lambda x: torch.full_like(x, torch.nan)) == "the answer is NaN everywhere"
    assert cause(lambda x: x + 1) == "it looks as if your function adds one"
