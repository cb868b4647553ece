"""`/v1/chat/completions`: by the model's template, and refused without one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running_server import NAME, RunningServer, add_beginning, running_server  # isort: skip (it may skip this file)

import openai

from minillm import LLM, SamplingParams
from minillm.chat_template import ChatTemplate, message_for_template
from minillm.engine.engine import Engine
from minillm.errors import ConfigError
from minillm.tokenizer import Tokenizer
from tests.chat_model import with_template
from tests.conftest import TinyPair

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here: ' ~ m.content) }}{% endif %}"
    "# {{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}# assistant:{% endif %}"
)
MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "def add(a, b):"}]
PROMPT = "# system: be brief\n# user: def add(a, b):\n# assistant:"
LENGTH = 12
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": LENGTH, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def folder(tiny: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template in its tokenizer's configuration."""
    return with_template(tiny.target, tmp_path_factory.mktemp("chat") / "target", TEMPLATE)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with running_server(folder) as running:
        yield running


@pytest.fixture(scope="module")
def expected(tiny: TinyPair) -> Any:
    llm = LLM(str(tiny.target), device="cpu", enforce_eager=True)
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, logprobs=2)
    ids = llm.engine.tokenizer.encode(PROMPT, add_special_tokens=False)
    return llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0]


def test_a_chat_is_a_completion_of_the_template(server: RunningServer, expected: Any) -> None:
    answer = server.client().chat.completions.create(messages=MESSAGES, **GREEDY)
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    chunks = list(server.client().chat.completions.create(messages=MESSAGES, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.outputs[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]


def test_the_checkpoint_limits_an_answer_that_names_no_limit(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "target")
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps({"max_new_tokens": 5}))
    with running_server(tmp_path / "target") as limited:
        answer = limited.client().chat.completions.create(messages=MESSAGES, **{**GREEDY, "max_tokens": None})
    assert answer.usage.completion_tokens == 5 and answer.choices[0].finish_reason == "length"


def test_the_checkpoints_limit_gives_way_to_the_context(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "target")
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps({"max_new_tokens": 256}))
    with running_server(tmp_path / "target") as limited:
        answer = limited.client().chat.completions.create(messages=MESSAGES, **{**GREEDY, "max_tokens": None})
    assert answer.usage.total_tokens == 256


@pytest.mark.parametrize("config", [{}, {"max_new_tokens": 256}])
def test_an_answer_without_a_limit_ends_with_the_block_pool(
    folder: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    """The last token is never computed, so it needs no slot."""
    shutil.copytree(folder, tmp_path / "target")
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps(config))
    with running_server(tmp_path / "target", num_kv_blocks=30, block_size=4) as small:
        client = small.client()
        answer = client.chat.completions.create(messages=MESSAGES, **{**GREEDY, "max_tokens": None})
        assert (answer.usage.total_tokens, answer.choices[0].finish_reason) == (121, "length")
        long: Any = [{"role": "user", "content": "x" * 150}]
        with pytest.raises(openai.BadRequestError, match="blocks, the pool has 30; shorten the prompt, or raise num_"):
            client.chat.completions.create(messages=long, **{**GREEDY, "max_tokens": None})


