"""Fill in the middle: a prompt with the text before and after a gap, so that the model writes the gap (Bavarian et al.
2022), in one of two orders:

    <|fim_prefix|>  before  <|fim_suffix|>  after  <|fim_middle|>            →  the gap     prefix first (PSM)
    <|fim_prefix|>  <|fim_suffix|>  after  <|fim_middle|>  before            →  the gap     suffix first (SPM)

Prefix first, with Qwen's token names, is what the templates of editors support; minillm knows no other names. With the
suffix first the gap follows the text before it, as in any other file, and the prefix cache holds while that text grows.
A checkpoint asks for it with `"fim_suffix_first": true` in its `tokenizer_config.json`.
"""

from __future__ import annotations

from minillm.errors import PromptError, UnsupportedError
from minillm.tokenizer import Tokenizer

FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"
FIM_TOKENS = (FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE)


def prefix_first(prefix: str, suffix: str) -> str:
    """The prompt for the gap between `prefix` and `suffix`, in the order prefix, suffix, gap (PSM)."""
    return f"{FIM_PREFIX}{prefix}{FIM_SUFFIX}{suffix}{FIM_MIDDLE}"


def suffix_first(prefix: str, suffix: str) -> str:
    """The prompt for the gap between `prefix` and `suffix`, in the order suffix, prefix, gap (SPM)."""
    return f"{FIM_PREFIX}{FIM_SUFFIX}{suffix}{FIM_MIDDLE}{prefix}"


def fim_prompt(tokenizer: Tokenizer, model: str, prefix: str, suffix: str) -> str:
    """The prompt that makes `model` fill the gap between `prefix` and `suffix`, in the order that its tokenizer names.

    Raises `UnsupportedError` if the tokenizer lacks a token of `FIM_TOKENS`, `PromptError` if a text contains one or is
    no `str`.
    """
    missing = [token for token in FIM_TOKENS if tokenizer.backend.token_to_id(token) is None]
    if missing:
        raise UnsupportedError(
            f"the tokenizer of {model!r} has no token {missing[0]}; take a model that marks gaps as Qwen does, or "
            "write the prompt with the tokens of this one, if it has any for gaps"
        )
    check_no_fim_token(tokenizer, "prefix", prefix)
    check_no_fim_token(tokenizer, "suffix", suffix)
    return (suffix_first if tokenizer.fim_suffix_first else prefix_first)(prefix, suffix)


def check_no_fim_token(tokenizer: Tokenizer, name: str, text: str) -> None:
    """Raise `PromptError` if `text`, which the error calls `name`, contains one of `FIM_TOKENS` that the tokenizer has,
    or is no `str`."""
    if not isinstance(text, str):
        raise PromptError(f"the {name} must be text, not {type(text).__name__}")
    for token in FIM_TOKENS:
        if token in text and tokenizer.backend.token_to_id(token) is not None:
            raise PromptError(f"the {name} contains {token}, which marks the gap itself; remove it")
