"""`of_vllm`: watch a real vLLM. Its scheduler's decisions become this project's events, so every picture draws them.

    with of_vllm(llm) as trace:
        llm.generate(prompts, params)
    CachePagesView(trace)

vLLM's scheduler is asked before and after each of its own calls: which requests it knows, the block table of each, how
many tokens it schedules, which drafts it verifies, how many tokens come back. Nothing in vLLM is changed but four
methods of this one scheduler, and they are restored at the end of the block.

What vLLM does differently, and the pictures then show: block 0 is never used; blocks behind rejected drafts are kept
instead of freed; drafting is a part of the model's step, so `draft_seconds` is 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from minillm.errors import UnsupportedError
from minillm.trace.events import (
    BlocksAllocated,
    BlocksCached,
    BlocksEvicted,
    BlocksFreed,
    BlocksShared,
    DraftProposed,
    EngineStarted,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    StepFinished,
    StepRan,
    StepStarted,
    TokensCommitted,
    Trace,
    Work,
    WorkKind,
    token_origins,
)

NUM_RANDOM = 8
"""vLLM adds a dash and this many random characters to each request id."""
REASONS = {"stop": "stop", "length": "length", "repetition": "stop"}
"""vLLM's finish reasons that are not an abort, in minillm's words."""
WRAPPED = ("add_request", "schedule", "update_from_output", "finish_requests")
"""The scheduler's methods that `_Recorder` replaces."""


@contextmanager
def of_vllm(llm: Any) -> Iterator[Trace]:
    """Record what the scheduler of `llm`, a `vllm.LLM`, does inside the `with` block. Written for vLLM 0.32.

    The engine must run in this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`), schedule one step at a time
    (`LLM(..., async_scheduling=False)`), and be idle. Raises `UnsupportedError` if it does not.
    """
    scheduler = _scheduler_of(llm)
    started = _engine_started(scheduler)
    trace = Trace([started])
    recorder = _Recorder(scheduler, llm.get_tokenizer(), trace, started.cached_blocks)
    for name in WRAPPED:
        setattr(scheduler, name, getattr(recorder, name))
    try:
        yield trace
    finally:
        for name in WRAPPED:
            delattr(scheduler, name)  # the class's own method shows again


