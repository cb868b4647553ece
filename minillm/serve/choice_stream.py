"""`ChoiceStream`: what one choice of a streamed answer has gained since its last chunk."""

from __future__ import annotations

from dataclasses import dataclass

from minillm.outputs import CompletionOutput, Logprob


@dataclass(frozen=True)
class Delta:
    """What is new in a choice."""

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    """One row per token of `token_ids`; None if they were not asked for."""


class ChoiceStream:
    """Cuts the cumulative outputs of one choice into deltas.

    The engine holds back text that a stop string may still remove, so the text of a chunk may end before that of its
    tokens.
    """

    def __init__(self) -> None:
        self.num_characters = 0
        self.num_tokens = 0
        self.ended = False
        """Whether the last delta has been taken."""

    def advance(self, output: CompletionOutput) -> Delta | None:
        """What is new in `output`; None if there is nothing to send yet."""
        self.ended = output.finish_reason is not None
        end = len(output.text)
        with_logprobs = output.logprobs is not None
        has_rows = with_logprobs and len(output.token_ids) > self.num_tokens
        if not (self.ended or has_rows or end > self.num_characters):
            return None
        delta = Delta(
            output.text[self.num_characters :],
            output.token_ids[self.num_tokens :],
            output.logprobs[self.num_tokens :] if output.logprobs is not None else None,
        )
        self.num_characters, self.num_tokens = end, len(output.token_ids)
        return delta
