"""`SamplingParams.bad_words`: texts that the output must not contain, as token ids.

A word is forbidden by its last token: where the output ends with all the others, that token cannot be chosen. So a word
of one token is never chosen. As in vLLM, white space in front of a word is dropped, and the word counts as the
tokenizer writes it, alone and behind a space. The same letters cut into other tokens are not found.
"""

from __future__ import annotations

from collections.abc import Sequence

from minillm.errors import ConfigError, PromptError
from minillm.tokenizer import Tokenizer

MAX_BAD_WORDS = 128
"""Sequences of tokens per request, each compared with the end of the output for every token. vLLM's default limit."""


def bad_word_token_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token ids of each different word, and of each behind a space if those are as many and begin with another
    token.

    Raises `ConfigError` for a word that has no tokens or cannot be encoded, or for more than `MAX_BAD_WORDS` results.
    """
    found: list[tuple[int, ...]] = []
    for word in dict.fromkeys(words):
        try:
            bare, spaced = (tuple(tokenizer.encode(space + word.lstrip(), False)) for space in ("", " "))
        except PromptError:
            raise ConfigError(f"bad_words has {word!r}, which the tokenizer cannot encode; leave it out") from None
        if not bare:
            raise ConfigError(
                f"bad_words has {word!r}, which has no tokens without the white space in front; leave it out, or give "
                "its tokens a logit_bias of -100"
            )
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    if len(found) > MAX_BAD_WORDS:
        raise ConfigError(f"bad_words: {len(found)} sequences of tokens; at most {MAX_BAD_WORDS} are allowed")
    return tuple(found)


def completing_token_ids(words: Sequence[tuple[int, ...]], output_token_ids: Sequence[int]) -> list[int]:
    """The last token of each word whose other tokens are the end of the output."""
    longest = max(map(len, words), default=1) - 1
    end = tuple(output_token_ids[-longest:]) if longest else ()
    return [word[-1] for word in words if len(word) <= len(end) + 1 and end[len(end) - len(word) + 1 :] == word[:-1]]
