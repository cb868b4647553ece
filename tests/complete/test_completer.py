"""One engine completes code: quickly loaded never, cancelled at once, and with a trace of its own for each request."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from minillm import LLM, AsyncLLM, EngineArgs, SamplingParams
from minillm.complete.completer import Completer
from minillm.complete.engine import engine_args
from minillm.complete.pictures import panel_html
from minillm.complete.prompt import Gap
from minillm.complete.suggestion import shown_text, suggestion_params
from minillm.errors import CheckpointError, EngineDeadError, PromptError
from minillm.outputs import CompletionOutput, RequestOutput
from minillm.trace import EngineStarted, RequestAdded, RequestFinished
from tests.conftest import TinyPair

CODE = "def add(a, b):\n    return a + b\n\n\nclass Stack:\n    def push(self, item):"
pytestmark = pytest.mark.timeout(120)


def engine_of(tiny: TinyPair, **options: Any) -> AsyncLLM:
    speculative = {"method": "draft_model", "model": str(tiny.draft), "num_speculative_tokens": 3}
    return AsyncLLM(
        EngineArgs(str(tiny.target), device="cpu", enforce_eager=True, speculative_config=speculative, **options)
    )


def completing(tiny: TinyPair, job: Callable[[Completer], Awaitable[None]]) -> None:
    """Run `job` on a completer of the tiny pair; at the end nothing is left in its engine."""
    completer = Completer(lambda: engine_of(tiny))
    asyncio.run(job(completer))
    completer.shutdown()
    assert completer.engine is not None and completer.engine.num_unfinished == 0
    inner = completer.engine.llm_engine.engine
    inner.scheduler.check_integrity()
    assert inner.pool.num_used == 0 and not inner.requests


def test_the_suggestion_is_what_generate_gives(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), device="cpu", enforce_eager=True)
    [output] = llm.generate(CODE, SamplingParams(temperature=0, max_tokens=20, stop=["\n\n"]), use_tqdm=False)

    async def job(completer: Completer) -> None:
        found = await completer.complete(Gap(CODE), 20)
        assert found.text == shown_text(output) and found.new_tokens == len(output.outputs[0].token_ids)
        assert not found.fills_gap and found.dropped_characters == 0 and found.cached_tokens == 0

    completing(tiny, job)


def test_the_next_key_finds_the_prompt_in_the_cache(tiny: TinyPair) -> None:
    async def job(completer: Completer) -> None:
        await completer.complete(Gap(CODE), 8)
        found = await completer.complete(Gap(CODE + "\n"), 8)
        assert found.cached_tokens >= found.prompt_tokens - 2 * 16
        started = completer.newest[1].events[0]
        assert len(started.cached_blocks) * started.block_size >= found.cached_tokens

    completing(tiny, job)


def test_a_text_after_the_cursor_is_seen(tiny: TinyPair) -> None:
    async def job(completer: Completer) -> None:
        found = await completer.complete(Gap(CODE, "\n\nprint(Stack())"), 8)
        assert found.fills_gap
        trace = completer.newest[1]
        assert "print(Stack())" in trace.of(RequestAdded)[0].prompt

    completing(tiny, job)


def test_code_longer_than_the_context_is_cut_and_that_is_reported(tiny: TinyPair) -> None:
    async def job(completer: Completer) -> None:
        found = await completer.complete(Gap(CODE * 40), 16)
        assert found.prompt_tokens <= 256 - 16
        assert found.dropped_characters > 0
        html = panel_html(*completer.newest)
        assert f"its first {found.dropped_characters:,} characters were left out" in html

    completing(tiny, job)


def test_cancelled_requests_leave_no_block_in_use(tiny: TinyPair) -> None:
    """Each of ten keys cancels the request of the key before, wherever it is."""

    cancelled = []

    async def job(completer: Completer) -> None:
        await completer.complete(Gap(CODE), 1)
        for number in range(10):
            task = asyncio.ensure_future(completer.complete(Gap(CODE + "x" * number), 100))
            for _ in range(number * 3):
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.wait([task])
            cancelled.append(task.cancelled())
        assert cancelled[0] and sum(cancelled) > 2, "a quick machine finishes some"
        found = await completer.complete(Gap(CODE), 8)
        assert completer.newest[0] is found

    completing(tiny, job)


def test_a_trace_holds_one_request_from_its_arrival_to_its_end(tiny: TinyPair) -> None:
    async def job(completer: Completer) -> None:
        first = asyncio.ensure_future(completer.complete(Gap(CODE), 100))
        while completer.engine is None or not completer.engine.num_unfinished:
            await asyncio.sleep(0.001)
        first.cancel()
        await completer.complete(Gap(CODE + "\n"), 8)
        events = completer.newest[1].events
        assert isinstance(events[0], EngineStarted) and isinstance(events[1], RequestAdded)
        [finished] = completer.newest[1].of(RequestFinished)
        assert finished.request_id == events[1].request_id and finished.reason in ("length", "stop")
        found, trace = completer.newest
        html = panel_html(replace(found, text="\n    return 1", new_tokens=1), trace)
        assert "1 token in" in html and "<pre>\n\n    return 1</pre>" in html, "browsers drop the first newline"
        assert all(name in html for name in ("token-acceptance", "cache-pages"))
        assert "<script" not in html

    completing(tiny, job)


def test_the_load_goes_on_when_the_request_that_began_it_is_cancelled(tiny: TinyPair) -> None:
    async def job(completer: Completer) -> None:
        first = asyncio.ensure_future(completer.complete(Gap(CODE), 4))
        await asyncio.sleep(0)
        assert completer.is_loading
        first.cancel()
        assert (await completer.complete(Gap(CODE), 4)).new_tokens
        assert not completer.is_loading

    completing(tiny, job)


def test_a_model_that_cannot_be_loaded_is_reported_every_time_and_tried_once() -> None:
    tries = []

    def load() -> AsyncLLM:
        tries.append(1)
        return AsyncLLM(EngineArgs("no/such/model"))

    async def job() -> None:
        completer = Completer(load)
        for _ in range(3):
            with pytest.raises(CheckpointError, match="no/such/model"):
                await completer.complete(Gap("x"), 4)
        completer.shutdown()

    asyncio.run(job())
    assert len(tries) == 1


def test_an_engine_that_has_ended_is_reported(tiny: TinyPair) -> None:
    async def job(completer: Completer) -> None:
        await completer.complete(Gap(CODE), 4)
        completer.engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await completer.complete(Gap(CODE), 4)

    completing(tiny, job)


@pytest.mark.parametrize(("max_tokens", "limit"), [(0, "from 1 to 256"), (257, "from 1 to 256"), (200, "256 tokens")])
def test_a_wrong_number_of_tokens_is_refused(tiny: TinyPair, max_tokens: int, limit: str) -> None:
    async def job(completer: Completer) -> None:
        await completer.complete(Gap(CODE), 4)
        with pytest.raises(PromptError, match=f"max_tokens={max_tokens} .*{limit}"):
            await completer.complete(Gap(CODE), max_tokens)

    completing(tiny, job)


def output_with(text: str, reason: str) -> RequestOutput:
    choice = CompletionOutput(0, text, [1], None, None, reason, None)
    return RequestOutput("a", "", [1], [choice], True, None, 0, None)


@pytest.mark.parametrize(
    ("text", "reason", "shown"),
    [
        ("return a + b", "stop", "return a + b"),
        ("return a + b\n    ", "stop", "return a + b"),
        ("\n    total = 0\n    for item in ite", "length", "\n    total = 0\n    for item in ite"),
        ("\n    total = sum(items)\n    ret", "length", "\n    total = sum(items)"),
        ("(a, b)", "length", "(a, b)"),
        ("x\n    y = 1\n    y = 1\n    y = 1\n", "length", "x\n    y = 1"),
        ("", "stop", ""),
    ],
)
def test_what_is_shown_of_a_completion(text: str, reason: str, shown: str) -> None:
    assert shown_text(output_with(text, reason)) == shown


def test_inside_a_line_a_suggestion_ends_with_the_line() -> None:
    assert suggestion_params(")\nprint()", 9).stop == ("\n",)
    assert suggestion_params("\nprint()", 9).stop == ("\n\n",)
    assert suggestion_params("", 9).max_tokens == 9


def test_the_models_are_those_of_the_lessons() -> None:
    bundled = engine_args({})
    assert bundled.model == "minicoder" and bundled.quantization == "int8"
    assert bundled.speculative_config["model"] == "minicoder-draft"
    assert bundled.speculative_config["quantization"] == "w8a8"
    own = engine_args({"MINILLM_MODEL": "/a/folder"})
    assert own.model == "/a/folder" and own.quantization is None
    assert own.speculative_config == {"method": "suffix"}
    pair = engine_args({"MINILLM_MODEL": "/a/folder", "MINILLM_DRAFT": "/b"})
    assert pair.speculative_config["model"] == "/b"
    own_draft = engine_args({"MINILLM_DRAFT": "/b"})  # which may be quantised in another way
    assert own_draft.quantization == "int8"
    assert own_draft.speculative_config == {"method": "draft_model", "model": "/b", "num_speculative_tokens": 4}
    bundled_draft = engine_args({"MINILLM_MODEL": "/a/folder", "MINILLM_DRAFT": "minicoder-draft"})
    assert bundled_draft.quantization is None and bundled_draft.speculative_config["quantization"] == "w8a8"


def test_a_server_that_never_completes_imports_no_engine() -> None:
    code = "import sys, minillm.complete.extension as e; print([m for m in ('torch', 'numba') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
