"""The engine in its own thread: the same tokens, and every request ends, whatever happens to it."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from minillm import LLM, AsyncLLM, EngineArgs, RequestOutput, RequestOutputKind, SamplingParams
from minillm.engine.engine import Engine
from minillm.errors import (
    ConfigError,
    EngineDeadError,
    EngineGenerateError,
    MinillmError,
    PromptError,
    QueueOverflowError,
    RequestTooLargeError,
    UnknownOptionError,
    UnsupportedError,
)
from minillm.trace import RequestAdded, RequestFinished
from tests.broken_logits import break_logits
from tests.conftest import TinyPair
from tests.held_engine import PATIENCE_S, held

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
ENDLESS = replace(GREEDY, max_tokens=200)
FINAL = replace(GREEDY, output_kind=RequestOutputKind.FINAL_ONLY)
PROMPTS = ["def add(a, b):", "for line in", "import os\n\n\ndef walk(root):", "class Stack:"]
pytestmark = pytest.mark.timeout(120)


@contextmanager
def served(tiny: TinyPair, limit: int | None = None, **options: Any) -> Iterator[AsyncLLM]:
    """An engine; at the end nothing is left in it."""
    args = EngineArgs(str(tiny.target), device="cpu", **{"block_size": 4, "enforce_eager": True, **options})
    engine = AsyncLLM(args, max_num_queued_reqs=limit)
    yield engine
    engine.shutdown()
    inner = engine.llm_engine.engine
    inner.scheduler.check_integrity()
    assert inner.pool.num_used == 0 and not inner.requests and not engine.llm_engine.metrics.requests
    assert engine.num_unfinished == 0


async def last(engine: AsyncLLM, prompt: Any, request_id: str, params: SamplingParams | None = GREEDY) -> RequestOutput:
    """The finished output of one request."""
    outputs = [output async for output in engine.generate(prompt, params, request_id)]
    assert outputs[-1].finished
    return outputs[-1]


def run(job: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(job())


def test_requests_at_once_get_what_generate_gives(tiny: TinyPair) -> None:
    alone = LLM(str(tiny.target), device="cpu", enforce_eager=True).generate(PROMPTS, GREEDY, use_tqdm=False)
    with served(tiny, max_num_seqs=3) as engine:

        async def job() -> list[RequestOutput]:
            return await asyncio.gather(*(last(engine, PROMPTS[i % 4], str(i)) for i in range(12)))

        for number, output in enumerate(run(job)):
            assert output.outputs[0].token_ids == alone[number % 4].outputs[0].token_ids
            assert output.outputs[0].text == alone[number % 4].outputs[0].text


def test_outputs_grow_and_the_last_is_finished(tiny: TinyPair) -> None:
    with served(tiny) as engine:

        async def job() -> list[RequestOutput]:
            return [output async for output in engine.generate(PROMPTS[0], GREEDY, "a")]

        outputs = run(job)
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == sorted(set(lengths)) and lengths[-1] == 24
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert all(outputs[-1].outputs[0].text.startswith(output.outputs[0].text) for output in outputs)


def test_final_only_yields_one_output(tiny: TinyPair) -> None:
    with served(tiny) as engine:

        async def job() -> list[RequestOutput]:
            return [output async for output in engine.generate(PROMPTS[0], FINAL, "a")]

        [output] = run(job)
        assert output.finished and len(output.outputs[0].token_ids) == 24


def test_a_request_without_parameters_has_the_defaults(tiny: TinyPair) -> None:
    with served(tiny) as engine:

        async def job() -> list[RequestOutput]:
            stream = await engine.add_request("b", PROMPTS[1])
            return [await last(engine, PROMPTS[0], "a", None), [output async for output in stream][-1]]

        for output in run(job):
            assert output.finished and 1 <= len(output.outputs[0].token_ids) <= SamplingParams().max_tokens


def test_deltas_are_refused(tiny: TinyPair) -> None:
    with pytest.raises(UnsupportedError, match="take CUMULATIVE"):
        SamplingParams(output_kind=RequestOutputKind.DELTA)
    with pytest.raises(ConfigError, match="output_kind=2"):
        SamplingParams(output_kind=2)


def test_a_reader_that_sleeps_gets_the_newest_output(tiny: TinyPair) -> None:
    with served(tiny) as engine:

        async def job() -> list[int]:
            lengths = []
            async for output in engine.generate(PROMPTS[0], GREEDY, "a"):
                lengths.append(len(output.outputs[0].token_ids))
                while engine.num_unfinished:  # until the engine is done
                    await asyncio.sleep(0.001)
            return lengths

        lengths = run(job)
        assert len(lengths) <= 2 and lengths[-1] == 24


def test_a_bad_request_is_refused_and_disturbs_no_other(tiny: TinyPair) -> None:
    with served(tiny, num_kv_blocks=12) as engine:

        async def refused(kind: type[MinillmError], prompt: Any, params: SamplingParams, name: str) -> None:
            with pytest.raises(kind):
                await engine.add_request(name, prompt, params)

        async def job() -> RequestOutput:
            good = asyncio.create_task(last(engine, PROMPTS[0], "good"))
            await asyncio.sleep(0)
            await refused(PromptError, "", GREEDY, "a")
            await refused(ConfigError, "x", replace(GREEDY, stop_token_ids=[10_000]), "b")
            await refused(RequestTooLargeError, "x", ENDLESS, "c")
            await refused(MinillmError, "x", GREEDY, "a#b")
            with pytest.raises(UnknownOptionError, match=r"AsyncLLM\.add_request has no option 'lora_request'"):
                await engine.add_request("d", "x", GREEDY, lora_request=None)
            with pytest.raises(UnknownOptionError, match=r"AsyncLLM\.generate has no option 'lora_request'"):
                engine.generate("x", GREEDY, "d", lora_request=None)
            return await good

        assert len(run(job).outputs[0].token_ids) == 24


def test_an_id_in_use_is_refused_and_free_again_afterwards(tiny: TinyPair) -> None:
    """The engine makes its second step when both requests are there, so the first one still runs."""
    with served(tiny) as engine:

        async def job() -> None:
            async with aclosing(await engine.add_request("a", PROMPTS[0], ENDLESS)) as stream:
                with held(engine, 0):
                    await anext(stream)
                    other = await engine.add_request("a", PROMPTS[1], GREEDY)
                with pytest.raises(MinillmError, match="'a' is in use"):
                    await anext(other)
            await last(engine, PROMPTS[1], "a")

        run(job)


@pytest.mark.parametrize("policy, order", [("priority", ["3", "1", "4", "0", "2"]), ("fcfs", list("01234"))])
def test_the_most_urgent_request_goes_first(tiny: TinyPair, policy: str, order: list[str]) -> None:
    """All of them arrive while the engine is in its first step, which is that of another request."""
    with served(tiny, max_num_seqs=1, scheduling_policy=policy) as engine:
        events: list[Any] = []
        engine.llm_engine.engine.listeners.append(events.append)
        short = replace(GREEDY, max_tokens=3)

        async def finished(request_id: str, priority: int = 0) -> None:
            async for _ in engine.generate(PROMPTS[0], short, request_id, priority=priority):
                pass

        async def job() -> None:
            with held(engine, -1) as step_waits:
                tasks = [asyncio.create_task(finished("first"))]
                await asyncio.to_thread(step_waits.wait, PATIENCE_S)
                for number, priority in enumerate((1, 0, 1, -5, 0)):
                    tasks.append(asyncio.create_task(finished(str(number), priority)))
                    while engine._inbox.qsize() <= number:
                        await asyncio.sleep(0.001)
            await asyncio.gather(*tasks)

        run(job)
        assert [e.request_id for e in events if isinstance(e, RequestFinished)] == ["first", *order]


def test_leaving_early_aborts_and_the_blocks_are_free(tiny: TinyPair) -> None:
    with served(tiny) as engine:

        async def job() -> None:
            async with aclosing(engine.generate(PROMPTS[0], ENDLESS, "a")) as outputs:
                await anext(outputs)
            task = asyncio.create_task(last(engine, PROMPTS[1], "b", ENDLESS))
            while not engine.num_unfinished:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await last(engine, PROMPTS[2], "c")  # its end comes after the aborts
            assert not engine.llm_engine.engine.requests

        run(job)


def test_a_request_is_aborted_by_its_id(tiny: TinyPair) -> None:
    with served(tiny) as engine:

        async def job() -> None:
            two = replace(ENDLESS, n=2, temperature=1.0)
            streams = [await engine.add_request(name, PROMPTS[0], two if name == "b" else ENDLESS) for name in "abc"]
            for stream in streams:
                await anext(stream)
            await engine.abort("a")
            await engine.abort(["b#1", "nobody"])  # the id of one completion, as for `LLMEngine.abort_request`
            for stream in streams[:2]:
                assert not [output async for output in stream if output.finished]
            assert engine.num_unfinished == 1
            outputs = [output async for output in streams[2]]
            assert outputs[-1].finished
            assert (await last(engine, PROMPTS[1], "a")).finished  # the id is free again

        run(job)


def test_a_request_is_aborted_by_its_id_while_its_prompt_is_tokenised(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only this one: the id is free again at once."""
    go_on, began = threading.Event(), threading.Event()
    with served(tiny) as engine:
        prepare = engine.llm_engine.prepare

        def slow(*arguments: Any) -> Any:
            began.set()
            assert go_on.wait(30)
            return prepare(*arguments)

        monkeypatch.setattr(engine.llm_engine, "prepare", slow)

        async def job() -> None:
            first = asyncio.create_task(engine.add_request("a", PROMPTS[0], ENDLESS))
            await asyncio.to_thread(began.wait, 30)
            await engine.abort("a")
            second = asyncio.create_task(engine.add_request("a", PROMPTS[1], GREEDY))
            await asyncio.sleep(0)  # it is accepted
            go_on.set()
            assert not [output async for output in await first]
            assert [output async for output in await second][-1].finished
            assert engine.num_unfinished == 0

        run(job)


