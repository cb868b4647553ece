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

import numpy as np
import torch
from torch import Tensor

from minillm.device_sampling import DeviceSampler
from minillm.models.runner import ModelRunner, Segment
from minillm.sampling import Draw, likeliest, probs_from_logits, sample, uniform
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
        self.sampler = DeviceSampler.beside(runner)
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
        without_chance = self.greedy or all(request.takes_likeliest for request in requests)
        if without_chance and len(set(num_drafts)) == 1 and self._num_behind(requests) <= self.max_num_batched_tokens:
            return self._propose_together(requests, num_drafts[0])
        tokens: list[list[int]] = [[] for _ in requests]
        probs: list[list[Tensor]] = [[] for _ in requests]
        logits = self._catch_up(requests)
        active = list(range(len(requests)))
        for step in range(max(num_drafts)):
            if step:
                active = [i for i in active if step < num_drafts[i]]
                logits = self.runner.run([self._next(requests[i], tokens[i]) for i in active])
            if without_chance:
                for i, token in zip(active, likeliest(logits), strict=True):
                    tokens[i].append(token)
                continue
            drawn, rows = self._draw(logits, [(requests[i], tokens[i]) for i in active])
            for i, token, row in zip(active, drawn, rows, strict=True):
                tokens[i].append(token)
                probs[i].append(row)
        for request, drafted in zip(requests, tokens, strict=True):
            request.num_draft_computed_tokens = request.num_tokens + len(drafted) - 1
        if without_chance:
            return [Draft(drafted) for drafted in tokens]
        rows = torch.stack([row for of_request in probs for row in of_request])
        return [Draft(t, q) for t, q in zip(tokens, rows.split([len(t) for t in tokens]), strict=True)]

    def _draw(self, logits: Tensor, states: list[tuple[Request, list[int]]]) -> tuple[list[int], Tensor]:
        """The next guess of each request that has drafted so much, and the distributions they were drawn from.

        The tokens are read, because the next forward is laid out on the host; the distributions stay where they are.
        """
        rows = [request.sampling_row(drafted) for request, drafted in states]
        uniforms = [uniform(r.seed, r.num_tokens + len(drafted), Draw.DRAFT) for r, drafted in states]
        if self.sampler is not None:
            return self.sampler.draw(logits, rows, np.array(uniforms))
        probs = probs_from_logits(logits, rows)
        return sample(probs, uniforms).tolist(), probs

    def _num_behind(self, requests: Sequence[Request]) -> int:
        """How many committed tokens the draft has yet to see."""
        for request in requests:
            self._skip_filled(request)
        return sum(request.num_tokens - request.num_draft_computed_tokens for request in requests)

    def _propose_together(self, requests: Sequence[Request], count: int) -> list[Draft]:
        """`count` guesses for each request, the likeliest every time: the runner may make them all in one call."""
        segments = []
        for request in requests:
            start = request.num_draft_computed_tokens
            segments.append(self._segment(request, start, request.token_ids[start:]))
            for position in range(request.num_tokens, request.num_tokens + count - 1):
                self._filled.pop(request.block_table[position // self.runner.block_size], None)
        drafts = [Draft(token_ids) for token_ids in self.runner.draft(segments, count)]
        for request in requests:
            request.num_draft_computed_tokens = request.num_tokens + count - 1
        return drafts

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
            for i, segment in zip(chunk, segments, strict=True):
                requests[i].num_draft_computed_tokens = segment.start + len(segment.token_ids)
            if len(chunk) == len(requests) and all(r.num_draft_computed_tokens == r.num_tokens for r in requests):
                return rows  # one forward was enough, as it nearly always is
            for i, row in zip(chunk, rows, strict=True):
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
        """The last guess, to make the next one from. It may be wrong, so the block it goes to has no name."""
        start = request.num_tokens + len(drafted) - 1
        self._filled.pop(request.block_table[start // self.runner.block_size], None)
        return Segment(drafted[-1:], start, request.block_table)

    def _segment(self, request: Request, start: int, token_ids: list[int]) -> Segment:
        """Committed `token_ids` from position `start` on, noting which blocks they fill.

        That is noted before it is done, so that a request can skip what another fills in the same forward.
        """
        if self.shares_blocks:
            size, table, end = self.runner.block_size, request.block_table, start + len(token_ids)
            for index in range(start // size, -(-end // size)):
                self._filled.pop(table[index], None)
            names = request.block_names(size)
            for index in reversed(range(end // size)):
                if self._filled.get(table[index]) == names[index]:
                    break
                self._filled[table[index]] = names[index]
        return Segment(token_ids, start, request.block_table)
