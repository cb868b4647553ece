"""Accepting drafts at given rates, whatever the models say: to measure the engine before good models exist.

`rejection_sample_method="synthetic"` is vLLM's, and so are its two options. Drafting, verifying and rolling back cost
what they cost with real drafts; only the decision is drawn from the given rates. The text is not the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real

from torch import Tensor

from minillm.errors import ConfigError
from minillm.sampling import Draw, sample, uniform
from minillm.speculative.rejection_sampler import Verdict, check_drafts


@dataclass(frozen=True)
class SyntheticRule:
    """Accepts the first i drafts of a round with probability `rates[i - 1]`."""

    rates: tuple[float, ...]
    """By position, not increasing. Drafts beyond the last one are never accepted."""

    is_exact = False

    def __post_init__(self) -> None:
        if not self.rates or not all(isinstance(rate, Real) and 0 <= rate <= 1 for rate in self.rates):
            raise ConfigError(f"synthetic_acceptance_rates={list(self.rates)} must list numbers from 0 to 1")
        if any(after > before for before, after in pairwise(self.rates)):
            raise ConfigError(
                f"synthetic_acceptance_rates={list(self.rates)} must not increase: rate i is the probability that all "
                "of the first i drafts are accepted"
            )

    @classmethod
    def of_length(cls, length: float, num_drafts: int) -> SyntheticRule:
        """Accept so that a round gives `length` tokens on average, the target's own included, and as nearly always the
        same number as possible: vLLM's `synthetic_acceptance_length`. Raises `ConfigError`."""
        if not isinstance(length, Real) or not 1 <= length <= num_drafts + 1:
            raise ConfigError(
                f"synthetic_acceptance_length={length!r} must be a number from 1 to {num_drafts + 1}: a round gives "
                f"one token of the target and at most {num_drafts} drafts"
            )
        return cls(tuple(min(1.0, max(0.0, length - 1 - i)) for i in range(num_drafts)))

    def verdicts(
        self,
        draft_token_ids: Sequence[Sequence[int]],
        draft_probs: Sequence[Tensor | None],
        target_probs: Tensor,
        seeds: Sequence[int],
        first_index: Sequence[int],
    ) -> list[Verdict]:
        """One verdict per request. The arguments are those of `rejection_sample`. One uniform decides a round: the
        number of accepted drafts is the number of rates that are larger than it."""
        check_drafts(draft_token_ids, draft_probs, target_probs.shape, seeds, first_index)
        verdicts, start = [], 0
        for token_ids, seed, index in zip(draft_token_ids, seeds, first_index, strict=True):
            drawn = uniform(seed, index, Draw.ACCEPT)
            accepted = sum(drawn < rate for rate in self.rates[: len(token_ids)])
            row = target_probs[start + accepted][None]
            own = sample(row, [uniform(seed, index, Draw.SAMPLE, accepted)]).tolist()
            verdicts.append(Verdict([*token_ids[:accepted], *own], accepted))
            start += len(token_ids) + 1
        return verdicts
