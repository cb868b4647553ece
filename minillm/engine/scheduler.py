"""The scheduler: which requests run in the next step, and with how many tokens.

Decoding, verification and prefill share one token budget per step. Running requests come first, by priority, and each
gets at least one token; the rest of the budget goes to waiting requests. When the pool has no free block left, the
running request of lowest priority is preempted: it loses its blocks and is recomputed later. Drafts never preempt.
The `KVCacheManager` says which blocks a request shares, and gives it others.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from minillm.batch import Segment
from minillm.cache.block_pool import BlockPool, BlockPoolError
from minillm.config import EngineArgs
from minillm.engine.kv_cache_manager import KVCacheManager
from minillm.request import Request
from minillm.speculative.draft_policy import DraftPlan, DraftPolicy
from minillm.speculative.drafter import NO_DRAFT, Draft
from minillm.trace import BlocksFreed, DraftReason, DraftsPlanned, Event, RequestPreempted, WorkKind


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
    def num_rows(self) -> int:
        """Rows that the request brings to the forward: its tokens and its drafts."""
        return self.num_tokens + len(self.draft.token_ids)

    @property
    def num_judged(self) -> int:
        """Rows of logits that choose tokens: one per draft and one more, or none before the prompt is complete."""
        return len(self.draft.token_ids) + 1 if self.completes else 0

    @property
    def num_logits(self) -> int:
        """Rows of logits that the step computes, those of prompt tokens included."""
        return self.num_rows if self.wants_prompt_logprobs else self.num_judged

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


def _ignore(request: Request) -> None:
    """The default callback."""


class Scheduler:
    """Two queues and the block pool. `LLM(scheduler_cls=...)` puts a subclass in its place; which blocks a request gets
    is decided by its `kv_cache_manager_cls`."""

    kv_cache_manager_cls: ClassVar[type[KVCacheManager]] = KVCacheManager

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
        """Whether this step asked the draft policy; only such a step's duration is reported to it."""
        self._steps_since_plan = 0
        """Steps since the draft policy was asked, because its plan, to draft nothing, holds."""
        self._steps_to_plan = 0
        """How many more steps the plan holds for."""
        self._reported: tuple[DraftReason, dict[Request, int]] = ("fixed", {})
        """Reason and numbers of the latest `DraftsPlanned`. Fixed numbers are not kept: their change is no event."""
        self.emit = emit
        self.kv_cache_manager = self.kv_cache_manager_cls(pool, bool(config.enable_prefix_caching), emit, copy_blocks)
        self.on_drop: Callable[[Request], None] = _ignore
        """Called with each request that has lost its blocks."""
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        """In order of rank."""
        self._arrivals = count()

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
        while not self.kv_cache_manager.allocate_slots(request, request.num_computed_tokens, num_tokens):
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
        found = self.kv_cache_manager.get_computed_blocks(request)
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
        self.kv_cache_manager.share(request, found)
        if not self.kv_cache_manager.allocate_slots(request, found.num_tokens, num_tokens):
            raise BlockPoolError(f"the pool has {self.pool.num_free} free blocks and gave none of {needed}")
        self._end_plan()
        self.running.append(request)
        self.waiting.remove(request)
        return Scheduled(request, found.num_tokens, num_tokens)

    def _waits_for_fork(self, request: Request) -> bool:
        """Whether the blocks that this request will share are still being filled."""
        parent = request.fork_of
        return parent is not None and not parent.finished and parent.num_computed_tokens < parent.num_prompt_tokens

    def _chunk(self, num_tokens: int) -> int:
        """`num_tokens`, limited to what one request may have of a step."""
        return min(num_tokens, self.config.long_prefill_token_threshold or num_tokens)

    def _plan_drafts(self) -> dict[Request, int]:
        """Most drafts of each running request in this step."""
        self.asked_policy = False
        if self.draft_policy is None:
            return {}
        limit = self.disable_by_batch_size
        too_many = limit is not None and len(self.running) + len(self.waiting) > limit
        if self._steps_to_plan and not too_many:
            self._steps_to_plan -= 1
            self._steps_since_plan += 1
            return {}
        decoding = [request for request in self.running if request.is_decoding]
        if not decoding:
            return {}
        if too_many:
            plan = DraftPlan([0] * len(decoding), reason="batch_size")
        else:
            self._end_plan()
            plan = self.draft_policy.plan(decoding, self._rows_without_drafts())
            self.asked_policy = True
            if len(decoding) == len(self.running):
                self._steps_to_plan = plan.num_steps - 1
        most_drafts = dict(zip(decoding, plan.num_drafts, strict=True))
        self._report_plan(plan, most_drafts)
        return most_drafts

    def _report_plan(self, plan: DraftPlan, most_drafts: dict[Request, int]) -> None:
        """Emit `plan`, unless it predicts nothing, has the reason of the latest event, and its numbers are fixed or
        stand in that event."""
        reason, reported = self._reported
        is_known = reason == "fixed" or most_drafts.items() <= reported.items()
        if plan.reason == reason and is_known and not plan.speedups:
            return
        ids = [request.request_id for request in most_drafts]
        self.emit(DraftsPlanned(ids, plan.num_drafts, plan.survival, plan.speedups, plan.reason))
        self._reported = plan.reason, {} if plan.reason == "fixed" else most_drafts

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
        self._steps_to_plan, held = 0, self._steps_since_plan
        if held and self.draft_policy is not None:
            self.draft_policy.plan_held(held)
        self._steps_since_plan = 0

    def _drafts_that_fit(self, item: Scheduled) -> int:
        """The number of wanted drafts that fit into blocks that are free without preemption."""
        for num_drafts in range(item.num_drafts, 0, -1):
            if self.kv_cache_manager.allocate_slots(item.request, item.start, item.num_tokens + num_drafts):
                return num_drafts
        return 0

    def _preempt(self, request: Request) -> None:
        """Free all blocks of `request` and put it back into the waiting queue, by its rank."""
        self.emit(RequestPreempted(request.request_id, request.num_computed_tokens))
        self.kv_cache_manager.free(request, "preempted")
        self._drop(request)
        insort(self.waiting, request, key=self.rank)
        self.running.remove(request)

    def roll_back(self, request: Request, start: int) -> None:
        """After tokens from `start` on: register the blocks that accepted drafts have filled, and free the tail blocks
        that hold only rejected ones. The block of the next token stays."""
        self.kv_cache_manager.cache_full_blocks(request, start, request.num_computed_tokens)
        kept = self.pool.blocks_for(request.num_computed_tokens + 1)
        self.kv_cache_manager.free(request, "rolled_back", kept)

    def remove(self, request: Request, reason: str) -> None:
        """Free a request's blocks and remove it from its queue; its full blocks stay in the prefix cache."""
        self.kv_cache_manager.cache_full_blocks(request, 0, request.num_computed_tokens)
        self.kv_cache_manager.free(request, reason)
        self._drop(request)
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)

    def _drop(self, request: Request) -> None:
        self._end_plan()
        request.drop_cache()
        self.on_drop(request)

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
