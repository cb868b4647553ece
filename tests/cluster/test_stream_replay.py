"""A stream that goes on with another replica: the client gets every character once."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="the extra `serve` is not installed")

from minillm.cluster.stream_replay import StreamReplay, can_replay
from minillm.errors import EngineDeadError

END = "data: [DONE]\n\n"


def event(text: str, index: int = 0, end: str | None = None, name: str = "cmpl-1", **chunk: Any) -> str:
    choice = {"index": index, "text": text, "finish_reason": end}
    return f"data: {json.dumps({'id': name, 'created': 1, 'choices': [choice], **chunk})}\n\n"


def chat(delta: dict[str, str], end: str | None = None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": end}
    return f"data: {json.dumps({'id': 'c', 'created': 1, 'choices': [choice]})}\n\n"


def received(replay: StreamReplay, *events: str) -> list[dict[str, Any]]:
    sent = [found for one in events if (found := replay.advance(one)) is not None]
    return [json.loads(one.removeprefix("data: ")) for one in sent if one != END]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index)


def test_an_undisturbed_stream_passes_unchanged() -> None:
    replay = StreamReplay()
    events = [event("de"), event("f f"), event("", end="length")]
    assert received(replay, *events) == [json.loads(one.removeprefix("data: ")) for one in events]
    assert replay.advance(END) == END


def test_another_replica_goes_on_where_the_first_was_lost_with_other_cuts() -> None:
    replay = StreamReplay()
    first = received(replay, event("de"), event("f fi"))
    replay.restart()
    second = received(
        replay, *(event(part, name="cmpl-2") for part in ("d", "ef f", "ib(", "n)")), event("", end="stop")
    )
    assert text_of(first + second) == "def fib(n)"
    assert [chunk["choices"][0]["text"] for chunk in second] == ["b(", "n)", ""]
    assert {chunk["id"] for chunk in second} == {"cmpl-1"}
    assert second[-1]["choices"][0]["finish_reason"] == "stop"


def test_the_token_counts_are_sent_once() -> None:
    replay = StreamReplay()
    usage = f"data: {json.dumps({'id': 'a', 'created': 1, 'choices': [], 'usage': {'total_tokens': 3}})}\n\n"
    assert len(received(replay, event("ab"), event("", end="length"), usage)) == 3
    replay.restart()
    assert received(replay, event("ab"), event("", end="length"), usage) == []
    assert replay.advance(END) == END


def test_choices_are_counted_apart() -> None:
    replay = StreamReplay()
    first = received(replay, event("aa", 0), event("x", 1))
    replay.restart()
    second = received(replay, event("xyz", 1), event("a", 0), event("ab", 0))
    assert text_of(first + second, 0) == "aab"
    assert text_of(first + second, 1) == "xyz"


def test_a_choice_that_has_ended_does_not_go_on() -> None:
    replay = StreamReplay()
    received(replay, event("abc", 0), event("", 0, end="stop"), event("x", 1))
    replay.restart()
    received(replay, event("ab", 0), event("x", 1))
    with pytest.raises(EngineDeadError, match="a different text"):
        replay.advance(event("cd", 0))


def test_a_second_loss_is_the_same() -> None:
    replay = StreamReplay()
    chunks = received(replay, event("one "))
    for parts in (("o", "ne t"), ("one two", " three")):
        replay.restart()
        chunks += received(replay, *map(event, parts))
    assert text_of(chunks) == "one two three"


def test_the_role_and_an_end_are_sent_once() -> None:
    replay = StreamReplay()
    events = [chat({"role": "assistant", "content": ""}), chat({"content": "hi"}), chat({"content": ""}, "stop")]
    assert len(received(replay, *events)) == 3
    replay.restart()
    assert received(replay, *events) == []


def test_usage_and_errors_pass() -> None:
    replay = StreamReplay()
    assert received(replay, 'data: {"error": {"code": 500}}\n\n') == [{"error": {"code": 500}}]
    usage = {"id": "cmpl-2", "created": 1, "choices": [], "usage": {"total_tokens": 3}}
    [found] = received(replay, f"data: {json.dumps(usage)}\n\n")
    assert found["usage"] == {"total_tokens": 3}


@pytest.mark.parametrize("other", [event("dex"), event("de", end="stop")])
def test_a_different_text_is_an_error_and_is_never_joined(other: str) -> None:
    replay = StreamReplay()
    replay.advance(event("def"))
    replay.restart()
    with pytest.raises(EngineDeadError, match="different text"):
        replay.advance(other)


@pytest.mark.parametrize(
    ("body", "possible"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0.7, "seed": 3}, True),
        ({"temperature": 0, "logprobs": False}, True),
        ({"temperature": 0.7}, False),
        ({"temperature": 0.7, "seed": -1}, False),
        ({}, False),
        ({"temperature": 0, "logprobs": 0}, False),
        ({"temperature": 0, "logprobs": True}, False),
        ({"temperature": 0, "return_token_ids": True}, False),
    ],
)
def test_only_a_determined_text_without_further_fields_goes_on(body: dict[str, Any], possible: bool) -> None:
    assert can_replay(body) is possible
