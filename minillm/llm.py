"""`LLM`: load a model, generate text. The offline API of vLLM, on minillm's engine."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import cached_property
from itertools import chain
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar

from tqdm import tqdm

from minillm.config import EngineArgs, refuses_unknown
from minillm.engine.engine import Engine
from minillm.errors import ConfigError, PromptError
from minillm.fill_in_the_middle import fim_prompt
from minillm.input_processor import Prompt
from minillm.llm_engine import LLMEngine
from minillm.outputs import RequestOutput
from minillm.request import Request
from minillm.sampling import SamplingParams
from minillm.trace import Trace

if TYPE_CHECKING:
    from minillm.chat_template import ChatTemplate


class LLM:
    """A model and its engine.

    `model` is a bundled name (`"minicoder"`), a local Hugging Face folder, or a hub id. Every option has vLLM's name
    and meaning. An option that minillm does not have raises an error. All errors are subclasses of `ValueError`.

    minillm's own options: `device` is the PyTorch device; `kv_cache_config` names a cache layout and its options
    (`{"layout": "sinks", "window": 252}`, see `minillm.cache.layouts`); `num_kv_blocks` is the size of the block pool;
    `block_pool_cls` and `ops={"paged_attention": function}` replace parts of the engine. So does `scheduler_cls`, which
    vLLM has too, with another interface.

    `block_size=None` is 16, or the size that the cache layout needs. `enable_prefix_caching=None` turns prefix caching
    on if the layout can share blocks. `enforce_eager=True` runs each step in plain PyTorch and leaves the weights in
    the model. Otherwise, on a CPU, the weights of a float32, bfloat16, INT8, W8A8, INT4 or AWQ model with a paged cache
    move into a step compiled for the processor (`minillm.runtime.cpu_executor`). `tensor_parallel_size=N` splits a
    full-precision model over N processes, which run plain PyTorch (`minillm.parallel`).
    """

    __signature__: ClassVar = inspect.signature(EngineArgs)

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        args = EngineArgs.from_options(model, options)
        self.model = args.model
        self.llm_engine = LLMEngine(args)

    @property
    def engine(self) -> Engine:
        """The inner engine, which holds the scheduler, the block pool and the runner."""
        return self.llm_engine.engine

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus completion, in tokens."""
        return self.llm_engine.max_model_len

    @refuses_unknown
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt. Returns one output per prompt, in the same order.

        `use_tqdm`: whether there is a progress bar, or what makes it in place of `tqdm`. All prompts are checked before
        anything is computed. An interrupt aborts the requests of this call, so the next call starts clean. Several
        threads may call it at once: their requests are batched into the same steps. Raises `PromptError`, `ConfigError`
        or `RequestTooLargeError` for bad arguments, and `NonFiniteLogitsError` if the model's logits are NaN or
        infinite.
        """
        groups = self._prepare(prompts, sampling_params, priority)
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        with (
            make_bar(total=len(groups), desc="generating", unit=" prompts", disable=not use_tqdm) as bar,
            closing(self.llm_engine.run(groups)) as steps,
        ):
            outputs: dict[int, RequestOutput] = {}
            for ended in steps:
                outputs |= ended
                bar.update(len(ended))
            return [outputs[index] for index in range(len(groups))]

    @refuses_unknown
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several: `[{"role": "user", "content": "…"}, …]`, or a list of those.

        A Jinja template writes each as a prompt: the text `chat_template`, or else the checkpoint's.
        `add_generation_prompt` ends the prompt with the beginning of an answer; `continue_final_message` has the model
        go on with the last message instead. The template gets `tools` and `chat_template_kwargs`.

        Raises the errors of `generate` and of `ChatTemplate.render`.
        """
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
        several = is_list and not (messages and isinstance(messages[0], Mapping))
        texts = [
            self._chat_template.render(
                conversation,
                template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                variables=chat_template_kwargs,
            )
            for conversation in (messages if several else [messages])
        ]
        encode = self.engine.tokenizer.encode  # the template has written the special tokens
        prompts = [{"prompt": text, "prompt_token_ids": encode(text, add_special_tokens=False)} for text in texts]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority)

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        from minillm.chat_template import ChatTemplate  # here, because Jinja takes a moment to import

        return ChatTemplate(self.engine.tokenizer, self.model)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The completion of one prompt as an iterator of pieces of text. Closing the iterator aborts the request.

        Raises the errors of `generate`, those for bad arguments at once.
        """
        if not isinstance(prompt, str | Mapping):
            raise PromptError(f"stream continues one prompt, which is text or a mapping, not {type(prompt).__name__}")
        groups = self._prepare(prompt, sampling_params)
        request = groups[0][0]
        if request.params.n > 1:
            raise ConfigError(f"n={request.params.n} completions cannot be streamed into one text; use n=1")
        if not request.params.detokenize:
            raise ConfigError("detokenize=False gives no text to stream; leave it out, or use generate")
        self.engine.check_fits(request)
        return self._pieces(groups)

    def _pieces(self, groups: list[list[Request]]) -> Iterator[str]:
        [[request]], shown = groups, 0
        params = request.params
        with closing(self.llm_engine.run(groups)) as steps:
            for _ in steps:
                with self.engine.lock:  # another thread's step may be adding to the text
                    end = len(request.text) if request.finished else max(shown, params.num_settled(request.text))
                    piece = request.text[shown:end]
                if piece:
                    yield piece
                    shown = end

    def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
    ) -> list[Request]:
        """Queue prompts without running them, for callers that run `engine.step()` themselves.

        Returns one request per completion, in order. Raises the errors of `generate` for bad arguments, before anything
        is queued.
        """
        groups = self._prepare(prompts, sampling_params, priority)
        self.llm_engine.queue(groups)
        return list(chain.from_iterable(groups))

    def fim_prompt(self, prefix: str, suffix: str) -> str:
        """The prompt that makes the model fill the gap between `prefix` and `suffix` (Bavarian et al. 2022).

        Raises `UnsupportedError` if the tokenizer lacks a token of `FIM_TOKENS`, `PromptError` if a text contains one
        or is no `str`.
        """
        return fim_prompt(self.engine.tokenizer, self.model, prefix, suffix)

    def trace(self) -> AbstractContextManager[Trace]:
        """Record everything the engine does inside the `with` block."""
        return self.llm_engine.trace()

    def reset_prefix_cache(self) -> bool:
        """Evict all cached blocks. While a request holds a block, nothing is evicted and False returned, as in vLLM."""
        return self.llm_engine.reset_prefix_cache()

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses without parameters: the values in the checkpoint's `generation_config.json`."""
        return self.llm_engine.default_sampling_params()

    def get_tokenizer(self) -> Any:
        """The tokenizer as a transformers object."""
        return self.engine.tokenizer.hf()

    def _prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None = None,
    ) -> list[list[Request]]:
        """Check all arguments. Returns, for each prompt, one unqueued request per completion."""
        several = isinstance(prompts, Iterable) and not isinstance(prompts, str | bytes | bytearray | Mapping)
        prompts = list(prompts) if several else [prompts]
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if priority is None or (isinstance(priority, Integral) and not isinstance(priority, bool)):
            priority = [int(priority or 0)] * len(prompts)
        for what, given in (("sampling params", sampling_params), ("priorities", priority)):
            if not isinstance(given, Sequence):
                raise ConfigError(f"{given!r} are no {what}; give one for each prompt in a list, or one for all")
            if len(given) != len(prompts):
                raise ConfigError(f"{len(given)} {what} for {len(prompts)} prompts; give one each, or one for all")
        return [
            self.llm_engine.prepare(prompt, params, rank)
            for prompt, params, rank in zip(prompts, sampling_params, priority, strict=True)
        ]