def test_requests_that_come_and_go_in_the_inner_engine_disturb_no_other(tiny: TinyPair) -> None:
    with served(tiny) as engine:

        async def aborted_there(request_id: str) -> None:
            stream = await engine.add_request(request_id, PROMPTS[0], ENDLESS)
            engine._inbox.put(lambda: engine.llm_engine.abort_request(request_id))
            assert not [output async for output in stream if output.finished]

        async def job() -> None:
            engine.llm_engine.add_request("no stream", PROMPTS[2], GREEDY)
            other = await engine.add_request("b", PROMPTS[0], GREEDY)
            await aborted_there("a")
            assert [output async for output in other][-1].finished
            await aborted_there("a")  # which leaves the engine nothing to do

        run(lambda: asyncio.wait_for(job(), 20))


def test_a_request_over_the_limit_is_refused_until_another_ends(tiny: TinyPair) -> None:
    with served(tiny, limit=3) as engine:

        async def job() -> None:
            two = replace(GREEDY, n=2, temperature=1.0, max_tokens=100)
            async with aclosing(await engine.add_request("a", PROMPTS[0], two)):
                one = await engine.add_request("b", PROMPTS[0], ENDLESS)
                with pytest.raises(QueueOverflowError, match="3 sequences are queued or running and the request has 1"):
                    await engine.add_request("c", PROMPTS[0], GREEDY)
                await one.aclose()
                await last(engine, PROMPTS[0], "c")
                with pytest.raises(QueueOverflowError, match="the limit is 3"):
                    await engine.add_request("d", PROMPTS[0], two)
            await last(engine, PROMPTS[0], "d", two)

        run(job)


