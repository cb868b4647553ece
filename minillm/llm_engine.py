"""`LLMEngine`: add requests, run steps, collect outputs. For servers and custom loops; `LLM` is built on it.

The names are vLLM's: `LLMEngine.from_engine_args(EngineArgs(model=...))`, `add_request`, `step`, `abort_request`.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain

from minillm.config import CacheConfig, EngineArgs, refuses_unknown
from minillm.engine.assembly import assemble
from minillm.engine.engine import Engine
from minillm.errors import MinillmError, NonFiniteLogitsError
from minillm.input_processor import InputProcessor, Prompt
from minillm.outputs import CompletionOutput, RequestOutput
from minillm.request import Request
from minillm.sampling import RequestOutputKind, SamplingParams
from minillm.speculative.config import SpeculativeConfig
from minillm.trace import EngineStarted, Trace
from minillm.trace.request_metrics import MetricsWatcher, prompt_id_of

MAX_FAILED_STEPS = 1000
"""After so many consecutive failures for another caller's request, `LLMEngine.run` raises the error itself: nobody else
steps for that request."""


class LLMEngine:
    """A model with its KV cache and request queues. The caller runs it one step at a time.

    Any thread may add and abort requests. Each output is returned once, by the `step` that produced it. Call `step`
    from one thread, or route the outputs to the threads that wait for them.
    """

    def __init__(self, args: EngineArgs) -> None:
        given = args.speculative_config
        speculative = None if given is None else SpeculativeConfig.from_dict(given)
        cache = CacheConfig.from_options(args.kv_cache_dtype, args.kv_cache_config)
        built = assemble(args, cache, speculative)
        self.engine: Engine = built.engine
        self.model = args.model
        self.max_model_len = built.max_model_len
        self.metrics = MetricsWatcher()
        self._groups: dict[str, list[Request]] = {}
        self.input_processor = InputProcessor(
            self.engine.runner.model.config,
            self.engine.tokenizer,
            self.engine.pool,
            self.max_model_len,
            args.seed,
            shares_prompts=self.engine.runner.cache.supports_prefix_sharing,
            names_in_use=self._groups,
        )
        self._started = EngineStarted(
            model=args.model,
            draft_model=speculative.model if speculative else None,
            block_size=built.args.block_size,
            num_blocks=self.engine.pool.num_blocks,
            bytes_per_block=built.bytes_per_block,
            num_speculative_tokens=speculative.max_drafts if speculative else 0,
            cache_layout=cache.name,
            prefix_caching=bool(built.args.enable_prefix_caching),
            max_num_seqs=built.args.max_num_seqs,
            max_num_batched_tokens=built.args.max_num_batched_tokens,
            speculative_method=speculative.method_name if speculative else None,
            keeps_every_token=self.engine.runner.cache.keeps_every_token,
            whole_sequences=self.engine.runner.cache.whole_sequences,
        )
        self.engine.listeners.append(self.metrics)

    @classmethod
    @refuses_unknown
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        """Build an engine, as in vLLM. Raises subclasses of `ValueError`."""
        return cls(engine_args)

    @refuses_unknown
    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> None:
        """Queue a prompt under an id of your choice; `priority` has an effect if `scheduling_policy="priority"`.

        Raises `PromptError`, `ConfigError` or `RequestTooLargeError`, or `MinillmError` for an id that is in use or
        that `check_request_id` refuses. On an error nothing is queued.
        """
        check_request_id(request_id)
        self.add_prepared(request_id, self.prepare(prompt, params, priority, request_id))

    def default_sampling_params(self) -> SamplingParams:
        """For requests without parameters: the values in the checkpoint's `generation_config.json`, as in vLLM."""
        return self.input_processor.default_sampling_params()

    def add_prepared(self, request_id: str, group: Sequence[Request]) -> None:
        """The second half of `add_request`, for a caller that has called `prepare` with this id, perhaps in another
        thread. Raises `RequestTooLargeError`, or `MinillmError` if the id is in use."""
        with self.engine.lock:
            if request_id in self._groups:
                raise MinillmError(f"request id {request_id!r} is in use; choose another")
            try:
                self.queue([group], is_awaited=True)
                self._groups[request_id] = group
            except BaseException:
                self.discard(group)  # an interrupt may have arrived after they were queued
                raise

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns the output so far of every request from `add_request` that gained tokens or finished;
        with `RequestOutputKind.FINAL_ONLY` only if it finished.

        A request that finished in an interrupted step is returned by the next step.

        Raises `NonFiniteLogitsError` if the model's logits for a request are NaN or infinite. Then no request gains a
        token, and every further step raises it again until that request is ended: `abort_request(error.request_id)`.
        """
        with self.engine.lock:
            grown = {prompt_id_of(request.request_id) for request in self.engine.step()} & self._groups.keys()
            ended = self._ended_among(self._groups)
            cumulative = RequestOutputKind.CUMULATIVE
            reported = {name for name in grown if self._groups[name][0].params.output_kind is cumulative}.union(ended)
            groups = sorted((self._groups[name] for name in reported), key=lambda group: group[0].arrival)
            outputs = [self.output(group) for group in groups]
            for name in ended:  # last, so that an interrupt before loses no output
                del self._groups[name]
                self.metrics.forget(name)
            return outputs

    def _ended_among(self, groups: Mapping[str, Sequence[Request]]) -> list[str]:
        """The names of those prompts that have ended.

        The metrics name them without a look at each of thousands. An interrupt may have kept them from an end: then
        they count more unfinished completions than there are.
        """
        if self.metrics.num_unfinished == len(self.engine.requests):
            return self.metrics.ended_among(groups)
        running = set(self.engine.requests.values())
        return [name for name, group in groups.items() if running.isdisjoint(group)]

    def _is_running(self, name: str) -> bool:
        """Whether a completion of a prompt with this id is unfinished. The metrics are quick to ask, but an interrupt
        may have kept them from an end."""
        return self.metrics.is_running(name) and name in map(prompt_id_of, self.engine.requests)

    def run(self, groups: Sequence[Sequence[Request]]) -> Generator[dict[int, RequestOutput], None, None]:
        """Queue prepared requests and step until all have ended; yields after each step the outputs of the groups that
        have ended, by their index.

        When the generator ends or is closed, requests that still run are aborted.
        """
        left = {prompt_id_of(group[0].request_id): group for group in groups}
        places = {name: i for i, name in enumerate(left)}
        try:
            self.queue(groups, is_awaited=True)
            failures = 0
            while left:
                with self.engine.lock:  # so that no other thread's step is in the middle of a request that is read here
                    others = self._failed_for_others(left.values(), nobody_else_steps=failures >= MAX_FAILED_STEPS)
                    ended = self._ended_among(left)
                    outputs = {i: self.output(groups[i]) for i in sorted(places[name] for name in ended)}
                    for name in ended:
                        del left[name]
                        self.metrics.forget(name)
                failures = failures + 1 if others else 0
                if others:
                    time.sleep(0.001)  # let the thread that waits for the failed request have its turn
                yield outputs
        finally:
            self.discard(list(chain.from_iterable(groups)))

    def _failed_for_others(self, groups: Iterable[Sequence[Request]], nobody_else_steps: bool) -> bool:
        """Run one step. Returns whether it failed for a request of another caller than that of `groups`, who gets the
        error from a step of its own. If `nobody_else_steps`, it is raised here."""
        try:
            self.engine.step()
        except NonFiniteLogitsError as problem:
            own = (request.request_id for request in chain.from_iterable(groups))
            if nobody_else_steps or problem.request_id is None or problem.request_id in own:
                raise
            return True
        return False

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests now, in any state. Unknown ids, including those that have just finished, are ignored. The id of
        one completion, which an error may name, ends all of its prompt."""
        with self.engine.lock:
            ids = [request_ids] if isinstance(request_ids, str) else request_ids
            groups = {name: self._groups[name] for name in map(prompt_id_of, ids) if name in self._groups}
            self.discard(list(chain.from_iterable(groups.values())))
            for name in groups:  # last, so that an interrupted abort can be repeated
                del self._groups[name]

    def reset_prefix_cache(self) -> bool:
        """Evict all cached blocks. While a request holds a block, nothing is evicted and False returned, as in vLLM."""
        with self.engine.lock:
            if self.engine.pool.num_used:
                return False
            self.engine.pool.evict_cached()
            return True

    def has_unfinished_requests(self) -> bool:
        """Whether requests are left to run, or finished in an interrupted step and are not returned yet."""
        return self.engine.has_requests or bool(self._groups)

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record everything the engine does inside the `with` block, for all threads."""
        with self.engine.lock:
            trace = Trace([replace(self._started, cached_blocks=self.engine.pool.cached_blocks)])
            self.engine.listeners.append(trace.append)
        try:
            yield trace
        finally:
            with self.engine.lock:
                self.engine.listeners.remove(trace.append)

    def prepare(
        self, prompt: Prompt, params: SamplingParams | None, priority: int = 0, request_id: str | None = None
    ) -> list[Request]:
        """See `InputProcessor.process_inputs`. A `max_tokens` that was asked for is checked against the pool by
        `queue`."""
        return self.input_processor.process_inputs(prompt, params, priority, request_id)

    def queue(self, groups: Sequence[Sequence[Request]], is_awaited: bool = False) -> None:
        """Queue prepared requests in order. Queues none of them if one is larger than the block pool, if an id is in
        use, or if it is interrupted. `is_awaited`: their metrics are kept until `discard` or the output of the end."""
        with self.engine.lock:
            for request in chain.from_iterable(groups):
                self.engine.check_fits(request)
            for group in groups:
                if self._is_running(name := prompt_id_of(group[0].request_id)):
                    raise MinillmError(f"request id {name!r} is in use; choose another")
            try:
                for request in chain.from_iterable(groups):
                    self.engine.add_request(request)
                if is_awaited:
                    self.metrics.awaited.update(prompt_id_of(group[0].request_id) for group in groups)
            except BaseException:
                self.discard(list(chain.from_iterable(groups)))
                raise

    def discard(self, requests: Sequence[Request]) -> None:
        """Abort those of these requests that are unfinished, and discard the metrics of their prompts.

        If one of them cannot be aborted without an error, the others are aborted all the same. Raises the last error.
        """
        with self.engine.lock, ExitStack() as calls:  # makes all of them, from the last one to the first
            calls.callback(self._forget, requests)
            for request in reversed(requests):
                if self.engine.requests.get(request.request_id) is request:
                    calls.callback(self.engine.abort, request.request_id)

    def _forget(self, requests: Iterable[Request]) -> None:
        """Discard the metrics of the prompts of these requests. Where a listener has ended one, it runs until after the
        step, and nobody waits for it. If `add_request` refused an id because it is in use, the metrics belong to the
        request that runs."""
        for request in requests:
            name = prompt_id_of(request.request_id)
            if not self._is_running(name):
                self.metrics.forget(name)
            elif self.engine.requests.get(request.request_id) is request:
                self.metrics.awaited.discard(name)

    def output(self, group: Sequence[Request]) -> RequestOutput:
        """The output so far of all completions of one prompt."""
        first = group[0]
        name = prompt_id_of(first.request_id)
        metrics = self.metrics.of(name)
        prompt_logprobs = None
        if first.params.prompt_logprobs is not None:
            prompt_logprobs = [first.prompt_logprobs.get(position) for position in range(first.num_prompt_tokens)]
        return RequestOutput(
            request_id=name,
            prompt=first.prompt,
            prompt_token_ids=first.token_ids[: first.num_prompt_tokens],
            outputs=[_completion(request) for request in group],
            finished=all(request.finished for request in group),
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=metrics.num_cached_tokens,
            metrics=metrics,
        )


def check_request_id(request_id: str) -> None:
    """Raise `MinillmError` unless this is a non-empty string without `#`."""
    if not isinstance(request_id, str) or not request_id or "#" in request_id:
        raise MinillmError(f"request id {request_id!r} must be a non-empty string without '#'")


def _completion(request: Request) -> CompletionOutput:
    with_logprobs = request.params.logprobs is not None
    text = request.text
    return CompletionOutput(
        index=request.index,
        text=text if request.finished else text[: request.params.num_settled(text)],
        token_ids=request.output_token_ids,
        cumulative_logprob=request.cumulative_logprob if with_logprobs else None,
        logprobs=list(request.logprobs) if with_logprobs else None,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
    )
