"""Drafting with a small model (Leviathan et al. 2023; Chen et al. 2023).

The draft's keys and values live in a second pool that the *same* block tables address, so one allocator serves both
models and a roll-back is one lowered counter for each. After a round in which all γ drafts were accepted the draft
has never seen its own last guess: the next round feeds that and the bonus token, because both are then uncomputed.

The draft fills blocks later than the target does: when a request finds blocks in the prefix cache, the draft may or may
not have been there. So it remembers which contents it has put into which block, and skips those when it catches up.
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

    def __init__(
        self, runner: ModelRunner, max_num_batched_tokens: int, greedy: bool, shares_blocks: bool = False
    ) -> None:
        self.runner = runner
        self.max_num_batched_tokens = max_num_batched_tokens
        self.greedy = greedy
        self.shares_blocks = shares_blocks
        self._filled: dict[int, bytes] = {}
        """Block id → name of the contents the draft has computed for all of it."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Drafter.copy_blocks`."""
        for _, target in pairs:
            self._filled.pop(target, None)  # first: an interrupt after the copy must not leave the old name
        self.runner.cache.copy_blocks(pairs)

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """See `Drafter.free_blocks`."""
        self.runner.cache.free(block_ids)

    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        """See `Drafter.propose`."""
        try:
            return self._propose(requests, num_drafts)
        except BaseException:
            self._filled.clear()  # what was noted, and skipped because of it, may not have happened
            for request in requests:
                request.num_draft_computed_tokens = 0
            raise

    def _propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        # Without chance the draft is one-hot: its likeliest token needs no distribution to be judged by.
        likeliest = self.greedy or all(_is_plain_greedy(r) for r in requests)
        tokens: list[list[int]] = [[] for _ in requests]
        probs: list[list[Tensor]] = [[] for _ in requests]
        logits = self._catch_up(requests)
        active = list(range(len(requests)))
        for step in range(max(num_drafts)):
            if step:
                active = [i for i in active if step < num_drafts[i]]
                logits = self.runner.run([self._next(requests[i], tokens[i]) for i in active])
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
                self._skip_filled(request)
                start = request.num_draft_computed_tokens
                end = min(request.num_tokens, start + budget)
                if start < end:
                    segments.append(self._segment(request, start, request.token_ids[start:end]))
                    chunk.append(i)
                    budget -= end - start
            rows = self.runner.run(segments)
            for i, segment, row in zip(chunk, segments, rows, strict=True):
                requests[i].num_draft_computed_tokens = segment.start + len(segment.token_ids)
                logits[i] = row
        return torch.stack([row for row in logits if row is not None])

    def _skip_filled(self, request: Request) -> None:
        """Move on past blocks that hold the draft's keys and values already; the last token is always fed."""
        size = self.runner.block_size
        if not self.shares_blocks or request.num_draft_computed_tokens % size:
            return
        names = request.block_names(size)
        for i in range(request.num_draft_computed_tokens // size, (request.num_tokens - 1) // size):
            if self._filled.get(request.block_table[i]) != names[i]:
                break
            request.num_draft_computed_tokens += size

    def _next(self, request: Request, drafted: list[int]) -> Segment:
        return self._segment(request, request.num_tokens + len(drafted) - 1, drafted[-1:])

    def _segment(self, request: Request, start: int, token_ids: list[int]) -> Segment:
        """`token_ids` from position `start` on, noting which blocks they fill.

        That is noted before it is done, so that a request can skip what another fills in the same forward.
        """
        if self.shares_blocks:
            size, table, end = self.runner.block_size, request.block_table, start + len(token_ids)
            for index in range(start // size, -(-end // size)):
                self._filled.pop(table[index], None)
            names = request.block_names(size)
            for index in reversed(range(min(end, request.num_tokens) // size)):
                if self._filled.get(table[index]) == names[index]:
                    break
                self._filled[table[index]] = names[index]
        return Segment(token_ids, start, request.block_table)


def _is_plain_greedy(request: Request) -> bool:
    """Whether the request takes the likeliest token, and nothing bends which one that is."""
    params = request.params
    return params.is_greedy and not params.has_penalties and request.num_output_tokens >= params.min_tokens


def _draw(logits: Tensor, states: list[tuple[Request, list[int]]]) -> tuple[list[int], Tensor]:
    """The next guess of each request that has drafted so much, and the distributions they were drawn from."""
    probs = probs_from_logits(logits, [request.sampling_row(drafted) for request, drafted in states])
    uniforms = [uniform(r.seed, r.num_tokens + len(drafted), Draw.DRAFT) for r, drafted in states]
    return sample(probs, torch.tensor(uniforms, device=probs.device)).tolist(), probs
