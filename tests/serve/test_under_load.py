"""Many clients at once, slow ones, and ones that leave: every answer arrives, and no block is lost."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from contextlib import suppress
from typing import Any

import pytest

from tests.serve.running_server import NAME, PATIENCE_S, RunningServer, running_server  # isort: skip (it may skip this file)

import httpx
import openai

from minillm import LLM, SamplingParams
from minillm.engine.engine import Engine
from tests.conftest import TinyPair
from tests.held_engine import held

PROMPTS = ["def add(a, b):", "for line in", "import os\n\n\ndef walk(root):", "class Stack:"]
LENGTH = 16
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": LENGTH, "extra_body": {"ignore_eos": True}}
ENDLESS: dict[str, Any] = {**GREEDY, "max_tokens": 200}
pytestmark = pytest.mark.timeout(180)


def expected(tiny: TinyPair, length: int = LENGTH) -> list[str]:
    llm = LLM(str(tiny.target), device="cpu", enforce_eager=True)
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    return [output.outputs[0].text for output in llm.generate(PROMPTS, params, use_tqdm=False)]


async def read(client: openai.AsyncOpenAI, number: int, options: dict[str, Any] = GREEDY) -> str:
    """The text of one request, streamed if its number is odd."""
    prompt = PROMPTS[number % 4]
    if number % 2 == 0:
        return (await client.completions.create(prompt=prompt, **options)).choices[0].text
    stream = await client.completions.create(prompt=prompt, stream=True, **options)
    return "".join([chunk.choices[0].text async for chunk in stream])


def test_64_at_once_get_what_each_would_get_alone(tiny: TinyPair) -> None:
    """Through 16 seats and a pool that is too small for them, so that some are preempted: to the end, 16 requests need
    80 blocks, with those of their prompts shared."""
    texts = expected(tiny)
    with running_server(tiny.target, max_num_seqs=16, num_kv_blocks=56) as server:

        async def job() -> list[str]:
            async with server.async_client() as client:
                with server.engine.llm_engine.engine.lock:  # no step runs before all have arrived
                    answers = [asyncio.create_task(read(client, number)) for number in range(64)]
                    while server.engine.num_unfinished < 64:
                        await asyncio.sleep(0.002)
                return await asyncio.gather(*answers)

        assert asyncio.run(job()) == [texts[number % 4] for number in range(64)]
        server.wait_until_idle()
        assert metric(server, "num_preemptions_total") > 0


def test_drafts_change_no_answer(tiny: TinyPair) -> None:
    texts = expected(tiny)
    speculative = {"model": str(tiny.draft), "num_speculative_tokens": 3}
    with running_server(tiny.target, speculative_config=speculative, max_num_seqs=8) as server:

        async def job() -> list[str]:
            async with server.async_client() as client:
                return await asyncio.gather(*(read(client, number) for number in range(16)))

        assert asyncio.run(job()) == [texts[number % 4] for number in range(16)]


def test_a_client_that_leaves_ends_its_request(tiny: TinyPair) -> None:
    with running_server(tiny.target) as server:
        with held(server.engine):
            stream = server.client().completions.create(prompt=PROMPTS[0], stream=True, **ENDLESS)
            next(iter(stream))
            stream.close()
            server.wait_until(lambda: server.engine.num_unfinished == 0)
        server.wait_until_idle()

        async def leave() -> None:
            """Before the answer to a request that is not streamed."""
            async with server.async_client() as client:
                task = asyncio.create_task(read(client, 0, ENDLESS))
                while not server.engine.llm_engine.engine.requests:
                    await asyncio.sleep(0.002)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        with held(server.engine):
            asyncio.run(leave())
            server.wait_until(lambda: server.engine.num_unfinished == 0)
        server.wait_until_idle()
        assert num_ended(server, "abort") == 2


def test_a_prompt_of_several_that_is_left_ends_all_of_them(tiny: TinyPair) -> None:
    with running_server(tiny.target) as server, held(server.engine):
        stream = server.client().completions.create(prompt=PROMPTS, stream=True, **ENDLESS)
        next(iter(stream))
        assert server.engine.num_unfinished == 4
        stream.close()
        server.wait_until(lambda: server.engine.num_unfinished == 0)


def test_a_slow_reader_gets_all_of_it_and_delays_nobody(tiny: TinyPair) -> None:
    """It reads nothing until its request has long ended in the engine; the sockets hold only a few bytes."""
    texts = expected(tiny)
    long = expected(tiny, 200)
    with running_server(tiny.target, send_buffer=4096) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = f'{{"prompt": "{PROMPTS[0]}", "temperature": 0, "max_tokens": 200, "stream": true, "logprobs": 20, '
        body += '"ignore_eos": true}'
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            slow.connect((host, int(port)))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            slow.sendall(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
            server.wait_until(lambda: server.engine.llm_engine.engine.requests)
            for number in range(4):  # others are served meanwhile
                answer = server.client().completions.create(prompt=PROMPTS[number], **GREEDY)
                assert answer.choices[0].text == texts[number]
            server.wait_until_idle()  # in the engine it has ended
            received = b"".join(iter(lambda: slow.recv(512), b""))
        events = [line for line in received.decode().splitlines() if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        choices = [json.loads(event[6:])["choices"][0] for event in events[:-1]]
        assert "".join(choice["text"] for choice in choices) == long[0]
        num_tokens = [len(choice["logprobs"]["tokens"]) for choice in choices]
        assert sum(num_tokens) == 200 and max(num_tokens) > 10  # what it had not read came in one piece


def test_clients_that_leave_at_random_lose_nothing_for_the_others(tiny: TinyPair) -> None:
    """150 clients: whole or streamed, patient or not. Every patient one gets its text; every block comes back.

    An impatient one that streams leaves after a few pieces; one that does not, after a short time, if its answer has
    not come by then.
    """
    texts, rng = expected(tiny), random.Random(11)
    plans = [(rng.random(), rng.random() < 0.4, rng.randint(1, 3)) for _ in range(150)]
    with running_server(tiny.target, max_num_seqs=6, num_kv_blocks=60) as server:

        async def leave_after(client: openai.AsyncOpenAI, number: int, num_pieces: int) -> None:
            stream = await client.completions.create(prompt=PROMPTS[number % 4], stream=True, **ENDLESS)
            text = ""
            for _ in range(num_pieces):
                piece = await anext(stream, None)  # if all of it has come, there are fewer
                text += piece.choices[0].text if piece else ""
            await stream.close()
            assert text.startswith(texts[number % 4]) or texts[number % 4].startswith(text)

        async def one(client: openai.AsyncOpenAI, number: int) -> None:
            start, leaves, num_pieces = plans[number]
            await asyncio.sleep(start)
            if not leaves:
                assert await read(client, number) == texts[number % 4]
            elif number % 2:
                await leave_after(client, number, num_pieces)
            else:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(read(client, number, ENDLESS), 0.1 * num_pieces)

        async def job() -> None:
            async with server.async_client() as client:
                await asyncio.gather(*(one(client, number) for number in range(150)))

        asyncio.run(job())
        server.wait_until_idle()


def test_a_step_that_fails_ends_its_requests_with_500_and_the_next_is_served(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(tiny.target) as server:
        client = server.client()
        step = Engine.step
        with held(server.engine):
            stream = iter(client.completions.create(prompt=PROMPTS[0], stream=True, **ENDLESS))
            next(stream)
            monkeypatch.setattr(Engine, "step", lambda self: 1 / 0)
        with pytest.raises(openai.APIError, match="a step failed with this request in the engine: ZeroDivisionError"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="ZeroDivisionError"):
            client.completions.create(prompt=PROMPTS[0], **GREEDY)
        monkeypatch.setattr(Engine, "step", step)
        assert client.completions.create(prompt=PROMPTS[0], **GREEDY).choices[0].text == expected(tiny)[0]


def test_an_engine_that_is_dead_is_not_healthy_and_its_server_ends(tiny: TinyPair) -> None:
    with running_server(tiny.target) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        server.engine.shutdown()
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive() and server.server.has_lost_engine

        async def ask() -> tuple[httpx.Response, httpx.Response]:
            """As while it ends."""
            transport = httpx.ASGITransport(server.server.config.app)
            async with httpx.AsyncClient(transport=transport, base_url=server.url) as client:
                return await client.get("/health"), await client.post("/v1/completions", json={"prompt": "a"})

        health, completion = asyncio.run(ask())
        assert health.status_code == 503 and "runs no more" in health.json()["error"]["message"]
        assert completion.status_code == 503 and completion.headers["retry-after"] == "1"


def metric(server: RunningServer, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    [value] = [line.split()[-1] for line in lines if line.startswith(f'vllm:{name}{{model_name="tiny"')]
    return float(value)


def num_ended(server: RunningServer, reason: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    [value] = [line.split()[-1] for line in lines if f'request_success_total{{finished_reason="{reason}"' in line]
    return float(value)


def test_without_a_prefix_cache_nothing_is_looked_up_and_nothing_is_found(tiny: TinyPair) -> None:
    """The second choice shares the blocks of the first one's prompt all the same."""
    with running_server(tiny.target, enable_prefix_caching=False) as server:
        server.client().completions.create(prompt=PROMPTS[2], **{**GREEDY, "temperature": 1, "n": 2})
        assert metric(server, "prefix_cache_queries_total") == metric(server, "prefix_cache_hits_total") == 0


