"""Who runs in the next step, with how many tokens, and who must wait.

One token budget per step is shared by decoding, verification and prefill. Requests that run come first, the most
urgent of them before the others, and each is left at least one token; what remains of the budget goes to those who
wait. When the pool runs dry, the least urgent running request loses its blocks and is recomputed later; drafts never
cost another request its place.

Nobody writes into a block that others read: whoever is about to gets a copy of its own first.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from minillm.cache.block_pool import BlockPool
from minillm.config import EngineConfig
from minillm.engine.request import Request
from minillm.trace import (
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksEvicted,
    BlocksFreed,
    BlocksShared,
    Event,
    RequestPreempted,
    WorkKind,
)


@dataclass(slots=True)
class Scheduled:
    """One request's share of a step: committed tokens `start … start + num_tokens - 1`, then drafts.

    `start` is the request's first uncomputed token, except that a request whose first blocks were shared with it in
    this step starts behind them: they count as computed only when the step has run.
    """

    request: Request
    start: int
    num_tokens: int
    num_drafts: int = 0
    """Drafts that fit; the drafter may propose fewer."""

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


@dataclass(frozen=True)
class Found:
    """Blocks that hold the first `num_tokens` tokens of a request already."""

    block_ids: list[int]
    num_tokens: int
    source: str
    num_draft_tokens: int = 0
    """Of these, so many are in the draft's pool as well."""


NOTHING = Found([], 0, "prefix")


