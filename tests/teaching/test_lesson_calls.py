"""`check`, `hint`, `use`, `predict` and `reveal`, as a lesson calls them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from minillm.errors import ExerciseFailed, LessonError, UnknownExerciseError
from minillm.teaching import check, exercises, hint, predict, reveal, use
from minillm.teaching.check_function import check_function
from minillm.teaching.hint_text import Hint

MODULE = """
from minillm.teaching.exercise import Case, Exercise, WrongVersion

def double(numbers):
    return [2 * n for n in numbers]

EXERCISES = [
    Exercise("l91.double", double, [Case("a pair", ([1, 3],))], ("h1", "h2", "h3", "h4"), ()),
]
"""


@pytest.fixture
def lesson_91(tmp_path, monkeypatch):
    """An exercise module that is found by name like the shipped ones."""
    (tmp_path / "l91_sample.py").write_text(MODULE)
    monkeypatch.setattr(exercises, "__path__", [*exercises.__path__, str(tmp_path)])


def test_check_finds_the_function_by_its_bare_name_in_the_calling_frame(lesson_91, capsys):
    def double(numbers):
        return [n + n for n in numbers]

    check("l91.double")
    assert capsys.readouterr().out == "PASS 1/1  l91.double\n"
    del double


def test_check_finds_the_function_among_the_callers_globals(lesson_91, capsys):
    namespace = {"check": check}
    exec("def double(numbers):\n    return numbers\ncheck('l91.double')", namespace)
    assert "FAIL 0/1" in capsys.readouterr().out


def test_an_explicit_function_wins_over_the_name(lesson_91, capsys):
    def double(numbers):
        return numbers

    check("l91.double", lambda numbers: [2 * n for n in numbers])
    assert "PASS 1/1" in capsys.readouterr().out
    del double


def test_missing_function_says_what_to_run(lesson_91, capsys):
    check("l91.double")
    assert "there is no function double here; run the cell that defines it" in capsys.readouterr().out


def test_strict_check_raises_with_the_whole_report(append_exercise, monkeypatch):
    monkeypatch.setenv("MINILLM_STRICT", "1")
    with pytest.raises(ExerciseFailed, match="forgets the rows"):
        check(append_exercise, lambda cache, new: new)
    check(append_exercise, lambda cache, new: torch.cat([cache, new]))


def test_strict_check_raises_for_a_function_that_is_missing(append_exercise, monkeypatch):
    monkeypatch.setenv("MINILLM_STRICT", "1")
    with pytest.raises(ExerciseFailed, match="NOT FOUND"):
        check(append_exercise)


def test_use_takes_the_learners_function_if_it_passes(append_exercise, capsys):
    def append_rows(cache, new):
        return torch.vstack((cache, new))

    assert use(append_exercise) is append_rows
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("strict", ["0", "1"])
def test_use_falls_back_to_the_reference_with_a_notice_and_never_raises(append_exercise, capsys, monkeypatch, strict):
    monkeypatch.setenv("MINILLM_STRICT", strict)
    assert use(append_exercise, lambda cache, new: new) is append_exercise.reference
    assert "Using the reference for l90.append_rows: yours passes 1 of 2 cases." in capsys.readouterr().out
    assert use(append_exercise) is append_exercise.reference
    assert "yours was not found" in capsys.readouterr().out


def test_the_reference_is_not_the_learners_own_solution(append_exercise, capsys):
    append_rows = use(append_exercise)
    check(append_exercise)
    assert "NOT DONE YET  l90.append_rows: this is the reference; write your own" in capsys.readouterr().out
    assert use(append_exercise) is append_rows is append_exercise.reference
    assert "Using the reference for l90.append_rows: yours is not done yet." in capsys.readouterr().out


def test_hints_come_one_by_one(lesson_91, capsys):
    hint("l91.double")
    hint("l91.double", 3)
    assert capsys.readouterr().out == "Hint 1 of 4 for l91.double: h1\nHint 3 of 4 for l91.double: h3\n"
    for level in (5, 0, 1.0, "1"):
        with pytest.raises(LessonError, match=f"hint level {level!r} of l91.double: there are 1 to 4"):
            hint("l91.double", level)


def test_a_hint_is_markdown_in_notebooks_and_plain_text_elsewhere():
    hint = Hint("Hint 1", "Only the *new* rows, `x * y * z`: x**2 + y**2 < m_a, $5.")
    assert repr(hint) == "Hint 1: Only the new rows, `x * y * z`: x**2 + y**2 < m_a, $5."
    assert hint._repr_markdown_() == (r"**Hint 1**: Only the *new* rows, `x * y * z`: x\*\*2 + y\*\*2 \< m\_a, \$5.")


def test_a_block_of_code_in_a_hint_stays_as_it_is():
    code = "```python\nreturn a * b * c\n```"
    hint = Hint("Hint 4", f"All of it:\n\n{code}")
    assert hint._repr_markdown_().endswith(code)
    assert repr(hint).endswith(code)


def test_a_hint_of_several_lines_is_a_block_of_code_after_the_line_that_introduces_it():
    code = "for x in rows:\n    total += x * x\n\nreturn total"
    assert Hint("Hint 4", f"\n{code}\n")._repr_markdown_() == f"**Hint 4**:\n\n```python\n{code}\n```"
    assert repr(Hint("Hint 4", f"\n{code}")) == f"Hint 4: \n{code}"
    told = Hint("Hint 4", f"The whole of it (`x` is a_row):\n{code}")._repr_markdown_()
    assert told == f"**Hint 4**: The whole of it (`x` is a\\_row):\n\n```python\n{code}\n```"
    assert Hint("Hint 1", "\nreturn a_b")._repr_markdown_() == "**Hint 1**:\n\n```python\nreturn a_b\n```"


@pytest.mark.parametrize("package", ["numba", "triton"])
def test_a_misspelt_name_is_told_where_another_lesson_cannot_be_imported(package):
    code = (
        f"import sys; sys.modules[{package!r}] = None\nfrom minillm.teaching.registry import find; find('l02.apend_kv')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "UnknownExerciseError: no exercise is called 'l02.apend_kv'; did you mean 'l02.append_kv'" in done.stderr


def test_unknown_name_lists_close_ones(lesson_91):
    with pytest.raises(UnknownExerciseError, match=r"'l91\.dubble'; did you mean 'l91\.double'"):
        check("l91.dubble")
    with pytest.raises(UnknownExerciseError, match=r"did you mean .*l91\.double"):
        check_function("double", len)


def test_prediction_stands_beside_the_measurement_with_the_factor(capsys):
    predict("l90.bytes", 1024, "bytes")
    reveal("l90.bytes", 4096)
    assert capsys.readouterr().out.splitlines()[-1] == (
        "l90.bytes: you predicted 1,024 bytes, the answer is 4,096 bytes: you were 4 times too low."
    )
    reveal("l90.bytes", 1024)
    assert "exactly right" in capsys.readouterr().out
    reveal("l90.bytes", 1026)
    assert "right within 0.5%" in capsys.readouterr().out


def test_prediction_left_open_blocks_nothing(capsys):
    predict("l90.open", None, "bytes")
    reveal("l90.open", 4096)
    reveal("l90.never_mentioned", 0.5)
    out = capsys.readouterr().out
    assert "No prediction for l90.open yet" in out
    assert "l90.open: the answer is 4,096 bytes; you made no prediction." in out
    assert "l90.never_mentioned: the answer is 0.5; you made no prediction." in out


def test_prediction_of_zero_has_no_factor(capsys):
    predict("l90.zero", 0)
    reveal("l90.zero", 3)
    assert "off by 3" in capsys.readouterr().out


@pytest.mark.parametrize(("value", "answer"), [(1e308, 1e-20), (1e-20, 1e308), (1e-200, -1e-200), (3, -3), (2, 0)])
def test_numbers_without_a_factor_between_them_have_a_difference(capsys, value, answer):
    predict("l90.far", value)
    reveal("l90.far", answer)
    assert capsys.readouterr().out.endswith(f": off by {abs(answer - value):.4g}.\n")


def test_small_numbers_have_a_factor(capsys):
    predict("l90.small", 1e-200)
    reveal("l90.small", 4e-200)
    assert "you were 4 times too low" in capsys.readouterr().out


@pytest.mark.parametrize("answer", [float("nan"), float("inf")])
def test_an_answer_that_is_no_number_has_no_factor(capsys, answer):
    predict("l90.bytes", 3, "bytes")
    reveal("l90.bytes", answer)
    assert f"the answer is {answer} bytes: there is no factor between them." in capsys.readouterr().out


@pytest.mark.parametrize(("value", "shown"), [(np.int64(4096), "4,096"), (np.float32(0.5), "0.5")])
def test_prediction_may_be_a_number_of_numpy(capsys, value, shown):
    predict("l90.bytes", value, "bytes")
    assert f"Your prediction for l90.bytes: {shown} bytes." in capsys.readouterr().out
    reveal("l90.bytes", 2 * value)
    assert f"you predicted {shown} bytes" in (out := capsys.readouterr().out) and "2 times too low" in out


@pytest.mark.parametrize("answer", [131_072, np.int64(131_072), torch.tensor(131_072)])
def test_answer_may_be_a_number_of_numpy_or_pytorch(capsys, answer):
    predict("l90.bytes", torch.tensor(65_536), "bytes")
    reveal("l90.bytes", answer)
    assert "you predicted 65,536 bytes, the answer is 131,072 bytes: you were 2 times" in capsys.readouterr().out


def test_prediction_that_is_no_number_says_what_to_write():
    with pytest.raises(LessonError, match="write a number such as 4096"):
        predict("l90.bytes", "many", "bytes")
    with pytest.raises(LessonError, match="write a number such as 4096"):
        predict("l90.bytes", float("nan"), "bytes")
    with pytest.raises(LessonError, match="write a number such as 4096"):
        predict("l90.bytes", np.bool_(True), "bytes")
    with pytest.raises(LessonError, match="write a number such as 4096"):
        predict("l90.bytes", 10**400, "bytes")
