"""Every reference has a text of its own, which `use` gives to a submission that got its exercise wrong."""

from __future__ import annotations

import sys

import pytest

from minillm.teaching.check_function import check_function
from minillm.teaching.exercise import Exercise
from minillm.teaching.grading.bundle import bundle
from minillm.teaching.grading.cells import Cell
from minillm.teaching.grading.program import load, parse
from minillm.teaching.registry import every


@pytest.mark.parametrize("exercise", every(), ids=lambda exercise: exercise.name)
def test_the_text_of_a_reference_passes_and_imports_no_exercise(exercise: Exercise, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # which `load` replaces
    text = bundle(exercise.reference, exercise.function_name)
    assert "teaching.exercises" not in text
    program = parse([Cell(1, f"f = use({exercise.name!r})")])
    function = load(program, "f", program.definition("f"), {exercise.name: text})
    assert check_function(exercise, function).passed