def test_a_choice_that_has_ended_makes_room_before_the_others_end(tiny: TinyPair) -> None:
    params = replace(GREEDY, n=4, temperature=1.0, seed=3)
    with served(tiny, limit=4) as engine:

        async def job() -> None:
            choices = (await last(engine, PROMPTS[0], "a", params)).outputs
            early = choices[0].token_ids[0]
            assert any(early not in choice.token_ids for choice in choices)
            with held(engine, num_tokens=12):
                stopped = replace(params, stop_token_ids=[early])
                async with aclosing(engine.generate(PROMPTS[0], stopped, "b")) as outputs:
                    async for output in outputs:
                        running = sum(choice.finish_reason is None for choice in output.outputs)
                        assert engine.num_unfinished == running > 0
                        if any(len(choice.token_ids) > 12 for choice in output.outputs):
                            break
                    assert running < 4
                    engine.check_admission(4 - running)
                    with pytest.raises(QueueOverflowError, match=f"{running} sequences are queued or running"):
                        engine.check_admission(5 - running)

        run(job)


def test_a_failed_step_reaches_every_waiter_and_the_engine_goes_on(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tiny) as engine:
        step, fail = Engine.step, threading.Event()

        def step_or_fail(self: Engine) -> Any:
            if fail.is_set():
                raise RuntimeError("the device is on fire")
            return step(self)

        monkeypatch.setattr(Engine, "step", step_or_fail)

        async def job() -> None:
            tasks = [asyncio.create_task(last(engine, PROMPTS[i], str(i), ENDLESS)) for i in range(4)]
            while engine.num_unfinished < 4:
                await asyncio.sleep(0.001)
            fail.set()
            for problem in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(problem, EngineGenerateError) and "the device is on fire" in str(problem)
            fail.clear()
            await last(engine, PROMPTS[0], "0")
            await engine.check_health()

        run(job)