@dataclass
class _Known:
    """What has been told about one request."""

    request: Any
    """vLLM's request."""
    name: str
    table: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Tokens in the cache before this step; vLLM itself forgets it when it preempts."""


class _Recorder:
    """Calls the scheduler's own methods and tells what they changed."""

    def __init__(self, scheduler: Any, tokenizer: Any, trace: Trace, cached: Sequence[int] = ()) -> None:
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.tell = trace.append
        self.manager = scheduler.kv_cache_manager
        self.blocks: Sequence[Any] = scheduler.kv_cache_manager.block_pool.blocks
        self.known: dict[str, _Known] = {}
        self.cached = set(cached)
        """Blocks that were told to be in the prefix cache."""
        self.num_steps = 0
        self.began = self.scheduled = 0.0
        self._own: dict[str, Callable[..., Any]] = {name: getattr(scheduler, name) for name in WRAPPED}

    def add_request(self, request: Any) -> None:
        """A request joins the waiting queue."""
        self._own["add_request"](request)
        known = self.known[request.request_id] = _Known(request, _name(request.request_id))
        ids = list(request.prompt_token_ids)
        self.tell(RequestAdded(known.name, self.tokenizer.decode(ids), ids, request.priority))

    def schedule(self, *args: Any, **options: Any) -> Any:
        """The first half of a step: who runs, with which blocks."""
        self.began = time.perf_counter()
        before = len(self.scheduler.running), len(self.scheduler.waiting)
        for known in self.known.values():
            known.num_computed = known.request.num_computed_tokens
        output = self._own["schedule"](*args, **options)
        self.scheduled = time.perf_counter()
        if not output.num_scheduled_tokens:
            return output
        self.num_steps += 1
        self.tell(StepStarted(self.num_steps, *before))
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        again = output.scheduled_cached_reqs
        starts |= dict(zip(again.req_ids, again.num_computed_tokens, strict=True))
        for request_id, known in self.known.items():
            self._tell_preemption(known, resumed=request_id in again.resumed_req_ids)
        for request_id in output.num_scheduled_tokens:
            self._tell_blocks(self.known[request_id], starts[request_id])
        work = []
        for request_id, count in output.num_scheduled_tokens.items():
            known, drafts = self.known[request_id], output.scheduled_spec_decode_tokens.get(request_id) or []
            if drafts:
                texts = [self.tokenizer.decode([token]) for token in drafts]
                self.tell(DraftProposed(known.name, list(drafts), texts))
            work.append(
                Work(known.name, _kind(known.request, starts[request_id], count, drafts), starts[request_id], count)
            )
        self.tell(StepRan(self.num_steps, work))
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """The second half: which tokens came back, and who has ended."""
        arrived = time.perf_counter()
        ran = scheduler_output.num_scheduled_tokens
        advanced = [(self.known[i], self.known[i].request.num_tokens) for i in ran if i in self.known]
        found, index = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        # Counted now, because the scheduler cuts off the tokens behind a stop.
        sampled = {known.name: len(found[index[known.request.request_id]]) if found else 0 for known, _ in advanced}
        result = self._own["update_from_output"](scheduler_output, model_runner_output)
        if not ran:
            return result
        for known, length in advanced:
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(known.request.request_id) or []
            self._tell_tokens(known, length, len(drafts), sampled[known.name])
            self._tell_end(known)
        num_free = self.manager.block_pool.get_num_free_blocks()
        seconds = time.perf_counter() - self.began
        self.tell(StepFinished(self.num_steps, seconds, 0.0, arrived - self.scheduled, num_free))
        return result

    def finish_requests(self, *args: Any, **options: Any) -> Any:
        """Requests are aborted from outside, or ended by a stop string, which vLLM finds outside its scheduler."""
        result = self._own["finish_requests"](*args, **options)
        for known in list(self.known.values()):
            self._tell_end(known)
        return result

    def _tell_preemption(self, known: _Known, resumed: bool) -> None:
        """Tell that a request has lost its blocks, and perhaps got others in the same step."""
        if known.table and (resumed or not self._table(known)):
            self.tell(RequestPreempted(known.name, known.num_computed))
            self.tell(BlocksFreed(known.name, known.table, "preempted"))
            known.table = []

    def _tell_blocks(self, known: _Known, num_computed: int) -> None:
        """Tell which blocks were added to a request's table, and which of them are in the prefix cache."""
        table = self._table(known)
        if not known.table and num_computed:
            shared = table[: -(-num_computed // self.scheduler.block_size)]
            self.tell(BlocksShared(known.name, shared, num_computed, "prefix"))
            self.cached.update(shared)
            known.table = shared
        new = table[len(known.table) :]
        if evicted := [block for block in new if block in self.cached]:
            self.tell(BlocksEvicted(evicted))
            self.cached.difference_update(evicted)
        if new:
            self.tell(BlocksAllocated(known.name, new))
        known.table = table
        hashed = [b for b in table if b not in self.cached and self.blocks[b].block_hash is not None]
        if hashed:
            self.tell(BlocksCached(known.name, hashed))
            self.cached.update(hashed)

    def _tell_tokens(self, known: _Known, before: int, num_drafts: int, num_sampled: int) -> None:
        request = known.request
        committed = list(request.all_token_ids[before:])
        if not committed:
            return  # a chunk of a prompt
        num_accepted = num_sampled - 1 if num_drafts else 0
        origins = token_origins(len(committed), num_drafts, num_accepted, num_accepted == num_drafts)
        num_computed = min(request.num_computed_tokens, request.num_tokens - 1)
        texts = [self.tokenizer.decode([token]) for token in committed]
        self.tell(TokensCommitted(known.name, committed, texts, origins, num_drafts, num_accepted, num_computed))

    def _tell_end(self, known: _Known) -> None:
        """Tell that a request has ended, if it has and that has not been told."""
        request = known.request
        if not request.is_finished() or self.known.pop(request.request_id, None) is None:
            return
        reason = REASONS.get(str(request.get_finished_reason()), "abort")
        if known.table:
            self.tell(BlocksFreed(known.name, known.table, "aborted" if reason == "abort" else "finished"))
        self.tell(RequestFinished(known.name, reason, request.num_prompt_tokens, request.num_output_tokens))

    def _table(self, known: _Known) -> list[int]:
        [table] = self.manager.get_block_ids(known.request.request_id)
        return list(table)


def _scheduler_of(llm: Any) -> Any:
    """The scheduler of a vLLM. Raises `UnsupportedError` if it cannot be watched."""
    core = getattr(getattr(getattr(llm, "llm_engine", None), "engine_core", None), "engine_core", None)
    scheduler = getattr(core, "scheduler", None)
    if scheduler is None:
        raise UnsupportedError(
            f"{type(llm).__name__} has no vLLM scheduler in this process; give a vllm.LLM made with the environment "
            "variable VLLM_ENABLE_V1_MULTIPROCESSING=0"
        )
    if scheduler.vllm_config.scheduler_config.async_scheduling:
        raise UnsupportedError("vLLM schedules steps ahead of their results; make it with async_scheduling=False")
    num_groups = len(scheduler.kv_cache_config.kv_cache_groups)
    if num_groups != 1:
        raise UnsupportedError(
            f"the model has {num_groups} groups of layers with caches of their own; only one is drawn"
        )
    if scheduler.has_requests():
        raise UnsupportedError("vLLM has unfinished requests; enter the block before they are added")
    return scheduler


def _engine_started(scheduler: Any) -> EngineStarted:
    config = scheduler.vllm_config
    speculative = config.speculative_config
    [group] = scheduler.kv_cache_config.kv_cache_groups
    pool = scheduler.kv_cache_manager.block_pool
    draft = getattr(speculative, "draft_model_config", None) if speculative and speculative.uses_draft_model() else None
    return EngineStarted(
        model=config.model_config.model,
        draft_model=draft.model if draft else None,
        block_size=scheduler.block_size,
        num_blocks=pool.num_gpu_blocks,
        bytes_per_block=group.kv_cache_spec.page_size_bytes * len(group.layer_names),
        num_speculative_tokens=speculative.num_speculative_tokens if speculative else 0,
        prefix_caching=bool(config.cache_config.enable_prefix_caching),
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        speculative_method=speculative.method if speculative else None,
        cached_blocks=[i for i, block in enumerate(pool.blocks) if block.block_hash is not None],
        whole_sequences=False,
    )


def _kind(request: Any, start: int, count: int, drafts: Sequence[int]) -> WorkKind:
    if drafts:
        return "verify"
    return "decode" if count == 1 and request.num_output_tokens and start == request.num_tokens - 1 else "prefill"


def _name(request_id: str) -> str:
    """minillm's name for a request of vLLM: `7-1a2b3c4d` is `7`, and `1_7-1a2b3c4d`, its second completion, `7#1`."""
    name = request_id
    if len(name) > NUM_RANDOM and name[-NUM_RANDOM - 1] == "-":
        name = name[: -NUM_RANDOM - 1]
    index, _, parent = name.partition("_")
    return f"{parent}#{index}" if parent and index.isdecimal() else name
