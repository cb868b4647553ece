"""The engine: schedule, draft, run, judge, commit. One `step` moves every scheduled request on by at least a chunk.

It tells what it does through events and knows nobody who listens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from threading import RLock
from typing import NoReturn

import torch
from torch import Tensor

from minillm.cache.block_pool import BlockPool
from minillm.config import EngineConfig
from minillm.engine.commit import commit, record_logprobs, record_prompt_logprobs
from minillm.engine.judge import DeviceJudge, first_broken_row, judge
from minillm.engine.request import Request
from minillm.engine.scheduler import Scheduled, Scheduler
from minillm.errors import MinillmError, NonFiniteLogitsError, RequestTooLargeError
from minillm.models.runner import ModelRunner, Segment
from minillm.speculative.drafter import Draft, Drafter
from minillm.speculative.rejection_sampler import Verdict
from minillm.tokenizer import Tokenizer
from minillm.trace import (
    DraftProposed,
    Listeners,
    RequestAdded,
    RequestFinished,
    StepFinished,
    StepRan,
    StepStarted,
    TokenOrigin,
    TokensCommitted,
    Work,
)

NO_DRAFT = Draft([])


class Engine:
    """Requests in, tokens out: `add_request`, then `step` until `has_requests` is false.

    Several threads may call it. `lock` lets one of them in at a time, and a step moves on the requests of all.
    """

    def __init__(
        self,
        runner: ModelRunner,
        pool: BlockPool,
        config: EngineConfig,
        tokenizer: Tokenizer,
        drafter: Drafter | None = None,
        num_speculative_tokens: int = 0,
        scheduler_cls: type[Scheduler] = Scheduler,
    ) -> None:
        self.runner = runner
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.pool = pool
        self.listeners = Listeners()
        self.emit = self.listeners.tell
        self.device_judge = DeviceJudge.beside(runner)
        # What scheduler and pool are given leads to the caches and not back here: an engine that is dropped is gone.
        self.scheduler = scheduler_cls(
            pool, config, num_speculative_tokens, self.emit, partial(_copy_blocks, runner, drafter)
        )
        pool.on_free = partial(_free_blocks, runner, drafter)
        self.requests: dict[str, Request] = {}
        """Every request that has not ended, in order of arrival."""
        self.num_steps = 0
        self.lock = RLock()
        """Held while a step runs, and by whoever changes what is queued."""

    @property
    def has_requests(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.requests)

    def check_request(self, request: Request) -> None:
        """Raise `RequestTooLargeError` if the request could not run even with the pool to itself."""
        needed = self.pool.blocks_for(request.num_prompt_tokens + request.max_tokens)
        if needed > self.pool.num_blocks:
            raise RequestTooLargeError(
                f"request {request.request_id} needs {needed} blocks for {request.num_prompt_tokens} prompt tokens and "
                f"{request.max_tokens} new ones, the pool has {self.pool.num_blocks}; raise num_kv_blocks or "
                "lower max_tokens"
            )
        if request.request_id in self.requests:
            raise MinillmError(f"request id {request.request_id!r} is in use; choose another")

    def add_request(self, request: Request) -> None:
        """Queue a request; raises what `check_request` raises."""
        with self.lock:
            self.check_request(request)
            self.requests[request.request_id] = request
            self.scheduler.add(request)
            prompt_token_ids = request.token_ids[: request.num_prompt_tokens]
            self.emit(RequestAdded(request.request_id, request.prompt, prompt_token_ids, request.priority))

    def abort(self, request_id: str) -> None:
        """End a request now, whatever it is doing; unknown ids are ignored, for it may just have finished."""
        with self.lock:
            request = self.requests.get(request_id)
            if request is not None:
                request.finish_reason = "abort"
                self._finish(request)

    def step(self) -> list[Request]:
        """Run one step; returns the requests that gained tokens. If it is interrupted, every request stays whole."""
        with self.lock:
            if not self.requests:
                return []
            try:
                return self._step()
            except BaseException:
                self._recover()
                raise

    def _recover(self) -> None:
        """After a step that broke off: make every request whole, and end those that had just finished."""
        if self.runner.cache.max_rollback is not None:
            # A step that broke off may have overwritten what its requests still need: they start again.
            for request in self.requests.values():
                request.drop_cache()
        self.scheduler.recover(self.requests.values())
        for request in [request for request in self.requests.values() if request.finished]:
            self._finish(request)

    def _step(self) -> list[Request]:
        began = time.perf_counter()
        self.num_steps += 1
        self.emit(StepStarted(self.num_steps, len(self.scheduler.running), len(self.scheduler.waiting)))
        scheduled = self.scheduler.schedule()
        drafts = self._propose(scheduled)
        drafted = time.perf_counter()
        segments = [_segment(item, draft) for item, draft in zip(scheduled, drafts, strict=True)]
        logits = self.runner.run(segments)
        self.emit(StepRan(self.num_steps, [_work(i, d) for i, d in zip(scheduled, drafts, strict=True)]))
        verdicts = self._judge(scheduled, drafts, segments, logits)
        ran = time.perf_counter()
        advanced = [self._commit(item, drafts[i], verdicts[i]) for i, item in enumerate(scheduled)]
        finished = time.perf_counter()
        self.emit(StepFinished(self.num_steps, finished - began, drafted - began, ran - drafted, self.pool.num_free))
        return [request for request in advanced if request is not None]

    def _propose(self, scheduled: Sequence[Scheduled]) -> list[Draft]:
        """One draft per scheduled request; an empty one where nothing is to be guessed."""
        wanted = [i for i, item in enumerate(scheduled) if item.num_drafts]
        drafts = [NO_DRAFT] * len(scheduled)
        if self.drafter is None or not wanted:
            return drafts
        requests = [scheduled[i].request for i in wanted]
        counts = [scheduled[i].num_drafts for i in wanted]
        for i, draft in zip(wanted, self.drafter.propose(requests, counts), strict=True):
            drafts[i] = draft
            texts = [self.tokenizer.token_text(token) for token in draft.token_ids]
            self.emit(DraftProposed(scheduled[i].request.request_id, draft.token_ids, texts))
        return drafts

    def _judge(
        self, scheduled: Sequence[Scheduled], drafts: Sequence[Draft], segments: Sequence[Segment], logits: Tensor
    ) -> list[Verdict | None]:
        """What each request gains: None while its prefill is not complete.

        A request that verifies brought its last committed token and its drafts: row j judges draft j, and the row
        after the last draft is the bonus. The last token of every request that completes has a row as well.
        """
        complete = [i for i, item in enumerate(scheduled) if item.completes]
        verdicts: list[Verdict | None] = [None] * len(scheduled)
        requests, judged = [scheduled[i].request for i in complete], [drafts[i] for i in complete]
        has_prompts = any(map(_wants_prompt, scheduled))
        rows = _without_prompts(scheduled, drafts, segments, logits) if has_prompts else logits
        decide = None
        if self.device_judge is None:
            broken_row = first_broken_row(logits)
        else:
            broken_row, decide = self.device_judge.judge(requests, judged, rows, logits)
        if broken_row is not None:
            _refuse(broken_row, scheduled, segments)
        if has_prompts:
            self._record_prompts(scheduled, segments, logits)
        if not complete:
            return verdicts
        decided = judge(requests, judged, rows) if decide is None else decide()
        for i, verdict in zip(complete, decided, strict=True):
            verdicts[i] = verdict
        if any(request.params.logprobs is not None for request in requests):
            parts = rows.split([len(draft.token_ids) + 1 for draft in judged])
            for request, verdict, part in zip(requests, decided, parts, strict=True):
                record_logprobs(request, verdict, part, self.tokenizer)
        return verdicts

    def _record_prompts(self, scheduled: Sequence[Scheduled], segments: Sequence[Segment], logits: Tensor) -> None:
        """Note the log-probabilities of prompt tokens, where they were asked for."""
        parts = logits.split([segment.num_logits for segment in segments])
        for item, part in zip(scheduled, parts, strict=True):
            if _wants_prompt(item):
                record_prompt_logprobs(item, part, self.tokenizer)

    def _commit(self, item: Scheduled, draft: Draft, verdict: Verdict | None) -> Request | None:
        """Enter the outcome into the request, roll back what was rejected, end the request if it is time."""
        request = item.request
        if verdict is None:
            request.num_computed_tokens = item.start + item.num_tokens
            return None
        valid = request.num_tokens + verdict.num_accepted
        committed = commit(request, verdict)
        # Tokens first, counters second: an interrupt in between only makes a few tokens be computed again.
        request.num_computed_tokens = min(valid, request.num_tokens - 1)
        request.num_draft_computed_tokens = min(request.num_draft_computed_tokens, request.num_computed_tokens)
        self.emit(
            TokensCommitted(
                request.request_id,
                committed,
                [self.tokenizer.token_text(token) for token in committed],
                _origins(len(committed), len(draft.token_ids), verdict.num_accepted),
                len(draft.token_ids),
                verdict.num_accepted,
                request.num_computed_tokens,
            )
        )
        if request.finished:
            self._finish(request)
        else:
            self.scheduler.roll_back(request)
        return request

    def _finish(self, request: Request) -> None:
        reason = request.finish_reason
        self.scheduler.remove(request, "aborted" if reason == "abort" else "finished")
        del self.requests[request.request_id]
        if self.drafter is not None:
            self.drafter.request_finished(request)
        self.emit(RequestFinished(request.request_id, reason, request.num_prompt_tokens, request.num_output_tokens))


def _copy_blocks(runner: ModelRunner, drafter: Drafter | None, pairs: Sequence[tuple[int, int]]) -> None:
    runner.cache.copy_blocks(pairs)
    if drafter is not None:
        drafter.copy_blocks(pairs)


def _free_blocks(runner: ModelRunner, drafter: Drafter | None, block_ids: Sequence[int]) -> None:
    runner.cache.free(block_ids)
    if drafter is not None:
        drafter.free_blocks(block_ids)


def _wants_prompt(item: Scheduled) -> bool:
    """Whether the log-probabilities of the prompt tokens in this chunk were asked for."""
    return item.request.params.prompt_logprobs is not None and item.start < item.request.num_prompt_tokens


def _without_prompts(
    scheduled: Sequence[Scheduled], drafts: Sequence[Draft], segments: Sequence[Segment], logits: Tensor
) -> Tensor:
    """The rows that are to be judged."""
    parts = logits.split([segment.num_logits for segment in segments])
    kept = [
        part[-len(draft.token_ids) - 1 :]
        for item, draft, part in zip(scheduled, drafts, parts, strict=True)
        if item.completes
    ]
    return torch.cat(kept) if kept else logits[:0]


def _refuse(row: int, scheduled: Sequence[Scheduled], segments: Sequence[Segment]) -> NoReturn:
    """Raise `NonFiniteLogitsError` for the request that a broken row of logits belongs to."""
    ends = accumulate(segment.num_logits for segment in segments)
    item = next(item for item, end in zip(scheduled, ends, strict=True) if row < end)
    raise NonFiniteLogitsError(
        f"the model gave NaN or infinite logits for request {item.request.request_id} at token "
        f"{item.start + item.num_tokens}; check the checkpoint, or run it in float32"
    )


def _segment(item: Scheduled, draft: Draft) -> Segment:
    """What the request brings to the forward, and for how many of its last tokens logits are wanted."""
    request = item.request
    token_ids = [*request.token_ids[item.start : item.start + item.num_tokens], *draft.token_ids]
    num_logits = len(draft.token_ids) + 1 if item.completes else 0
    return Segment(token_ids, item.start, request.block_table, len(token_ids) if _wants_prompt(item) else num_logits)


def _work(item: Scheduled, draft: Draft) -> Work:
    kind = item.kind
    if kind == "verify" and not draft.token_ids:
        kind = "decode"
    return Work(item.request.request_id, kind, item.start, item.num_tokens + len(draft.token_ids))


def _origins(num_committed: int, num_drafts: int, num_accepted: int) -> list[TokenOrigin]:
    """Where each committed token came from; a stop may have cut the tail off."""
    last: TokenOrigin = "sampled" if not num_drafts else "bonus" if num_accepted == num_drafts else "recovered"
    return [*["accepted"] * num_accepted, last][:num_committed]