@pytest.mark.parametrize("bad", [ENDLESS, replace(ENDLESS, n=2, temperature=1.0)], ids=["greedy", "two samples"])
def test_broken_logits_end_only_the_request_they_belong_to(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch, bad: SamplingParams
) -> None:
    good = [run(lambda i=i: alone(tiny, PROMPTS[i])) for i in range(3)]
    break_logits(monkeypatch, lambda request: request.request_id.startswith("bad") and request.num_output_tokens > 5)
    with served(tiny) as engine:

        async def job() -> None:
            engine.llm_engine.add_request("bad, without a stream", PROMPTS[2], bad)
            tasks = [asyncio.create_task(last(engine, PROMPTS[i], str(i), ENDLESS)) for i in range(3)]
            with pytest.raises(EngineGenerateError, match="NaN or infinite logits for request bad"):
                await last(engine, PROMPTS[3], "bad", bad)
            assert [output.outputs[0].token_ids for output in await asyncio.gather(*tasks)] == good

        run(job)


async def alone(tiny: TinyPair, prompt: str) -> list[int]:
    """The tokens of a prompt that has the engine to itself."""
    with served(tiny) as engine:
        return (await last(engine, prompt, "alone", ENDLESS)).outputs[0].token_ids


def test_a_loop_that_dies_tells_everyone_now_and_later(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tiny) as engine:
        started = threading.Event()

        def crash(self: Engine) -> Any:
            started.wait(30)
            raise SystemExit("out of patience")

        monkeypatch.setattr(Engine, "step", crash)

        async def job() -> None:
            tasks = [asyncio.create_task(last(engine, PROMPTS[i], str(i))) for i in range(4)]
            while engine.num_unfinished < 4:
                await asyncio.sleep(0.001)
            started.set()
            for problem in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(problem, EngineDeadError) and "out of patience" in str(problem)
            assert engine.errored
            with pytest.raises(EngineDeadError):
                await engine.check_health()
            with pytest.raises(EngineDeadError):
                await last(engine, PROMPTS[0], "later")

        run(job)


@pytest.mark.parametrize("kind", [RequestAdded, RequestFinished])
def test_a_loop_that_dies_while_requests_come_or_go_tells_them(tiny: TinyPair, kind: type) -> None:
    """At `RequestFinished` the step fails first, and then the abort of the request that is left."""
    with served(tiny) as engine:

        def broken(event: Any) -> None:
            if isinstance(event, kind):
                raise RuntimeError("a listener is broken")

        engine.llm_engine.engine.listeners.append(broken)

        async def job() -> list[Any]:
            both = [last(engine, PROMPTS[0], "a"), last(engine, PROMPTS[1], "b", ENDLESS)]
            return await asyncio.wait_for(asyncio.gather(*both, return_exceptions=True), 20)

        for problem in run(job):
            assert isinstance(problem, EngineDeadError | EngineGenerateError)
            assert "a listener is broken" in str(problem)


