"""`PromptBatch`: the prompts of one HTTP request in the engine, and their outputs as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from minillm.async_llm import AsyncLLM
from minillm.input_processor import Prompt
from minillm.output_stream import OutputStream
from minillm.outputs import RequestOutput
from minillm.sampling import SamplingParams
from minillm.serve.http_errors import ApiError
from minillm.serve.responses import PromptTokensDetails, Usage


class PromptBatch:
    """One stream of outputs per prompt. Closing it aborts those that have not ended."""

    def __init__(self, streams: list[OutputStream]) -> None:
        self.streams = streams
        self.newest: dict[int, RequestOutput] = {}
        """Number of the prompt → its newest output."""

    @classmethod
    async def start(
        cls, engine: AsyncLLM, name: str, prompts: Sequence[Prompt], params: SamplingParams, priority: int
    ) -> PromptBatch:
        """Queue all prompts. If one is refused, those before it are aborted. Raises the errors of
        `AsyncLLM.add_request`."""
        wanted, limit = params.n * len(prompts), engine.max_num_queued_reqs
        if limit is not None and wanted > limit:
            raise ApiError(
                f"{len(prompts)} prompts with n={params.n} are {wanted} sequences; the limit of this server is {limit} "
                "(--max-num-queued-reqs)"
            )
        engine.check_admission(wanted)
        batch = cls([])
        try:
            for number, prompt in enumerate(prompts):
                batch.streams.append(await engine.add_request(f"{name}-{number}", prompt, params, priority=priority))
        except BaseException:
            await batch.aclose()
            raise
        return batch

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yield `(number of the prompt, its output so far)` whenever one has grown, until all are finished."""
        if len(self.streams) == 1:
            async for output in self.streams[0]:
                self.newest[0] = output
                yield 0, output
            return
        waiting = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(self.streams)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    number, output = waiting.pop(task), task.result()
                    self.newest[number] = output
                    yield number, output
                    if not output.finished:
                        waiting[asyncio.ensure_future(anext(self.streams[number]))] = number
        finally:
            for task in waiting:
                task.cancel()  # which also keeps asyncio from logging an error that nobody saw

    async def finish(self) -> list[RequestOutput]:
        """Wait for all prompts. Returns their finished outputs, in order."""
        try:
            async for _ in self.outputs():
                pass
        finally:
            await self.aclose()
        return [self.newest[number] for number in range(len(self.streams))]

    async def aclose(self) -> None:
        """Abort what has not ended."""
        for stream in self.streams:
            await stream.aclose()

    def usage(self) -> Usage:
        """The tokens so far."""
        outputs = self.newest.values()
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(o.num_cached_tokens for o in outputs)),
        )
