"""Which rows of a step's logits belong to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.engine.scheduler import Scheduled


@dataclass(frozen=True)
class StepRows:
    """The logits of one step, cut by request.

    A request brings its last committed token and its drafts: row j judges draft j, and the row after the last draft is
    the bonus. Rows of prompt tokens come before those, if their log-probabilities were asked for.
    """

    judged: Tensor
    """`[sum of num_judged, vocab]`: the rows that choose tokens, side by side."""
    by_request: list[Tensor]
    """All rows of each scheduled request."""

    @classmethod
    def cut(cls, scheduled: Sequence[Scheduled], logits: Tensor) -> StepRows:
        """`logits`: `[sum of num_logits, vocab]`."""
        by_request = list(logits.split([item.num_logits for item in scheduled]))
        if not any(item.wants_prompt_logprobs for item in scheduled):
            return cls(logits, by_request)
        judged = [rows[len(rows) - item.num_judged :] for item, rows in zip(scheduled, by_request, strict=True)]
        return cls(torch.cat(judged), by_request)

    @staticmethod
    def owner(scheduled: Sequence[Scheduled], row: int) -> Scheduled:
        """Whose row of the step's logits this is."""
        for item in scheduled:
            row -= item.num_logits
            if row < 0:
                return item
        raise IndexError("the step has fewer rows")
