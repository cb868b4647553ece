"""Words that must not be written: which token ids they are, and which token each step forbids."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import ConfigError
from minillm.models import bundled
from minillm.sampling import bad_words
from minillm.sampling.bad_words import bad_word_token_ids, completing_token_ids
from minillm.tokenizer import Tokenizer

words = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=5)


@settings(max_examples=300)
@given(words, st.lists(st.integers(0, 2), max_size=8))
def test_a_token_is_forbidden_if_and_only_if_it_completes_a_word(words: list[tuple[int, ...]], output: list[int]):
    forbidden = set(completing_token_ids(words, output))
    for token in range(3):
        longer = (*output, token)
        assert (token in forbidden) == any(longer[-len(word) :] == word for word in words)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(bundled.path("minicoder"))


def test_a_word_counts_alone_and_behind_a_space(tokenizer: Tokenizer) -> None:
    found = bad_word_token_ids(["return", " self"], tokenizer)
    assert [tokenizer.decode(ids) for ids in found] == ["return", " return", "self", " self"]
    assert all(len(ids) == 1 for ids in found)


def test_a_word_behind_a_space_of_other_length_does_not_count(tokenizer: Tokenizer) -> None:
    """As in vLLM."""
    assert len(tokenizer.encode(" isinstance", False)) == 1
    assert [tokenizer.decode(ids) for ids in bad_word_token_ids(["isinstance"], tokenizer)] == ["isinstance"]


def test_a_word_behind_a_space_that_begins_with_the_same_token_does_not_count_twice() -> None:
    """As in vLLM. The tokenizer of this test drops spaces."""

    class WithoutSpaces(Tokenizer):
        def __init__(self) -> None:
            pass

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [ord(c) for c in text if c != " "]

    assert bad_word_token_ids(["a b"], WithoutSpaces()) == ((97, 98),)


def test_a_word_of_white_space_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"bad_words has '\\n', which has no tokens without the white space in front"):
        bad_word_token_ids(["a", "\n"], tokenizer)


def test_a_word_that_cannot_be_encoded_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"bad_words has '\\ud800', which the tokenizer cannot encode"):
        bad_word_token_ids(["a", "\ud800"], tokenizer)


def test_too_many_words_are_refused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_words, "MAX_BAD_WORDS", 3)
    assert len(bad_word_token_ids(["return", "isinstance"], tokenizer)) == 3
    with pytest.raises(ConfigError, match="4 sequences of tokens; at most 3 are allowed"):
        bad_word_token_ids(["return", "self"], tokenizer)


def test_a_word_that_is_given_often_counts_once(tokenizer: Tokenizer) -> None:
    """As in vLLM."""
    assert bad_word_token_ids(["return"] * 129, tokenizer) == bad_word_token_ids(["return"], tokenizer)
