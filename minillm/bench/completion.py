"""One completion with separate times for prefill (to the first new token) and decode (from there to the end)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Completion:
    """The new tokens of one prompt and their times."""

    token_ids: list[int]
    prefill_s: float
    """Seconds until the first new tokens."""
    decode_s: float
    """Seconds from then to the end."""
    num_first: int = 1
    """Number of tokens that arrived together first; they do not count as decoded."""
    num_forwards: int = 0
    """Forwards of the target during `decode_s`; 0 if they are not counted."""
    num_drafts: int = 0
    num_accepted: int = 0

    @property
    def num_decoded(self) -> int:
        """Number of tokens generated during `decode_s`."""
        return len(self.token_ids) - self.num_first


class Completer(Protocol):
    """A loaded model of some engine that completes one prompt at a time, greedily."""

    details: dict[str, Any]
    """Values to report in addition to its speed."""

    def complete(self, prompt: Sequence[int], new_tokens: int) -> Completion:
        """Generate exactly `new_tokens` tokens after `prompt`; end-of-text tokens do not stop it."""


def completion_metrics(prompts: Sequence[Sequence[int]], found: Sequence[Completion]) -> dict[str, float]:
    """Values to report for the completions of `prompts`, in one or more rounds, in addition to the decode speed.

    Prompt tokens per second of prefill; new tokens per second of the whole time; and with drafts, τ (tokens per forward
    of the target) and the acceptance rate.
    """
    prefill, decode = sum(c.prefill_s for c in found), sum(c.decode_s for c in found)
    tokens, drafts = sum(len(c.token_ids) for c in found), sum(c.num_drafts for c in found)
    values = {
        "prefill_tokens_per_s": sum(map(len, prompts)) * len(found) / len(prompts) / prefill,
        "end_to_end_tokens_per_s": tokens / (prefill + decode),
    }
    if drafts:
        values["tokens_per_forward"] = sum(c.num_decoded for c in found) / sum(c.num_forwards for c in found)
        values["acceptance_rate"] = sum(c.num_accepted for c in found) / drafts
    return values
