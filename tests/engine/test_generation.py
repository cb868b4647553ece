"""What a user asks for is what comes out: stops, lengths, seeds, n, logprobs, streams. Plain and drafted alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.engine.commit import _find_stop, commit
from minillm.errors import ConfigError
from minillm.request import Request
from minillm.speculative.rejection_sampler import Verdict
from minillm.tokenizer import Detokenizer, Tokenizer
from minillm.trace import StepRan, TokensCommitted, request_metrics
from tests.conftest import TinyPair

PROMPTS = ["def add(a, b):", "for line in", "import os\n\n\ndef walk(root):", "class"]


@pytest.fixture(scope="module", params=["plain", "drafted"])
def llm(request: pytest.FixtureRequest, tiny: TinyPair) -> LLM:
    """An engine with a pool of scattered small blocks, with and without a draft."""
    config = {"method": "draft_model", "model": str(tiny.draft), "num_speculative_tokens": 4}
    return LLM(str(tiny.target), block_size=4, speculative_config=config if request.param == "drafted" else None)


def greedy(llm: LLM, prompt: str, **options: Any) -> Any:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **options})
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 24])
def test_max_tokens_is_exact_inside_an_accepted_run(llm: LLM, max_tokens: int) -> None:
    full = greedy(llm, PROMPTS[0])
    out = greedy(llm, PROMPTS[0], max_tokens=max_tokens)
    assert out.token_ids == full.token_ids[:max_tokens]
    assert out.finish_reason == "length" and out.stop_reason is None


@pytest.mark.parametrize("at", [0, 1, 2, 3, 7])
def test_a_stop_token_inside_an_accepted_run_ends_it_there(llm: LLM, at: int) -> None:
    full = greedy(llm, PROMPTS[1]).token_ids
    stop = full[at]
    out = greedy(llm, PROMPTS[1], stop_token_ids=[stop])
    assert out.token_ids == full[: full.index(stop) + 1]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)


def test_end_of_text_ends_a_request_and_min_tokens_holds_it_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    full = greedy(llm, PROMPTS[1]).token_ids
    inputs = llm.llm_engine.input_processor
    config = inputs.model_config
    monkeypatch.setattr(inputs, "model_config", replace(config, eos_token_ids=(full[3],)))
    out = greedy(llm, PROMPTS[1], ignore_eos=False)
    assert out.token_ids == full[: full.index(full[3]) + 1]
    assert (out.finish_reason, out.stop_reason) == ("stop", full[3]), (
        "not the tokenizer's own: as in vLLM, a stop token"
    )
    monkeypatch.setattr(inputs, "model_config", config)
    monkeypatch.setattr(llm.engine.tokenizer, "eos_id", full[3])  # the model's configuration need not name it
    ended = greedy(llm, PROMPTS[1], ignore_eos=False)
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (out.token_ids, "stop", None)
    assert greedy(llm, PROMPTS[1]).token_ids == full
    longer = greedy(llm, PROMPTS[1], ignore_eos=False, min_tokens=10)
    assert full[3] not in longer.token_ids[:10] and len(longer.token_ids) >= 10


@pytest.mark.parametrize("drafted", [False, True])
def test_min_tokens_ends_at_its_token_also_inside_an_accepted_run(tiny: TinyPair, drafted: bool) -> None:
    """The draft is the target, so all drafts are accepted: `min_tokens` is reached inside the first round."""
    drafts = {"model": str(tiny.target), "num_speculative_tokens": 5}
    llm = LLM(str(tiny.target), speculative_config=drafts if drafted else None)
    whole = {prompt: greedy(llm, prompt).token_ids for prompt in PROMPTS}
    ends = llm.llm_engine.input_processor.eos_ids
    borders = [
        (prompt, at)
        for prompt, tokens in whole.items()
        for at in range(2, 7)  # the prompt's step gives the first token, the first round those at 1 to 6
        if tokens.index(tokens[at]) == at and not ends & {*tokens[: at + 1]}
    ]
    assert len(borders) > 5
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    params = [
        SamplingParams(**options, min_tokens=least, stop_token_ids=[whole[prompt][at]])
        for prompt, at in borders
        for least in (at, at + 1)
    ]
    outputs = llm.generate([prompt for prompt, _ in borders for _ in range(2)], params, use_tqdm=False)
    got = [output.outputs[0].token_ids for output in outputs]
    for (prompt, at), ended, late in zip(borders, got[::2], got[1::2], strict=True):
        assert ended == whole[prompt][: at + 1]
        assert late[:at] == whole[prompt][:at] and late[at] != whole[prompt][at]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_is_cut_where_it_starts(llm: LLM, include: bool) -> None:
    text = greedy(llm, PROMPTS[2]).text
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    out = greedy(llm, PROMPTS[2], stop=["never to be seen", stop], include_stop_str_in_output=include)
    first = text.index(stop)
    assert out.text == text[: first + (len(stop) if include else 0)]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)


def test_of_two_stop_strings_in_one_token_the_one_that_ends_first_ends_the_text() -> None:
    request = Request("a", "", [1], 1, SamplingParams(stop=["xyz?", "yz"]), 9, seed=0)
    request.text = "wxyz?"
    assert _find_stop(request, seen=0) == ("yz", 2)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_completes_a_stop_string_if_its_text_is_kept(tiny: TinyPair, include: bool) -> None:
    """As in vLLM. The string is then the reason, and the text ends with it."""
    tokenizer = Tokenizer.from_folder(tiny.target)
    token = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_string(i) == "re")
    params = SamplingParams(stop="r", stop_token_ids=[token], include_stop_str_in_output=include)
    request = Request("a", "", [1], 1, params, 9, seed=0, stop_ids=frozenset({token}))
    request.detokenizer = Detokenizer(tokenizer)
    commit(request, Verdict([token], 0))
    expected = ("r", "stop", "r") if include else ("", "stop", token)
    assert (request.text, request.finish_reason, request.stop_reason) == expected


@pytest.mark.parametrize("stops", [False, True])
def test_a_stream_gives_the_same_text_in_pieces(llm: LLM, stops: bool) -> None:
    """It never shows the beginning of a stop string, which is longer than any token and than another stop string."""
    params = SamplingParams(seed=3, max_tokens=30, ignore_eos=True)
    if stops:
        text = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].text
        params = replace(params, stop=[text[len(text) // 2 :][:8], "\N{SNOWMAN}"])
    pieces = list(llm.stream(PROMPTS[0], params))
    whole = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
    assert "".join(pieces) == whole.text and (whole.finish_reason == "stop") is stops
    assert len(pieces) > 2


def test_a_stream_without_text_is_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="detokenize=False gives no text to stream"):
        list(llm.stream(PROMPTS[0], SamplingParams(detokenize=False)))


@pytest.mark.parametrize("params", [[{"temperature": 0}, None], [SamplingParams(), {}]])
def test_parameters_that_are_none_are_refused(llm: LLM, params: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"sampling params {.*} must be SamplingParams\(…\), not dict"):
        llm.generate(PROMPTS[:2], params, use_tqdm=False)
    with pytest.raises(ConfigError, match="must be SamplingParams"):
        llm.llm_engine.add_request("1", PROMPTS[0], {"temperature": 0})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"{'temperature': 0} are no sampling params"):
        list(llm.stream(PROMPTS[0], {"temperature": 0}))  # type: ignore[arg-type]
    assert not llm.llm_engine.has_unfinished_requests()


def test_log_probabilities_of_a_prompt_are_computed_for_one_of_its_completions(llm: LLM) -> None:
    llm.reset_prefix_cache()
    params = SamplingParams(n=3, seed=1, max_tokens=1, prompt_logprobs=0)
    ids = llm.engine.tokenizer.encode(PROMPTS[2])
    with llm.trace() as trace:
        [output] = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    assert all(output.prompt_logprobs[1:])
    tokens = sum(work.num_tokens for step in trace.of(StepRan) for work in step.work)
    assert tokens < 2 * len(ids)


def test_a_seed_gives_the_same_text_whatever_else_is_in_the_batch(llm: LLM) -> None:
    params = SamplingParams(seed=11, max_tokens=20, temperature=0.9, top_p=0.95, ignore_eos=True)
    alone = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].token_ids
    others = [SamplingParams(seed=i, max_tokens=9 + 3 * i, ignore_eos=True) for i in range(3)]
    crowd = llm.generate([*PROMPTS[1:], PROMPTS[0]], [*others, params], use_tqdm=False)
    assert crowd[-1].outputs[0].token_ids == alone


def test_a_seed_gives_the_same_text_when_it_is_preempted(tiny: TinyPair) -> None:
    params = SamplingParams(seed=11, max_tokens=20, ignore_eos=True)
    roomy = LLM(str(tiny.target), block_size=4)
    tight = LLM(str(tiny.target), block_size=4, num_kv_blocks=12)
    expected, outputs = (llm.generate(PROMPTS, params, use_tqdm=False) for llm in (roomy, tight))
    assert sum(o.metrics.num_preemptions for o in outputs) > 0
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]


def test_n_completions_differ_and_are_those_of_their_own_seeds(llm: LLM) -> None:
    params = [SamplingParams(n=3, seed=seed, max_tokens=12, ignore_eos=True) for seed in (5, 6)]
    out, next_seed = llm.generate([PROMPTS[0]] * 2, params, use_tqdm=False)
    assert [o.index for o in out.outputs] == [0, 1, 2]
    texts = {tuple(o.token_ids) for o in [*out.outputs, *next_seed.outputs]}
    assert len(texts) == 6
    alone = llm.generate(PROMPTS[0], SamplingParams(seed=5, max_tokens=12, ignore_eos=True), use_tqdm=False)[0]
    assert alone.outputs[0].token_ids == out.outputs[0].token_ids
    assert out.metrics.num_output_tokens == 36


def test_unseeded_requests_differ_but_a_new_engine_repeats_them(tiny: TinyPair) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    runs = []
    for _ in range(2):
        llm = LLM(str(tiny.target), seed=4)
        runs.append([o.outputs[0].token_ids for o in llm.generate([PROMPTS[0]] * 2, params, use_tqdm=False)])
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]


def test_engines_of_different_seeds_sample_differently(tiny: TinyPair) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    texts = [
        LLM(str(tiny.target), seed=seed).generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].token_ids
        for seed in (0, 1, 1 << 24, 1 << 48, 1 << 64, -1, (1 << 24) - 1)
    ]
    assert len(set(map(tuple, texts))) == len(texts)


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    from transformers import AutoModelForCausalLM

    out = llm.generate(
        PROMPTS[0],
        SamplingParams(temperature=0, max_tokens=9, logprobs=2, prompt_logprobs=1, ignore_eos=True),
        use_tqdm=False,
    )[0]
    ids = [*out.prompt_token_ids, *out.outputs[0].token_ids]
    peer = AutoModelForCausalLM.from_pretrained(llm.model).float()
    with torch.inference_mode():
        expected = peer(torch.tensor([ids])).logits[0].log_softmax(-1)
    start = len(out.prompt_token_ids)
    assert len(out.outputs[0].logprobs) == 9 and out.prompt_logprobs[0] is None
    for i, row in enumerate(out.outputs[0].logprobs):
        token = out.outputs[0].token_ids[i]
        assert row[token].rank == 1 and len(row) == 2
        assert row[token].logprob == pytest.approx(float(expected[start + i - 1, token]), abs=1e-4)
    for i in range(1, start):
        entry, row = out.prompt_logprobs[i][ids[i]], expected[i - 1]
        assert entry.logprob == pytest.approx(float(row[ids[i]]), abs=1e-4)
        assert entry.rank == int((row > row[ids[i]]).sum()) + 1
    total = sum(row[t].logprob for row, t in zip(out.outputs[0].logprobs, out.outputs[0].token_ids, strict=True))
    assert out.outputs[0].cumulative_logprob == pytest.approx(total)


def test_logprobs_end_with_the_text_inside_an_accepted_run(tiny: TinyPair) -> None:
    drafts = {"method": "draft_model", "model": str(tiny.target), "num_speculative_tokens": 5, "adaptive": False}
    llm = LLM(str(tiny.target), speculative_config=drafts)
    whole = greedy(llm, PROMPTS[0], logprobs=1)
    for end in range(3, 12):
        if whole.token_ids.index(whole.token_ids[end]) == end:  # a stop token that was not there before
            part = greedy(llm, PROMPTS[0], logprobs=1, stop_token_ids=[whole.token_ids[end]])
            assert (part.token_ids, part.logprobs) == (whole.token_ids[: end + 1], whole.logprobs[: end + 1])


def test_metrics_of_more_prompts_than_are_kept(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_metrics, "MAX_ENDED_PROMPTS", 2)
    llm = LLM(str(tiny.target), max_num_seqs=8)
    for lengths in (range(2, 11), [3] * 9):  # one after the other, and eight in one step
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
        outputs = llm.generate([PROMPTS[0]] * 9, params, use_tqdm=False)
        assert [output.metrics.num_output_tokens for output in outputs] == list(lengths)
        assert not llm.llm_engine.metrics.requests


def test_prompt_logprobs_do_not_depend_on_chunks(tiny: TinyPair) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    rows = [
        LLM(str(tiny.target), max_num_seqs=1, max_num_batched_tokens=budget)
        .generate(PROMPTS[2], params, use_tqdm=False)[0]
        .prompt_logprobs
        for budget in (3, 512)
    ]
    for short, long in zip(*rows, strict=True):
        assert (short is None) == (long is None)
        if short:
            assert short.keys() == long.keys()
            assert [s.logprob for s in short.values()] == pytest.approx([x.logprob for x in long.values()], abs=1e-4)


def test_penalties_see_the_drafts_before_them(tiny: TinyPair) -> None:
    """Greedy with a repetition penalty: drafts change the penalty of the tokens after them, so this must be exact."""
    params = SamplingParams(
        temperature=0, max_tokens=24, repetition_penalty=1.3, frequency_penalty=0.5, ignore_eos=True
    )
    config = {"method": "draft_model", "model": str(tiny.draft), "num_speculative_tokens": 4}
    plain, drafted = LLM(str(tiny.target)), LLM(str(tiny.target), speculative_config=config)
    expected = [o.outputs[0].token_ids for o in plain.generate(PROMPTS, params, use_tqdm=False)]
    with drafted.trace() as trace:
        assert [o.outputs[0].token_ids for o in drafted.generate(PROMPTS, params, use_tqdm=False)] == expected
    assert sum(e.num_accepted for e in trace.of(TokensCommitted)) > 5


def test_metrics_count_what_happened(llm: LLM) -> None:
    out = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)[0]
    m = out.metrics
    assert m.num_output_tokens == 16 and m.num_blocks == 0 and m.peak_blocks >= 4
    assert m.num_decode_forwards + m.num_accepted == m.num_decode_tokens == 15  # the prompt's forward gave the first
    assert 0 <= m.queue_time <= m.ttft and m.tpot > 0
    assert (m.acceptance_rate is None) == (llm.engine.drafter is None)


def test_detokenize_false_gives_ids_only(llm: LLM) -> None:
    out = greedy(llm, PROMPTS[0], detokenize=False)
    assert out.text == "" and len(out.token_ids) == 24


def test_prompts_as_ids_and_as_text_agree(llm: LLM) -> None:
    ids = llm.engine.tokenizer.encode(PROMPTS[0])
    by_ids = llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0), use_tqdm=False)[0]
    by_text = llm.generate({"prompt": PROMPTS[0]}, SamplingParams(temperature=0), use_tqdm=False)[0]
    assert by_ids.outputs[0].token_ids == by_text.outputs[0].token_ids
    assert by_ids.prompt == by_text.prompt == PROMPTS[0]
    assert llm.get_tokenizer().decode(ids) == PROMPTS[0]
