"""`/v1/completions`: from the request to prompts and sampling parameters, and from outputs to choices."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from fastapi import Response

from minillm.async_llm import AsyncLLM
from minillm.fill_in_the_middle import fim_prompt
from minillm.input_processor import Prompt
from minillm.outputs import CompletionOutput, RequestOutput
from minillm.sampling import SamplingParams
from minillm.serve.choice_stream import ChoiceStream, Delta
from minillm.serve.disconnects import EventStream
from minillm.serve.http_errors import ApiError, error_event
from minillm.serve.logprobs import completion_logprobs
from minillm.serve.prompt_batch import PromptBatch
from minillm.serve.requests import MAX_PROMPTS, CompletionRequest
from minillm.serve.responses import END, Completion, CompletionChoice, Usage, event
from minillm.serve.settings import ServerSettings


class CompletionJob:
    """One request to `/v1/completions`."""

    def __init__(self, engine: AsyncLLM, settings: ServerSettings, body: CompletionRequest) -> None:
        """Check the request. Raises `ApiError`, `ConfigError` or `PromptError`."""
        body.check_fields(engine.llm_engine.engine.scheduler.config.scheduling_policy)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise ApiError(f"best_of={body.best_of} is not supported; leave it out, or ask for n", param="best_of")
        if body.logprobs is not None and not settings.allows_logprobs(body.logprobs):
            limit = settings.max_logprobs
            raise ApiError(f"logprobs={body.logprobs} must be from 0 to {limit} on this server", param="logprobs")
        if body.max_tokens is not None and body.max_tokens < (0 if body.echo else 1):
            message = f"max_tokens={body.max_tokens} must be at least 1, or 0 with echo; left out, it is 16"
            raise ApiError(message, param="max_tokens")
        self.engine = engine
        self.body = body
        self.model = settings.model_names[0]
        self.id = f"cmpl-{uuid4().hex}"
        self.created = int(time.time())
        self.tokenizer = engine.llm_engine.engine.tokenizer
        self.prompts = self._prompts()
        self.prompt_only = bool(body.echo and body.max_tokens == 0)
        self.params: SamplingParams = body.sampling_params(
            engine.llm_engine.default_sampling_params(),
            # One token is the least that the engine generates; the answer leaves it out.
            max_tokens=1 if self.prompt_only else (16 if body.max_tokens is None else body.max_tokens),
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )

    def _prompts(self) -> list[Prompt]:
        given, suffix = self.body.prompt, self.body.suffix
        if suffix is not None:
            if not isinstance(given, str) or self.body.echo:
                raise ApiError("suffix needs one prompt, given as text, and no echo", param="suffix")
            given = fim_prompt(self.tokenizer, self.model, given, suffix)  # which is not empty
        if not given:
            raise ApiError("the prompt is empty; give a text or at least one token", param="prompt")
        if isinstance(given, str) or isinstance(given[0], int):
            given = [given]
        if len(given) > MAX_PROMPTS:
            message = f"prompt has {len(given)} prompts; at most {MAX_PROMPTS} are allowed: send several requests"
            raise ApiError(message, param="prompt")
        salt = {"cache_salt": self.body.cache_salt} if self.body.cache_salt else {}
        return [{**self._prompt(one), **salt} for one in given]

    def _prompt(self, given: str | list[int]) -> dict[str, Any]:
        if not isinstance(given, str):
            return {"prompt_token_ids": given}
        if self.body.add_special_tokens:
            return {"prompt": given}
        return {"prompt": given, "prompt_token_ids": self.tokenizer.encode(given, add_special_tokens=False)}

    async def respond(self) -> Response:
        """Run it. Returns the answer, or the stream of its chunks."""
        batch = await PromptBatch.start(self.engine, self.id, self.prompts, self.params, self.body.priority)
        if self.body.stream:
            return EventStream(self._events(batch), batch.aclose)
        outputs = await batch.finish()
        choices = [self._choice(i, output, each) for i, output in enumerate(outputs) for each in output.outputs]
        answer = Completion(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=self._usage(batch)
        )
        return Response(answer.model_dump_json(), media_type="application/json")

    def _usage(self, batch: PromptBatch) -> Usage:
        """The tokens so far; with `max_tokens` 0 without the one that the engine has computed all the same."""
        usage = batch.usage()
        if self.prompt_only:
            return usage.model_copy(update={"completion_tokens": 0, "total_tokens": usage.prompt_tokens})
        return usage

    def _choice(self, number: int, output: RequestOutput, choice: CompletionOutput) -> CompletionChoice:
        whole = Delta(choice.text, choice.token_ids, choice.logprobs)
        return self._piece(number, output, choice, whole, offset=0, is_first=True)

    def _piece(
        self,
        number: int,
        output: RequestOutput,
        choice: CompletionOutput,
        delta: Delta,
        offset: int,
        is_first: bool,
    ) -> CompletionChoice:
        """What `delta` adds to a choice; the first piece may begin with the prompt."""
        text, token_ids, rows = delta.text, delta.token_ids, delta.logprobs
        if self.prompt_only:
            text, token_ids, rows = "", [], rows and []
        if self.body.echo and is_first:
            text = (output.prompt or "") + text
            if rows is not None:
                token_ids, rows = [*output.prompt_token_ids, *token_ids], [*(output.prompt_logprobs or []), *rows]
        piece = CompletionChoice(
            index=number * self.params.n + choice.index,
            text=text,
            logprobs=None if rows is None else completion_logprobs(self.tokenizer, token_ids, rows, offset),
            finish_reason=choice.finish_reason,
        )
        if choice.stop_reason is not None:
            piece.stop_reason = choice.stop_reason
        if self.body.return_token_ids:
            piece.token_ids = [] if self.prompt_only else delta.token_ids
            if is_first:
                piece.prompt_token_ids = output.prompt_token_ids
        return piece

    async def _events(self, batch: PromptBatch) -> AsyncIterator[str]:
        streams: dict[int, ChoiceStream] = {}
        offsets: dict[int, int] = {}
        try:
            async for number, output in batch.outputs():
                for choice in output.outputs:
                    index = number * self.params.n + choice.index
                    is_first = index not in streams
                    stream = streams.setdefault(index, ChoiceStream())
                    if stream.ended or (delta := stream.advance(choice)) is None:
                        if is_first:
                            del streams[index]
                        continue
                    piece = self._piece(number, output, choice, delta, offsets.get(index, 0), is_first)
                    if piece.logprobs is not None and piece.logprobs.tokens:
                        offsets[index] = piece.logprobs.text_offset[-1] + len(piece.logprobs.tokens[-1])
                    usage = None
                    if self.body.wants_running_usage:
                        num_tokens = 0 if self.prompt_only else len(choice.token_ids)
                        usage = Usage.of_choice(len(output.prompt_token_ids), num_tokens)
                    yield event(self._chunk([piece], usage))
            if self.body.wants_usage:
                yield event(self._chunk([], self._usage(batch)))
        except Exception as problem:
            yield error_event(problem)
        yield END

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        fields = {"usage": usage} if usage else {}
        return Completion(
            id=self.id, object="text_completion", created=self.created, model=self.model, choices=choices, **fields
        )
