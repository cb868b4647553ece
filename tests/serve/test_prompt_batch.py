"""`PromptBatch` alone: what happens to the streams of the other prompts when one of them fails."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from minillm.errors import EngineGenerateError
from minillm.output_stream import OutputStream
from minillm.serve.prompt_batch import PromptBatch


def test_an_error_that_ends_several_prompts_at_once_is_raised_once_and_not_logged_again() -> None:
    logged: list[str] = []

    async def job() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context["message"]))
        streams = [OutputStream(str(number), 1, abort=_end) for number in range(3)]
        batch = PromptBatch(streams)
        answer = asyncio.ensure_future(batch.finish())
        await asyncio.sleep(0)
        for stream in streams:
            stream.put(error=EngineGenerateError("the step failed"))
        with pytest.raises(EngineGenerateError, match="the step failed"):
            await answer
        assert all(stream.ended for stream in streams)

    asyncio.run(job())
    gc.collect()  # asyncio logs an error that nobody saw when its task is collected
    assert logged == []


def test_a_client_that_leaves_ends_every_prompt_and_nothing_is_still_waited_for() -> None:
    async def job() -> set[Any]:
        streams = [OutputStream(str(number), 1, abort=_end) for number in range(3)]
        answer = asyncio.ensure_future(PromptBatch(streams).finish())
        await asyncio.sleep(0)
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        assert all(stream.ended for stream in streams)
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(job()) == set()


def _end(stream: OutputStream) -> None:
    stream.ended = True
