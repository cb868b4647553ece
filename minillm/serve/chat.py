"""`/v1/chat/completions`: a conversation becomes a prompt by the model's chat template; outputs become messages."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from fastapi import Response

from minillm.async_llm import AsyncLLM
from minillm.chat_template import ChatTemplate
from minillm.outputs import CompletionOutput
from minillm.serve.choice_stream import ChoiceStream, Delta
from minillm.serve.disconnects import EventStream
from minillm.serve.http_errors import ApiError, error_event
from minillm.serve.logprobs import chat_logprobs
from minillm.serve.prompt_batch import PromptBatch
from minillm.serve.requests import ChatRequest
from minillm.serve.responses import (
    END,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Message,
    Usage,
    event,
)
from minillm.serve.settings import ServerSettings


class ChatJob:
    """One request to `/v1/chat/completions`."""

    def __init__(self, engine: AsyncLLM, settings: ServerSettings, template: ChatTemplate, body: ChatRequest) -> None:
        """Check the request. Raises `ApiError` or `ConfigError`."""
        body.check_fields(engine.llm_engine.engine.scheduler.config.scheduling_policy)
        top = body.top_logprobs or 0
        if body.echo:
            raise ApiError("echo is not supported in a chat; leave it out", param="echo")
        if top and not body.logprobs:
            raise ApiError("top_logprobs needs logprobs=true", param="top_logprobs")
        if not settings.allows_logprobs(top):
            limit = settings.max_logprobs
            raise ApiError(f"top_logprobs={top} must be from 0 to {limit} on this server", param="top_logprobs")
        self.engine = engine
        self.body = body
        self.model = settings.model_names[0]
        self.id = f"chatcmpl-{uuid4().hex}"
        self.created = int(time.time())
        self.tokenizer = engine.llm_engine.engine.tokenizer
        self.num_top = top
        for name in ("max_completion_tokens", "max_tokens"):
            limit = getattr(body, name)
            if limit is not None and limit < 1:
                raise ApiError(f"{name}={limit} must be at least 1; left out, it is as many as fit", param=name)
        text = body.prompt_text(template)
        token_ids = self.tokenizer.encode(text, add_special_tokens=body.add_special_tokens)
        self.prompt: dict[str, Any] = {"prompt": text, "prompt_token_ids": token_ids}
        if body.cache_salt:
            self.prompt["cache_salt"] = body.cache_salt
        limits = (body.max_completion_tokens, body.max_tokens, self._default_limit(len(token_ids)))
        self.params = body.sampling_params(
            engine.llm_engine.default_sampling_params(),
            max_tokens=next((limit for limit in limits if limit is not None), None),
            logprobs=top if body.logprobs else None,
        )

    def _default_limit(self, num_prompt_tokens: int) -> int | None:
        """What the checkpoint's `generation_config.json` names, if there is room for it. None: as many as fit."""
        inputs = self.engine.llm_engine.input_processor
        stated = inputs.model_config.sampling_defaults.get("max_tokens")
        return stated if stated is not None and stated < inputs.room_after(num_prompt_tokens) else None

    async def respond(self) -> Response:
        """Run it. Returns the answer, or the stream of its chunks."""
        batch = await PromptBatch.start(self.engine, self.id, [self.prompt], self.params, self.body.priority)
        if self.body.stream:
            return EventStream(self._events(batch), batch.aclose)
        [output] = await batch.finish()
        choices = [self._choice(choice) for choice in output.outputs]
        answer = ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=batch.usage(),
            prompt_token_ids=self.prompt["prompt_token_ids"] if self.body.return_token_ids else None,
        )
        return Response(answer.model_dump_json(), media_type="application/json")

    def _choice(self, choice: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=Message(content=choice.text),
            logprobs=self._logprobs(Delta(choice.text, choice.token_ids, choice.logprobs)),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self.body.return_token_ids else None,
        )

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if delta.logprobs is None:
            return None
        return chat_logprobs(self.tokenizer, delta.token_ids, delta.logprobs, self.num_top)

    async def _events(self, batch: PromptBatch) -> AsyncIterator[str]:
        streams = [ChoiceStream() for _ in range(self.params.n)]
        has_begun = False
        try:
            async for _, output in batch.outputs():
                if not has_begun:  # only now, as in vLLM: a gateway may send a request elsewhere until this is sent
                    for index in range(self.params.n):
                        yield event(self._role_chunk(index))
                    has_begun = True
                for choice in output.outputs:
                    stream = streams[choice.index]
                    if stream.ended or (delta := stream.advance(choice)) is None:
                        continue
                    piece = self._piece(choice, delta)
                    yield event(self._chunk([piece], self._running_usage(len(choice.token_ids))))
            if self.body.wants_usage:
                yield event(self._chunk([], batch.usage()))
        except Exception as problem:
            yield error_event(problem)
        yield END

    def _role_chunk(self, index: int) -> ChatChunk:
        """The first chunk of a choice."""
        role = {"role": "assistant", "content": ""}
        chunk = self._chunk([ChatChunkChoice(index=index, delta=role, finish_reason=None)], self._running_usage(0))
        if self.body.return_token_ids:
            chunk.prompt_token_ids = self.prompt["prompt_token_ids"]
        return chunk

    def _running_usage(self, num_tokens: int) -> Usage | None:
        """The tokens of a choice that has `num_tokens` so far; None if the chunks carry no counts."""
        if not self.body.wants_running_usage:
            return None
        return Usage.of_choice(len(self.prompt["prompt_token_ids"]), num_tokens)

    def _piece(self, choice: CompletionOutput, delta: Delta) -> ChatChunkChoice:
        piece = ChatChunkChoice(index=choice.index, delta={"content": delta.text}, finish_reason=choice.finish_reason)
        if delta.logprobs is not None:
            piece.logprobs = self._logprobs(delta)
        if choice.stop_reason is not None:
            piece.stop_reason = choice.stop_reason
        if self.body.return_token_ids:
            piece.token_ids = delta.token_ids
        return piece

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatChunk:
        fields = {"usage": usage} if usage else {}
        return ChatChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.model,
            choices=choices,
            **fields,
        )
