"""Drafting with a small model (Leviathan et al. 2023; Chen et al. 2023).

The draft's keys and values live in a second pool that the *same* block tables address, so one allocator serves both
models and a roll-back is one lowered counter for each. After a round in which all γ drafts were accepted the draft
has never seen its own last guess: the next round feeds that and the bonus token, because both are then uncomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minillm.models.runner import ModelRunner, Segment
from minillm.sampling import Draw, probs_from_logits, sample, uniform
from minillm.speculative.drafter import Draft, Drafter

if TYPE_CHECKING:
    from minillm.engine.request import Request


class DraftModelDrafter(Drafter):
    """A chain of `num_drafts` tokens per request, all requests together, one draft forward per position."""

    def __init__(self, runner: ModelRunner, max_num_batched_tokens: int, greedy: bool) -> None:
        self.runner = runner
        self.max_num_batched_tokens = max_num_batched_tokens
        self.greedy = greedy

    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        """See `Drafter.propose`."""
        # Without chance the draft is one-hot: its likeliest token needs no distribution to be judged by.
        likeliest = self.greedy or all(_is_plain_greedy(r) for r in requests)
        tokens: list[list[int]] = [[] for _ in requests]
        probs: list[list[Tensor]] = [[] for _ in requests]
        logits = self._catch_up(requests)
        active = list(range(len(requests)))
        for step in range(max(num_drafts)):
            if step:
                active = [i for i in active if step < num_drafts[i]]
                logits = self.runner.run([self._segment(requests[i], tokens[i]) for i in active])
            if likeliest:
                for i, token in zip(active, logits.argmax(-1).tolist(), strict=True):
                    tokens[i].append(token)
                continue
            drawn, rows = _draw(logits, [(requests[i], tokens[i]) for i in active])
            for i, token, row in zip(active, drawn, rows, strict=True):
                tokens[i].append(token)
                probs[i].append(row)
        for request, drafted in zip(requests, tokens, strict=True):
            request.num_draft_computed_tokens = request.num_tokens + len(drafted) - 1
        return [Draft(t, torch.stack(p) if p else None) for t, p in zip(tokens, probs, strict=True)]

    def _catch_up(self, requests: Sequence[Request]) -> Tensor:
        """Feed every committed token the draft has not seen, in chunks of the step budget; logits of the last ones."""
        logits: list[Tensor | None] = [None] * len(requests)
        while behind := [i for i, r in enumerate(requests) if r.num_draft_computed_tokens < r.num_tokens]:
            budget, chunk, segments = self.max_num_batched_tokens, [], []
            for i in behind:
                request = requests[i]
                start = request.num_draft_computed_tokens
                end = min(request.num_tokens, start + budget)
                if start < end:
                    segments.append(Segment(request.token_ids[start:end], start, request.block_table))
                    chunk.append(i)
                    budget -= end - start
            rows = self.runner.run(segments)
            for i, segment, row in zip(chunk, segments, rows, strict=True):
                requests[i].num_draft_computed_tokens = segment.start + len(segment.token_ids)
                logits[i] = row
        return torch.stack([row for row in logits if row is not None])

    @staticmethod
    def _segment(request: Request, drafted: list[int]) -> Segment:
        return Segment(drafted[-1:], request.num_tokens + len(drafted) - 1, request.block_table)


def _is_plain_greedy(request: Request) -> bool:
    """Whether the request takes the likeliest token, and nothing bends which one that is."""
    params = request.params
    return params.is_greedy and not params.has_penalties and request.num_output_tokens >= params.min_tokens


def _draw(logits: Tensor, states: list[tuple[Request, list[int]]]) -> tuple[list[int], Tensor]:
    """The next guess of each request that has drafted so much, and the distributions they were drawn from."""
    probs = probs_from_logits(logits, [request.sampling_row(drafted) for request, drafted in states])
    uniforms = [uniform(r.seed, r.num_tokens + len(drafted), Draw.DRAFT) for r, drafted in states]
    return sample(probs, torch.tensor(uniforms, device=probs.device)).tolist(), probs
