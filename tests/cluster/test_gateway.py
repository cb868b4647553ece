"""The gateway over replicas that are lost: every request is answered once, with the same text. Without Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

import httpx

from minillm.cluster.gateway import MAX_TRIES, Answer, ReplicaLost, build_gateway
from minillm.cluster.prefix_of_request import PrefixReader
from minillm.cluster.replica import HttpCall, Replica, ReplicaSettings
from minillm.errors import EngineDeadError
from minillm.serve.disconnects import CLOSED_REQUEST
from minillm.trace import Event, RequestFinished
from tests.conftest import TinyPair
from tests.held_engine import held

GREEDY = {"prompt": "def add(a, b):\n", "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def settings(tiny: TinyPair) -> ReplicaSettings:
    engine = {"block_size": 4, "enforce_eager": True, "device": "cpu"}
    return ReplicaSettings(str(tiny.target), engine, model_names=("tiny",), max_num_queued_reqs=4)


@pytest.fixture(scope="module")
def replica(settings: ReplicaSettings) -> Iterator[Replica]:
    made = Replica(settings, "a")
    yield made
    made.engine.shutdown()


LAST = -1


class Unreliable:
    """Replicas of which one is lost after so many pieces of its answer, per try; LAST: after all; None: not at all."""

    def __init__(self, replica: Replica, *lost_after: int | None) -> None:
        self.replica, self.lost_after = replica, list(lost_after)
        self.calls: list[HttpCall] = []

    async def send(self, call: HttpCall) -> Answer:
        self.calls.append(call)
        limit = self.lost_after.pop(0) if self.lost_after else None
        answer = self.replica.handle(call)
        try:
            count = 0
            async for piece in answer:
                if count == limit:
                    raise ReplicaLost("killed")
                yield piece
                count += 1
            if limit == LAST:
                raise ReplicaLost("killed")
        finally:
            await answer.aclose()


def ask(
    replicas: Unreliable, settings: ReplicaSettings, *bodies: Any, path: str = "/v1/completions", **how: Any
) -> Any:
    keys: Sequence[str] = how.pop("api_keys", ())
    method = how.pop("method", None)
    app = build_gateway(replicas, settings, how.pop("reader", None), tuple(keys))

    async def send() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60) as client:
            return await asyncio.gather(
                *(client.request(method or ("POST" if b else "GET"), path, json=b, **how) for b in bodies)
            )

    answers = asyncio.run(send())
    return answers[0] if len(answers) == 1 else answers


def streamed(response: httpx.Response) -> tuple[str, list[dict[str, Any]]]:
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]" and "[DONE]" not in events
    chunks = [json.loads(one) for one in events]
    return "".join(choice["text"] for chunk in chunks for choice in chunk.get("choices", ())), chunks


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def expected(replica: Replica, settings: ReplicaSettings) -> str:
    return text(ask(Unreliable(replica), settings, GREEDY))


def test_an_answer_passes_with_the_name_of_its_replica(replica: Replica, settings: ReplicaSettings) -> None:
    answer = ask(Unreliable(replica), settings, GREEDY)
    assert answer.headers["x-minillm-replica"] == "a"
    assert answer.headers["content-type"] == "application/json"
    assert ask(Unreliable(replica), settings, None, path="/v1/models").json()["data"][0]["id"] == "tiny"
    assert ask(Unreliable(replica), settings, None, path="/health").status_code == 200


@pytest.mark.parametrize("lost_after", [(0,), (1,), (0, 1)])
def test_a_lost_replicas_request_is_sent_again(
    replica: Replica, settings: ReplicaSettings, expected: str, lost_after: tuple[int, ...]
) -> None:
    replicas = Unreliable(replica, *lost_after)
    answer = ask(replicas, settings, GREEDY)
    assert text(answer) == expected
    assert len(replicas.calls) == int(answer.headers["x-minillm-tries"]) == len(lost_after) + 1


def test_a_sampled_answer_that_nobody_has_seen_is_sent_again(replica: Replica, settings: ReplicaSettings) -> None:
    assert text(ask(Unreliable(replica, 1), settings, GREEDY | {"temperature": 1.0}))


@pytest.mark.parametrize("lost_after", [(0,), (1,), (2,), (9,), (5, 12)])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.9, "seed": 5}, {"n": 2, "temperature": 0.9, "seed": 5}])
def test_a_stream_goes_on_elsewhere(
    replica: Replica, settings: ReplicaSettings, lost_after: tuple[int, ...], how: dict[str, Any]
) -> None:
    body = GREEDY | {"stream": True} | how
    whole, chunks = streamed(ask(Unreliable(replica), settings, body))
    again, more = streamed(ask(Unreliable(replica, *lost_after), settings, body))
    by_choice = [
        ["".join(c["text"] for chunk in each for c in chunk["choices"] if c["index"] == i) for i in range(2)]
        for each in (chunks, more)
    ]
    assert by_choice[0] == by_choice[1] and len(whole) == len(again)
    assert len({chunk["id"] for chunk in more}) == 1
    ends = [[c["index"] for chunk in each for c in chunk["choices"] if c["finish_reason"]] for each in (chunks, more)]
    assert sorted(ends[0]) == sorted(ends[1]) == list(range(how.get("n", 1)))


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_stream_whose_end_was_sent_has_ended(replica: Replica, settings: ReplicaSettings, temperature: float) -> None:
    replicas = Unreliable(replica, LAST)
    _, chunks = streamed(ask(replicas, settings, GREEDY | {"stream": True, "temperature": temperature}))
    assert "error" not in chunks[-1] and len(replicas.calls) == 1


def test_a_stream_that_cannot_go_on_ends_with_an_error(replica: Replica, settings: ReplicaSettings) -> None:
    body = GREEDY | {"stream": True, "temperature": 1.0}
    _, chunks = streamed(ask(Unreliable(replica, 5), settings, body))
    assert chunks[-1]["error"]["code"] == 503
    assert "lost in the middle" in chunks[-1]["error"]["message"]
    assert len(chunks) > 1


def test_a_stream_of_which_nothing_has_been_sent_is_sent_again_whatever_it_is(
    replica: Replica, settings: ReplicaSettings
) -> None:
    _, chunks = streamed(ask(Unreliable(replica, 1), settings, GREEDY | {"stream": True, "temperature": 1.0}))
    assert "error" not in chunks[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_loses_every_replica_is_given_up(
    replica: Replica, settings: ReplicaSettings, stream: bool
) -> None:
    replicas = Unreliable(replica, *[1] * 9)
    answer = ask(replicas, settings, GREEDY | {"stream": stream})
    error = streamed(answer)[1][-1]["error"] if stream else answer.json()["error"]
    assert error["code"] == 503 and f"{MAX_TRIES} replicas were lost" in error["message"]
    assert len(replicas.calls) == MAX_TRIES


class EngineFails(Unreliable):
    """One replica is sent the first try, and its engine fails after so many pieces of the answer; another the next."""

    def __init__(self, first: Replica, second: Replica, pieces: int) -> None:
        super().__init__(second)
        self.first, self.pieces = first, pieces

    async def send(self, call: HttpCall) -> Answer:
        if self.calls:
            answer = super().send(call)
        else:
            self.calls.append(call)
            answer = self.first.handle(call)
            for _ in range(self.pieces):
                yield await anext(answer)
            self.first.engine._inbox.put(fail)
            while not self.first.engine.errored:
                await asyncio.sleep(0.01)
        async for piece in answer:
            yield piece


def fail() -> None:
    raise RuntimeError("the engine loop fails")


@pytest.mark.parametrize("stream", [False, True])
def test_a_replica_whose_engine_has_failed_ends_and_its_request_is_sent_again(
    replica: Replica,
    settings: ReplicaSettings,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
) -> None:
    def end_process() -> None:
        raise ReplicaLost("its process has ended")

    monkeypatch.setattr("minillm.cluster.replica.end_process", end_process)
    failing = Replica(settings, "b")
    asyncio.run(failing.check_health())
    replicas = EngineFails(failing, replica, 3 if stream else 0)
    answer = ask(replicas, settings, GREEDY | {"stream": stream})
    found, chunks = streamed(answer) if stream else (text(answer), [])
    assert found == expected and len(replicas.calls) == 2
    assert not any("error" in chunk for chunk in chunks)
    with pytest.raises(EngineDeadError, match="the engine loop fails"):
        asyncio.run(failing.check_health())


def test_a_refusal_of_the_replica_passes(replica: Replica, settings: ReplicaSettings) -> None:
    refused = ask(Unreliable(replica), settings, GREEDY | {"top_p": 7})
    assert refused.status_code == 400 and "top_p=7" in refused.json()["error"]["message"]
    three = GREEDY | {"n": 3, "temperature": 1.0}
    full = ask(Unreliable(replica), settings, three, three)
    assert sorted(answer.status_code for answer in full) == [200, 503]
    assert next(a for a in full if a.status_code == 503).headers["retry-after"] == "1"


def test_headers_of_a_redirect_and_of_a_wrong_method_pass(replica: Replica, settings: ReplicaSettings) -> None:
    redirect = ask(Unreliable(replica), settings, GREEDY, path="/v1/completions/")
    assert (redirect.status_code, redirect.headers["location"]) == (307, "/v1/completions")
    for method in ("GET", "PUT"):
        wrong = ask(Unreliable(replica), settings, None, method=method)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert f"/v1/completions does not take {method}; use POST" in wrong.text


def test_keys_and_lengths_are_checked_before_a_replica_is_asked(replica: Replica, settings: ReplicaSettings) -> None:
    replicas = Unreliable(replica)
    assert ask(replicas, settings, GREEDY, api_keys=["secret"]).status_code == 401
    assert ask(replicas, settings, GREEDY | {"prompt": "x" * (5 << 20)}).status_code == 413
    assert replicas.calls == []
    assert ask(replicas, settings, GREEDY, api_keys=["secret"], headers={"Authorization": "Bearer secret"}).is_success
    assert all(name != b"authorization" for name, _ in replicas.calls[0].headers)


def test_a_web_page_is_answered_by_the_gateway(replica: Replica, settings: ReplicaSettings) -> None:
    replicas = Unreliable(replica)
    page = {"Origin": "https://page.example"}
    answer = ask(replicas, settings, GREEDY, headers=page)
    assert answer.headers.get_list("access-control-allow-origin") == ["*"]
    named = replace(settings, allowed_origins=("https://mine.example",))
    assert "access-control-allow-origin" not in ask(replicas, named, GREEDY, headers=page).headers


def test_a_replica_has_a_limit_of_sequences(tiny: TinyPair) -> None:
    made = Replica(ReplicaSettings(str(tiny.target), {"device": "cpu", "enforce_eager": True}), "b")
    try:
        answer = ask(Unreliable(made), ReplicaSettings("b"), GREEDY | {"n": 1025, "temperature": 1})
        assert answer.status_code == 400
        assert "1025 sequences; the limit of this server is 1024" in answer.json()["error"]["message"]
    finally:
        made.engine.shutdown()


def test_the_router_gets_the_hashes_of_the_prompt(replica: Replica, settings: ReplicaSettings) -> None:
    replicas = Unreliable(replica)
    ask(replicas, settings, GREEDY, reader=PrefixReader(settings.model, 4))
    assert len(replicas.calls[0].block_hashes) >= 2


def test_metrics_are_those_of_a_replica(replica: Replica, settings: ReplicaSettings) -> None:
    assert ask(Unreliable(replica), settings, None, path="/metrics").status_code == 404


def test_a_client_that_leaves_while_it_sends_its_body_is_no_failure(
    replica: Replica, settings: ReplicaSettings
) -> None:
    replicas = Unreliable(replica)
    messages = iter([{"type": "http.request", "body": b'{"pro', "more_body": True}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    asyncio.run(build_gateway(replicas, settings, None)(scope, receive, send))
    assert sent[0]["status"] == CLOSED_REQUEST and not replicas.calls


def test_an_answer_that_nobody_reads_on_is_aborted(replica: Replica) -> None:
    body = json.dumps(GREEDY | {"stream": True, "max_tokens": 200, "ignore_eos": True}).encode()
    call = HttpCall("POST", "/v1/completions", ((b"content-type", b"application/json"),), body)

    reasons: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, RequestFinished):
            reasons.append(event.reason)

    async def leave() -> None:
        with held(replica.engine):
            answer = replica.handle(call)
            await anext(answer)
            await anext(answer)
            assert replica.engine.num_unfinished == 1
            await answer.aclose()
        while not reasons:
            await asyncio.sleep(0.01)

    listeners = replica.engine.llm_engine.engine.listeners
    listeners.append(note)
    try:
        asyncio.run(leave())
    finally:
        listeners.remove(note)
    assert reasons == ["abort"]
