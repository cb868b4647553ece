from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from minillm.training.train_tokenizer import END_OF_TEXT, END_OF_TEXT_ID, train_tokenizer

from .conftest import source_file

TOKENIZER = train_tokenizer([source_file(i) for i in range(20)], 300)


@given(st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: END_OF_TEXT not in text))
def test_any_text_comes_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


def test_every_byte_has_a_token():
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert len(alphabet) == 256
    assert all(TOKENIZER.token_to_id(letter) is not None for letter in alphabet)


def test_end_of_text_is_token_zero_and_not_merged():
    assert TOKENIZER.encode(f"a{END_OF_TEXT}b").ids.count(END_OF_TEXT_ID) == 1
    assert TOKENIZER.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID


def test_indentation_leaves_its_last_space_to_the_word():
    assert TOKENIZER.encode("\n        return x").tokens[:3] == ["Ċ", "ĠĠĠĠĠĠĠ", "Ġreturn"]