def test_an_engine_that_has_lost_a_process_is_dead(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor-parallel one raises `EngineDeadError` at every step from then on."""

    def lost(self: Engine) -> Any:
        raise EngineDeadError("the process of rank 1 has ended")

    with served(tiny) as engine:
        monkeypatch.setattr(Engine, "step", lost)

        async def job() -> None:
            with pytest.raises(EngineDeadError, match="rank 1 has ended"):
                await last(engine, PROMPTS[0], "a")
            with pytest.raises(EngineDeadError, match="rank 1 has ended"):
                await engine.check_health()

        run(job)


def test_shutdown_ends_those_that_wait_and_refuses_others(tiny: TinyPair) -> None:
    with served(tiny) as engine:

        async def job() -> None:
            engine.llm_engine.add_request("without a stream", PROMPTS[2], ENDLESS)
            task = asyncio.create_task(last(engine, PROMPTS[0], "a", ENDLESS))
            while not engine.num_unfinished:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(engine.shutdown)
            for waiter in (task, last(engine, PROMPTS[0], "b")):
                with pytest.raises(EngineDeadError, match="shut down"):
                    await waiter

        run(job)


def test_an_event_loop_that_ends_leaves_nothing_behind(tiny: TinyPair) -> None:
    with served(tiny) as engine:

        async def leave() -> None:
            await engine.add_request("a", PROMPTS[0], ENDLESS)

        run(leave)
        assert len(run(lambda: last(engine, PROMPTS[1], "b")).outputs[0].token_ids) == 24
        run(lambda: last(engine, PROMPTS[1], "a"))


def test_a_request_whose_event_loop_closes_before_it_hears_of_the_end_takes_no_room(tiny: TinyPair) -> None:
    with served(tiny, limit=1) as engine:
        ended, told = threading.Event(), threading.Event()
        engine.llm_engine.engine.listeners.append(lambda e: isinstance(e, RequestFinished) and ended.set())
        loop, stopped = asyncio.new_event_loop(), threading.Event()
        engine._inbox.put(stopped.wait)  # else the event loop may hear of the end while it still runs
        loop.run_until_complete(engine.add_request("a", PROMPTS[0], replace(GREEDY, max_tokens=1)))
        stopped.set()
        assert ended.wait(PATIENCE_S)
        engine._inbox.put(told.set)  # which is done after the step
        assert told.wait(PATIENCE_S) and engine.num_unfinished == 1
        loop.close()
        assert engine.num_unfinished == 0
        run(lambda: last(engine, PROMPTS[1], "b"))


def test_coming_and_going_at_random_loses_no_request_and_no_block(tiny: TinyPair) -> None:
    """200 requests of all kinds through a pool that is too small for them; a third leave early."""
    rng = random.Random(5)
    with served(tiny, num_kv_blocks=60, max_num_seqs=6) as engine:

        async def one(number: int) -> str:
            n = rng.choice([1, 1, 2])
            params = SamplingParams(temperature=1.0, n=n, seed=number, max_tokens=rng.randint(1, 30), ignore_eos=True)
            await asyncio.sleep(rng.random() * 0.5)
            steps, leave = 0, rng.choice([0, rng.randint(1, 10), 1000])
            async with aclosing(engine.generate(PROMPTS[number % 4], params, str(number))) as outputs:
                if not leave:
                    return "left at once"
                async for output in outputs:
                    steps += 1
                    if output.finished:
                        assert all(len(each.token_ids) == params.max_tokens for each in output.outputs)
                        return "finished"
                    if steps >= leave:
                        return "left"
            raise AssertionError("the stream ended without a finished output")

        async def job() -> list[str]:
            return await asyncio.gather(*(one(number) for number in range(200)))

        ended = run(job)
        assert {"finished", "left", "left at once"} == set(ended)


def test_closing_a_stream_wakes_the_task_that_waits_for_it(tiny: TinyPair) -> None:
    async def job() -> None:
        with served(tiny) as engine:
            stream = await engine.add_request("a", PROMPTS[0], FINAL)
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await asyncio.wait_for(waiting, 20)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    run(job)


def test_an_engine_that_nobody_uses_is_freed_and_its_thread_ends(tiny: TinyPair) -> None:
    llm = AsyncLLM(EngineArgs(str(tiny.target), device="cpu", enforce_eager=True))
    asyncio.run(last(llm, PROMPTS[0], "a"))
    thread, inner = llm._thread, weakref.ref(llm.llm_engine.engine)
    del llm
    gc.collect()
    thread.join(PATIENCE_S)
    gc.collect()
    assert not thread.is_alive() and inner() is None
