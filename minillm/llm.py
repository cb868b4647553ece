"""`LLM`: load a model, generate text. The offline API of vLLM, on minillm's engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from tqdm.auto import tqdm

from minillm.config import EngineConfig, SpeculativeConfig, reject_unknown
from minillm.engine.assembly import assemble
from minillm.engine.engine import Engine
from minillm.engine.request import Request, request_seed
from minillm.errors import ConfigError, PromptError, UnsupportedError
from minillm.metrics import MetricsWatcher
from minillm.outputs import CompletionOutput, RequestOutput
from minillm.sampling import SamplingParams
from minillm.tokenizer import Detokenizer
from minillm.trace import EngineStarted, Trace

Prompt = str | Mapping[str, Any]
"""Text, or `{"prompt_token_ids": [...]}`, or `{"prompt": "text"}`."""


class LLM:
    """A model with its engine.

    `model` is a bundled name (`"minicoder"`), a local Hugging Face folder, or a hub id. Every option has vLLM's name
    and meaning; an option that minillm does not have is refused, never ignored. Raises subclasses of `ValueError`.
    `enforce_eager=False` allows faster ways of running a step than plain PyTorch; this version has none, so both
    values give the same.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        seed: int = 0,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        kv_cache_memory_bytes: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = False,
        enable_chunked_prefill: bool = True,
        enforce_eager: bool = False,
        speculative_config: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> None:
        reject_unknown("LLM", unknown, set(LLM.__init__.__kwdefaults__ or ()))
        _refuse("quantization", quantization, None)
        _refuse("kv_cache_dtype", kv_cache_dtype, "auto")
        _refuse("enable_prefix_caching", enable_prefix_caching, False)
        if not isinstance(enforce_eager, bool):
            raise ConfigError(f"enforce_eager={enforce_eager!r} must be True or False")
        config = EngineConfig(
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
        )
        speculative = SpeculativeConfig.from_dict(speculative_config) if speculative_config else None
        built = assemble(model, dtype, device, config, speculative)
        self.model = model
        self.engine: Engine = built.engine
        self.max_model_len = built.max_model_len
        self._started = EngineStarted(
            model=model,
            draft_model=speculative.model if speculative else None,
            block_size=block_size,
            num_blocks=self.engine.pool.num_blocks,
            bytes_per_block=built.bytes_per_block,
            num_speculative_tokens=speculative.num_speculative_tokens if speculative else 0,
        )
        self._metrics = MetricsWatcher()
        self.engine.listeners.append(self._metrics)
        self._seed = seed
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; the outputs come in the order of the prompts.

        All prompts are checked before anything is computed. If it is interrupted, its requests are dropped and the
        next call starts clean. Raises `PromptError`, `ConfigError` or `RequestTooLargeError`.
        """
        groups = self._prepare(prompts, sampling_params)
        left = {request.request_id: requests for requests in groups for request in requests}
        bar = tqdm(total=len(groups), desc="generating", unit=" prompts", disable=not use_tqdm)
        try:
            self._queue(groups)
            while left:
                for request in self.engine.step():
                    requests = left.get(request.request_id)
                    if request.finished and requests is not None:
                        del left[request.request_id]
                        bar.update(all(r.finished for r in requests))
        finally:
            for request_id in left:
                self.engine.abort(request_id)
            if left:
                for requests in groups:
                    self._metrics.pop(requests[0].request_id.split("-")[0])
            bar.close()
        return [self._output(requests) for requests in groups]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The completion of one prompt, piece by piece as text. Dropping the iterator ends the request."""
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise ConfigError(f"n={params.n} completions cannot be streamed into one text; use n=1")
        # A stop string is cut from the text, so what could be the start of one is held back.
        held_back = 0 if params.include_stop_str_in_output else max(map(len, params.stop_strings), default=1) - 1
        groups = self._prepare(prompt, params)
        [[request]] = groups
        shown = 0
        try:
            self._queue(groups)
            while not request.finished:
                if request not in self.engine.step():
                    continue
                end = len(request.text) if request.finished else max(shown, len(request.text) - held_back)
                if end > shown:
                    yield request.text[shown:end]
                    shown = end
        finally:
            self.engine.abort(request.request_id)
            self._metrics.pop(request.request_id.split("-")[0])

    def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Request]:
        """Queue prompts without running them, for those who call `engine.step()` themselves.

        Returns one request per completion, in order. Raises what `generate` raises, before anything is queued.
        """
        groups = self._prepare(prompts, sampling_params)
        self._queue(groups)
        return list(chain.from_iterable(groups))

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record everything the engine does inside the `with` block."""
        trace = Trace([self._started])
        self.engine.listeners.append(trace.append)
        try:
            yield trace
        finally:
            self.engine.listeners.remove(trace.append)

    def get_tokenizer(self) -> Any:
        """The tokenizer as transformers has it."""
        return self.engine.tokenizer.hf()

    def _prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[list[Request]]:
        """Check everything and queue nothing yet: per prompt one request for each completion."""
        prompts = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = _one_each(sampling_params, len(prompts))
        first = self._num_requests
        groups = [self._requests(prompt, params[i], first + i) for i, prompt in enumerate(prompts)]
        for request in chain.from_iterable(groups):
            self.engine.check_request(request)
        self._num_requests += len(groups)
        return groups

    def _queue(self, groups: list[list[Request]]) -> None:
        for request in chain.from_iterable(groups):
            self.engine.add_request(request)

    def _requests(self, prompt: Prompt, params: SamplingParams, number: int) -> list[Request]:
        text, token_ids = self._read_prompt(prompt)
        room = self.max_model_len - len(token_ids)
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if room < max(max_tokens, 1):
            raise PromptError(
                f"{len(token_ids)} prompt tokens and {max(max_tokens, 1)} new ones are over the context of "
                f"{self.max_model_len}; shorten the prompt or lower max_tokens"
            )
        tokenizer = self.engine.tokenizer
        stops = frozenset(params.all_stop_token_ids)
        eos = frozenset() if params.ignore_eos else frozenset(self.engine.runner.model.config.eos_token_ids)
        return [
            Request(
                request_id=f"{number}-{index}" if params.n > 1 else str(number),
                prompt=text,
                token_ids=list(token_ids),
                num_prompt_tokens=len(token_ids),
                params=params,
                max_tokens=max_tokens,
                seed=request_seed(params.seed, self._seed, number, index),
                index=index,
                stop_ids=stops | eos,
                detokenizer=(
                    Detokenizer(tokenizer, params.skip_special_tokens, token_ids) if params.detokenize else None
                ),
            )
            for index in range(params.n)
        ]

    def _read_prompt(self, prompt: Prompt) -> tuple[str, list[int]]:
        """The prompt as text and as ids, checked."""
        tokenizer = self.engine.tokenizer
        if isinstance(prompt, Mapping):
            reject_unknown("a prompt", prompt, {"prompt", "prompt_token_ids"})
            token_ids = prompt.get("prompt_token_ids")
            text = prompt.get("prompt")
        else:
            text, token_ids = prompt, None
        if token_ids is None:
            if not isinstance(text, str):
                raise PromptError(f"a prompt must be text or token ids, not {type(text).__name__}")
            token_ids = tokenizer.encode(text)
        token_ids = list(token_ids)
        if not token_ids:
            raise PromptError("the prompt is empty; give at least one token")
        vocab_size = self.engine.runner.model.config.vocab_size
        for position, token in enumerate(token_ids):
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise PromptError(
                    f"prompt token {position} is {token!r}; ids must be integers from 0 to {vocab_size - 1}"
                )
        return text if text is not None else tokenizer.decode(token_ids, skip_special_tokens=False), token_ids

    def _output(self, requests: list[Request]) -> RequestOutput:
        first = requests[0]
        request_id = first.request_id.split("-")[0]
        prompt_token_ids = first.token_ids[: first.num_prompt_tokens]
        prompt_logprobs = None
        if first.params.prompt_logprobs is not None:
            prompt_logprobs = [first.prompt_logprobs.get(position) for position in range(first.num_prompt_tokens)]
        return RequestOutput(
            request_id=request_id,
            prompt=first.prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=[_completion(request) for request in requests],
            finished=all(request.finished for request in requests),
            prompt_logprobs=prompt_logprobs,
            metrics=self._metrics.pop(request_id),
        )


def _completion(request: Request) -> CompletionOutput:
    wanted = request.params.logprobs is not None
    return CompletionOutput(
        index=request.index,
        text=request.text,
        token_ids=request.output_token_ids,
        cumulative_logprob=request.cumulative_logprob if wanted else None,
        logprobs=request.logprobs if wanted else None,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
    )


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ConfigError(f"{len(params)} sampling params for {count} prompts; give one for all, or one each")
    return list(params)


def _refuse(option: str, value: object, only: object) -> None:
    if value != only:
        raise UnsupportedError(f"{option}={value!r} is not available in this version; use {only!r}")
