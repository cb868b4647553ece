"""The engine: schedule, draft, run, judge, commit. One `step` advances every scheduled request by at least a chunk.

It reports what it does as events (`minillm.trace`) and does not depend on who listens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from threading import Lock, RLock

from torch import Tensor

from minillm.cache.block_pool import BlockPool
from minillm.config import EngineArgs
from minillm.engine.commit import commit, commit_again, record_logprobs, record_prompt_logprobs
from minillm.engine.judge import BrokenRowError, DeviceJudge, HostJudge
from minillm.engine.scheduler import Scheduled, Scheduler
from minillm.engine.step_rows import StepRows
from minillm.errors import DraftError, MinillmError, NonFiniteLogitsError, RequestTooLargeError, UnsupportedError
from minillm.ops.transfer import indices_on_device
from minillm.request import Request
from minillm.runtime.runner import ModelRunner
from minillm.speculative.draft_policy import DraftPolicy
from minillm.speculative.drafter import NO_DRAFT, Draft, Drafter, checked_drafts
from minillm.speculative.rejection_sampler import EXACT, Rule, Verdict, check_tree
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
    token_origins,
)


class Engine:
    """Requests in, tokens out: `add_request`, then `step` until `has_requests` is false.

    Several threads may call it: `lock` serialises them, and a step advances the requests of all.
    """

    def __init__(
        self,
        runner: ModelRunner,
        pool: BlockPool,
        config: EngineArgs,
        tokenizer: Tokenizer,
        drafter: Drafter | None = None,
        draft_policy: DraftPolicy | None = None,
        scheduler_cls: type[Scheduler] = Scheduler,
        accept_rule: Rule = EXACT,
    ) -> None:
        self.runner = runner
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.pool = pool
        self.listeners = Listeners()
        self.emit = self.listeners.emit
        device_judge = DeviceJudge.for_runner(runner) if accept_rule is EXACT else None
        self.judge = device_judge or HostJudge(accept_rule)
        # Scheduler and pool get references to the caches, not to the engine: without a cycle, an engine that is no
        # longer used is freed at once.
        self.scheduler = scheduler_cls(pool, config, draft_policy, self.emit, partial(_copy_blocks, runner, drafter))
        pool.on_free = partial(_free_blocks, runner, drafter)
        if drafter is not None:
            self.scheduler.on_drop = drafter.request_dropped
        self.requests: dict[str, Request] = {}
        """Every unfinished request, in order of arrival."""
        self.num_steps = 0
        self.lock = RLock()
        """Held while a step runs and while requests are queued or aborted."""
        self._in_step = Lock()
        """Held while a step runs: a listener may call the engine from inside one."""
        self._to_abort: list[str] = []
        """What listeners want to end after this step."""
        self._is_damaged = False
        """Whether a step or an abort was interrupted, and what it left is not repaired yet."""

    @property
    def has_requests(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.requests)

    def check_fits(self, request: Request) -> None:
        """Raise `RequestTooLargeError` if the request needs more blocks than the whole pool has."""
        # The last token of the output is never computed.
        needed = self.pool.blocks_for(request.num_prompt_tokens + request.max_tokens - 1)
        if needed > self.pool.num_blocks:
            raise RequestTooLargeError(
                f"request {request.request_id} needs {needed} blocks for {request.num_prompt_tokens} prompt tokens and "
                f"{request.max_tokens} new ones, the pool has {self.pool.num_blocks}; lower max_tokens, or "
                "raise num_kv_blocks or kv_cache_memory_bytes"
            )

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises what `check_fits` raises, or `MinillmError` if the request's id is in use."""
        with self.lock:
            self.check_fits(request)
            if request.request_id in self.requests:
                raise MinillmError(f"request id {request.request_id!r} is in use; choose another")
            self.requests[request.request_id] = request
            self.scheduler.add(request)
            prompt_token_ids = request.token_ids[: request.num_prompt_tokens]
            self.emit(RequestAdded(request.request_id, request.prompt, prompt_token_ids, request.priority))

    def abort(self, request_id: str) -> None:
        """End a request now, or if a listener asks during a step, after it. Unknown ids are ignored, because the
        request may just have finished."""
        with self.lock:
            if self._in_step.locked():
                self._to_abort.append(request_id)
                return
            request = self.requests.get(request_id)
            if request is not None:
                request.finish_reason = "abort"
                try:
                    self._repair()
                    self._finish(request)
                except BaseException:
                    self._recover()
                    raise

    def step(self) -> list[Request]:
        """Run one step; returns the requests that gained tokens. If it is interrupted, every request stays valid.

        Raises `MinillmError` if a listener calls it during a step."""
        with self.lock:
            if self._in_step.locked():
                raise MinillmError("a listener cannot run steps during a step; let it note what to do after the step")
            if not self.requests:
                return []
            try:
                with self._in_step:
                    self._repair()
                    advanced = self._step()
            except BaseException:
                self._recover()
                self._abort_noted()
                raise
            self._abort_noted()
            return advanced

    def _abort_noted(self) -> None:
        while self._to_abort:
            self.abort(self._to_abort.pop())

    def _repair(self) -> None:
        """Recover once more if the last recovery was interrupted, too."""
        if self._is_damaged:
            self._recover()

    def _recover(self) -> None:
        """After an interrupted step: make every request valid again, and end those that had just finished."""
        self._is_damaged = True
        for request in self.requests.values():
            commit_again(request)
        if self.runner.cache.max_rollback is not None:
            # The step may have overwritten keys and values that its requests still need: compute them again.
            for request in self.requests.values():
                request.num_computed_tokens = 0
        self.scheduler.recover(self.requests.values())
        for request in [request for request in self.requests.values() if request.finished]:
            self._finish(request)
        self._is_damaged = False

    def _step(self) -> list[Request]:
        began = time.perf_counter()
        self.num_steps += 1
        self.emit(StepStarted(self.num_steps, len(self.scheduler.running), len(self.scheduler.waiting)))
        scheduled = self.scheduler.schedule()
        planned = time.perf_counter()
        if not scheduled:  # as in vLLM, a scheduler may let a step pass
            self.emit(StepFinished(self.num_steps, planned - began, 0.0, 0.0, self.pool.num_free))
            return []
        self._propose(scheduled)
        drafted = time.perf_counter()
        logits, hidden = self._run(scheduled)
        work = [_work(item) for item in scheduled]
        self.emit(StepRan(self.num_steps, work))
        verdicts = self._judge(scheduled, logits)
        ran = time.perf_counter()
        last_rows = StepRows(scheduled, logits).of_last_tokens(verdicts) if hidden is not None else []
        advanced = [self._commit(item, verdict) for item, verdict in zip(scheduled, verdicts, strict=True)]
        if hidden is not None:
            self._pass_hidden_to_drafter(last_rows, advanced, hidden)
        finished = time.perf_counter()
        if self.scheduler.asked_policy and all(part.kind != "prefill" for part in work):
            _tell_duration(self.scheduler.draft_policy, scheduled, finished - began)
        self.emit(StepFinished(self.num_steps, finished - began, drafted - planned, ran - drafted, self.pool.num_free))
        return [request for request in advanced if request is not None]

    def _propose(self, scheduled: Sequence[Scheduled]) -> None:
        """Give each scheduled request that may have one its draft."""
        wanted = [item for item in scheduled if item.num_drafts]
        if self.drafter is None or not wanted:
            return
        num_drafts = [item.num_drafts for item in wanted]
        drafts = checked_drafts(self.drafter, [item.request for item in wanted], num_drafts)
        for item, draft in zip(wanted, drafts, strict=True):
            self._check_draft(draft)
            item.draft = draft
            texts = [self.tokenizer.token_text(token) for token in draft.token_ids]
            self.emit(DraftProposed(item.request.request_id, draft.token_ids, texts, draft.parents))

    def _run(self, scheduled: Sequence[Scheduled]) -> tuple[Tensor, Tensor | None]:
        """Run the forward and return its logits, and the hidden states of the same rows if the drafter needs them. A
        drafter that observes queries gets those of the prompts that this step completes."""
        segments = [item.segment for item in scheduled]
        if self.drafter is None:
            return self.runner.run(segments), None
        observed, needs_hidden = self._observed_rows(scheduled), self._drafter_needs_hidden(scheduled)
        if not (observed or needs_hidden):
            return self.runner.run(segments), None
        step = self.runner.run_observed(segments, [row for _, rows in observed for row in rows])
        queries = step.queries.split([len(rows) for _, rows in observed], dim=1)
        for (request, _), its_queries in zip(observed, queries, strict=True):
            self.drafter.observe(request, its_queries)
        return step.logits, step.hidden if needs_hidden else None

    def _observed_rows(self, scheduled: Sequence[Scheduled]) -> list[tuple[Request, range]]:
        """The rows of the step whose queries the drafter observes: the last ones of each prompt that is completed."""
        num_observed = self.drafter.num_observed_queries
        if not num_observed:
            return []
        ends = accumulate(item.num_rows for item in scheduled)
        return [
            (item.request, range(end - min(num_observed, item.num_tokens), end))
            for item, end in zip(scheduled, ends, strict=True)
            if item.completes and item.kind == "prefill"
        ]

    def _drafter_needs_hidden(self, scheduled: Sequence[Scheduled]) -> bool:
        """Whether the drafter observes the hidden states of this step."""
        policy = self.scheduler.draft_policy
        if policy is None:  # then nothing is drafted
            return False
        return self.drafter.observes_hidden and policy.may_draft_next([item.request for item in scheduled])

    def _pass_hidden_to_drafter(self, rows: Sequence[int], advanced: Sequence[Request | None], hidden: Tensor) -> None:
        """Call `observe_hidden` for the requests that have gained tokens and go on. `rows`: `StepRows.of_last_tokens`,
        in the order of the requests in `advanced`."""
        gained = zip([request for request in advanced if request is not None], rows, strict=True)
        going_on = [(request, row) for request, row in gained if not request.finished]
        if going_on:
            chosen = indices_on_device([row for _, row in going_on], hidden.device)
            self.drafter.observe_hidden([request for request, _ in going_on], hidden.index_select(0, chosen))

    def _check_draft(self, draft: Draft) -> None:
        """Raise `DraftError` for a token outside the vocabulary, or parents that form no tree; `UnsupportedError` for a
        tree that cannot be verified here."""
        model = self.runner.model.config
        for token in draft.token_ids:
            if not 0 <= token < model.vocab_size:
                raise DraftError(
                    f"{type(self.drafter).__name__} drafted token {token}; the model's tokens are 0 to "
                    f"{model.vocab_size - 1}"
                )
        if draft.parents is None:
            return
        if model.has_windows:
            raise UnsupportedError(
                f"{type(self.drafter).__name__} drafted a tree, which is not verified in a model with a sliding "
                "window; draft a chain"
            )
        if not self.runner.cache.supports_trees:
            raise UnsupportedError(
                f"{type(self.drafter).__name__} drafted a tree, which {type(self.runner.cache).__name__} cannot "
                "verify; use cache layout 'paged'"
            )
        check_tree(draft.token_ids, draft.parents)

    def _judge(self, scheduled: Sequence[Scheduled], logits: Tensor) -> list[Verdict | None]:
        """What each request gains: None while its prefill is not complete."""
        rows = StepRows(scheduled, logits)
        complete = [item for item in scheduled if item.completes]
        try:
            decided = self.judge.judge(
                [item.request for item in complete], [item.draft for item in complete], rows.judged, logits
            )
        except BrokenRowError as broken:
            item, number = rows.owner(broken.row)
            raise NonFiniteLogitsError(
                f"the model gave NaN or infinite logits for request {item.request.request_id} at token "
                f"{number}; check the checkpoint, or run it in float32",
                item.request.request_id,
            ) from None
        in_order = iter(decided)
        verdicts = [next(in_order) if item.completes else None for item in scheduled]
        if any(item.wants_logprobs for item in scheduled):
            for item, verdict, part in zip(scheduled, verdicts, rows.by_request, strict=True):
                record_prompt_logprobs(item, part, self.tokenizer)
                record_logprobs(item, verdict, part, self.tokenizer)
        return verdicts

    def _commit(self, item: Scheduled, verdict: Verdict | None) -> Request | None:
        """Append the accepted tokens to the request, roll back the rejected ones, end the request if it is done."""
        request, draft = item.request, item.draft
        if verdict is None:
            request.num_computed_tokens = item.start + item.num_tokens
            return None
        valid = request.num_tokens + verdict.num_accepted
        if verdict.path:
            self._keep_path(request, verdict.path)
        committed = commit(request, verdict)
        # Tokens first, counters second: after an interrupt in between, a few tokens are computed again.
        request.num_computed_tokens = min(valid, request.num_tokens - 1)
        self.emit(
            TokensCommitted(
                request.request_id,
                committed,
                [self.tokenizer.token_text(token) for token in committed],
                _origins(len(committed), draft, verdict),
                len(draft.token_ids),
                verdict.num_accepted,
                request.num_computed_tokens,
                verdict.path if draft.parents is not None else None,
            )
        )
        if draft is not NO_DRAFT:
            self.scheduler.draft_policy.judged(request, item.num_drafts, len(draft.token_ids), verdict.num_accepted)
        if draft.token_ids:
            self.drafter.judged(request, draft, verdict)
        if request.finished:
            self._finish(request)
        else:
            self.scheduler.roll_back(request, item.start)
        return request

    def _keep_path(self, request: Request, path: Sequence[int]) -> None:
        """Move keys and values of the accepted nodes of a tree to consecutive slots, those of the committed tokens."""
        first, size, table = request.num_tokens, self.pool.block_size, request.block_table
        moves = [(first + node, first + i) for i, node in enumerate(path) if node != i]
        if moves:
            slots = [[table[at // size] * size + at % size for at in column] for column in zip(*moves, strict=True)]
            self.runner.cache.move_tokens(*slots)

    def _finish(self, request: Request) -> None:
        reason = request.finish_reason
        self.scheduler.remove(request, "aborted" if reason == "abort" else "finished")
        try:
            if self.drafter is not None:
                self.drafter.request_finished(request)
        finally:
            # Whatever stops the drafter, the request has ended, and the listeners are told. An interrupt from here on
            # may keep them from it: only `requests` says for certain who runs.
            del self.requests[request.request_id]
            self.emit(RequestFinished(request.request_id, reason, request.num_prompt_tokens, request.num_output_tokens))


def _copy_blocks(runner: ModelRunner, drafter: Drafter | None, pairs: Sequence[tuple[int, int]]) -> None:
    runner.copy_blocks(pairs)
    if drafter is not None:
        drafter.copy_blocks(pairs)


def _free_blocks(runner: ModelRunner, drafter: Drafter | None, block_ids: Sequence[int]) -> None:
    runner.cache.free(block_ids)
    if drafter is not None:
        drafter.free_blocks(block_ids)


def _work(item: Scheduled) -> Work:
    return Work(item.request.request_id, item.kind, item.start, item.num_rows)


def _tell_duration(policy: DraftPolicy, scheduled: Sequence[Scheduled], seconds: float) -> None:
    """Tell the policy how long a step took, unless drafts were asked for, and `NO_DRAFT` was all that there was."""
    drafts = {item.request: len(item.draft.token_ids) for item in scheduled if item.draft is not NO_DRAFT}
    if drafts or not any(item.num_drafts for item in scheduled):
        num_context = sum(item.start for item in scheduled)
        policy.step_finished(drafts, sum(item.num_rows for item in scheduled), num_context, seconds)


def _origins(num_committed: int, draft: Draft, verdict: Verdict) -> list[TokenOrigin]:
    """See `token_origins`."""
    num_drafts, parents = len(draft.token_ids), draft.parents
    end = verdict.path[-1] if verdict.path else -1
    ends_at_leaf = verdict.num_accepted == num_drafts if parents is None else end not in parents
    return token_origins(num_committed, num_drafts, verdict.num_accepted, ends_at_leaf)
