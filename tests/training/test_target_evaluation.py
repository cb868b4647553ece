"""What is measured of a target alone: repetition, and texts after the first functions of held-out files."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minillm.errors import TrainingError
from minillm.training import target_evaluation
from minillm.training.target_evaluation import FIRST_FUNCTION, measure_repetition


def test_repetition_counts_the_continuation_only(monkeypatch):
    """The prompts repeat one token, the files' text behind them never does, the model writes one token for ever."""
    file = np.concatenate([np.full(64, 7), np.arange(100, 132)])
    monkeypatch.setattr(np.random, "default_rng", lambda seed: _Always(0))
    monkeypatch.setattr(
        target_evaluation,
        "continue_rows",
        lambda llm, prompts, length, temperatures, seed: torch.cat(
            [prompts, torch.full((len(prompts), length - 64), 9)], 1
        ),
    )
    found = measure_repetition(None, [np.append(file, 0)], rows=3, length=32)
    assert found.tokens == 32 and found.code == 0.0
    assert found.greedy == pytest.approx(1 - 1 / 25), "25 spans of 8 in 32 tokens, all the same"


class _Always:
    def __init__(self, value: int) -> None:
        self.value = value

    def integers(self, below: int) -> int:
        return self.value


def test_repetition_needs_a_file_that_is_long_enough():
    with pytest.raises(TrainingError, match="more than 96 tokens"):
        measure_repetition(None, [np.arange(96)], rows=1, length=32)


@pytest.mark.parametrize(
    ("text", "signature"),
    [
        ("import a\n\n\ndef f(x: int) -> int:\n    return x\n", "def f(x: int) -> int:\n"),
        ("class A:\n    def g(self,\n          x=(1, 2)):\n        pass\n", "    def g(self,\n          x=(1, 2)):\n"),
    ],
)
def test_the_first_function_of_a_file_is_found(text, signature):
    match = FIRST_FUNCTION.search(text)
    assert match and match[0] == signature


def test_a_file_without_a_function_has_none():
    assert FIRST_FUNCTION.search("x = 1\n# def in words only\n") is None
