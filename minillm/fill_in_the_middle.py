"""Fill in the middle: a prompt with the text before and after a gap, so that the model writes the gap.

    <|fim_prefix|>  before the gap  <|fim_suffix|>  after the gap  <|fim_middle|>  →  the gap, then end of text

This is the order prefix, suffix, middle (PSM) of Bavarian et al. 2022, with Qwen's token names, which the templates of
editors support.
"""

from __future__ import annotations

import tokenizers

from minillm.errors import PromptError, UnsupportedError

FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"
FIM_TOKENS = (FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE)


def fim_text(prefix: str, suffix: str, middle: str = "") -> str:
    """The prompt for the gap between `prefix` and `suffix`; with `middle`, a whole training example."""
    return f"{FIM_PREFIX}{prefix}{FIM_SUFFIX}{suffix}{FIM_MIDDLE}{middle}"


def fim_prompt(tokenizer: tokenizers.Tokenizer, model: str, prefix: str, suffix: str) -> str:
    """The prompt that makes `model` fill the gap between `prefix` and `suffix`.

    Raises `UnsupportedError` if the tokenizer lacks a token of `FIM_TOKENS`, `PromptError` if a text contains one.
    """
    missing = [token for token in FIM_TOKENS if tokenizer.token_to_id(token) is None]
    if missing:
        raise UnsupportedError(
            f"the tokenizer of {model!r} has no token {missing[0]}; take a model that was trained to fill gaps"
        )
    for name, text in (("prefix", prefix), ("suffix", suffix)):
        if found := next((token for token in FIM_TOKENS if token in text), None):
            raise PromptError(f"the {name} contains {found}, which marks the gap itself; remove it")
    return fim_text(prefix, suffix)
