"""Every field of a request has its effect: on the sampling parameters, the prefix cache, the queue, the template."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running_server import RunningServer, running_server  # isort: skip (it may skip this file)

from minillm import SamplingParams
from minillm.chat_template import ChatTemplate
from minillm.errors import ConfigError
from minillm.serve.http_errors import ApiError
from minillm.serve.requests import ChatRequest, CompletionRequest, GenerationRequest
from minillm.tokenizer import Tokenizer
from minillm.trace import RequestAdded
from tests.chat_model import with_template
from tests.conftest import TinyPair

TEMPLATE = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{{ raise_exception('no tools here') }}{% endif %}"
    "# {{ m.role }}: {{ m.content }}\n{% endfor %}{% if not enable_thinking %}# no thoughts\n{% endif %}"
)
TEXT = "def add(a, b):\n    return a + b\n"
BODIES: list[tuple[type[GenerationRequest], str, dict[str, Any]]] = [
    (CompletionRequest, "/v1/completions", {"prompt": TEXT}),
    (ChatRequest, "/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
]
SAMPLING = {
    "n": 3,
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "seed": 11,
    "stop": ["never said"],
    "stop_token_ids": [7],
    "logit_bias": {9: 1.5, 10: 100.0, 11: -100.0},
    "allowed_token_ids": [7, 9, 10, 11, 200],
    "bad_words": ["def"],
    "ignore_eos": True,
    "min_tokens": 2,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("chat") / "template.jinja"
    file.write_text(TEMPLATE)
    return file


@pytest.fixture(scope="module")
def server(tiny: TinyPair, template: Path) -> Iterator[RunningServer]:
    with running_server(tiny.target, template=template, scheduling_policy="priority") as running:
        yield running


def render(tiny: TinyPair, template: Path, messages: list[dict[str, Any]], **options: Any) -> str:
    chats = ChatTemplate(Tokenizer.from_folder(tiny.target), "tiny", template)
    return ChatRequest(messages=messages, **options).prompt_text(chats)


@pytest.mark.parametrize(("kind", "path", "body"), BODIES)
@pytest.mark.parametrize("name", SAMPLING)
def test_a_field_reaches_the_sampling_params(
    kind: type[GenerationRequest], path: str, body: dict[str, Any], name: str
) -> None:
    plain = kind(**body).sampling_params(SamplingParams(), max_tokens=8)
    assert getattr(plain, name) != SAMPLING[name]
    given = kind(**body, **{name: SAMPLING[name]}).sampling_params(SamplingParams(), max_tokens=8)
    assert given == replace(plain, **{name: SAMPLING[name]})


def test_biases_are_taken_as_at_least_minus_100_and_at_most_100() -> None:
    """As in vLLM; the keys of a JSON object are strings."""
    body = CompletionRequest.model_validate_json('{"prompt": "a", "logit_bias": {"9": 300.0, "11": -1e9, "5": 2}}')
    given = body.sampling_params(SamplingParams(), max_tokens=8)
    assert given.logit_bias == {9: 100.0, 11: -100.0, 5: 2.0}


def test_a_bias_of_nan_is_refused() -> None:
    """JSON has no such number, but Python's parser reads it."""
    body = CompletionRequest.model_validate({"prompt": "a", "logit_bias": {"5": float("nan")}})
    with pytest.raises(ConfigError, match="logit_bias"):
        body.sampling_params(SamplingParams(), max_tokens=8)


@pytest.mark.parametrize(("kind", "path", "body"), BODIES)
def test_all_fields_together_are_answered(
    server: RunningServer, kind: type[GenerationRequest], path: str, body: dict[str, Any]
) -> None:
    answer = server.post(path, json={**body, **SAMPLING, "max_tokens": 8, "cache_salt": "mine", "priority": 1})
    assert answer.status_code == 200 and len(answer.json()["choices"]) == SAMPLING["n"], answer.text


