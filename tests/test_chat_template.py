"""Conversations as prompts: what a template gets of a message, and `LLM.chat`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from minillm import LLM, SamplingParams
from minillm.chat_template import ChatTemplate, message_for_template
from minillm.errors import CheckpointError, ConfigError, PromptError, UnsupportedError
from minillm.tokenizer import Tokenizer
from tests.chat_model import with_template
from tests.conftest import TinyPair

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "# {{ m.role }}: {{ m.content }}{{ '\n' }}{% endfor %}{{ mood }}{{ tools | length if tools else '' }}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)
GREEDY = SamplingParams(temperature=0, max_tokens=8)
FIRST = [{"role": "user", "content": "def add(a, b):"}]
LONGER = [*FIRST, {"role": "assistant", "content": "    return a"}]


@pytest.fixture(scope="module")
def folder(tiny: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template."""
    return with_template(tiny.target, tmp_path_factory.mktemp("chat") / "target", TEMPLATE)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, device="cpu", enforce_eager=True)


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}


@pytest.mark.parametrize(
    ("message", "written"),
    [
        ({"role": "user", "content": None}, {"role": "user", "content": ""}),
        (
            {"role": "user", "content": "a", "name": "Zoë", "refusal": "b"},
            {"role": "user", "content": "a", "name": "Zoë"},
        ),
        ({"role": "user", "content": "a", "name": None, "task": "t"}, {"role": "user", "content": "a", "task": "t"}),
        ({"role": "user", "content": "a", "tool_calls": [call("{}")]}, {"role": "user", "content": "a"}),
        ({"role": "tool", "content": "5", "tool_call_id": "1"}, {"role": "tool", "content": "5", "tool_call_id": "1"}),
        ({"role": "assistant", "content": "a", "tool_call_id": "1"}, {"role": "assistant", "content": "a"}),
        ({"role": "assistant", "content": "a", "tool_calls": []}, {"role": "assistant", "content": "a"}),
        (
            {"role": "assistant", "content": "a", "reasoning": "why"},
            {"role": "assistant", "content": "a", "reasoning": "why", "reasoning_content": "why"},
        ),
        (
            {"role": "assistant", "content": "a", "reasoning_content": "why", "reasoning": None},
            {"role": "assistant", "content": "a", "reasoning": "why", "reasoning_content": "why"},
        ),
        ({"role": "user", "content": "a", "reasoning": "why"}, {"role": "user", "content": "a"}),
        (
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "a"},
                    {"type": "output_text", "text": "b"},
                    {"type": "text", "text": None},
                    {"type": "text"},
                    {"type": "refusal", "refusal": "c"},
                    {"type": "input_text", "text": ""},
                ],
            },
            {"role": "assistant", "content": "a\nb\nc\n"},
        ),
    ],
)
def test_a_template_gets_the_fields_that_it_knows(message: dict[str, Any], written: dict[str, Any]) -> None:
    assert message_for_template(message) == written


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ('{"a": 2, "b": [3]}', {"a": 2, "b": [3]}),
        ({"a": 2}, {"a": 2}),
        ("", {}),
        (None, {}),
        ("[2]", {}),
        ("5", {}),
        ('{"a": 2', {}),
        ("[" * 100_000, {}),
        ([2], {}),
    ],
    ids=lambda given: repr(given)[:20],
)
def test_the_arguments_of_a_call_become_a_mapping(arguments: Any, parsed: dict[str, Any]) -> None:
    """Clients of OpenAI's API send them as JSON, and templates go through their items."""
    given = {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}
    assert message_for_template(given) == {"role": "assistant", "content": "", "tool_calls": [call(parsed)]}
    assert given["tool_calls"] == [call(arguments)], "the caller's own message has changed"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("hi", "must be a mapping with a 'role'"),
        ({"content": "hi"}, "must be a mapping with a 'role'"),
        ({"role": 5, "content": "hi"}, "must be a mapping with a 'role'"),
        ({"role": "user", "content": 5}, "must be text or a list of parts, not int"),
        ({"role": "user", "content": ["hi"]}, "must be text or a list of parts, not list"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "needs a string as its text, not int"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": []}]}, "type 'refusal' needs a string as its tex"),
        ({"role": "user", "content": [{"type": ["text"]}]}, r"a part of type \['text'\]; this model reads text"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "a part of type 'image_url'; this model reads text"),
        ({"role": "assistant", "tool_calls": ["add"]}, "tool call 'add' must be a mapping of type 'function'"),
        ({"role": "assistant", "tool_calls": 5}, "tool_calls=5 must be a list"),
        (
            {"role": "assistant", "tool_calls": [{**call("{}"), "type": "custom"}]},
            "must be a mapping of type 'function'",
        ),
        ({"role": "assistant", "tool_calls": [{"type": "function"}]}, "must be a mapping of type 'function'"),
    ],
)
def test_a_message_of_another_form_is_refused(message: Any, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        message_for_template(message)


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (FIRST, {}),
        (FIRST, {"add_generation_prompt": False}),
        (LONGER, {"add_generation_prompt": False, "continue_final_message": True}),
        (FIRST, {"tools": [{"type": "function", "function": {"name": "add"}}]}),
    ],
)
def test_a_chat_continues_what_transformers_writes(llm: LLM, folder: Path, messages: Any, options: Any) -> None:
    [output] = llm.chat(messages, GREEDY, False, **options)
    theirs = AutoTokenizer.from_pretrained(folder)
    options = {"add_generation_prompt": True, **options}
    assert output.prompt == theirs.apply_chat_template(messages, tokenize=False, **options)
    ids = theirs.apply_chat_template(messages, return_dict=False, **options)
    assert output.prompt_token_ids == ids
    assert output.outputs[0].text == llm.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)[0].outputs[0].text


