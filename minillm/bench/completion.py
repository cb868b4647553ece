"""One completion with its two parts timed apart: until the first new token is there, and from then on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Completion:
    """New tokens and what they took."""

    token_ids: list[int]
    prefill_s: float
    """Seconds until the first new tokens were there."""
    decode_s: float
    """Seconds from then to the end."""
    num_first: int = 1
    """How many tokens came first together; they are not counted as decoded."""
    num_forwards: int = 0
    """Forwards of the target that gained tokens; 0 where nobody counts them."""
    num_drafts: int = 0
    num_accepted: int = 0

    @property
    def num_decoded(self) -> int:
        """Tokens that `decode_s` was spent on."""
        return len(self.token_ids) - self.num_first


class Completer(Protocol):
    """A loaded model of some engine that completes one prompt at a time, greedily."""

    about: dict[str, Any]
    """What to report of it beside its speed."""

    def complete(self, prompt: Sequence[int], new_tokens: int) -> Completion:
        """`new_tokens` tokens after `prompt`, which end-of-text tokens do not cut short."""


def figures(prompts: Sequence[Sequence[int]], found: Sequence[Completion]) -> dict[str, float]:
    """What to report of the completions of `prompts` beside the speed of decoding.

    Tokens of prompts per second until the first tokens were there; new tokens per second of the whole time; and where
    there were drafts, τ (tokens per forward of the target) and the share of the drafts that was accepted.
    """
    prefill, decode = sum(c.prefill_s for c in found), sum(c.decode_s for c in found)
    tokens, drafts = sum(len(c.token_ids) for c in found), sum(c.num_drafts for c in found)
    told = {
        "prefill_tokens_per_s": sum(map(len, prompts)) / prefill,
        "end_to_end_tokens_per_s": tokens / (prefill + decode),
    }
    if drafts:
        told["tokens_per_forward"] = tokens / sum(c.num_forwards for c in found)
        told["acceptance_rate"] = sum(c.num_accepted for c in found) / drafts
    return told
