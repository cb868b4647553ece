"""The outputs of generation, under vLLM's names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from minillm.trace.request_metrics import RequestMetrics


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token at one position, under the model's raw distribution."""

    logprob: float
    rank: int
    """1 is the most likely token."""
    decoded_token: str


@dataclass
class CompletionOutput:
    """One completion of one prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum over the completion; None unless `logprobs` was requested."""
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    """None while unfinished. `stop`: end of text, a stop token or a stop string. `length`: `max_tokens` reached."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for end of text."""

    def finished(self) -> bool:
        """Whether the completion has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """All completions of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    """Number of prompt tokens whose keys and values were found in the prefix cache."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


def tokens_per_forward(outputs: Sequence[RequestOutput]) -> float:
    """τ of all requests together: the tokens that decode forwards of the target gained, per forward (see
    `RequestMetrics`); NaN if there was none."""
    forwards = sum(output.metrics.num_decode_forwards for output in outputs)
    return sum(output.metrics.num_decode_tokens for output in outputs) / forwards if forwards else math.nan
