"""The prompt for a gap: with marks or without, never too long, and the same at its start from key to key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from minillm.complete.prompt import Gap, GapPrompt, end_of, gap_prompt, start_of
from minillm.errors import PromptError
from minillm.fill_in_the_middle import FIM_TOKENS, prefix_first, suffix_first
from minillm.tokenizer import Tokenizer
from tests.conftest import TinyPair

LINES = [f"value_{i} = add({i}, {i * i})  # ü\n" for i in range(400)]


@pytest.fixture(scope="module")
def fills(tiny: TinyPair) -> Tokenizer:
    """A tokenizer with the tokens of fill in the middle."""
    return Tokenizer.from_folder(tiny.target)


@pytest.fixture
def continues(fills: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """One without them."""
    monkeypatch.setattr("minillm.complete.prompt.FIM_TOKENS", (*FIM_TOKENS, "<|no such token|>"))
    return fills


def made(tokenizer: Tokenizer, prefix: str, suffix: str = "", limit: int = 200) -> GapPrompt:
    return gap_prompt(tokenizer, "tiny", Gap(prefix, suffix), limit)


@pytest.mark.parametrize("order", [prefix_first, suffix_first])
def test_a_model_with_the_tokens_sees_both_sides(
    fills: Tokenizer, monkeypatch: pytest.MonkeyPatch, order: Callable[[str, str], str]
) -> None:
    monkeypatch.setattr(fills, "fim_suffix_first", order is suffix_first)
    found = made(fills, "def f():\n    return ", "\nprint(f())")
    assert found.fills_gap and found.num_dropped == 0
    assert fills.decode(found.token_ids, skip_special_tokens=False) == order("def f():\n    return ", "\nprint(f())")


def test_a_model_without_them_sees_what_is_before(continues: Tokenizer) -> None:
    found = made(continues, "def f():\n    return ", "\nprint(f())")
    assert not found.fills_gap
    assert continues.decode(found.token_ids, skip_special_tokens=False) == "def f():\n    return "


@pytest.mark.parametrize(("with_suffix", "fills_gap"), [(0.3, True), (0.1, False)])
def test_a_model_whose_card_says_that_the_suffix_is_no_use_to_it_does_not_see_it(
    fills: Tokenizer, tmp_path: Path, with_suffix: float, fills_gap: bool
) -> None:
    gaps = {"gaps": 400, "with_suffix": with_suffix, "without_suffix": 0.2}
    (tmp_path / "training.json").write_text(json.dumps({"alone": {"gaps": gaps}}))
    assert gap_prompt(fills, str(tmp_path), Gap("x = ", "\ny"), 200).fills_gap is fills_gap


def test_nothing_after_the_cursor_needs_no_marks(fills: Tokenizer) -> None:
    found = made(fills, "def f():", "  \n")
    assert not found.fills_gap and fills.decode(found.token_ids) == "def f():"


def test_nothing_before_the_cursor_is_refused(fills: Tokenizer) -> None:
    with pytest.raises(PromptError, match="no code before the cursor"):
        made(fills, " \n", "x = 1")


@pytest.mark.parametrize("suffix", ["x", ""])
def test_a_mark_in_the_code_is_refused(fills: Tokenizer, suffix: str) -> None:
    with pytest.raises(PromptError, match="the prefix contains"):
        made(fills, f"mark = '{FIM_TOKENS[0]}'", suffix)


def test_code_that_cannot_be_encoded_is_refused(fills: Tokenizer) -> None:
    for text, suffix in (("x = '\ud800'", ""), ("x = ", "'\ud800'")):
        with pytest.raises(PromptError, match="half a surrogate pair"):
            made(fills, text, suffix)


def test_a_token_before_every_text_counts_once(fills: Tokenizer) -> None:
    backend = tokenizers.Tokenizer.from_str(fills.backend.to_str())
    backend.post_processor = TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer = Tokenizer(backend, fills.folder)
    prefix, suffix = "def f():\n    return ", "x"
    for after in ("", suffix):
        needed = len(tokenizer.encode(f"{''.join(FIM_TOKENS)}{prefix}{after}" if after else prefix))
        found = made(tokenizer, prefix, after, needed)
        assert found.num_dropped == 0 and len(found.token_ids) == needed
    assert end_of(tokenizer, prefix, 0) == end_of(tokenizer, prefix, -1) == ""


def test_what_is_no_token_of_the_model_is_no_mark(fills: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.fill_in_the_middle.FIM_TOKENS", ("<|no such token|>",))
    assert made(fills, "mark = '<|no such token|>'").token_ids


@pytest.mark.parametrize("suffix", ["", "".join(LINES[:50])])
@pytest.mark.parametrize("limit", [40, 100, 233])
@pytest.mark.parametrize("length", [1, 3, 20, 399])
def test_a_prompt_never_exceeds_its_limit(fills: Tokenizer, suffix: str, limit: int, length: int) -> None:
    prefix = "".join(LINES[:length]) + "result = ad"
    found = made(fills, prefix, suffix, limit)
    text = fills.decode(found.token_ids, skip_special_tokens=False)
    assert len(found.token_ids) <= limit
    before = text.rpartition(FIM_TOKENS[2])[2]
    assert before == prefix[found.num_dropped :], "what is left is the end of the prefix"
    if found.num_dropped and limit > 200:  # a line begins in each step, because it has 25 tokens
        assert prefix[found.num_dropped - 1] == "\n", "and it begins at a line"
    if found.num_dropped and limit >= 100:
        assert len(found.token_ids) > limit // 2, "not more is dropped than necessary"


def test_a_long_line_is_cut_inside(fills: Tokenizer) -> None:
    kept = end_of(fills, "é" * 3000, 50)
    assert set(kept) == {"é"} and 0 < len(fills.encode(kept)) <= 50
    text = "é" * 3000 + "\nx"
    kept = end_of(fills, text, 50)
    assert text.endswith(kept) and 25 < len(fills.encode(kept)) <= 50, "the line before the last one is not lost"
    kept = start_of(fills, "é" * 3000, 50)
    assert set(kept) == {"é"} and 0 < len(fills.encode(kept)) <= 50


def test_a_text_of_long_tokens_begins_at_a_line(fills: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cut off before it is tokenised is then enough."""
    monkeypatch.setattr("minillm.complete.prompt.CHARACTERS_PER_TOKEN", 1)
    text = "".join(LINES)
    kept = end_of(fills, text, 200)
    assert kept and text.endswith(kept) and text[len(text) - len(kept) - 1] == "\n"


def test_a_text_of_long_tokens_is_cut_inside_a_long_line(fills: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by the cut before it is tokenised."""
    monkeypatch.setattr("minillm.complete.prompt.CHARACTERS_PER_TOKEN", 1)
    text = "#" * 3000 + "\nx = 1"
    kept = end_of(fills, text, 200)
    assert text.endswith(kept) and 100 < len(kept) <= 200


def test_the_text_after_the_gap_ends_with_a_line(fills: Tokenizer) -> None:
    kept = start_of(fills, "".join(LINES), 60)
    assert kept and "".join(LINES).startswith(kept) and kept.endswith("\n")
    assert start_of(fills, "x = 1", 60) == "x = 1"


def test_from_key_to_key_the_start_stays_and_moves_rarely(fills: Tokenizer) -> None:
    """Else no block of the prefix cache would fit: a start that moved with every key would give as many starts."""
    limit, typed = 200, "".join(LINES[:12])
    text = "".join(LINES[:40])
    starts = [made(fills, text + typed[:n], limit=limit).num_dropped for n in range(1, len(typed), 2)]
    assert starts == sorted(starts)
    num_tokens = len(fills.encode(typed))
    assert 2 <= len(set(starts)) <= 2 + num_tokens // (limit // 4)
