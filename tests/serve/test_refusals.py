"""What the server refuses, and how: OpenAI's shape of errors, and the fix in the message."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.running_server import NAME, RunningServer, running_server  # isort: skip (it may skip this file)

import httpx
import openai
from fastapi.exceptions import RequestValidationError
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import ValidationError

from minillm.errors import ConfigError
from minillm.serve.http_errors import describe
from minillm.serve.requests import IGNORED, UNSUPPORTED, ChatRequest, CompletionRequest, GenerationRequest
from minillm.serve.settings import ServerSettings
from tests.conftest import TinyPair
from tests.held_engine import held

LIMIT = 2000


@pytest.fixture(scope="module")
def server(tiny: TinyPair) -> Iterator[RunningServer]:
    with running_server(tiny.target, settings={"max_body_bytes": LIMIT, "max_logprobs": 5}, limit=8) as running:
        yield running


def refused(answer: httpx.Response, status: int, message: str, param: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["code"] == status
    assert message in error["message"], error["message"]
    assert error["param"] == param


BAD_BODIES: list[tuple[dict[str, Any], str, str | None]] = [
    ({"prompt": ""}, "the prompt is empty", "prompt"),
    ({"prompt": []}, "the prompt is empty", "prompt"),
    ({}, "prompt: Field required", "prompt"),
    ({"prompt": 5}, "prompt", "prompt"),
    ({"prompt": "a", "max_tokens": "many"}, "max_tokens: Input should be a valid integer", "max_tokens"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens=0 must be at least 1, or 0 with echo", "max_tokens"),
    ({"prompt": "a", "max_tokens": -1, "echo": True}, "max_tokens=-1 must be at least 1", "max_tokens"),
    ({"prompt": "a", "max_tokens": 300}, "over the context of 256", None),
    ({"prompt": "a", "temperature": 3}, "temperature=3.0: must be a number from 0", None),
    ({"prompt": "a", "n": 0}, "n=0: must be an integer from 1", None),
    ({"prompt": "a", "n": 9}, "1 prompts with n=9 are 9 sequences; the limit of this server is 8", None),
    ({"prompt": "a", "n": 2, "temperature": 0}, "n=2: must be 1 at temperature=0", None),
    ({"prompt": [5, 100_000]}, "prompt token 1 is 100000", None),
    ({"prompt": "a\ud800"}, "half a surrogate pair", None),
    (
        {"prompt": "a", "priority": 3},
        "priority=3 has no effect under the scheduling policy 'fcfs'; leave it out, or start the server with "
        "--scheduling-policy priority",
        "priority",
    ),
    ({"prompt": "a", "best_of": 3}, "best_of=3 is not supported", "best_of"),
    ({"prompt": "a", "logprobs": 6}, "logprobs=6 must be from 0 to 5", "logprobs"),
    ({"prompt": "a", "logprobs": -1}, "logprobs=-1 must be from 0 to 5", "logprobs"),
    ({"prompt": "a", "logit_bias": {"a": 1.0}}, "logit_bias", "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5": "much"}}, "logit_bias", "logit_bias"),
    (
        {"prompt": "a", "logit_bias": {"5": 1, "7": "much"}},
        "logit_bias.7: Input should be a valid number",
        "logit_bias",
    ),
    ({"prompt": "a", "logit_bias": {"-5": 1.0}}, "logit_bias={-5: 1.0}: must map token ids", None),
    ({"prompt": "a", "logit_bias": {"100000": 1.0}}, "logit_bias has 100000", None),
    ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids=[]: must be", None),
    ({"prompt": "a", "bad_words": [""]}, "bad_words=['']: must be", None),
    (
        {"prompt": "a", "structured_outputs": {"regex": "a"}},
        "structured_outputs is not supported",
        "structured_outputs",
    ),
    ({"prompt": "a", "include_reasoning": False}, "include_reasoning is not supported", "include_reasoning"),
    ({"prompt": "a", "request_id": "mine"}, "request_id is not supported", "request_id"),
    (
        {"prompt": "a", "response_format": {"type": "json_object"}},
        "response_format is not supported",
        "response_format",
    ),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options need stream=true", "stream_options"),
    ({"prompt": "a", "suffix": "b", "echo": True}, "suffix needs one prompt", "suffix"),
    ({"prompt": ["a"], "suffix": "b"}, "suffix needs one prompt", "suffix"),
    ({"prompt": "a", "suffix": "<|fim_middle|>"}, "marks the gap itself", None),
    ({"prompt": "a", "stop": [""]}, "stop", None),
    (
        {"prompt": "a", "stop": list("abcde")},
        "stop has 5 strings; at most 4 are allowed: leave some out, or use stop_token_ids",
        "stop",
    ),
]


def test_a_server_without_a_limit_reports_the_whole_vocabulary() -> None:
    limited, unlimited = (ServerSettings(("m",), max_logprobs=limit) for limit in (5, -1))
    assert [limited.allows_logprobs(n) for n in (-1, 0, 5, 6)] == [False, True, True, False]
    assert [unlimited.allows_logprobs(n) for n in (-2, -1, 0, 900)] == [False, True, True, True]


@pytest.mark.parametrize(("body", "message", "param"), BAD_BODIES)
def test_a_bad_field_is_named(server: RunningServer, body: dict[str, Any], message: str, param: str | None) -> None:
    for stream in (False, True) if "stream_options" not in body else (False,):
        content = json.dumps({**body, "stream": stream})
        answer = server.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        refused(answer, 400, message, param)


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionRequest, {"prompt": [0.5] * 3000}, "prompt"),
        (CompletionRequest, {"prompt": [[0.5] * 50] * 50}, "prompt"),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["b"] * 3000}, "stop_token_ids"),
        (CompletionRequest, {"prompt": "a", "logit_bias": {f"b{i}": "c" for i in range(3000)}}, "logit_bias"),
        (CompletionRequest, {"prompt": "a", "logit_bias": {"b" * 3000: 1}}, "logit_bias"),
        (CompletionRequest, {"prompt": "a", **{name: [None] for name in CompletionRequest.model_fields}}, "model"),
        (ChatRequest, {"messages": [{}] * 3000}, "messages"),
        (ChatRequest, {"messages": [{"role": "user", "content": [5] * 3000}]}, "messages"),
    ],
)
def test_many_wrong_items_get_a_short_answer(kind: type[GenerationRequest], body: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind(**body)
    assert caught.value.error_count() < 100
    message, _, first = describe(RequestValidationError(caught.value.errors()))
    assert len(message) < 500 and first == param


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("body", [b"", b'{"prompt": "a"', b"[1, 2", b'"a"', b"[]", b"\xff\xfe{", b"nul", b"{" * 1500])
def test_a_body_that_is_no_json_object(server: RunningServer, path: str, body: bytes) -> None:
    answer = server.post(path, content=body, headers={"Content-Type": "application/json"})
    refused(answer, 400, "the body must be a JSON object")


def test_a_body_in_another_encoding_is_told_which_to_take(server: RunningServer) -> None:
    body = '{"prompt": "é"}'.encode("latin-1")
    answer = server.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    refused(answer, 400, "a JSON object in UTF-8")
    refused(answer, 400, "it cannot be read: 'utf-8' codec can't decode byte 0xe9")


def test_a_form_is_no_json(server: RunningServer) -> None:
    refused(
        server.post("/v1/completions", data={"prompt": "a"}), 400, "sent with the header 'Content-Type: application"
    )


def test_fields_that_nobody_knows_are_ignored_as_in_vllm(server: RunningServer) -> None:
    body = {"prompt": "a", "max_tokens": 1, "field_of_the_future": 7, "logit_bias": None, "user": "me", "tools": []}
    body |= {"return_token_offsets": True}
    assert server.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("params", "body"),
    [
        (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
        (chat_create_params.CompletionCreateParamsBase, ChatRequest),
    ],
)
def test_every_field_of_openai_is_known(params: type, body: type[GenerationRequest]) -> None:
    """Those that ask for something of the answer are implemented or refused."""
    fields = set(params.__annotations__)
    assert len(fields) > 15 and fields - body.model_fields.keys() - UNSUPPORTED.keys() == fields & IGNORED


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/nothing"])
def test_a_body_over_the_limit_is_refused_announced_or_not(server: RunningServer, path: str) -> None:
    body = b'{"prompt": "' + b"a" * LIMIT + b'"}'
    message = f"over the limit of {LIMIT} bytes"
    refused(server.post(path, content=body, headers={"Content-Type": "application/json"}), 413, message)

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    if path != "/v1/nothing":  # nobody reads that body
        refused(server.post(path, content=pieces(), headers={"Content-Type": "application/json"}), 413, message)


def test_a_body_at_the_limit_is_read(server: RunningServer) -> None:
    body = b'{"prompt": "a", "max_tokens": 1'
    body += b" " * (LIMIT - len(body) - 1) + b"}"
    assert server.post("/v1/completions", content=body, headers={"Content-Type": "application/json"}).status_code == 200


def test_paths_and_methods_that_are_not_there(server: RunningServer) -> None:
    paths = "/v1/completions, /v1/chat/completions, /v1/models, /v1/models/{name}, /health, /metrics"
    refused(server.post("/v1/nothing", json={}), 404, f"there is no path /v1/nothing; this server has {paths}")
    answer = httpx.get(f"{server.url}/v1/completions")
    refused(answer, 405, "/v1/completions does not take GET; use POST")
    assert answer.headers["allow"] == "POST"


PAGE = {"Origin": "https://page.example"}
ASKS = {**PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def test_a_web_page_may_call_and_read_every_answer(tiny: TinyPair) -> None:
    """Browsers ask first, and send no key then."""
    with running_server(tiny.target, settings={"api_keys": ("secret",)}) as server:
        url = f"{server.url}/v1/completions"
        asked = httpx.options(url, headers=ASKS)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, "*")
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert "authorization" in asked.headers["access-control-allow-headers"]
        body = {"prompt": "a", "max_tokens": 1}
        for key, status in (("secret", 200), ("wrong", 401)):
            answer = httpx.post(url, json=body, headers={**PAGE, "Authorization": f"Bearer {key}"})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, "*")
        assert httpx.options(url).status_code == 401  # it is no browser that asks


def test_only_the_web_pages_that_are_named_may_call(tiny: TinyPair) -> None:
    with running_server(tiny.target, settings={"allowed_origins": ("https://mine.example",)}) as server:
        url = f"{server.url}/v1/completions"
        assert httpx.options(url, headers=ASKS).status_code == 400
        mine = httpx.options(url, headers={**ASKS, "Origin": "https://mine.example"})
        assert (mine.status_code, mine.headers["access-control-allow-origin"]) == (200, "https://mine.example")
        assert "access-control-allow-origin" not in httpx.get(f"{server.url}/v1/models", headers=PAGE).headers


@pytest.mark.parametrize(
    "origin",
    [
        *("", 5, "example.org", "https://", "https://example.org/", "https://example.org/page", "https://Example.org"),
        *("HTTPS://example.org", "https://*.example.org", "https://example.org:443", "http://example.org:80"),
        *("https://example.org:", "https://me@example.org", " https://example.org", "https://example.org\n"),
    ],
)
def test_an_origin_that_no_page_has_is_refused(origin: Any) -> None:
    message = rf"allowed origin {re.escape(repr(origin))}: no page has it; write '\*' .* 'https://example\.org', as br"
    with pytest.raises(ConfigError, match=message):
        ServerSettings(("m",), allowed_origins=("https://example.org", origin))


def test_an_origin_that_a_page_may_have_is_taken() -> None:
    pages = ("https://example.org", "http://localhost:3000", "http://[::1]:80800", "https://a-b.example:80")
    ServerSettings(("m",), allowed_origins=("*", "null", "chrome-extension://abc", *pages))


@pytest.mark.parametrize("key", ["secret\n", "secret ", "\tsecret", " "])
def test_a_key_that_no_request_can_send_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="begins or ends with white space"):
        ServerSettings(("m",), api_keys=("other", key))


def test_a_tokenizer_without_the_tokens_refuses_a_suffix(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minillm.fill_in_the_middle.FIM_TOKENS", ("<|no such token|>",))
    answer = server.post("/v1/completions", json={"prompt": "a", "suffix": "b"})
    refused(answer, 400, "has no token <|no such token|>; take a model that marks gaps as Qwen does")


def test_a_key_is_asked_for_under_v1_only(tiny: TinyPair) -> None:
    with running_server(tiny.target, settings={"api_keys": ("first", "sécond", "voilà")}) as server:
        for key in ("first", "wrong", "firs", "first2"):
            if key == "first":
                assert server.client(key).completions.create(model=NAME, prompt="a", max_tokens=1).choices
                continue
            with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
                server.client(key).completions.create(model=NAME, prompt="a", max_tokens=1)
        refused(server.post("/v1/completions", json={"prompt": "a"}), 401, "Authorization: Bearer KEY")
        for key in ("first", "sécond", "voilà", " first"):
            header = {"Authorization": f"Bearer {key}".encode()}
            assert server.post("/v1/completions", json={"prompt": "a"}, headers=header).status_code == 200
        refused(server.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": "first"}), 401, "")
        for path in ("/health", "/metrics"):
            assert httpx.get(f"{server.url}{path}").status_code == 200


def test_a_full_queue_answers_503_and_when_to_come_again(tiny: TinyPair) -> None:
    with running_server(tiny.target, limit=2) as server:
        endless = {"model": NAME, "prompt": "a", "max_tokens": 240, "stream": True, "extra_body": {"ignore_eos": True}}
        with held(server.engine):
            open_streams = [server.client().completions.create(**endless) for _ in range(2)]
            answer = server.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
            refused(answer, 503, "the limit is 2: try again later")
            assert answer.headers["retry-after"] == "1"
            open_streams[0].close()
            server.wait_until(lambda: server.engine.num_unfinished < 2)
        assert server.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        open_streams[1].close()
