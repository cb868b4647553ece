"""Functions are compared by their trees, and no line beside a function takes it out of the comparison."""

from __future__ import annotations

import ast

import pytest

from minillm.teaching.grading.cells import Cell
from minillm.teaching.grading.program import parse
from minillm.teaching.grading.similarity import shape, shapes_of, similarity

FUNCTION = "def f(x):\n    total = 0\n    for each in x:\n        total += each * 2\n    return total"

LONG = FUNCTION.replace("return total", "if total > 9 and x:\n        total = total - len(x) // 2\n    return total")


def shapes(*sources: str) -> dict[str, list[str]]:
    return shapes_of(parse([Cell(number, source) for number, source in enumerate(sources, 1)]))


def test_other_names_texts_and_numbers_make_no_other_tree():
    other = FUNCTION.replace("total", "result").replace("each", "value").replace("2", "3")
    assert similarity(shapes(FUNCTION)["f"], shapes(other)["f"]) == 1.0
    assert similarity(shapes(FUNCTION)["f"], shapes("def f(x):\n    return sum(x) * 2")["f"]) < 0.5


@pytest.mark.parametrize(
    "after",
    [
        *("f = f", "f: object = f", "f = wrap(f)", "from math import floor as f", "f += f", "if True:\n    f = f"),
        "def f(x):\n    raise NotImplementedError",
    ],
)
def test_a_name_that_is_bound_again_does_not_hide_its_function(after: str):
    assert shapes(FUNCTION, after) == {"f": shape(ast.parse(FUNCTION).body[0])}


def test_a_function_that_is_renamed_is_compared_by_both_names():
    found = shapes(FUNCTION.replace("def f", "def g"), "f = g")
    assert found["f"] == found["g"] == shapes(FUNCTION)["f"]
    assert "f" not in shapes("from math import floor", "f = floor")


def test_a_function_of_two_lines_is_compared_with_its_helpers():
    wrapper = "def f(x):\n    return {0}(x)"
    copy = shapes(LONG.replace("def f", "def g"), wrapper.format("g"))["f"]
    again = shapes(wrapper.format("h"), LONG.replace("def f", "def real"), "h = real")["f"]
    assert similarity(copy, again) == 1.0 and similarity(copy, shapes(LONG)["f"]) > 0.5
    through = shapes(LONG.replace("def f", "def g"), "def h(x):\n    return g(x)", wrapper.format("h"))["f"]
    assert len(through) > len(copy)
    calls_itself = "def f(x):\n    return f(x)"
    assert shapes(calls_itself) == {"f": shape(ast.parse(calls_itself).body[0])}


def test_a_longer_function_is_compared_without_its_helpers():
    """Those that a lesson gives are alike in every notebook."""
    calls = LONG.replace("each * 2", "g(each) * 2")
    assert shapes(calls, "def g(x):\n    return x + 1 + x")["f"] == shape(ast.parse(calls).body[0])


def test_the_last_definition_counts_in_a_branch_too():
    hidden = "if True:\n" + "\n".join(f"    {line}" for line in FUNCTION.splitlines())
    assert shapes("def f(x):\n    return x", hidden, "f = f") == shapes(FUNCTION)
