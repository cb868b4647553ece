"""Lesson 07: five schedulers with one mistake each. The docstring of each is the mistake."""

from __future__ import annotations

from minillm.engine.scheduler import Scheduled, Scheduler
from minillm.request import Request


class Overtakes(Scheduler):
    """Admits the shortest waiting request that fits, past the head of the line."""

    def _schedule_waiting(self, scheduled: list[Scheduled], budget: int) -> None:
        for request in sorted(self.waiting, key=lambda r: r.num_tokens):
            if budget > 0 and len(self.running) < self.config.max_num_seqs:
                admitted = self._admit(request, budget)
                if admitted is not None:
                    scheduled.append(admitted)
                    budget -= admitted.num_tokens


class PromptFirst(Scheduler):
    """Gives the whole step to requests that compute their prompt; the others stand still."""

    def schedule(self) -> list[Scheduled]:
        """The mistake: decoding requests are dropped from a step with a prompt in it."""
        scheduled = super().schedule()
        prompts_only = [item for item in scheduled if item.kind == "prefill"]
        return prompts_only or scheduled


class NoRoomCheck(Scheduler):
    """Admits a request as soon as there is a block for its first token."""

    def _admit(self, request: Request, budget: int) -> Scheduled | None:
        num_tokens = min(request.num_tokens, budget, self.pool.num_free * self.pool.block_size)
        if not num_tokens or not self.kv_cache_manager.allocate_slots(request, 0, num_tokens):
            return None
        self.running.append(request)
        self.waiting.remove(request)
        return Scheduled(request, 0, num_tokens)


class PreemptsFirst(Scheduler):
    """Preempts the request that came first."""

    def rank(self, request: Request) -> tuple[int, int]:
        """The mistake: among equals, the last to come is the most urgent."""
        return (request.priority, -request.arrival)

    def add(self, request: Request) -> None:
        """The queue stays in order of arrival."""
        super().add(request)
        self.waiting.sort(key=lambda r: r.arrival)


class KeepsCounter(Scheduler):
    """Preempts a request, but keeps counting its lost tokens as computed."""

    def _preempt(self, request: Request) -> None:
        computed = request.num_computed_tokens
        super()._preempt(request)
        request.num_computed_tokens = computed - computed % self.pool.block_size

    def _admit(self, request: Request, budget: int) -> Scheduled | None:
        if not request.num_computed_tokens:
            return super()._admit(request, budget)
        if not self.kv_cache_manager.allocate_slots(request, 0, request.num_tokens):
            return None
        self.running.append(request)
        self.waiting.remove(request)
        return Scheduled(request, request.num_computed_tokens, request.num_tokens - request.num_computed_tokens)


BROKEN = (Overtakes, PromptFirst, NoRoomCheck, PreemptsFirst, KeepsCounter)
