"""`Completer`: completes code with one engine, which it loads at the first request, and keeps the newest trace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from itertools import count

from minillm.async_llm import AsyncLLM
from minillm.complete.engine import engine_args
from minillm.complete.prompt import Gap, gap_prompt
from minillm.complete.suggestion import Suggestion, shown_text, suggestion_params
from minillm.errors import PromptError
from minillm.trace import EngineStarted, Event, RequestAdded, Trace

MAX_CONTEXT = 2048
"""Prompt and new tokens. Longer ones would take too long on a CPU, and too much of the block pool."""
MAX_NEW_TOKENS = 256
"""The most tokens that a request may ask for."""


def load_engine() -> AsyncLLM:
    """The engine of `engine_args`. Raises `CheckpointError` or `ConfigError`."""
    return AsyncLLM(engine_args())


class Completer:
    """One request runs at a time. A cancelled one is aborted before the next one begins."""

    def __init__(self, load: Callable[[], AsyncLLM] = load_engine) -> None:
        self.engine: AsyncLLM | None = None
        self.newest: tuple[Suggestion, Trace] | None = None
        """The last request that was not cancelled, and the engine's events from its arrival to its end."""
        self._load = load
        self._loading: asyncio.Task[AsyncLLM] | None = None
        self._turn = asyncio.Lock()
        self._numbers = count()
        self._started: EngineStarted | None = None
        self._trace = Trace()

    @property
    def is_loading(self) -> bool:
        """Whether the model is being loaded now."""
        return self._loading is not None and not self._loading.done()

    @property
    def load_error(self) -> BaseException | None:
        """Why the model could not be loaded; None if it could, or if that is not known yet."""
        if self._loading is None or not self._loading.done() or self._loading.cancelled():
            return None
        return self._loading.exception()

    async def complete(self, gap: Gap, max_tokens: int) -> Suggestion:
        """What the model writes into `gap`. Cancelling it aborts the request in the engine.

        Raises `PromptError` for what is wrong with the request. Every other error is the engine's: `ConfigError`,
        `CheckpointError`, `EngineGenerateError` or `EngineDeadError`. An engine that could not be loaded is not tried
        again.
        """
        if not 1 <= max_tokens <= MAX_NEW_TOKENS:
            raise PromptError(f"max_tokens={max_tokens} must be from 1 to {MAX_NEW_TOKENS}")
        if self._loading is None:
            self._loading = asyncio.ensure_future(asyncio.to_thread(self._load_and_watch))
        engine = await asyncio.shield(self._loading)  # a cancelled request does not cancel the load
        began = time.perf_counter()
        async with self._turn:
            return await self._run(engine, gap, max_tokens, began)

    async def _run(self, engine: AsyncLLM, gap: Gap, max_tokens: int, began: float) -> Suggestion:
        inner = engine.llm_engine
        context = min(inner.max_model_len, MAX_CONTEXT)
        if max_tokens > context // 2:
            raise PromptError(f"max_tokens={max_tokens} is over half of the context of {context} tokens; lower it")
        tokenizer, room = inner.engine.tokenizer, context - max_tokens
        prompt = await asyncio.to_thread(gap_prompt, tokenizer, inner.model, gap, room)
        params, name = suggestion_params(gap.suffix, max_tokens), f"completion-{next(self._numbers)}"
        async with aclosing(engine.generate({"prompt_token_ids": prompt.token_ids}, params, name)) as outputs:
            output = await anext(outputs)
        found = Suggestion(
            text=shown_text(output),
            fills_gap=prompt.fills_gap,
            prompt_tokens=len(prompt.token_ids),
            cached_tokens=output.num_cached_tokens,
            new_tokens=len(output.outputs[0].token_ids),
            dropped_characters=prompt.num_dropped,
            milliseconds=1000 * (time.perf_counter() - began),
        )
        self.newest = found, self._trace
        return found

    def shutdown(self) -> None:
        """End the engine."""
        if self.engine is not None:
            self.engine.shutdown()

    def _load_and_watch(self) -> AsyncLLM:
        engine = self._load()
        with engine.llm_engine.trace() as trace:
            [self._started] = trace.events
        engine.llm_engine.engine.listeners.append(self._note)
        self.engine = engine
        return engine

    def _note(self, event: Event) -> None:
        """In the engine's thread: each request begins a new trace."""
        if isinstance(event, RequestAdded):
            assert self._started is not None and self.engine is not None
            cached = self.engine.llm_engine.engine.pool.cached_blocks
            self._trace = Trace([replace(self._started, cached_blocks=cached)])
        self._trace.append(event)
