"""A prompt with a gap: three tokens that only a tokenizer with them can read."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from minillm import LLM, SamplingParams
from minillm.errors import PromptError, UnsupportedError
from minillm.fill_in_the_middle import FIM_TOKENS
from minillm.tokenizer import Tokenizer
from tests.conftest import TinyPair


@pytest.fixture(scope="module")
def llm(tiny: TinyPair) -> LLM:
    return LLM(str(tiny.target), device="cpu", enforce_eager=True)


@pytest.mark.parametrize("suffix_first", [False, True])
def test_the_gap_is_marked_by_three_single_tokens_in_the_order_of_the_checkpoint(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, suffix_first: bool
) -> None:
    tokenizer = llm.engine.tokenizer
    assert tokenizer.fim_suffix_first, "the models trained here"
    monkeypatch.setattr(tokenizer, "fim_suffix_first", suffix_first)
    before, after = "def add(a, b):\n    return ", "\n\n\nclass Stack:\n"
    prompt = llm.fim_prompt(before, after)
    marks = [tokenizer.backend.token_to_id(token) for token in FIM_TOKENS]
    ids = tokenizer.encode(prompt)
    assert [token_id for token_id in ids if token_id in marks] == marks
    first, second, last = (
        tokenizer.decode(ids[begin:end])
        for begin, end in itertools.pairwise([1, *(ids.index(mark) for mark in marks[1:]), len(ids)])
    )
    assert ids[0] == marks[0]
    assert (first, second, last) == (("", after, before) if suffix_first else (before, after, ""))
    [output] = llm.generate(prompt, SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert output.prompt_token_ids == ids and len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize(("config", "expected"), [(None, False), ({}, False), ({"fim_suffix_first": True}, True)])
def test_a_checkpoint_that_says_nothing_has_the_order_of_editors(
    tiny: TinyPair, tmp_path: Path, config: dict[str, bool] | None, expected: bool
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny.target / "tokenizer.json").read_bytes())
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_folder(tmp_path).fim_suffix_first is expected


@pytest.mark.parametrize("mark", FIM_TOKENS)
def test_a_text_that_holds_a_mark_is_refused(llm: LLM, mark: str) -> None:
    with pytest.raises(PromptError, match=r"the suffix contains <\|fim_\w+\|>, which marks the gap itself"):
        llm.fim_prompt("a = ", f"x{mark}")
    with pytest.raises(PromptError, match="the prefix contains"):
        llm.fim_prompt(mark, "")


@pytest.mark.parametrize("given", [None, ["a"], b"a"])
def test_what_is_no_text_is_refused(llm: LLM, given: Any) -> None:
    with pytest.raises(PromptError, match=f"the suffix must be text, not {type(given).__name__}"):
        llm.fim_prompt("a = ", given)
    with pytest.raises(PromptError, match="the prefix must be text"):
        llm.fim_prompt(given, "")


def test_a_tokenizer_without_the_tokens_is_told(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.fill_in_the_middle.FIM_TOKENS", (*FIM_TOKENS, "<|no such token|>"))
    with pytest.raises(UnsupportedError, match=r"has no token <\|no such token\|>; take a model that marks gaps"):
        llm.fim_prompt("a", "b")
