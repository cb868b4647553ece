"""Who runs in the next step, with how many tokens, and who must wait.

One token budget per step is shared by decoding, verification and prefill. Requests that run come first, in order of
arrival; what is left of the budget goes to those who wait. When the pool runs dry, the request that came last loses
its blocks and is recomputed later; drafts never cost another request its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from minillm.cache.block_pool import BlockPool
from minillm.config import EngineConfig
from minillm.engine.request import Request
from minillm.trace import BlocksAllocated, BlocksFreed, Event, RequestPreempted, WorkKind


@dataclass(frozen=True)
class Scheduled:
    """One request's share of a step: `num_tokens` committed tokens from its first uncomputed one, then drafts."""

    request: Request
    num_tokens: int
    num_drafts: int = 0
    """Drafts that fit; the drafter may propose fewer."""

    @property
    def start(self) -> int:
        """Index of the first token that goes through the model."""
        return self.request.num_computed_tokens

    @property
    def completes(self) -> bool:
        """Whether all committed tokens are computed after this step, so that a new one can be chosen."""
        return self.start + self.num_tokens == self.request.num_tokens

    @property
    def kind(self) -> WorkKind:
        """What the step does for this request."""
        if not self.request.is_decoding:
            return "prefill"
        return "verify" if self.num_drafts else "decode"


class Scheduler:
    """Two queues and the block pool."""

    def __init__(
        self,
        pool: BlockPool,
        config: EngineConfig,
        num_speculative_tokens: int,
        emit: Callable[[Event], None],
    ) -> None:
        self.pool = pool
        self.config = config
        self.num_speculative_tokens = num_speculative_tokens
        self.emit = emit
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.waiting.append(request)

    def schedule(self) -> list[Scheduled]:
        """Choose the work of the next step and give every chosen request the blocks it needs for it."""
        scheduled, budget, preempted = self._schedule_running()
        if not preempted:
            self._schedule_waiting(scheduled, budget)
        return scheduled

    def _schedule_running(self) -> tuple[list[Scheduled], int, bool]:
        scheduled: list[Scheduled] = []
        budget, preempted = self.config.max_num_batched_tokens, False
        position = 0
        while position < len(self.running) and budget > 0:
            request = self.running[position]
            num_tokens = min(request.num_new_tokens, budget)
            while not self._extend(request, num_tokens):
                self._preempt(self.running[-1])
                preempted = True
                if request not in self.running[position:]:
                    break
            else:
                # Every running request after this one is left at least one token of the budget.
                spare = budget - num_tokens - (len(self.running) - position - 1)
                num_drafts = self._drafts_that_fit(request, spare)
                scheduled.append(Scheduled(request, num_tokens, num_drafts))
                budget -= num_tokens + num_drafts
                position += 1
        return scheduled, budget, preempted

    def _schedule_waiting(self, scheduled: list[Scheduled], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            num_tokens = min(request.num_new_tokens, budget)
            if num_tokens < request.num_new_tokens and not self.config.enable_chunked_prefill:
                break
            # Room for the whole prompt, or it would soon be preempted and the work done twice.
            if self.pool.blocks_for(request.num_tokens) > self.pool.num_free or not self._extend(request, num_tokens):
                break
            self.running.append(request)
            self.waiting.popleft()
            scheduled.append(Scheduled(request, num_tokens))
            budget -= num_tokens

    def _drafts_that_fit(self, request: Request, spare_tokens: int) -> int:
        """As many drafts as are wanted, may be kept, and find room in the budget and in blocks free without a fight."""
        if not request.is_decoding or not self.num_speculative_tokens:
            return 0
        # The target adds a token of its own to every round, so the last token never needs a draft.
        wanted = min(self.num_speculative_tokens, request.num_remaining_tokens - 1, spare_tokens)
        for num_drafts in range(wanted, 0, -1):
            if self._extend(request, 1 + num_drafts):
                return num_drafts
        return 0

    def _extend(self, request: Request, num_tokens: int) -> bool:
        """Give `request` blocks for `num_tokens` more tokens; False, and no change, if the pool has too few."""
        missing = self.pool.blocks_for(request.num_computed_tokens + num_tokens) - len(request.block_table)
        if missing <= 0:
            return True
        block_ids = self.pool.allocate(missing)
        if block_ids is None:
            return False
        request.block_table += block_ids
        self.emit(BlocksAllocated(request.request_id, block_ids))
        return True

    def _preempt(self, request: Request) -> None:
        """Take everything from `request` and let it wait, first in line."""
        self.emit(RequestPreempted(request.request_id, request.num_computed_tokens))
        self._free(request, 0, "preempted")
        request.drop_cache()
        self.waiting.appendleft(request)
        self.running.remove(request)

    def roll_back(self, request: Request) -> None:
        """Free whole tail blocks that hold nothing but void tokens; the next token's block stays."""
        self._free(request, self.pool.blocks_for(request.num_computed_tokens + 1), "rolled_back")

    def remove(self, request: Request, reason: str) -> None:
        """Free a request's blocks and forget it."""
        self._free(request, 0, reason)
        request.drop_cache()
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)

    def _free(self, request: Request, keep: int, reason: str) -> None:
        tail = request.block_table[keep:]
        if tail:
            self.pool.free(tail)
            del request.block_table[keep:]
            self.emit(BlocksFreed(request.request_id, tail, reason))

    def recover(self, requests: Iterable[Request]) -> None:
        """After an interrupt between any two lines: rebuild the queues and the pool from the requests themselves."""
        alive = []
        for request in requests:
            if request.finished:
                request.drop_cache()
            else:
                alive.append(request)
        self.running = [request for request in alive if request.block_table]
        self.waiting = deque(request for request in alive if not request.block_table)
        for request in self.waiting:
            request.drop_cache()
        self.pool.reclaim(request.block_table for request in self.running)
        for request in self.running:
            covered = len(request.block_table) * self.pool.block_size
            request.num_computed_tokens = min(request.num_computed_tokens, covered)
            # Drafts that were proposed and never judged are void.
            request.num_draft_computed_tokens = min(request.num_draft_computed_tokens, request.num_computed_tokens)

    def check_integrity(self) -> None:
        """Raise `BlockPoolError` unless every block is accounted for; waiting requests hold none."""
        self.pool.check_integrity(request.block_table for request in [*self.running, *self.waiting])