def test_choices_without_a_seat_are_waiting_and_those_that_have_ended_are_not(tiny: TinyPair) -> None:
    sampled = {**ENDLESS, "prompt": PROMPTS[0], "temperature": 1, "n": 3, "seed": 3}
    with running_server(tiny.target, max_num_seqs=1) as server:
        short = server.client().completions.create(**{**sampled, "max_tokens": 1, "logprobs": 0})
        first = short.choices[0].logprobs.tokens[0]
        with held(server.engine, num_tokens=1):  # the first choice stops at its first token
            stream = server.client().completions.create(**sampled, stop=first, stream=True)
            server.wait_until(
                lambda: metric(server, "num_requests_running") == 1 == metric(server, "num_requests_waiting")
            )
            stream.close()


def test_metrics_count_what_the_clients_saw(tiny: TinyPair) -> None:
    speculative = {"model": str(tiny.draft), "num_speculative_tokens": 3}
    llm = LLM(str(tiny.target), device="cpu", block_size=4, enforce_eager=True, speculative_config=speculative)
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    right = [llm.generate(PROMPTS[2], params, use_tqdm=False)[0].metrics for _ in range(3)]
    num_drafted, num_accepted = sum(m.num_drafts for m in right), sum(m.num_accepted for m in right)
    assert 0 < num_accepted < num_drafted
    with running_server(tiny.target, speculative_config=speculative) as server:
        client = server.client()
        answers = [client.completions.create(prompt=PROMPTS[2], **GREEDY) for _ in range(3)]
        used = [answer.usage for answer in answers]
        assert metric(server, "prompt_tokens_total") == sum(usage.prompt_tokens for usage in used)
        assert metric(server, "generation_tokens_total") == 3 * LENGTH
        cached = sum(usage.prompt_tokens_details.cached_tokens for usage in used)
        assert metric(server, "prefix_cache_hits_total") == cached > 0
        assert metric(server, "prefix_cache_queries_total") == sum(usage.prompt_tokens for usage in used)
        for name in (
            "e2e_request_latency_seconds",
            "time_to_first_token_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_inference_time_seconds",
            "request_time_per_output_token_seconds",
        ):
            assert metric(server, f"{name}_count") == 3
        for name in ("prompt_tokens", "generation_tokens"):
            assert metric(server, f"request_{name}_sum") == metric(server, f"{name}_total")
        assert metric(server, "inter_token_latency_seconds_count") == sum(m.num_decode_forwards for m in right)
        assert metric(server, "spec_decode_num_draft_tokens_total") == num_drafted
        assert metric(server, "spec_decode_num_accepted_tokens_total") == num_accepted
        assert 0 < metric(server, "spec_decode_num_drafts_total") < num_drafted
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert metric(server, name) == 0
        client.completions.create(prompt=PROMPTS[2], **GREEDY, stop=answers[0].choices[0].text[-1])
        assert [num_ended(server, reason) for reason in ("length", "stop", "abort")] == [3, 1, 0]
        with held(server.engine):
            stream = client.completions.create(prompt=PROMPTS[2], stream=True, **ENDLESS)
            next(iter(stream))
            assert metric(server, "num_requests_running") == 1 and metric(server, "kv_cache_usage_perc") > 0
            assert metric(server, "time_to_first_token_seconds_count") == 5
            stream.close()