def test_a_stream_that_fails_before_its_first_token_has_sent_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the roles, so a gateway can still send the request elsewhere."""
    with running_server(folder) as server:
        monkeypatch.setattr(Engine, "step", lambda self: 1 / 0)
        chunks = []
        with pytest.raises(openai.APIError, match="ZeroDivisionError"):
            chunks.extend(server.client().chat.completions.create(messages=MESSAGES, stream=True, **GREEDY))
        assert chunks == []


def test_every_choice_of_a_stream_begins_with_its_role(server: RunningServer) -> None:
    two = {**GREEDY, "temperature": 1, "n": 2}
    chunks = list(server.client().chat.completions.create(messages=MESSAGES, stream=True, **two))
    roles = [(chunk.choices[0].index, chunk.choices[0].delta.role) for chunk in chunks]
    assert roles[:2] == [(0, "assistant"), (1, "assistant")] and not any(role for _, role in roles[2:])


def test_the_prompts_tokens_are_returned_if_asked_for(server: RunningServer, expected: Any) -> None:
    options = {**GREEDY, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    answer = server.client().chat.completions.create(messages=MESSAGES, **options)
    assert answer.prompt_token_ids == expected.prompt_token_ids
    assert answer.choices[0].token_ids == expected.outputs[0].token_ids
    first, *others = server.client().chat.completions.create(messages=MESSAGES, stream=True, **options)
    assert first.prompt_token_ids == expected.prompt_token_ids
    assert not any(getattr(chunk, "prompt_token_ids", None) for chunk in others)


def test_special_tokens_are_added_to_those_of_the_template_if_asked_for(
    folder: Path, tmp_path: Path, expected: Any
) -> None:
    shutil.copytree(folder, tmp_path / "target")
    first = add_beginning(tmp_path / "target")
    with running_server(tmp_path / "target") as running:
        for asked, begins in (({}, []), ({"add_special_tokens": True}, [first])):
            options = {**GREEDY, "extra_body": {"return_token_ids": True, **asked}}
            answer = running.client().chat.completions.create(messages=MESSAGES, **options)
            assert answer.prompt_token_ids == [*begins, *expected.prompt_token_ids]


def test_every_chunk_carries_the_counts_if_asked_for(server: RunningServer, expected: Any) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        server.client().chat.completions.create(messages=MESSAGES, stream=True, stream_options=options, **GREEDY)
    )
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {len(expected.prompt_token_ids)}
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and (counts[0], counts[-1]) == (0, LENGTH)


def test_the_counts_in_a_chunk_are_those_of_its_choice(server: RunningServer, expected: Any) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    two = {**GREEDY, "temperature": 1, "n": 2}
    chunks = list(
        server.client().chat.completions.create(messages=MESSAGES, stream=True, stream_options=options, **two)
    )
    assert {chunk.choices[0].index: chunk.usage.completion_tokens for chunk in chunks[:-1]} == {0: LENGTH, 1: LENGTH}
    assert chunks[-1].usage.completion_tokens == 2 * LENGTH
    num_prompt_tokens = len(expected.prompt_token_ids)
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {num_prompt_tokens}
    assert {chunk.usage.total_tokens - chunk.usage.completion_tokens for chunk in chunks} == {num_prompt_tokens}


def test_parts_of_text_are_joined_and_an_image_is_refused(server: RunningServer, expected: Any) -> None:
    """By a line end, as in vLLM."""
    parts = [{"type": "text", "text": "def add"}, {"type": "text", "text": "(a, b):"}]
    messages: Any = [MESSAGES[0], {"role": "user", "content": parts}]
    assert message_for_template(messages[1]) == {"role": "user", "content": "def add\n(a, b):"}
    parts[:] = [{"type": "text", "text": "def add(a, b):"}]
    answer = server.client().chat.completions.create(messages=messages, **GREEDY)
    assert answer.choices[0].message.content == expected.outputs[0].text
    messages[1]["content"] = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(openai.BadRequestError, match="a part of type 'image_url'; this model reads text") as caught:
        server.client().chat.completions.create(messages=messages, **GREEDY)
    assert caught.value.param == "messages"


def test_logprobs_of_a_chat(server: RunningServer, expected: Any) -> None:
    answer = server.client().chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY)
    content = answer.choices[0].logprobs.content
    output = expected.outputs[0]
    assert [each.logprob for each in content] == pytest.approx(
        [row[token].logprob for row, token in zip(output.logprobs, output.token_ids, strict=True)]
    )
    assert [len(each.top_logprobs) for each in content] == [2] * LENGTH
    assert bytes(byte for each in content for byte in each.bytes).decode(errors="replace") == output.text
    chunks = server.client().chat.completions.create(messages=MESSAGES, logprobs=True, stream=True, **GREEDY)
    told = [each for chunk in chunks if (found := chunk.choices[0].logprobs) for each in found.content]
    assert [each.token for each in told] == [each.token for each in content]
    assert told[0].top_logprobs == []


def test_no_limit_means_as_many_tokens_as_the_context_has(server: RunningServer, expected: Any) -> None:
    options = {key: value for key, value in GREEDY.items() if key != "max_tokens"}
    answer = server.client().chat.completions.create(messages=MESSAGES, **options)
    assert answer.usage.total_tokens == 256
    answer = server.client().chat.completions.create(messages=MESSAGES, max_completion_tokens=3, **options)
    assert answer.usage.completion_tokens == 3


def test_what_the_template_refuses_is_the_callers_mistake(server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="refuses these messages: no tools here"):
        server.client().chat.completions.create(
            messages=[{"role": "tool", "content": "x", "tool_call_id": "1"}], **GREEDY
        )


def test_half_a_surrogate_pair_in_a_templates_words_is_escaped(server: RunningServer) -> None:
    body = json.dumps({"messages": [{"role": "tool", "content": "\ud800"}]})
    answer = server.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith("refuses these messages: no tools here: \\ud800")


BROKEN = "a\n{% for message in messages %}"


def test_a_broken_template_of_the_checkpoint_is_the_servers_mistake(folder: Path, tmp_path: Path) -> None:
    with running_server(with_template(folder, tmp_path / "target", BROKEN)) as server:
        client = server.client().with_options(max_retries=0)
        with pytest.raises(openai.InternalServerError, match=r"chat template is not valid Jinja: .*, line 2") as caught:
            client.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert caught.value.param is None


def test_a_broken_template_of_a_file_is_refused_at_the_start(tiny: TinyPair, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny.target)
    file = tmp_path / "template.jinja"
    for text in (BROKEN, "a\n{{ messages | no_such_filter }}"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"template\.jinja is not valid Jinja: .*, line 2; name another"):
            ChatTemplate(tokenizer, NAME, file)
    file.write_text("{{ raise_exception('never one message alone') }}")  # it may take others
    ChatTemplate(tokenizer, NAME, file)


def test_a_model_without_a_template_cannot_chat_but_takes_one_from_a_file(
    tiny: TinyPair, expected: Any, tmp_path: Path
) -> None:
    with running_server(tiny.target) as server, pytest.raises(openai.BadRequestError, match="has no chat template"):
        server.client().chat.completions.create(messages=MESSAGES, **GREEDY)
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    with running_server(tiny.target, template=file) as server:
        answer = server.client().chat.completions.create(messages=MESSAGES, **GREEDY)
        assert answer.choices[0].message.content == expected.outputs[0].text


@pytest.mark.parametrize("name", ["max_completion_tokens", "max_tokens"])
def test_the_field_that_is_wrong_is_named(server: RunningServer, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match=f"{name}=0 must be at least 1; left out") as refused:
        server.client().chat.completions.create(model=NAME, messages=MESSAGES, **{name: 0})
    assert refused.value.param == name
