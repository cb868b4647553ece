"""`Suggestion`: the text that is offered at the cursor, cut where a reader would cut it."""

from __future__ import annotations

from dataclasses import dataclass

from minillm.outputs import RequestOutput
from minillm.sampling import RequestOutputKind, SamplingParams

BLANK_LINE, LINE_END = "\n\n", "\n"


@dataclass(frozen=True)
class Suggestion:
    """One completion and what it took."""

    text: str
    """Empty: nothing to offer."""
    fills_gap: bool
    """Whether the model saw the text after the cursor."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose keys and values were found in the cache."""
    new_tokens: int
    dropped_characters: int
    """Characters at the start of the code that did not fit into the context."""
    milliseconds: float
    """From the request to the text, without HTTP."""


def suggestion_params(suffix: str, max_tokens: int) -> SamplingParams:
    """Greedy, up to a blank line; inside a line, up to its end."""
    inside = bool(suffix.partition(LINE_END)[0].strip())
    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        stop=[LINE_END if inside else BLANK_LINE],
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def shown_text(output: RequestOutput) -> str:
    """The text to offer, without what a reader would not want:

    - lines from the first one on that repeats the line before it, where a small model goes in circles;
    - a last line that the limit of tokens has cut, unless it is most of the text.
    """
    [choice] = output.outputs
    lines = choice.text.split(LINE_END)
    repeated = next((i for i in range(1, len(lines)) if lines[i].strip() and lines[i] == lines[i - 1]), None)
    text = LINE_END.join(lines[:repeated]).rstrip()
    whole = LINE_END.join(lines[:-1]).rstrip()
    is_cut = choice.finish_reason == "length" and repeated is None
    return whole if is_cut and 2 * len(whole) >= len(text) else text
