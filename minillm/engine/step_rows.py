"""Which rows of a step's logits belong to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from minillm.engine.scheduler import Scheduled
from minillm.speculative.rejection_sampler import Verdict


@dataclass(frozen=True)
class StepRows:
    """The logits of one step, cut by request.

    A request brings its last committed token and its drafts: row j judges draft j, and the row after the last draft is
    the bonus. Rows of prompt tokens come before those, if their log-probabilities were asked for.
    """

    scheduled: Sequence[Scheduled]
    logits: Tensor
    """`[sum of num_logits, vocab]`."""

    @cached_property
    def by_request(self) -> Sequence[Tensor]:
        """All rows of each scheduled request."""
        return self.logits.split([item.num_logits for item in self.scheduled])

    @property
    def judged(self) -> Tensor:
        """`[sum of num_judged, vocab]`: the rows that choose tokens, side by side."""
        if not any(item.wants_prompt_logprobs for item in self.scheduled):
            return self.logits
        pairs = zip(self.scheduled, self.by_request, strict=True)
        return torch.cat([rows[len(rows) - item.num_judged :] for item, rows in pairs])

    def of_last_tokens(self, verdicts: Sequence[Verdict | None]) -> list[int]:
        """For each request with a verdict, the index of the row that chose its last token: after the last accepted
        draft, or the first judged row if none was accepted. To be asked before the tokens are committed."""
        found, end = [], 0
        for item, verdict in zip(self.scheduled, verdicts, strict=True):
            end += item.num_logits
            if verdict is not None:
                accepted = verdict.path[-1] + 1 if verdict.path else verdict.num_accepted
                found.append(end - item.num_judged + accepted)
        return found

    def owner(self, row: int) -> tuple[Scheduled, int]:
        """Whose row of the step's logits this is, and the position of the token that it was to choose (of a tree, its
        place in the order of the drafts)."""
        for item in self.scheduled:
            row -= item.num_logits
            if row < 0:
                return item, item.start + item.num_rows + row + 1
        raise IndexError("the step has fewer rows")
