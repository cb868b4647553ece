"""Fill in the middle: a prompt with the text before and after a gap, so that the model writes the gap.

    <|fim_prefix|>  before the gap  <|fim_suffix|>  after the gap  <|fim_middle|>  →  the gap, then end of text

This is the order prefix, suffix, middle (PSM) of Bavarian et al. 2022, with Qwen's token names, which the templates of
editors support.
"""

from __future__ import annotations

FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"
FIM_TOKENS = (FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE)


def fim_text(prefix: str, suffix: str, middle: str = "") -> str:
    """The prompt for the gap between `prefix` and `suffix`; with `middle`, a whole training example."""
    return f"{FIM_PREFIX}{prefix}{FIM_SUFFIX}{suffix}{FIM_MIDDLE}{middle}"