def test_a_chat_gets_no_special_tokens_but_those_of_its_template(folder: Path) -> None:
    llm = LLM(folder, device="cpu", enforce_eager=True)
    ids = llm.engine.tokenizer.encode(FIRST[0]["content"])
    llm.engine.tokenizer.backend.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    template = "{{ messages[0].content }}"
    assert llm.chat(FIRST, GREEDY, False, chat_template=template)[0].prompt_token_ids == ids
    assert llm.generate(FIRST[0]["content"], GREEDY, use_tqdm=False)[0].prompt_token_ids == [0, *ids]


def test_several_conversations_are_answered_in_order(llm: LLM) -> None:
    short = SamplingParams(temperature=0, max_tokens=1)
    outputs = llm.chat([FIRST, LONGER], [GREEDY, short], use_tqdm=False)
    assert [output.prompt.count("# ") for output in outputs] == [2, 3]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 1]
    assert llm.chat([FIRST], GREEDY, False)[0].outputs == llm.chat(FIRST, GREEDY, False, priority=0)[0].outputs
    assert llm.chat([], use_tqdm=False) == []


def test_a_template_and_its_variables_can_be_given(llm: LLM, tiny: TinyPair) -> None:
    options: dict[str, Any] = {"sampling_params": GREEDY, "use_tqdm": False}
    [output] = llm.chat(FIRST, chat_template_kwargs={"mood": "(calm) "}, **options)
    assert output.prompt == "# user: def add(a, b):\n(calm) # assistant:"
    bare = LLM(str(tiny.target), device="cpu", enforce_eager=True)
    [output] = bare.chat(FIRST, chat_template="{{ messages[0].content }}", **options)
    assert output.prompt == "def add(a, b):"
    for name, value in (("template", "x"), ("documents", [{"text": "x"}])):  # also the name of an argument
        written = f"{{{{ {name} }}}}"
        [output] = bare.chat(FIRST, chat_template=written, chat_template_kwargs={name: value}, **options)
        assert output.prompt == str(value)
    with pytest.raises(UnsupportedError, match=r"has no chat template, so it cannot chat; give one \(chat_template=…"):
        bare.chat(FIRST, **options)


@pytest.mark.parametrize(
    ("messages", "options", "error", "words"),
    [
        ("hi", {}, PromptError, "must be a list of at least one message, not 'hi'"),
        (5, {}, PromptError, "must be a list of at least one message, not 5"),
        (FIRST[0], {}, PromptError, "must be a list of at least one message, not {'role'"),
        ([FIRST, []], {}, PromptError, r"must be a list of at least one message, not \[\]"),
        ([FIRST[0], "hi"], {}, PromptError, "message 'hi' must be a mapping"),
        ([{"role": "tool", "content": "x"}], {}, PromptError, "refuses these messages: no tools here"),
        (LONGER, {"continue_final_message": True}, ConfigError, "needs add_generation_prompt=False"),
        (FIRST, {"chat_template": 5}, ConfigError, "chat_template=5 must be the text of a Jinja template"),
        (FIRST, {"chat_template": "a\n{% if %}"}, ConfigError, "the chat template is not valid Jinja: .*, line 2"),
        (FIRST, {"chat_template_kwargs": {"tokenize": True}}, ConfigError, "chat_template_kwargs has 'tokenize'"),
        (FIRST, {"chat_template_kwargs": [1]}, ConfigError, r"chat_template_kwargs=\[1\] must be a mapping of names"),
        (
            FIRST,
            {"chat_template_kwargs": {1: 2}},
            ConfigError,
            "chat_template_kwargs={1: 2} must be a mapping",
        ),
        (FIRST, {"tools": 5}, ConfigError, "tools=5 must be a list of mappings"),
    ],
)
def test_what_cannot_be_a_chat_is_refused(llm: LLM, messages: Any, options: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        llm.chat(messages, GREEDY, False, **options)


def test_a_broken_template_of_the_checkpoint_is_named(folder: Path, tmp_path: Path) -> None:
    broken = with_template(folder, tmp_path / "target", "a\n{% if %}")
    with pytest.raises(CheckpointError, match=r"the checkpoint's chat template is not valid Jinja: .*, line 2; fix it"):
        ChatTemplate(Tokenizer.from_folder(broken), "tiny").render(FIRST)
