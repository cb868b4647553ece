"""The scheduler: which requests run in the next step, and with how many tokens.

Decoding, verification and prefill share one token budget per step. Running requests come first, by priority, and each
gets at least one token; the rest of the budget goes to waiting requests. When the pool has no free block left, the
running request of lowest priority is preempted: it loses its blocks and is recomputed later. Drafts never preempt.

A shared block is never written: a request that is about to write into one gets its own copy first.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count

from minillm.batch import Segment
from minillm.cache.block_pool import BlockPool, BlockPoolError
from minillm.config import EngineArgs
from minillm.request import Request
from minillm.speculative.draft_policy import DraftPolicy
from minillm.speculative.drafter import NO_DRAFT, Draft
from minillm.trace import (
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksEvicted,
    BlocksFreed,
    BlocksShared,
    DraftsPlanned,
    Event,
    RequestPreempted,
    WorkKind,
)


@dataclass(slots=True)
class Scheduled:
    """One request's share of a step: committed tokens `start … start + num_tokens - 1`, then drafts.

    `start` is the request's first uncomputed token. A request that was given shared blocks in this step starts behind
    them, although they count as computed only when the step has run.
    """

    request: Request
    start: int
    num_tokens: int
    num_drafts: int = 0
    """Drafts that fit; the drafter may propose fewer."""
    draft: Draft = NO_DRAFT
    """What the drafter proposed."""

    @property
    def completes(self) -> bool:
        """Whether all committed tokens are computed after this step, so that a new one can be chosen."""
        return self.start + self.num_tokens == self.request.num_tokens

    @property
    def kind(self) -> WorkKind:
        """What the step does for this request."""
        if not self.request.is_decoding:
            return "prefill"
        return "verify" if self.draft.token_ids else "decode"

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the log-probabilities of the prompt tokens in this chunk are reported."""
        return self.request.reports_prompt_logprobs and self.start < self.request.num_prompt_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of prompt or output tokens were asked for."""
        params = self.request.params
        return params.logprobs is not None or params.prompt_logprobs is not None

    @property
    def num_judged(self) -> int:
        """Rows of logits that choose tokens: one per draft and one more, or none before the prompt is complete."""
        return len(self.draft.token_ids) + 1 if self.completes else 0

    @property
    def num_logits(self) -> int:
        """Rows of logits that the step computes, those of prompt tokens included."""
        return self.num_tokens + len(self.draft.token_ids) if self.wants_prompt_logprobs else self.num_judged

    @property
    def segment(self) -> Segment:
        """What the request brings to the forward."""
        request = self.request
        return Segment(
            [*request.token_ids[self.start : self.start + self.num_tokens], *self.draft.token_ids],
            self.start,
            request.block_table,
            self.num_logits,
            self.draft.parents,
            num_prompt_tokens=request.num_prompt_tokens,
        )


@dataclass(frozen=True)
class SharedBlocks:
    """Blocks that already hold the first `num_tokens` tokens of a request."""

    block_ids: list[int]
    num_tokens: int
    source: str


NO_SHARED_BLOCKS = SharedBlocks([], 0, "prefix")


def _ignore(request: Request) -> None:
    """The default callback."""


class Scheduler:
    """Two queues and the block pool. `LLM(scheduler_cls=...)` puts a subclass in its place."""

    def __init__(
        self,
        pool: BlockPool,
        config: EngineArgs,
        draft_policy: DraftPolicy | None,
        emit: Callable[[Event], None],
        copy_blocks: Callable[[Sequence[tuple[int, int]]], None],
    ) -> None:
        self.pool = pool
        self.config = config
        self.draft_policy = draft_policy
        """Decides how many drafts each request gets; None: no speculation."""
        self.disable_by_batch_size: int | None = None
        """With more requests than this, running and waiting, none gets drafts; None: no limit."""
        self.asked_policy = False
        """Whether the draft policy was asked in the latest step. It is told of no other."""
        self.steps_since_plan = 0
        """Steps since the draft policy was asked, because its plan, to draft nothing, holds."""
        self._steps_to_plan = 0
        """How many more steps the plan holds for."""
        self.emit = emit
        self.copy_blocks = copy_blocks
        self.on_drop: Callable[[Request], None] = _ignore
        """Called with each request that has lost its blocks."""
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        """In order of rank."""
        self._arrivals = count()
        pool.on_evict = lambda block_ids: emit(BlocksEvicted(list(block_ids)))

    def rank(self, request: Request) -> tuple[int, int]:
        """The order in which requests are served: lowest first."""
        return (request.priority if self.config.scheduling_policy == "priority" else 0, request.arrival)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        request.arrival = next(self._arrivals)
        insort(self.waiting, request, key=self.rank)

    def schedule(self) -> list[Scheduled]:
        """Choose the requests of the next step and allocate the blocks they need for it."""
        scheduled, budget, preempted = self._schedule_running()
        if not preempted:
            self._schedule_waiting(scheduled, budget)
        return scheduled

    def _schedule_running(self) -> tuple[list[Scheduled], int, bool]:
        scheduled: list[Scheduled] = []
        budget, preempted = self.config.max_num_batched_tokens, False
        most_drafts = self._plan_drafts()
        queue = sorted(self.running, key=self.rank)
        while queue:
            request = queue.pop(0)
            # Keep one token of the budget for every running request behind this one.
            spare = budget - len(queue)
            num_tokens = min(self._chunk(request.num_new_tokens), spare)
            fits, preempts = self._make_room(request, num_tokens, queue)
            preempted |= preempts
            if fits:
                # Every step also yields one token of the target, so the last token never needs a draft.
                wanted = min(most_drafts.get(request, 0), request.num_remaining_tokens - 1, spare - num_tokens)
                scheduled.append(Scheduled(request, request.num_computed_tokens, num_tokens, wanted))
                budget -= num_tokens + wanted
        # Drafts get blocks only after all committed tokens have theirs, and before others can share their blocks.
        for item in scheduled:
            num_drafts = self._drafts_that_fit(item)
            budget += item.num_drafts - num_drafts
            item.num_drafts = num_drafts
        return scheduled, budget, preempted

    def _make_room(self, request: Request, num_tokens: int, behind: list[Request]) -> tuple[bool, bool]:
        """Reserve the slots of the next `num_tokens` tokens, preempting the last of the requests `behind`, and at last
        `request` itself, until they fit. Returns whether they fit, and whether any request was preempted."""
        preempted = False
        while not self._reserve_slots(request, request.num_computed_tokens, num_tokens):
            victim = behind.pop() if behind else request
            self._preempt(victim)
            preempted = True
            if victim is request:
                return False, True
        return True, preempted

    def _schedule_waiting(self, scheduled: list[Scheduled], budget: int) -> None:
        passed = 0  # requests that stay in the queue
        while passed < len(self.waiting) and budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[passed]
            if self._waits_for_fork(request):
                passed += 1
                continue
            admitted = self._admit(request, budget)
            if admitted is None:  # no later request overtakes, or a long prompt might wait forever
                break
            scheduled.append(admitted)
            budget -= admitted.num_tokens

    def _admit(self, request: Request, budget: int) -> Scheduled | None:
        """Start a waiting request if the pool has room for all its tokens; with less it would soon be preempted."""
        found = self._find_shared_blocks(request)
        left = request.num_tokens - found.num_tokens
        num_tokens = min(self._chunk(left), budget)
        if num_tokens < left and not self.config.enable_chunked_prefill:
            return None
        # Blocks of the prefix cache count as free until they are shared. The last shared block of a fork is copied: the
        # last prompt token is computed again.
        cached = sum(not self.pool.ref_count(block_id) for block_id in found.block_ids)
        copies = len(found.block_ids) - found.num_tokens // self.pool.block_size
        needed = self.pool.blocks_for(request.num_tokens) - len(found.block_ids) + copies
        if needed > self.pool.num_free - cached:
            return None
        if found.block_ids:
            self.pool.share(found.block_ids)
            request.block_table += found.block_ids
            self.emit(BlocksShared(request.request_id, found.block_ids, found.num_tokens, found.source))
        if not self._reserve_slots(request, found.num_tokens, num_tokens):
            raise BlockPoolError(f"the pool has {self.pool.num_free} free blocks and gave none of {needed}")
        self._end_plan()
        self.running.append(request)
        self.waiting.remove(request)
        return Scheduled(request, found.num_tokens, num_tokens)

    def _waits_for_fork(self, request: Request) -> bool:
        """Whether the blocks that this request will share are still being filled."""
        parent = request.fork_of
        return parent is not None and not parent.finished and parent.num_computed_tokens < parent.num_prompt_tokens

    def _find_shared_blocks(self, request: Request) -> SharedBlocks:
        """Blocks that a waiting request can share. Its last token is always computed, because its logits are needed."""
        parent = request.fork_of
        if parent is not None and not parent.finished and not request.num_output_tokens:
            shared = self.pool.blocks_for(request.num_prompt_tokens)
            start = request.num_prompt_tokens - 1
            return SharedBlocks(parent.block_table[:shared], start, "fork")
        if not self.config.enable_prefix_caching or request.lacks_prompt_logprobs:
            return NO_SHARED_BLOCKS
        found: list[int] = []
        hashes = request.block_hashes(self.pool.block_size)
        for block_hash in hashes[: (request.num_tokens - 1) // self.pool.block_size]:
            block_id = self.pool.find(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return SharedBlocks(found, len(found) * self.pool.block_size, "prefix")

    def _chunk(self, num_tokens: int) -> int:
        """`num_tokens`, limited to what one request may have of a step."""
        return min(num_tokens, self.config.long_prefill_token_threshold or num_tokens)

    def _plan_drafts(self) -> dict[Request, int]:
        """Most drafts of each running request in this step."""
        self.asked_policy = False
        limit = self.disable_by_batch_size
        if self.draft_policy is None or (limit is not None and len(self.running) + len(self.waiting) > limit):
            return {}
        if self._steps_to_plan:
            self._steps_to_plan -= 1
            self.steps_since_plan += 1
            return {}
        decoding = [request for request in self.running if request.is_decoding]
        if not decoding:
            return {}
        self._end_plan()
        plan = self.draft_policy.plan(decoding, self._rows_without_drafts())
        self.asked_policy = True
        if len(decoding) == len(self.running):
            self._steps_to_plan = plan.num_steps - 1
        if plan.speedups:
            ids = [request.request_id for request in decoding]
            self.emit(DraftsPlanned(ids, plan.num_drafts, plan.survival, plan.speedups))
        return dict(zip(decoding, plan.num_drafts, strict=True))

    def _rows_without_drafts(self) -> int:
        """About how many tokens this step has if nothing is drafted: those of the running requests, and those of the
        waiting ones for which there are seats and free blocks."""
        rows, free = sum(self._chunk(request.num_new_tokens) for request in self.running), self.pool.num_free
        for request in self.waiting[: self.config.max_num_seqs - len(self.running)]:
            if self._waits_for_fork(request):
                continue
            free -= self.pool.blocks_for(request.num_tokens)
            if free < 0:
                break
            rows += self._chunk(request.num_new_tokens)
        return min(rows, self.config.max_num_batched_tokens)

    def _end_plan(self) -> None:
        """Let the next step be planned, and tell the policy how many steps its plan has held for."""
        self._steps_to_plan, held = 0, self.steps_since_plan
        if held and self.draft_policy is not None:
            self.draft_policy.plan_held(held)
        self.steps_since_plan = 0

    def _drafts_that_fit(self, item: Scheduled) -> int:
        """The number of wanted drafts that fit into blocks that are free without preemption."""
        for num_drafts in range(item.num_drafts, 0, -1):
            if self._reserve_slots(item.request, item.start, item.num_tokens + num_drafts):
                return num_drafts
        return 0

    def _reserve_slots(self, request: Request, start: int, num_tokens: int) -> bool:
        """Give `request` blocks of its own for tokens `start … start + num_tokens - 1`.

        Missing blocks are appended, shared ones copied. Returns False, without any change, if the pool has too few.
        Full blocks of committed tokens are registered at once, so that other requests find them in this same step: a
        layer stores all keys before it reads any.
        """
        end, held = start + num_tokens, len(request.block_table)
        needed = self.pool.blocks_for(end)
        missing = max(0, needed - held)
        written = range(start // self.pool.block_size, min(needed, held))
        shared = [i for i in written if self.pool.ref_count(request.block_table[i]) > 1]
        block_ids = self.pool.allocate(missing + len(shared)) if missing or shared else []
        if block_ids is None:
            return False
        for index in shared:
            self._copy_on_write(request, index, block_ids.pop())
        if block_ids:
            request.block_table += block_ids
            self.emit(BlocksAllocated(request.request_id, block_ids))
        self._cache_full_blocks(request, start, min(end, request.num_tokens))
        return True

    def _copy_on_write(self, request: Request, index: int, target: int) -> None:
        source = request.block_table[index]
        self.copy_blocks([(source, target)])  # contents first: an interrupt after this line loses nothing
        request.block_table[index] = target
        self.pool.free([source])
        self.emit(BlockCopied(request.request_id, source, target))

    def _cache_full_blocks(self, request: Request, start: int, end: int) -> None:
        """Register the hashes of the blocks that become full when tokens `start … end - 1` are computed."""
        size = self.pool.block_size
        full = range(start // size, end // size)
        if not (full and self.config.enable_prefix_caching):
            return
        table, hashes = request.block_table, request.block_hashes(size)
        cached = [table[i] for i in full if self.pool.register(table[i], hashes[i])]
        if cached:
            self.emit(BlocksCached(request.request_id, cached))

    def _preempt(self, request: Request) -> None:
        """Free all blocks of `request` and put it back into the waiting queue, by its rank."""
        self.emit(RequestPreempted(request.request_id, request.num_computed_tokens))
        self._free(request, 0, "preempted")
        self._drop(request)
        insort(self.waiting, request, key=self.rank)
        self.running.remove(request)

    def roll_back(self, request: Request, start: int) -> None:
        """After tokens from `start` on: register the blocks that accepted drafts have filled, and free the tail blocks
        that hold only rejected ones. The block of the next token stays."""
        self._cache_full_blocks(request, start, request.num_computed_tokens)
        self._free(request, self.pool.blocks_for(request.num_computed_tokens + 1), "rolled_back")

    def remove(self, request: Request, reason: str) -> None:
        """Free a request's blocks and remove it from its queue; its full blocks stay in the prefix cache."""
        self._cache_full_blocks(request, 0, request.num_computed_tokens)
        self._free(request, 0, reason)
        self._drop(request)
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)

    def _drop(self, request: Request) -> None:
        self._end_plan()
        request.drop_cache()
        self.on_drop(request)

    def _free(self, request: Request, keep: int, reason: str) -> None:
        tail = request.block_table[keep:]
        if tail:
            self.pool.free(tail)
            del request.block_table[keep:]
            self.emit(BlocksFreed(request.request_id, tail, reason))

    def recover(self, requests: Iterable[Request]) -> None:
        """Rebuild the queues and the pool from the requests, after an interrupt between any two lines.

        Requests and queues come first. Then listeners, drafter and cache are told; if one of them fails, the others are
        told all the same.
        """
        requests = list(requests)
        alive = sorted((request for request in requests if not request.finished), key=self.rank)
        # A request without computed tokens starts again: its table may hold shared blocks it has not copied yet.
        self.running = [request for request in alive if request.block_table and request.num_computed_tokens]
        self.waiting = [request for request in alive if request not in self.running]
        self._end_plan()
        released = [*(request for request in requests if request.finished), *self.waiting]
        freed = [BlocksFreed(r.request_id, list(r.block_table), "interrupted") for r in released if r.block_table]
        for request in released:
            request.drop_cache()
        for request in self.running:
            covered = len(request.block_table) * self.pool.block_size
            request.num_computed_tokens = min(request.num_computed_tokens, covered)
        with ExitStack() as calls:  # makes all of them, from the last one to the first
            calls.callback(self.pool.reclaim, [request.block_table for request in self.running])
            for request in released:
                calls.callback(self.on_drop, request)
            for event in reversed(freed):
                calls.callback(self.emit, event)

    def check_integrity(self) -> None:
        """Raise `BlockPoolError` unless the pool and the block tables of all requests agree."""
        self.pool.check_integrity(request.block_table for request in [*self.running, *self.waiting])
