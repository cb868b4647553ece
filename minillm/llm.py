"""`LLM`: load a model, generate text. The offline API of vLLM, on minillm's engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

from tqdm import tqdm

from minillm.config import reject_unknown
from minillm.engine.engine import Engine
from minillm.engine.request import Request
from minillm.errors import ConfigError, PromptError, UnsupportedError
from minillm.fill_in_the_middle import FIM_TOKENS, fim_text
from minillm.llm_engine import EngineArgs, LLMEngine, Prompt
from minillm.outputs import RequestOutput
from minillm.sampling import SamplingParams
from minillm.trace import Trace


class LLM:
    """A model with its engine.

    `model` is a bundled name (`"minicoder"`), a local Hugging Face folder, or a hub id. Every option has vLLM's name
    and meaning; an option that minillm does not have is refused, never ignored. Raises subclasses of `ValueError`.

    minillm's own options: `device` says where it runs; `kv_cache_config` names a cache layout and its options
    (`{"layout": "sinks", "window": 252}`, see `minillm.cache.layouts`); `num_kv_blocks` sizes the pool in blocks;
    `block_pool_cls` and `ops={"paged_attention": function}` run the engine on parts of one's own, as `scheduler_cls`
    does.
    `block_size=None` is 16, or whatever the cache layout needs. `enable_prefix_caching=None` is on wherever the layout
    can share blocks. `enforce_eager=True` runs each step in plain PyTorch and keeps the model whole; otherwise, on a
    CPU, the weights of a float32, INT8, W8A8, INT4 or AWQ model over a paged cache move into a step compiled for the
    processor (`minillm.models.cpu_executor`).
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
        kv_cache_config: Mapping[str, Any] | None = None,
        block_size: int | None = None,
        num_kv_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        kv_cache_memory_bytes: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool | None = None,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        scheduling_policy: str = "fcfs",
        enforce_eager: bool = False,
        speculative_config: Mapping[str, Any] | None = None,
        scheduler_cls: type | None = None,
        block_pool_cls: type | None = None,
        ops: Mapping[str, Callable[..., Any]] | None = None,
        **unknown: Any,
    ) -> None:
        reject_unknown("LLM", unknown, set(LLM.__init__.__kwdefaults__ or ()))
        args = EngineArgs(
            model=model,
            dtype=dtype,
            device=device,
            seed=seed,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_config=kv_cache_config,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
            scheduling_policy=scheduling_policy,
            enforce_eager=enforce_eager,
            speculative_config=speculative_config,
            scheduler_cls=scheduler_cls,
            block_pool_cls=block_pool_cls,
            ops=ops,
        )
        self.model = model
        self.llm_engine = LLMEngine(args)

    @property
    def engine(self) -> Engine:
        """The inner engine: scheduler, block pool, runner."""
        return self.llm_engine.engine

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus completion, in tokens."""
        return self.llm_engine.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; the outputs come in the order of the prompts.

        All prompts are checked before anything is computed. If it is interrupted, its requests are dropped and the
        next call starts clean. Several threads may call it at once: their requests run in the same steps. Raises
        `PromptError`, `ConfigError` or `RequestTooLargeError`.
        """
        groups = self._prepare(prompts, sampling_params, priority)
        left = list(groups)
        bar = tqdm(total=len(groups), desc="generating", unit=" prompts", disable=not use_tqdm)
        try:
            self.llm_engine.queue(groups)
            while left:
                self.engine.step()
                still = [group for group in left if not all(request.finished for request in group)]
                bar.update(len(left) - len(still))
                left = still
            return [self.llm_engine.output(group) for group in groups]
        except BaseException:
            for group in groups:
                self.llm_engine.drop(group)
            raise
        finally:
            bar.close()

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
            self.llm_engine.queue(groups)
            while not request.finished:
                self.engine.step()
                end = len(request.text) if request.finished else max(shown, len(request.text) - held_back)
                if end > shown:
                    yield request.text[shown:end]
                    shown = end
        finally:
            self.llm_engine.drop([request])

    def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[Request]:
        """Queue prompts without running them, for those who call `engine.step()` themselves.

        Returns one request per completion, in order. Raises what `generate` raises, before anything is queued.
        """
        groups = self._prepare(prompts, sampling_params, priority)
        self.llm_engine.queue(groups)
        return list(chain.from_iterable(groups))

    def fim_prompt(self, prefix: str, suffix: str) -> str:
        """A prompt for the gap between `prefix` and `suffix`: the model writes the gap and ends (Bavarian et al. 2022).

        Raises `UnsupportedError` if the tokenizer lacks a token of `FIM_TOKENS`, `PromptError` if a text contains one.
        """
        missing = [token for token in FIM_TOKENS if self.engine.tokenizer.backend.token_to_id(token) is None]
        if missing:
            raise UnsupportedError(
                f"the tokenizer of {self.model!r} has no token {missing[0]}; take a model that was trained to fill gaps"
            )
        for name, text in (("prefix", prefix), ("suffix", suffix)):
            if found := next((token for token in FIM_TOKENS if token in text), None):
                raise PromptError(f"the {name} contains {found}, which marks the gap itself; remove it")
        return fim_text(prefix, suffix)

    def trace(self) -> AbstractContextManager[Trace]:
        """Record everything the engine does inside the `with` block."""
        return self.llm_engine.trace()

    def reset_prefix_cache(self) -> None:
        """Forget the contents of all blocks that no request holds, as in vLLM."""
        self.llm_engine.reset_prefix_cache()

    def get_tokenizer(self) -> Any:
        """The tokenizer as transformers has it."""
        return self.engine.tokenizer.hf()

    def _prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None = None,
    ) -> list[list[Request]]:
        """Check everything and queue nothing yet: per prompt one request for each completion."""
        several = isinstance(prompts, Iterable) and not isinstance(prompts, str | Mapping)
        prompts = list(prompts) if several else [prompts]
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        priority = [0] * len(prompts) if priority is None else priority
        for what, given in (("sampling params", sampling_params), ("priorities", priority)):
            if len(given) != len(prompts):
                raise ConfigError(f"{len(given)} {what} for {len(prompts)} prompts; give one each, or one for all")
        return [
            self.llm_engine.prepare(prompt, params, rank)
            for prompt, params, rank in zip(prompts, sampling_params, priority, strict=True)
        ]
