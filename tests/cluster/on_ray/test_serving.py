"""Replicas of Ray Serve behind the gateway: the prefix router, killed replicas, streams, a client that leaves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import openai
import pytest
import ray

from minillm import LLM, SamplingParams
from minillm.async_llm import AsyncLLM
from minillm.bench.processes import free_port
from minillm.cluster.application import ClusterSettings, serving
from minillm.cluster.failover import process_of
from minillm.cluster.replica import ReplicaSettings
from minillm.errors import ConfigError
from minillm.trace import Event, RequestFinished
from tests.conftest import TinyPair

ENGINE = {"device": "cpu", "enforce_eager": True, "block_size": 4, "num_kv_blocks": 256}
PATIENCE_S = 120


@pytest.fixture(scope="module")
def url(tiny: TinyPair) -> Iterator[str]:
    replica = ReplicaSettings(str(tiny.target), ENGINE, model_names=("tiny",))
    with serving(ClusterSettings(replica, num_replicas=2, api_keys=("key",)), port=free_port()) as found:
        yield found


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=PATIENCE_S)


def kill(replica: str) -> None:
    os.kill(process_of(replica), signal.SIGKILL)


def ask(url: str, prompt: list[int], **options: object) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **options}
    headers = {"Authorization": "Bearer key"}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)


def test_prompts_with_one_prefix_go_to_one_replica_and_are_found_in_its_cache(url: str) -> None:
    documents = [[number] * 20 for number in range(1, 7)]
    by_document = []
    for document in documents:
        answers = [ask(url, [*document, own]) for own in (31, 32, 33)]
        by_document.append({answer.headers["x-minillm-replica"] for answer in answers})
        cached = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached == [0, 20, 20]
    assert all(len(replicas) == 1 for replicas in by_document)
    assert len(set.union(*by_document)) == 2  # and the documents are spread over both


def test_the_api_is_that_of_the_server(client: openai.OpenAI, url: str, tiny: TinyPair) -> None:
    prompt = "def add(a, b):\n"
    [expected] = LLM(str(tiny.target), **ENGINE).generate([prompt], SamplingParams(temperature=0, max_tokens=12))
    found = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
    assert found.choices[0].text == expected.outputs[0].text
    stream = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected.outputs[0].text
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.BadRequestError, match="top_p=7"):
        client.completions.create(model="tiny", prompt=prompt, top_p=7)
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 401


def test_a_stream_whose_replica_is_killed_goes_on(client: openai.OpenAI, tiny: TinyPair) -> None:
    prompt = "class Stack:\n"
    options = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True}
    [expected] = LLM(str(tiny.target), **ENGINE).generate([prompt], SamplingParams(**options))
    extra = {"ignore_eos": True}
    stream = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=200, temperature=0, stream=True, extra_body=extra
    )
    texts = [next(stream).choices[0].text]
    kill(stream.response.headers["x-minillm-replica"])
    texts += [chunk.choices[0].text for chunk in stream]
    assert "".join(texts) == expected.outputs[0].text


def test_a_sampled_stream_whose_replica_is_killed_ends_with_an_error(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="tiny", prompt="x", max_tokens=200, temperature=1, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    kill(stream.response.headers["x-minillm-replica"])
    with pytest.raises(openai.APIError, match="lost in the middle"):
        list(stream)


def fail(actor: Any) -> None:
    engine_of(actor)._inbox.put(partial(int, "the engine loop fails"))


def test_a_stream_whose_replicas_engine_fails_goes_on(client: openai.OpenAI, tiny: TinyPair) -> None:
    prompt, options = "class Queue:\n", {"temperature": 0.0, "max_tokens": 220, "ignore_eos": True}
    [expected] = LLM(str(tiny.target), **ENGINE).generate([prompt], SamplingParams(**options))
    extra = {"ignore_eos": True}
    stream = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=220, temperature=0, stream=True, extra_body=extra
    )
    texts = [next(stream).choices[0].text]
    name = stream.response.headers["x-minillm-replica"]
    replica = ray.get_actor(f"SERVE_REPLICA::minillm#Replica#{name}", namespace="serve")
    replica.__ray_call__.remote(fail)
    texts += [chunk.choices[0].text for chunk in stream]
    assert "".join(texts) == expected.outputs[0].text
    again = client.completions.create(model="tiny", prompt=prompt, max_tokens=220, temperature=0, extra_body=extra)
    assert again.choices[0].text == expected.outputs[0].text


def engine_of(actor: Any) -> AsyncLLM:
    return actor._replica_impl._user_callable_wrapper._callable.engine


def watch(actor: Any) -> None:
    engine = engine_of(actor)
    engine.reasons = []

    def note(event: Event) -> None:
        if isinstance(event, RequestFinished):
            engine.reasons.append(event.reason)

    engine.llm_engine.engine.listeners.append(note)


def reasons(actor: Any) -> list[str]:
    return engine_of(actor).reasons


def test_a_client_that_leaves_ends_its_request(url: str) -> None:
    headers = {"Authorization": "Bearer key"}
    prompt, options = [7] * 24, {"max_tokens": 220, "ignore_eos": True}
    name = ask(url, prompt).headers["x-minillm-replica"]
    replica = ray.get_actor(f"SERVE_REPLICA::minillm#Replica#{name}", namespace="serve")
    ray.get(replica.__ray_call__.remote(watch))
    body = {"prompt": prompt, "temperature": 0, "stream": True, **options}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S) as response:
        assert next(response.iter_lines()).startswith("data: ")
        assert response.headers["x-minillm-replica"] == name
    deadline = time.monotonic() + PATIENCE_S
    while not (found := ray.get(replica.__ray_call__.remote(reasons))):
        assert time.monotonic() < deadline
    assert found == ["abort"]


def test_serve_that_runs_already_is_left_alone(url: str, tiny: TinyPair) -> None:
    settings = ClusterSettings(ReplicaSettings(str(tiny.target), ENGINE))
    with pytest.raises(ConfigError, match="runs Serve already"), serving(settings, port=free_port()):
        pass
    assert ask(url, [5] * 8).status_code == 200


def test_bad_settings_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="router='random'"):
        ClusterSettings(ReplicaSettings("minicoder"), router="random")
    with pytest.raises(ConfigError, match="num_replicas=0"):
        ClusterSettings(ReplicaSettings("minicoder"), num_replicas=0)
    with pytest.raises(ConfigError, match="an API key is empty"):
        ClusterSettings(ReplicaSettings("minicoder"), api_keys=("",))
