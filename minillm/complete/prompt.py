"""The prompt for a gap in code: fill in the middle where the model can, else the text before the gap.

A prompt that is too long loses text at its start. What is left must begin at the same place after the next key, or no
block of the prefix cache would fit. So the start moves in steps of a quarter of the limit, to the beginning of a line
if one begins within a step:

    key 1   ········│def f(n): …  retu│     dropped │ kept │
    key 2   ········│def f(n): …  retur│    the same start: all full blocks are cached
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from minillm.errors import PromptError
from minillm.fill_in_the_middle import FIM_TOKENS, check_no_fim_token, fim_prompt
from minillm.models import bundled
from minillm.tokenizer import Tokenizer

SUFFIX_SHARE = 8
"""The text after the gap gets at most one in so many tokens. With the prefix first it is computed anew at every key,
because it follows the text that the key has changed."""
STEPS = 4
"""The start of a long text moves by one in so many parts of the limit."""
CHARACTERS_PER_TOKEN = 8
"""More than tokens of code have. Text beyond is cut off before it is tokenised, which takes time in proportion."""


@dataclass(frozen=True)
class Gap:
    """The text before and after the cursor."""

    prefix: str
    suffix: str = ""


@dataclass(frozen=True)
class GapPrompt:
    """What the model is given for a gap."""

    token_ids: list[int]
    fills_gap: bool
    """Whether the model sees the text after the gap."""
    num_dropped: int
    """Characters at the start of the prefix that did not fit."""


def can_fill_gaps(tokenizer: Tokenizer, model: str) -> bool:
    """Whether the tokenizer has all tokens of fill in the middle, and the model has learned to use them.

    `minillm train` measures that on held-out gaps and writes it to `training.json`; another model is trusted.
    """
    if any(tokenizer.backend.token_to_id(token) is None for token in FIM_TOKENS):
        return False
    folder = bundled.path(model) if model in bundled.names() else Path(model).expanduser()
    facts = folder / "training.json"
    measured = json.loads(facts.read_text(encoding="utf-8")).get("alone") if facts.is_file() else None
    return measured is None or measured["gaps"]["with_suffix"] > measured["gaps"]["without_suffix"]


def gap_prompt(tokenizer: Tokenizer, model: str, gap: Gap, limit: int) -> GapPrompt:
    """The prompt for `gap`, with at most `limit` tokens.

    Without text after the gap, or for a model that cannot fill gaps, it is the text before the gap. Raises
    `PromptError` if there is no text before the gap, or if a text that the model is given contains a token of fill in
    the middle.
    """
    if not gap.prefix.strip():
        raise PromptError("there is no code before the cursor; type something first")
    if not (gap.suffix.strip() and can_fill_gaps(tokenizer, model)):
        prefix = end_of(tokenizer, gap.prefix, limit - len(tokenizer.encode("")))
        check_no_fim_token(tokenizer, "prefix", prefix)
        return GapPrompt(tokenizer.encode(prefix), False, len(gap.prefix) - len(prefix))
    markers = len(FIM_TOKENS) + len(tokenizer.encode(""))
    suffix = start_of(tokenizer, gap.suffix, limit // SUFFIX_SHARE)
    room = limit - markers - len(tokenizer.encode(suffix, add_special_tokens=False))
    prefix = end_of(tokenizer, gap.prefix, room)
    token_ids = tokenizer.encode(fim_prompt(tokenizer, model, prefix, suffix))
    return GapPrompt(token_ids, True, len(gap.prefix) - len(prefix))


def end_of(tokenizer: Tokenizer, text: str, limit: int) -> str:
    """The end of `text`, with at most `limit` tokens of its own. It begins at a line if one begins within a step; else
    a long line is cut inside, rather than lost."""
    limit = max(0, limit)
    step = max(1, limit // STEPS)
    width = step * CHARACTERS_PER_TOKEN
    begin = _whole_steps(len(text) - limit * CHARACTERS_PER_TOKEN, width)
    kept = _from_line(text, begin, begin + width)
    while True:
        encoded = tokenizer.encode_with_offsets(kept, add_special_tokens=False)
        drop = _whole_steps(len(encoded.ids) - limit, step)
        if not drop:
            return kept
        begin, end = (encoded.offsets[min(number, len(encoded.ids) - 1)][0] for number in (drop, drop + step))
        kept = _from_line(kept, begin or 1, end)


def start_of(tokenizer: Tokenizer, text: str, limit: int) -> str:
    """The start of `text`, with at most `limit` tokens. It ends with a line if a whole line fits."""
    text = text[: limit * CHARACTERS_PER_TOKEN]
    encoded = tokenizer.encode_with_offsets(text, add_special_tokens=False)
    if len(encoded.ids) <= limit:
        return text
    text = text[: encoded.offsets[limit][0]]
    return text[: text.rfind("\n") + 1] or text


def _from_line(text: str, begin: int, end: int) -> str:
    """`text` from the first line that starts at one of the characters `begin` to `end`; from `begin` if none does."""
    if begin == 0:
        return text
    line = text.find("\n", begin - 1, end) + 1
    return text[line if 0 < line < len(text) else begin :]


def _whole_steps(excess: int, step: int) -> int:
    """`excess` rounded up to whole steps; 0 if there is none."""
    return -(-max(0, excess) // step) * step
