"""A prompt with a gap: three tokens that only a tokenizer with them can read."""

from __future__ import annotations

import pytest

from minillm import LLM, SamplingParams
from minillm.errors import PromptError, UnsupportedError
from minillm.fill_in_the_middle import FIM_TOKENS
from tests.conftest import TinyPair


@pytest.fixture(scope="module")
def llm(tiny: TinyPair) -> LLM:
    return LLM(str(tiny.target), device="cpu", enforce_eager=True)


def test_the_gap_is_marked_by_three_single_tokens_in_the_order_of_training(llm: LLM) -> None:
    prompt = llm.fim_prompt("def add(a, b):\n    return ", "\n\n\nclass Stack:\n")
    tokenizer = llm.engine.tokenizer
    marks = [tokenizer.backend.token_to_id(token) for token in FIM_TOKENS]
    ids = tokenizer.encode(prompt)
    assert [token_id for token_id in ids if token_id in marks] == marks
    assert ids[0] == marks[0] and ids[-1] == marks[2]
    between = ids[1 : ids.index(marks[1])]
    assert tokenizer.decode(between) == "def add(a, b):\n    return "
    [output] = llm.generate(prompt, SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert output.prompt_token_ids == ids and len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize("mark", FIM_TOKENS)
def test_a_text_that_holds_a_mark_is_refused(llm: LLM, mark: str) -> None:
    with pytest.raises(PromptError, match=r"the suffix contains <\|fim_\w+\|>, which marks the gap itself"):
        llm.fim_prompt("a = ", f"x{mark}")
    with pytest.raises(PromptError, match="the prefix contains"):
        llm.fim_prompt(mark, "")


def test_a_tokenizer_without_the_tokens_is_told(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.fill_in_the_middle.FIM_TOKENS", (*FIM_TOKENS, "<|no such token|>"))
    with pytest.raises(UnsupportedError, match=r"has no token <\|no such token\|>; take a model"):
        llm.fim_prompt("a", "b")