@pytest.mark.parametrize(("kind", "path", "body"), BODIES)
def test_a_prefix_is_shared_under_the_same_salt_only(
    server: RunningServer, kind: type[GenerationRequest], path: str, body: dict[str, Any]
) -> None:
    def cached(salt: str) -> int:
        answer = server.post(path, json={**body, "max_tokens": 1, "cache_salt": salt})
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(f"first of {path}") == 0
    assert cached(f"first of {path}") > 0
    assert cached(f"second of {path}") == 0


@pytest.mark.parametrize(("kind", "path", "body"), BODIES)
def test_a_priority_reaches_an_engine_that_schedules_by_it(
    server: RunningServer, kind: type[GenerationRequest], path: str, body: dict[str, Any]
) -> None:
    with server.engine.llm_engine.trace() as trace:
        assert server.post(path, json={**body, "max_tokens": 1, "priority": -3}).status_code == 200
    assert [event.priority for event in trace.of(RequestAdded)] == [-3]


@pytest.mark.parametrize(("kind", "path", "body"), BODIES)
def test_a_priority_that_would_have_no_effect_is_refused(
    kind: type[GenerationRequest], path: str, body: dict[str, Any]
) -> None:
    kind(**body, priority=0).check_fields("fcfs")
    kind(**body, priority=2).check_fields("priority")
    with pytest.raises(
        ApiError, match=r"priority=2 has no effect .* 'fcfs'; .*--scheduling-policy priority"
    ) as refused:
        kind(**body, priority=2).check_fields("fcfs")
    assert refused.value.param == "priority"


def test_a_null_or_an_empty_list_of_calls_is_as_good_as_left_out(tiny: TinyPair, template: Path) -> None:
    answer = {"role": "assistant", "content": "yes", "refusal": None}
    for calls in (None, []):
        assert render(tiny, template, [{**answer, "tool_calls": calls}]).startswith("# assistant: yes")
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    with pytest.raises(ApiError, match="no tools here"):
        render(tiny, template, [{**answer, "tool_calls": [call]}])


def test_the_variables_of_a_template_can_be_given(tiny: TinyPair, template: Path, server: RunningServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert render(tiny, template, messages) == "# user: hi\n# no thoughts\n"
    assert render(tiny, template, messages, chat_template_kwargs={"enable_thinking": True}) == "# user: hi\n"
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    ids = [
        server.post("/v1/chat/completions", json={**body, "chat_template_kwargs": given}).json()["prompt_token_ids"]
        for given in (None, {"enable_thinking": True})
    ]
    assert len(ids[0]) > len(ids[1])


@pytest.mark.parametrize(
    "name",
    [
        "self",
        "messages",
        "conversation",
        "conversations",
        "chat_template",
        "tokenize",
        "add_generation_prompt",
        "tools",
    ],
)
def test_what_is_no_variable_of_a_template_is_refused(tiny: TinyPair, template: Path, name: str) -> None:
    with pytest.raises(ApiError, match=f"chat_template_kwargs has '{name}'.*leave it out") as refused:
        render(tiny, template, [{"role": "user", "content": "hi"}], chat_template_kwargs={name: None})
    assert refused.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("has_file", [False, True])
def test_a_tokenizer_that_cannot_be_read_is_named_until_it_can(
    tiny: TinyPair, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_file: bool
) -> None:
    """It may have been for lack of open files."""

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("too many open files")

    folder = with_template(tiny.target, tmp_path / "target", TEMPLATE)
    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedTokenizerFast.from_pretrained", broken)
        chats = ChatTemplate(Tokenizer.from_folder(folder), "tiny", template if has_file else None)
        for _ in range(2):
            with pytest.raises(ApiError, match=r"cannot read the tokenizer .*too many open files.*; fetch") as refused:
                ChatRequest(messages=[{"role": "user", "content": "hi"}]).prompt_text(chats)
            assert refused.value.status == 500
    assert ChatRequest(messages=[{"role": "user", "content": "hi"}]).prompt_text(chats)
