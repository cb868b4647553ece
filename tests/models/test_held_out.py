"""The held-out prompts are held out, many, and of mixed lengths."""

from __future__ import annotations

import pytest

from minillm.errors import ConfigError
from minillm.models import bundled
from minillm.models.held_out import calibration_prompts, evaluation_prompts, held_out_prompts
from minillm.tokenizer import Tokenizer
from minillm.training.corpus import Document


def test_every_prompt_comes_from_a_file_that_training_leaves_out() -> None:
    assert all(Document(prompt.source, prompt.prompt).held_out for prompt in held_out_prompts())


def test_there_are_short_and_long_ones() -> None:
    tokenizer = Tokenizer.from_folder(bundled.path("minicoder"))
    lengths = [len(tokenizer.encode(prompt.prompt)) for prompt in held_out_prompts()]
    assert len(lengths) == 128 and min(lengths) <= 6 and max(lengths) >= 200
    assert len({prompt.source for prompt in held_out_prompts()}) > 40


def test_asking_for_too_many_is_an_error() -> None:
    assert len(held_out_prompts(3)) == 3
    with pytest.raises(ConfigError, match="129"):
        held_out_prompts(129)


def test_no_file_is_both_fitted_to_and_judged_on() -> None:
    fitted, judged = calibration_prompts(), evaluation_prompts()
    assert len(fitted) == 69 and len(judged) == 59
    assert not {prompt.source for prompt in fitted} & {prompt.source for prompt in judged}
    assert sorted(map(repr, fitted + judged)) == sorted(map(repr, held_out_prompts()))
