"""`/v1/completions` by the real client: whole, streamed and offline are the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running_server import NAME, RunningServer, add_beginning, running_server  # isort: skip (it may skip this file)

import httpx
import openai

from minillm import LLM, SamplingParams
from minillm.fill_in_the_middle import suffix_first
from minillm.serve.requests import MAX_PROMPTS, CompletionRequest
from tests.conftest import TinyPair

PROMPTS = ["def add(a, b):", "for line in", "import os\n\n\ndef walk(root):", "class Stack:"]
LENGTH = 20
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": LENGTH, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(tiny: TinyPair) -> Iterator[RunningServer]:
    with running_server(tiny.target) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def offline(tiny: TinyPair) -> LLM:
    return LLM(str(tiny.target), device="cpu", enforce_eager=True)


def generate(offline: LLM, prompt: Any, **params: Any) -> Any:
    given = {"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True, **params}
    [output] = offline.generate([prompt], SamplingParams(**given), use_tqdm=False)
    return output


def streamed(server: RunningServer, **options: Any) -> tuple[dict[int, str], list[Any]]:
    """The text of each choice, put together from the chunks, and all chunks."""
    texts: dict[int, str] = {}
    chunks = list(server.client().completions.create(stream=True, **options))
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts, chunks


# --- the same text in three ways -------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS)
def test_whole_streamed_and_offline_are_the_same(server: RunningServer, offline: LLM, prompt: str) -> None:
    expected = generate(offline, prompt)
    whole = server.client().completions.create(prompt=prompt, **GREEDY)
    texts, chunks = streamed(server, prompt=prompt, **GREEDY)
    assert whole.choices[0].text == texts[0] == expected.outputs[0].text
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert whole.model == chunks[0].model == NAME and whole.object == chunks[0].object == "text_completion"
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].id.startswith("cmpl-")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(expected.prompt_token_ids), LENGTH)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + LENGTH


def test_token_ids_are_prompts_and_are_returned_if_asked_for(server: RunningServer, offline: LLM) -> None:
    expected = generate(offline, PROMPTS[0])
    body = {"ignore_eos": True, "return_token_ids": True}
    options = {**GREEDY, "prompt": expected.prompt_token_ids, "extra_body": body}
    [choice] = server.client().completions.create(**options).choices
    assert choice.token_ids == expected.outputs[0].token_ids
    assert choice.prompt_token_ids == expected.prompt_token_ids
    _, chunks = streamed(server, **options)
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == expected.outputs[0].token_ids
    assert chunks[0].choices[0].prompt_token_ids == expected.prompt_token_ids


def test_special_tokens_are_left_out_if_asked_for(tiny: TinyPair, offline: LLM, tmp_path: Path) -> None:
    shutil.copytree(tiny.target, tmp_path / "target")
    first = add_beginning(tmp_path / "target")
    plain = offline.engine.tokenizer.encode("def add")
    options = {"model": NAME, "temperature": 0, "max_tokens": 1}
    with running_server(tmp_path / "target") as running:
        for asked, expected in (({}, [first, *plain]), ({"add_special_tokens": False}, plain)):
            for prompt, ids in (("def add", expected), (plain, plain)):
                more = {"return_token_ids": True, **asked}
                answer = running.client().completions.create(prompt=prompt, extra_body=more, **options)
                assert answer.choices[0].prompt_token_ids == ids


def test_several_prompts_have_their_choices_in_order(server: RunningServer, offline: LLM) -> None:
    expected = [generate(offline, prompt).outputs[0].text for prompt in PROMPTS]
    whole = server.client().completions.create(prompt=PROMPTS, **GREEDY)
    assert [(choice.index, choice.text) for choice in whole.choices] == list(enumerate(expected))
    texts, _ = streamed(server, prompt=PROMPTS, **GREEDY)
    assert texts == dict(enumerate(expected))
    ids = [offline.engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert [c.text for c in server.client().completions.create(prompt=ids, **GREEDY).choices] == expected


def test_a_seed_gives_the_same_samples_whole_streamed_and_offline(server: RunningServer, offline: LLM) -> None:
    sampled = {
        "model": NAME,
        "prompt": PROMPTS[0],
        "temperature": 1.1,
        "top_p": 0.9,
        "n": 3,
        "seed": 7,
        "max_tokens": 9,
    }
    sampled["extra_body"] = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1}
    expected = generate(
        offline,
        PROMPTS[0],
        temperature=1.1,
        top_p=0.9,
        n=3,
        seed=7,
        max_tokens=9,
        ignore_eos=False,
        **sampled["extra_body"],
    )
    whole = server.client().completions.create(**sampled)
    texts, _ = streamed(server, **sampled)
    assert [choice.text for choice in whole.choices] == [texts[i] for i in range(3)]
    assert [texts[i] for i in range(3)] == [output.text for output in expected.outputs]
    assert whole.usage.completion_tokens == sum(len(output.token_ids) for output in expected.outputs)


# --- stop, echo, log-probabilities, suffix ---------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["\N{SNOWMAN}", "never said, and longer than the one that comes"])
def test_a_stop_string_is_never_sent_not_even_its_beginning(server: RunningServer, offline: LLM, other: str) -> None:
    """The one that comes is longer or shorter than the other, and of several tokens."""
    text = generate(offline, PROMPTS[0]).outputs[0].text
    stop = text[len(text) // 3 : 2 * len(text) // 3]
    assert 3 < len(stop) < 40 and other not in text
    options = {**GREEDY, "prompt": PROMPTS[0], "stop": [stop, other]}
    whole = server.client().completions.create(**options).choices[0]
    texts, chunks = streamed(server, **options)
    assert whole.text == texts[0] == text[: text.index(stop)]
    assert whole.finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    assert whole.stop_reason == chunks[-1].choices[0].stop_reason == stop


def test_a_stream_holds_back_no_more_than_the_engine(server: RunningServer, offline: LLM) -> None:
    options = {"stop": ["never said, of thirty letters."], "max_tokens": 60}
    params = SamplingParams(temperature=0, ignore_eos=True, **options)
    engine, texts = offline.llm_engine, {}
    engine.add_request("a", PROMPTS[0], params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            texts[len(output.outputs[0].token_ids)] = output.outputs[0].text
    body = {"ignore_eos": True, "return_token_ids": True}
    _, chunks = streamed(server, **{**GREEDY, **options, "prompt": PROMPTS[0], "extra_body": body})
    sent, num_tokens = "", 0
    for [choice] in (chunk.choices for chunk in chunks):
        sent, num_tokens = sent + choice.text, num_tokens + len(choice.token_ids)
        assert sent == texts[num_tokens]
    assert len(chunks) > 2


def test_echo_begins_with_the_prompt(server: RunningServer, offline: LLM) -> None:
    expected = generate(offline, PROMPTS[0], logprobs=2, prompt_logprobs=2)
    options = {**GREEDY, "prompt": PROMPTS[0], "echo": True}
    assert server.client().completions.create(**options).choices[0].text == PROMPTS[0] + expected.outputs[0].text
    texts, _ = streamed(server, **options)
    assert texts[0] == PROMPTS[0] + expected.outputs[0].text
    told = server.client().completions.create(logprobs=2, **options).choices[0].logprobs
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    rows = [*expected.prompt_logprobs[1:], *expected.outputs[0].logprobs]
    ids = [*expected.prompt_token_ids[1:], *expected.outputs[0].token_ids]
    assert told.token_logprobs[1:] == pytest.approx([row[token].logprob for row, token in zip(rows, ids, strict=True)])


def test_what_a_request_leaves_out_is_the_checkpoints_choice() -> None:
    body = CompletionRequest(model=NAME, prompt="a", top_k=2)
    params = body.sampling_params(SamplingParams(temperature=0.5, top_k=7), max_tokens=4)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 2, 4)


def test_echo_without_new_tokens_scores_a_text(server: RunningServer, offline: LLM) -> None:
    ids = offline.engine.tokenizer.encode(PROMPTS[2])
    answer = server.client().completions.create(model=NAME, prompt=PROMPTS[2], max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].text == PROMPTS[2]
    assert len(answer.choices[0].logprobs.tokens) == len(ids) == answer.usage.total_tokens
    assert "".join(answer.choices[0].logprobs.tokens) == PROMPTS[2]
    text = "a\r\nb\x0bc\r\n"
    told = server.client().completions.create(model=NAME, prompt=text, max_tokens=0, echo=True, logprobs=0).choices[0]
    placed = zip(told.logprobs.text_offset, told.logprobs.tokens, strict=True)
    assert all(text[at:].startswith(token) for at, token in placed) and "".join(told.logprobs.tokens) == text
    options = {"model": NAME, "prompt": PROMPTS[2], "max_tokens": 0, "echo": True}
    *_, last = server.client().completions.create(stream=True, stream_options={"include_usage": True}, **options)
    assert (last.usage.completion_tokens, last.usage.total_tokens) == (0, len(ids))


def test_logprobs_are_those_of_the_engine_whole_and_streamed(server: RunningServer, offline: LLM) -> None:
    expected = generate(offline, PROMPTS[0], logprobs=3).outputs[0]
    options = {**GREEDY, "prompt": PROMPTS[0], "logprobs": 3}
    whole = server.client().completions.create(**options).choices[0].logprobs
    values = [row[token].logprob for row, token in zip(expected.logprobs, expected.token_ids, strict=True)]
    assert whole.token_logprobs == pytest.approx(values)
    for told, row in zip(whole.top_logprobs, expected.logprobs, strict=True):
        assert told == pytest.approx({each.decoded_token: each.logprob for each in row.values()})
    offsets = [sum(map(len, whole.tokens[:i])) for i in range(LENGTH)]
    assert whole.text_offset == offsets
    _, chunks = streamed(server, **options)
    about = {  # a prompt found in the prefix cache changes the last bits
        "token_logprobs": pytest.approx(whole.token_logprobs),
        "top_logprobs": [pytest.approx(row) for row in whole.top_logprobs],
    }
    for field in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        pieces = [each for chunk in chunks for each in getattr(chunk.choices[0].logprobs, field)]
        assert pieces == about.get(field, getattr(whole, field))


@pytest.mark.parametrize("prefix", ["def add(a, b):\n    return ", ""])
def test_a_suffix_asks_for_the_gap(server: RunningServer, offline: LLM, prefix: str) -> None:
    """Which may be at the start of a file."""
    suffix = "\n\n\nclass Stack:\n"
    expected = generate(offline, suffix_first(prefix, suffix))
    answer = server.client().completions.create(prompt=prefix, suffix=suffix, **GREEDY)
    assert answer.choices[0].text == expected.outputs[0].text
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)


def test_a_request_has_a_limit_of_prompts(server: RunningServer) -> None:
    prompts = ["a"] * (MAX_PROMPTS + 1)
    with pytest.raises(openai.BadRequestError, match="prompt has 1025 prompts; at most 1024 are allowed: send several"):
        server.client().completions.create(model=NAME, prompt=prompts, max_tokens=1)
    assert not server.engine.num_unfinished


# --- streams ---------------------------------------------------------------------------------------------------------


def test_usage_comes_last_in_a_stream_if_asked_for(server: RunningServer) -> None:
    _, plain = streamed(server, prompt=PROMPTS[0], **GREEDY)
    assert all(chunk.usage is None for chunk in plain)
    _, chunks = streamed(server, prompt=PROMPTS[0], stream_options={"include_usage": True}, **GREEDY)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == LENGTH
    assert all(chunk.usage is None for chunk in chunks[:-1])
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    _, chunks = streamed(server, prompt=PROMPTS[0], stream_options=options, **GREEDY)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] < counts[-1] == LENGTH
    nothing: Any = ({"continuous_usage_stats": True}, {"include_usage": None}, {})
    for options in nothing:
        _, chunks = streamed(server, prompt=PROMPTS[0], stream_options=options, **GREEDY)
        assert all(chunk.usage is None for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": None}
    _, chunks = streamed(server, prompt=PROMPTS[0], stream_options=options, **GREEDY)
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


def test_options_of_a_stream_that_ask_for_nothing_need_no_stream(server: RunningServer) -> None:
    for options in (None, {}):
        body = {"prompt": "a", "max_tokens": 1, "stream_options": options}
        assert server.post("/v1/completions", json=body).status_code == 200


def test_the_counts_in_a_chunk_are_those_of_its_choice(server: RunningServer, offline: LLM) -> None:
    usage: Any = {"include_usage": True, "continuous_usage_stats": True}
    options = {**GREEDY, "temperature": 1, "n": 2, "prompt": PROMPTS[:2]}
    _, chunks = streamed(server, stream_options=usage, **options)
    lengths = [len(offline.engine.tokenizer.encode(prompt)) for prompt in PROMPTS[:2]]
    assert lengths[0] != lengths[1]
    found = {}
    for chunk in chunks[:-1]:
        counts = chunk.usage
        found[chunk.choices[0].index] = counts.completion_tokens
        assert counts.prompt_tokens == lengths[chunk.choices[0].index // 2]
        assert counts.total_tokens == counts.prompt_tokens + counts.completion_tokens
    assert found == dict.fromkeys(range(4), LENGTH)
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (sum(lengths), 4 * LENGTH)


def test_a_stream_is_server_sent_events_that_end_with_done(server: RunningServer) -> None:
    answer = server.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert all(line.startswith("data: {") for line in lines[:-1]) and lines[-1] == "data: [DONE]"


# --- names -----------------------------------------------------------------------------------------------------------


def test_models_are_listed_and_any_of_their_names_will_do(server: RunningServer) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == [NAME, "other-name"]
    assert client.models.retrieve("other-name").max_model_len == 256
    assert httpx.get(f"{server.url}/v1/models/").json() == httpx.get(f"{server.url}/v1/models").json()
    answer = client.completions.create(model="other-name", prompt="a", max_tokens=1)
    assert answer.model == NAME
    with pytest.raises(openai.NotFoundError, match="'gpt' does not exist; this server has tiny, other-name"):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.NotFoundError, match="'gpt' does not exist; this server has tiny, other-name"):
        client.models.retrieve("gpt")