class Scheduler:
    """Two queues and the block pool. `LLM(scheduler_cls=...)` puts a subclass in its place."""

    def __init__(
        self,
        pool: BlockPool,
        config: EngineConfig,
        num_speculative_tokens: int,
        emit: Callable[[Event], None],
        copy_blocks: Callable[[Sequence[tuple[int, int]]], None],
    ) -> None:
        self.pool = pool
        self.config = config
        self.num_speculative_tokens = num_speculative_tokens
        self.disable_by_batch_size: int | None = None
        """With more requests than this, running and waiting, nobody drafts; None: everybody always may."""
        self.emit = emit
        self.copy_blocks = copy_blocks
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        """The most urgent first."""
        self._arrivals = count()
        pool.on_evict = lambda block_ids: emit(BlocksEvicted(list(block_ids)))

    def rank(self, request: Request) -> tuple[int, int]:
        """What requests are ordered by; the lowest is the most urgent."""
        return (request.priority if self.config.scheduling_policy == "priority" else 0, request.arrival)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        request.arrival = next(self._arrivals)
        insort(self.waiting, request, key=self.rank)

    def schedule(self) -> list[Scheduled]:
        """Choose the work of the next step and give every chosen request the blocks it needs for it."""
        scheduled, budget, preempted = self._schedule_running()
        if not preempted:
            self._schedule_waiting(scheduled, budget)
        return scheduled

    def _schedule_running(self) -> tuple[list[Scheduled], int, bool]:
        scheduled: list[Scheduled] = []
        budget, preempted = self.config.max_num_batched_tokens, False
        queue = sorted(self.running, key=self.rank)
        while queue:
            request = queue.pop(0)
            # Every running request behind this one is left at least one token of the budget.
            spare = budget - len(queue)
            num_tokens = min(self._chunk(request.num_new_tokens), spare)
            start = request.num_computed_tokens
            while not self._extend(request, start, num_tokens):
                victim = queue.pop() if queue else request
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                wanted = self._drafts_wanted(request, spare - num_tokens)
                scheduled.append(Scheduled(request, start, num_tokens, wanted))
                budget -= num_tokens + wanted
        # Blocks for drafts come from what is left when everybody has those for committed tokens.
        for item in scheduled:
            num_drafts = self._drafts_that_fit(item)
            budget += item.num_drafts - num_drafts
            item.num_drafts = num_drafts
        return scheduled, budget, preempted

    def _schedule_waiting(self, scheduled: list[Scheduled], budget: int) -> None:
        for request in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.config.max_num_seqs:
                break
            if self._waits_for_fork(request):
                continue
            admitted = self._admit(request, budget)
            if admitted is None:  # nobody overtakes, or a long prompt might wait forever
                break
            scheduled.append(admitted)
            budget -= admitted.num_tokens

    def _admit(self, request: Request, budget: int) -> Scheduled | None:
        """Let a waiting request run, if there is room for all its tokens: else it would soon be preempted again."""
        found = self._find_blocks(request)
        left = request.num_tokens - found.num_tokens
        num_tokens = min(self._chunk(left), budget)
        if num_tokens < left and not self.config.enable_chunked_prefill:
            return None
        cached = sum(not self.pool.ref_count(block_id) for block_id in found.block_ids)
        copies = len(found.block_ids) - found.num_tokens // self.pool.block_size
        needed = self.pool.blocks_for(request.num_tokens) - len(found.block_ids) + copies
        if needed > self.pool.num_free - cached:
            return None
        if found.block_ids:
            self.pool.share(found.block_ids)
            request.block_table += found.block_ids
            request.num_draft_computed_tokens = found.num_draft_tokens
            self.emit(BlocksShared(request.request_id, found.block_ids, found.num_tokens, found.source))
        if not self._extend(request, found.num_tokens, num_tokens):
            return None
        self.running.append(request)
        self.waiting.remove(request)
        return Scheduled(request, found.num_tokens, num_tokens)

    def _waits_for_fork(self, request: Request) -> bool:
        """Whether the blocks that this request is to share are still being filled."""
        parent = request.fork_of
        return parent is not None and not parent.finished and parent.num_computed_tokens < parent.num_prompt_tokens

    def _find_blocks(self, request: Request) -> Found:
        """What need not be computed for a waiting request. Its last token always is: its logits are wanted."""
        parent = request.fork_of
        if parent is not None and not parent.finished and not request.num_output_tokens:
            shared = self.pool.blocks_for(request.num_prompt_tokens)
            start = request.num_prompt_tokens - 1
            return Found(parent.block_table[:shared], start, "fork", min(parent.num_draft_computed_tokens, start))
        if not self.config.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return NOTHING
        found: list[int] = []
        names = request.block_names(self.pool.block_size)
        for name in names[: (request.num_tokens - 1) // self.pool.block_size]:
            block_id = self.pool.find(name)
            if block_id is None:
                break
            found.append(block_id)
        return Found(found, len(found) * self.pool.block_size, "prefix")

    def _chunk(self, num_tokens: int) -> int:
        """So many tokens of one request at most go into one step."""
        return min(num_tokens, self.config.long_prefill_token_threshold or num_tokens)

    def _drafts_wanted(self, request: Request, spare_tokens: int) -> int:
        """As many drafts as may be kept and find room in the budget."""
        if not self.num_speculative_tokens or not request.is_decoding:
            return 0
        limit = self.disable_by_batch_size
        if limit is not None and len(self.running) + len(self.waiting) > limit:
            return 0
        # The target adds a token of its own to every round, so the last token never needs a draft.
        return min(self.num_speculative_tokens, request.num_remaining_tokens - 1, spare_tokens)

    def _drafts_that_fit(self, item: Scheduled) -> int:
        """As many of the wanted drafts as find room in blocks that are free without a fight."""
        for num_drafts in range(item.num_drafts, 0, -1):
            if self._extend(item.request, item.start, item.num_tokens + num_drafts):
                return num_drafts
        return 0

    def _extend(self, request: Request, start: int, num_tokens: int) -> bool:
        """Give `request` blocks of its own for tokens `start … start + num_tokens - 1`.

        Missing blocks are appended, shared ones copied. False, and no change, if the pool has too few. Full blocks of
        committed tokens can be found by others from now on, in this very step: all keys are stored before any is read.
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
        self._name_full_blocks(request, start, min(end, request.num_tokens))
        return True

    def _copy_on_write(self, request: Request, index: int, target: int) -> None:
        source = request.block_table[index]
        self.copy_blocks([(source, target)])  # first the contents: an interrupt after this line loses nothing
        request.block_table[index] = target
        self.pool.free([source])
        self.emit(BlockCopied(request.request_id, source, target))

    def _name_full_blocks(self, request: Request, start: int, end: int) -> None:
        """Make the blocks that are full once tokens `start … end - 1` are computed findable by their contents."""
        size = self.pool.block_size
        full = range(start // size, end // size)
        if not (full and self.config.enable_prefix_caching):
            return
        names = request.block_names(size)
        named = [request.block_table[i] for i in full if self.pool.name(request.block_table[i], names[i])]
        if named:
            self.emit(BlocksCached(request.request_id, named))

    def _preempt(self, request: Request) -> None:
        """Take everything from `request` and let it wait in its old place in line."""
        self.emit(RequestPreempted(request.request_id, request.num_computed_tokens))
        self._free(request, 0, "preempted")
        request.drop_cache()
        insort(self.waiting, request, key=self.rank)
        self.running.remove(request)

    def roll_back(self, request: Request) -> None:
        """Free whole tail blocks that hold nothing but void tokens; the next token's block stays."""
        self._free(request, self.pool.blocks_for(request.num_computed_tokens + 1), "rolled_back")

    def remove(self, request: Request, reason: str) -> None:
        """Free a request's blocks and forget it; what it computed can be found by those who come after."""
        self._name_full_blocks(request, 0, request.num_computed_tokens)
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
        alive.sort(key=self.rank)
        # Who has computed nothing begins anew: its table may hold others' blocks that it has not copied yet.
        self.running = [request for request in alive if request.block_table and request.num_computed_tokens]
        self.waiting = [request for request in alive if request not in self.running]
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
