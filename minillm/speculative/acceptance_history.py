"""How far the drafts of one request, or of all, are accepted: what `AdaptiveDrafts` decides by."""

from __future__ import annotations

from collections.abc import Sequence

MANY_ROUNDS = 8
"""So many rounds and fewer are not forgotten before a try."""
LARGEST_WEIGHT = 1e100
"""Of a round, before all are scaled down."""
PRIOR_WEIGHT = 4.0
"""How many rounds weigh as much as what is believed before them: of a request what is known from all, of all what is
known from the position before."""


class AcceptanceHistory:
    """How far drafts reach; older rounds count less. Rounds without a draft count if a model ran (not `NO_DRAFT`).

    A drafter may make fewer drafts than it was asked for: a lookup does where it finds a short or doubtful match. So a
    position counts only in rounds that asked for it. If none did lately, what is known of it gets old.
    """

    def __init__(self, num_positions: int, memory: float) -> None:
        """`memory`: the weight of a round against the next, below 1."""
        self.memory = memory
        self.asked, self.made = [0.0] * num_positions, [0.0] * num_positions
        """By position: the rounds that asked for a draft there, and those that had one."""
        self.reached, self.accepted = [0.0] * num_positions, [0.0] * num_positions
        """The rounds that asked for a draft there and in which all before it were accepted, and those in which there
        was one that was accepted, too."""
        self._weight = 1.0
        """Of the latest round. It grows, which is the same as if those before it faded."""

    def add(self, num_asked: int, num_drafts: int, num_accepted: int) -> None:
        """Count one round."""
        weight = self._next_weight()
        for i in range(num_asked):
            self.asked[i] += weight
        for i in range(num_drafts):
            self.made[i] += weight
        for i in range(min(num_asked, num_accepted + 1)):
            self.reached[i] += weight
        for i in range(num_accepted):
            self.accepted[i] += weight

    def add_tree(self, size: float, share: float) -> None:
        """Count one round with a tree. `size` and `share`: its drafts and the accepted ones, of the most that there can
        be."""
        weight = self._next_weight()
        self.asked[0] += weight
        self.made[0] += weight * size
        self.reached[0] += weight
        self.accepted[0] += weight * share

    def fade(self, share: float) -> None:
        """Let the rounds so far count so much less."""
        self._scale(share)

    def forget_half(self) -> None:
        """Let the rounds so far count half as much, if there are many: a drafter that finds nothing adds none, and what
        is known of it must not fade."""
        if self.reached[0] > MANY_ROUNDS * self._weight:
            self._scale(0.5)

    def rates(self, usual: Sequence[float] | float) -> list[float]:
        """By position: the share of rounds with an accepted draft there, of those with all before it accepted. `usual`:
        what is believed before any round, as in `_estimates`."""
        return self._estimates(self.accepted, self.reached, usual)

    def shares_made(self, usual: Sequence[float] | float) -> list[float]:
        """By position: the share of rounds with a draft there."""
        return self._estimates(self.made, self.asked, usual)

    def _estimates(
        self, happened: Sequence[float], rounds: Sequence[float], usual: Sequence[float] | float
    ) -> list[float]:
        """Quotients by position. What is believed before any round weighs as much as `PRIOR_WEIGHT` rounds: `usual` by
        position or, if it is one number, of the first; then a position is believed to be like the one before it."""
        prior, found = PRIOR_WEIGHT * self._weight, []
        belief = usual if isinstance(usual, float) else 0.0
        for i, (some, total) in enumerate(zip(happened, rounds, strict=True)):
            if not isinstance(usual, float):
                belief = usual[i]
            belief = (prior * belief + some) / (prior + total)
            found.append(belief)
        return found

    def _next_weight(self) -> float:
        self._weight /= self.memory
        if self._weight > LARGEST_WEIGHT:
            self._scale(1 / self._weight)
            self._weight = 1.0
        return self._weight

    def _scale(self, factor: float) -> None:
        for values in (self.asked, self.made, self.reached, self.accepted):
            values[:] = [factor * value for value in values]
