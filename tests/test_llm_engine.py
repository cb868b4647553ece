"""Requests in, steps, outputs out: the API for those who hold the engine themselves."""

from __future__ import annotations

import inspect
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tqdm import tqdm

import minillm.llm
from minillm import LLM, RequestOutput, SamplingParams
from minillm.cache.block_pool import BlockPool
from minillm.config import EngineArgs
from minillm.engine.scheduler import Scheduler
from minillm.errors import (
    CheckpointError,
    ConfigError,
    MinillmError,
    NonFiniteLogitsError,
    PromptError,
    RequestTooLargeError,
    UnknownOptionError,
)
from minillm.llm_engine import LLMEngine
from minillm.ops.paged_attention import paged_attention
from minillm.outputs import tokens_per_forward
from minillm.request import Request
from minillm.trace import (
    BlocksShared,
    EngineStarted,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    StepRan,
    StepStarted,
    TokensCommitted,
    Trace,
    Work,
    request_metrics,
)
from minillm.trace.acceptance_state import AcceptanceState
from minillm.trace.request_metrics import MetricsWatcher
from tests.broken_logits import break_logits
from tests.conftest import TinyPair

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
WARM = replace(GREEDY, temperature=0.9, seed=3)
PROMPTS = ["def add(a, b):", "for line in", "import os\n\n\ndef walk(root):"]


def test_a_seed_of_numpy_is_a_seed(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), enforce_eager=True)
    texts = [
        llm.generate(PROMPTS[0], replace(WARM, seed=seed), use_tqdm=False)[0].outputs[0].token_ids
        for seed in (3, np.int64(3), np.uint32(3))
    ]
    assert texts[0] == texts[1] == texts[2]


def test_a_checkpoint_may_name_the_sampling_of_calls_that_name_none(tiny: TinyPair, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.target, folder)
    values = {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1}
    values |= {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    further = {"do_sample": True, "max_new_tokens": 5}
    (folder / "generation_config.json").write_text(json.dumps(values | further))
    llm = LLM(str(folder), seed=0)
    params = SamplingParams(**values, max_tokens=5)
    assert llm.get_default_sampling_params() == params
    assert LLM(str(tiny.target)).get_default_sampling_params() == SamplingParams()
    expected = LLM(str(folder), seed=0).generate(PROMPTS, params, use_tqdm=False)
    found = llm.generate(PROMPTS, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in found] == [output.outputs[0].token_ids for output in expected]


def test_a_max_tokens_that_nobody_asked_for_ends_with_the_context(tiny: TinyPair, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.target, folder)
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 100_000, "eos_token_id": []}))
    llm = LLM(str(folder), max_model_len=24)
    [output] = llm.generate({"prompt_token_ids": [5] * 20}, use_tqdm=False)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (4, "length")
    with pytest.raises(PromptError, match="over the context of 24"):
        llm.generate({"prompt_token_ids": [5] * 20}, llm.get_default_sampling_params(), use_tqdm=False)
    with pytest.raises(PromptError, match=r"over the context of 24; shorten the prompt$"):
        llm.generate({"prompt_token_ids": [5] * 24}, use_tqdm=False)


@pytest.mark.parametrize("params", [None, SamplingParams(max_tokens=None, ignore_eos=True)])
def test_a_max_tokens_that_nobody_asked_for_ends_with_the_block_pool(
    tiny: TinyPair, tmp_path: Path, params: SamplingParams | None
) -> None:
    """The last token is never computed, so it needs no slot: 9 prompt tokens and 8 new ones fill 16."""
    folder = tmp_path / "model"
    shutil.copytree(tiny.target, folder)
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 100_000, "eos_token_id": []}))
    llm = LLM(str(folder), block_size=4, num_kv_blocks=4, enforce_eager=True)
    for num_prompt_tokens, num_new in ((9, 8), (16, 1)):
        [output] = llm.generate({"prompt_token_ids": [5] * num_prompt_tokens}, params, use_tqdm=False)
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (num_new, "length")
    fix = (
        "17 prompt tokens need 5 blocks, the pool has 4; shorten the prompt, or raise num_kv_blocks or kv_cache_memory"
    )
    with pytest.raises(RequestTooLargeError, match=fix):
        llm.generate({"prompt_token_ids": [5] * 17}, params, use_tqdm=False)


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -1}, {"top_p": 0}, {"top_k": "many"}, {"repetition_penalty": 0}, {"presence_penalty": 3}],
    ids=str,
)
def test_a_checkpoint_with_impossible_sampling_is_refused(tiny: TinyPair, tmp_path: Path, bad: dict[str, Any]) -> None:
    shutil.copytree(tiny.target, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(bad))
    with pytest.raises(CheckpointError, match=f"generation_config.json: .*{next(iter(bad))}"):
        LLM(str(tmp_path / "model"))


def engine(tiny: TinyPair, **options: Any) -> LLMEngine:
    return LLMEngine.from_engine_args(EngineArgs(str(tiny.target), **{"block_size": 4, **options}))


def drain(llm: LLMEngine) -> dict[str, RequestOutput]:
    """Step until nothing is left; the last output of every request."""
    last: dict[str, RequestOutput] = {}
    while llm.has_unfinished_requests():
        last |= {output.request_id: output for output in llm.step()}
        llm.engine.scheduler.check_integrity()
    settled(llm)
    return last


def settled(llm: LLMEngine) -> None:
    """Nothing is left of anybody."""
    llm.engine.scheduler.check_integrity()
    assert llm.engine.pool.num_used == 0
    assert not llm.has_unfinished_requests() and not llm.engine.requests
    assert not llm.metrics.requests, "figures of requests that are gone"


def expected(tiny: TinyPair, params: SamplingParams = GREEDY) -> list[list[list[int]]]:
    outputs = LLM(str(tiny.target)).generate(PROMPTS, params, use_tqdm=False)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


# ------------------------------------------------------------------------------------------------------ add and step


def test_requests_may_come_at_any_time_and_get_what_generate_gives(tiny: TinyPair) -> None:
    llm = engine(tiny)
    assert not llm.has_unfinished_requests()
    assert llm.step() == []
    last: dict[str, RequestOutput] = {}
    for number, prompt in enumerate(PROMPTS):
        llm.add_request(f"user {number}", prompt, GREEDY)
        for _ in range(4):
            last |= {output.request_id: output for output in llm.step()}
    last |= drain(llm)
    assert [[last[f"user {i}"].outputs[0].token_ids] for i in range(3)] == expected(tiny)
    for number, prompt in enumerate(PROMPTS):
        output = last[f"user {number}"]
        assert output.prompt == prompt and output.finished and output.outputs[0].finish_reason == "length"


def test_outputs_are_cumulative_and_only_of_those_who_moved(tiny: TinyPair) -> None:
    llm = engine(tiny, max_num_batched_tokens=8, max_num_seqs=4)
    llm.add_request("short", {"prompt_token_ids": [5]}, GREEDY)
    llm.add_request("long", {"prompt_token_ids": [6] * 30}, GREEDY)
    seen: dict[str, RequestOutput] = {}
    with llm.trace() as trace:
        while llm.has_unfinished_requests():
            before = len(trace.of(TokensCommitted))
            outputs = llm.step()
            moved = {event.request_id for event in trace.of(TokensCommitted)[before:]}
            assert {output.request_id for output in outputs} == moved
            for output in outputs:
                [completion] = output.outputs
                if output.request_id in seen:
                    [old] = seen[output.request_id].outputs
                    assert completion.token_ids[:-1] == old.token_ids and completion.text.startswith(old.text)
                    assert old.finish_reason is None and not seen[output.request_id].finished
                else:
                    assert len(completion.token_ids) == 1
                seen[output.request_id] = output
    assert {name: len(output.outputs[0].token_ids) for name, output in seen.items()} == {"short": 12, "long": 12}


@pytest.mark.parametrize("included", [False, True])
def test_text_that_a_stop_string_may_take_back_is_not_shown(tiny: TinyPair, included: bool) -> None:
    llm = engine(tiny)
    llm.add_request("a", PROMPTS[0], GREEDY)
    text = drain(llm)["a"].outputs[0].text
    stop = text[4:9]
    shown = []
    llm.add_request("b", PROMPTS[0], replace(GREEDY, stop=[stop], include_stop_str_in_output=included))
    while llm.has_unfinished_requests():
        shown += [output.outputs[0].text for output in llm.step()]
    assert shown[-1] == text[: text.index(stop) + len(stop) * included] and len(shown) > 2
    assert all(later.startswith(earlier) for earlier, later in pairwise(shown))


def test_the_sum_of_log_probabilities_is_that_of_every_token(tiny: TinyPair) -> None:
    llm = engine(tiny)
    llm.add_request("a", PROMPTS[0], replace(GREEDY, logprobs=1))
    while llm.has_unfinished_requests():
        for output in llm.step():
            [completion] = output.outputs
            rows = zip(completion.logprobs or [], completion.token_ids, strict=True)
            assert completion.cumulative_logprob == pytest.approx(sum(row[token].logprob for row, token in rows))


def test_a_snapshot_does_not_change_with_the_next_step(tiny: TinyPair) -> None:
    llm = engine(tiny)
    llm.add_request("a", PROMPTS[0], replace(GREEDY, logprobs=1))
    [first] = llm.step()
    [second] = llm.step()
    assert len(first.outputs[0].token_ids) == len(first.outputs[0].logprobs or []) == 1
    assert first.metrics.num_output_tokens == 1 and second.metrics.num_output_tokens == 2


def test_all_completions_of_a_prompt_come_in_one_output(tiny: TinyPair) -> None:
    llm = engine(tiny)
    llm.add_request("a", PROMPTS[0], replace(WARM, n=3))
    finished = []
    while llm.has_unfinished_requests():
        for output in llm.step():
            assert [completion.index for completion in output.outputs] == [0, 1, 2]
            assert output.finished == all(completion.finish_reason for completion in output.outputs)
            finished.append(output.finished)
    assert finished.count(True) == 1 and finished[-1]
    assert [c.token_ids for c in output.outputs] == expected(tiny, replace(WARM, n=3))[0]
    settled(llm)


# --------------------------------------------------------------------------------------------------------------- ids


@pytest.mark.parametrize("request_id", ["", "a#0", 7, None])
def test_a_bad_id_is_refused(tiny: TinyPair, request_id: Any) -> None:
    llm = engine(tiny)
    with pytest.raises(MinillmError, match="must be a non-empty string without '#'"):
        llm.add_request(request_id, "x", GREEDY)
    settled(llm)


def test_an_id_can_be_used_again_only_when_its_request_has_ended(tiny: TinyPair) -> None:
    llm = engine(tiny)
    for params in (GREEDY, replace(WARM, n=2)):
        llm.add_request("a", PROMPTS[0], params)
        llm.step()
        with pytest.raises(MinillmError, match="'a' is in use"):
            llm.add_request("a", PROMPTS[1], GREEDY)
        assert len(drain(llm)["a"].outputs[0].token_ids) == 12


@pytest.mark.parametrize(
    "prompt, params, error",
    [
        ({"prompt_token_ids": []}, GREEDY, PromptError),
        ({"prompt_token_ids": [10**6]}, GREEDY, PromptError),
        ({"prompt_token_ids": [5], "cache_salt": 3}, GREEDY, PromptError),
        ("x", replace(GREEDY, max_tokens=1000), PromptError),
        ("x", replace(WARM, n=2, max_tokens=80), RequestTooLargeError),
    ],
    ids=["empty", "no such token", "salt", "context", "pool"],
)
def test_a_refused_request_leaves_nothing_behind(tiny: TinyPair, prompt: Any, params: Any, error: type) -> None:
    llm = engine(tiny, num_kv_blocks=16)
    llm.add_request("good", PROMPTS[0], GREEDY)
    llm.step()
    with pytest.raises(error):
        llm.add_request("bad", prompt, params)
    with pytest.raises(ConfigError, match="priority='high'"):
        llm.add_request("bad", "x", GREEDY, priority="high")  # type: ignore[arg-type]
    llm.add_request("bad", "x", GREEDY)  # the id is still free
    last = drain(llm)
    assert [last["good"].outputs[0].token_ids] == expected(tiny)[0]
    assert last["bad"].finished


def test_an_argument_that_only_vllms_engine_has_is_refused_by_name(tiny: TinyPair) -> None:
    llm = engine(tiny)
    with pytest.raises(UnknownOptionError, match=r"LLMEngine\.add_request has no option 'lora_request'"):
        llm.add_request("a", PROMPTS[0], GREEDY, lora_request=None)
    assert not llm.has_unfinished_requests()
    with pytest.raises(UnknownOptionError, match="from_engine_args has no option 'usage_context'; it has: engine_args"):
        LLMEngine.from_engine_args(engine_args=None, usage_context=None)


# ------------------------------------------------------------------------------------------------------------- abort


def test_abort_ends_a_request_whatever_it_is_doing(tiny: TinyPair) -> None:
    llm = engine(tiny, max_num_seqs=2)
    llm.add_request("running", PROMPTS[0], replace(WARM, n=2))
    llm.add_request("waiting", PROMPTS[1], GREEDY)
    llm.add_request("other", PROMPTS[2], GREEDY)
    llm.step()
    with llm.trace() as trace:
        llm.abort_request(["running", "nobody"])
        llm.abort_request("waiting")
        llm.abort_request("waiting")
    ended = [(event.request_id, event.reason) for event in trace.of(RequestFinished)]
    assert ended == [("running#0", "abort"), ("running#1", "abort"), ("waiting", "abort")]
    assert llm.engine.pool.num_used == 0
    last = drain(llm)
    assert list(last) == ["other"]
    assert [last["other"].outputs[0].token_ids] == expected(tiny)[2]


def test_after_an_abort_the_id_is_free(tiny: TinyPair) -> None:
    llm = engine(tiny)
    llm.add_request("a", PROMPTS[0], GREEDY)
    llm.step()
    llm.abort_request("a")
    settled(llm)
    llm.add_request("a", PROMPTS[1], GREEDY)
    assert [drain(llm)["a"].outputs[0].token_ids] == expected(tiny)[1]


def test_completions_that_the_inner_engine_ends_are_reported(tiny: TinyPair) -> None:
    llm = engine(tiny)
    llm.add_request("a", PROMPTS[0], replace(WARM, n=2))
    llm.step()
    llm.engine.abort("a#0")
    llm.engine.abort("a#1")
    assert llm.has_unfinished_requests()
    [output] = llm.step()
    assert [completion.finish_reason for completion in output.outputs] == ["abort", "abort"]
    settled(llm)


# ------------------------------------------------------------------------------------------------------------ trouble


class Stop:
    """A listener that raises at the n-th event of a kind."""

    def __init__(self, kind: type, left: int = 1) -> None:
        self.kind, self.left = kind, left

    def __call__(self, event: Any) -> None:
        self.left -= isinstance(event, self.kind)
        if isinstance(event, self.kind) and self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("num_others", [0, 1])
def test_what_ended_in_an_interrupted_step_is_returned_by_the_next(tiny: TinyPair, num_others: int) -> None:
    """Three end in one step. The interrupt keeps the metrics from the end of the last one."""
    llm = engine(tiny)
    for name, prompt in zip("abc", PROMPTS, strict=True):
        llm.add_request(name, prompt, GREEDY)
    if num_others:
        llm.add_request("goes on", PROMPTS[0], replace(GREEDY, max_tokens=30))
    llm.engine.listeners.insert(0, Stop(RequestFinished, 3))
    with pytest.raises(KeyboardInterrupt):
        while True:
            llm.step()
    assert len(llm.engine.requests) == num_others, "three have ended, and nobody has been told"
    told = {output.request_id: output for output in llm.step() if output.finished}
    assert [[told[name].outputs[0].token_ids] for name in "abc"] == expected(tiny)
    llm.add_request("c", PROMPTS[2], GREEDY)  # the id is free again
    assert [drain(llm)["c"].outputs[0].token_ids] == expected(tiny)[2]


def test_prompts_that_end_in_steps_of_another_caller_are_not_forgotten(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than prompts that nobody waits for are kept."""
    monkeypatch.setattr(request_metrics, "MAX_ENDED_PROMPTS", 2)
    llm = engine(tiny)
    for number in range(7):
        llm.add_request(f"early {number}", PROMPTS[0], replace(GREEDY, max_tokens=2))
    group = llm.prepare(PROMPTS[1], replace(GREEDY, max_tokens=30))
    for _ in llm.run([group]):
        pass
    told = {}
    for _ in range(3):
        told |= {output.request_id: output for output in llm.step() if output.finished}
    assert len(told) == 7 and not llm.has_unfinished_requests()
    assert all(output.metrics.num_output_tokens == 2 for output in told.values())
    assert not llm.metrics.requests and not llm.metrics.awaited


@pytest.mark.parametrize("place", [1, 2, 3])
def test_an_interrupt_while_outputs_are_made_loses_none(
    tiny: TinyPair, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two end in one step, and another goes on."""
    llm = engine(tiny)
    for name, tokens in (("a", 3), ("b", 3), ("c", 6)):
        llm.add_request(name, PROMPTS[0], replace(GREEDY, max_tokens=tokens))
    make, ended = llm.output, []

    def interrupted(group: Sequence[Request]) -> RequestOutput:
        made = make(group)
        if made.finished and made.request_id not in ended:
            ended.append(made.request_id)
            if len(ended) == place:
                raise KeyboardInterrupt
        return made

    monkeypatch.setattr(llm, "output", interrupted)
    told: list[str] = []
    interrupts = 0
    while llm.has_unfinished_requests():
        try:
            told += [output.request_id for output in llm.step() if output.finished]
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1 and sorted(told) == ["a", "b", "c"]
    settled(llm)


def test_an_interrupt_while_a_request_ends_loses_no_output(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the drafter learns from the output, and another request goes on."""
    llm = engine(tiny, speculative_config={"method": "suffix"})
    llm.add_request("a", PROMPTS[0], replace(GREEDY, max_tokens=3))
    llm.add_request("b", PROMPTS[1], replace(GREEDY, max_tokens=60))

    def interrupted(request: Request) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.drafter, "request_finished", interrupted)
    with pytest.raises(KeyboardInterrupt):
        while True:
            llm.step()
    assert "a" in [output.request_id for output in llm.step() if output.finished]
    assert llm.has_unfinished_requests()
    llm.add_request("a", PROMPTS[0], GREEDY)  # the id is free again
    assert len(drain(llm)["a"].outputs[0].token_ids) == 12


def test_an_interrupted_abort_can_be_repeated(tiny: TinyPair) -> None:
    """The interrupt keeps the metrics from one of two ends, and another request goes on."""
    llm = engine(tiny)
    llm.add_request("a", PROMPTS[0], replace(WARM, n=2))
    llm.add_request("b", PROMPTS[1], GREEDY)
    llm.step()
    llm.engine.listeners.insert(0, Stop(RequestFinished))
    with pytest.raises(KeyboardInterrupt):
        llm.abort_request("a")
    llm.abort_request("a")
    assert list(llm.engine.requests) == list(llm.metrics.requests) == ["b"]
    llm.add_request("a", PROMPTS[0], GREEDY)  # the id is free again
    last = drain(llm)
    assert [[last[name].outputs[0].token_ids] for name in "ab"] == expected(tiny)[:2]


def broken_view(event: Any) -> None:
    """A watcher that fails at the end of every request."""
    if isinstance(event, RequestFinished):
        raise RuntimeError("no display")


def test_a_view_that_fails_at_every_end_keeps_no_request_in_the_engine(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), block_size=4)
    with llm.trace() as trace, pytest.raises(RuntimeError, match="no display"):
        trace.watch(broken_view)
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    settled(llm.llm_engine)
    with llm.trace() as trace:
        [output] = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert {work.request_id for step in trace.of(StepRan) for work in step.work} == {output.request_id}


def test_an_abort_of_several_goes_on_after_one_that_fails(tiny: TinyPair) -> None:
    llm = engine(tiny)
    for name, prompt in zip("abc", PROMPTS, strict=True):
        llm.add_request(name, prompt, replace(WARM, n=2))
    llm.step()
    with llm.trace() as trace, pytest.raises(RuntimeError, match="no display"):
        trace.watch(broken_view)
        llm.abort_request(list("abc"))
    assert not llm.engine.requests and not llm.engine.pool.num_used
    llm.abort_request(list("abc"))
    settled(llm)


def test_broken_logits_of_one_request_stop_all_until_it_is_aborted(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = expected(tiny)[0]
    break_logits(monkeypatch, lambda request: request.request_id == "bad")
    llm = engine(tiny)
    llm.add_request("good", PROMPTS[0], GREEDY)
    llm.add_request("bad", PROMPTS[1], GREEDY)
    for _ in range(2):
        with pytest.raises(NonFiniteLogitsError) as caught:
            llm.step()
        assert caught.value.request_id == "bad"
        assert llm.engine.requests["good"].num_output_tokens == 0
    llm.abort_request(caught.value.request_id)
    assert [drain(llm)["good"].outputs[0].token_ids] == alone


@pytest.mark.parametrize("place", [1, 2, 3])
def test_an_interrupt_while_completions_are_queued_queues_none(tiny: TinyPair, place: int) -> None:
    llm = engine(tiny)
    add, calls = llm.engine.scheduler.add, []

    def interrupted(request: Request) -> None:
        calls.append(request)
        if len(calls) == place:
            raise KeyboardInterrupt
        add(request)

    llm.engine.scheduler.add = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.add_request("a", PROMPTS[0], replace(WARM, n=3))
    settled(llm)
    llm.engine.scheduler.add = add
    llm.add_request("a", PROMPTS[0], GREEDY)
    assert [drain(llm)["a"].outputs[0].token_ids] == expected(tiny)[0]


@pytest.mark.parametrize("place", [1, 2, 3])
def test_an_interrupt_while_prompts_are_submitted_queues_none(tiny: TinyPair, place: int) -> None:
    """Nobody would have a handle of those that were queued."""
    llm = LLM(str(tiny.target), block_size=4)
    llm.engine.listeners.insert(0, Stop(RequestAdded, place))
    with pytest.raises(KeyboardInterrupt):
        llm.submit(PROMPTS, GREEDY)
    settled(llm.llm_engine)
    assert [[o.outputs[0].token_ids] for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == expected(tiny)


def test_generate_chooses_ids_that_no_request_of_ones_own_has(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), block_size=4)
    llm.llm_engine.add_request("1", PROMPTS[0], GREEDY)
    outputs = llm.generate(PROMPTS[1:], GREEDY, use_tqdm=False)
    assert "1" not in [output.request_id for output in outputs]
    assert [[output.outputs[0].token_ids] for output in outputs] == expected(tiny)[1:]
    [mine] = llm.llm_engine.step()  # generate has run it to its end beside its own
    assert mine.request_id == "1" and [mine.outputs[0].token_ids] == expected(tiny)[0]
    settled(llm.llm_engine)


def test_refusing_an_id_in_use_leaves_its_owner_alone(tiny: TinyPair) -> None:
    """`submit` numbers its requests; one of the same name is refused, and the first goes on with its figures."""
    llm = LLM(str(tiny.target), block_size=4)
    [first] = llm.submit(PROMPTS[0], GREEDY)
    llm.engine.step()
    with pytest.raises(MinillmError, match="in use"):
        llm.llm_engine.add_request(first.request_id, PROMPTS[1], GREEDY)
    while llm.engine.has_requests:
        llm.engine.step()
    assert [first.output_token_ids] == expected(tiny)[0]
    assert llm.llm_engine.metrics.requests[first.request_id].num_output_tokens == 12


# ------------------------------------------------------------------------------------------------------------ figures


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What the metrics take for the time: set by the test."""
    now = [0.0]
    monkeypatch.setattr(request_metrics.time, "perf_counter", lambda: now[0])
    yield now


def test_the_queue_time_ends_where_the_first_step_begins(clock: list[float]) -> None:
    watcher = MetricsWatcher()
    ran = StepRan(1, [Work("a", "prefill", 0, 4)])
    for clock[0], event in ((1.0, RequestAdded("a", "def", [1, 2, 3, 4])), (3.0, StepStarted(1, 0, 1)), (7.0, ran)):
        watcher(event)
    assert watcher.of("a").queue_time == 2.0


def test_times_are_counted_per_request(tiny: TinyPair, clock: list[float]) -> None:
    """One place to run, ten ticks per step: the second waits for the first one's six steps."""
    llm = engine(tiny, max_num_seqs=1, max_num_batched_tokens=4)
    params = replace(GREEDY, max_tokens=5)
    llm.add_request("first", {"prompt_token_ids": [5] * 8}, params)
    clock[0] = 3.0
    llm.add_request("second", {"prompt_token_ids": [6] * 12}, params)
    last: dict[str, RequestOutput] = {}
    while llm.has_unfinished_requests():
        clock[0] += 10.0
        last |= {output.request_id: output for output in llm.step()}
    first, second = last["first"].metrics, last["second"].metrics
    # Two chunks of prompt, the second of which gives a token; then four decode forwards.
    assert (first.arrival_time, first.queue_time, first.ttft, first.tpot) == (0.0, 13.0, 23.0, 10.0)
    assert first.num_target_forwards == 6 and first.num_decode_forwards == first.num_decode_tokens == 4
    # Three chunks, after the six steps of the first.
    assert (second.arrival_time, second.queue_time, second.ttft, second.tpot) == (3.0, 70.0, 90.0, 10.0)
    assert (first.last_token_time, second.last_token_time) == (63.0, 133.0)
    assert first.num_output_tokens == second.num_output_tokens == 5


def test_the_time_per_token_is_that_of_a_completion(tiny: TinyPair, clock: list[float]) -> None:
    """Four completions gain a token each in every step of ten ticks."""
    llm = engine(tiny)
    llm.add_request("four", PROMPTS[0], SamplingParams(n=4, seed=1, max_tokens=5, ignore_eos=True))
    while llm.has_unfinished_requests():
        clock[0] += 10.0
        outputs = llm.step()
    assert outputs[0].metrics.num_output_tokens == 20 and outputs[0].metrics.tpot == 10.0
    assert not llm.metrics._latest


def test_preemptions_and_cached_tokens_are_counted_per_request(tiny: TinyPair) -> None:
    llm = engine(tiny, num_kv_blocks=14)
    prompts = {name: {"prompt_token_ids": [5] * 9 + [i]} for i, name in enumerate("abcd", start=10)}
    with llm.trace() as trace:
        for name, prompt in prompts.items():
            llm.add_request(name, prompt, replace(GREEDY, max_tokens=20))
        last = drain(llm)
    preempted = [event.request_id for event in trace.of(RequestPreempted)]
    assert preempted
    assert {name: output.metrics.num_preemptions for name, output in last.items()} == {
        name: preempted.count(name) for name in prompts
    }
    assert [last[name].num_cached_tokens for name in prompts] == [0, 8, 8, 8]
    assert all(output.metrics.num_cached_tokens == output.num_cached_tokens for output in last.values())


@pytest.mark.parametrize("drafts", [None, {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}])
def test_tokens_per_forward_are_those_of_the_acceptance_picture(tiny: TinyPair, drafts: dict | None) -> None:
    """Preempted requests included: a prefill counts in neither, the first one nor one that computes lost tokens."""
    llm = engine(tiny, num_kv_blocks=14, speculative_config=drafts)
    with llm.trace() as trace:
        for i in range(4):
            llm.add_request(str(i), {"prompt_token_ids": [5] * 9 + [i]}, replace(GREEDY, max_tokens=20))
        last = drain(llm)
    assert trace.of(RequestPreempted)
    pictured = AcceptanceState().fold_all(trace.events)
    for name, output in last.items():
        drawn = next(r for each, r in pictured.requests.items() if each.partition("#")[0] == name)
        assert output.metrics.num_decode_forwards == drawn.forwards and output.metrics.num_decode_tokens == drawn.gained
    if drafts:
        assert tokens_per_forward(list(last.values())) == pytest.approx(pictured.total().tokens_per_forward)


def test_what_a_preempted_request_finds_again_does_not_count_as_cached(tiny: TinyPair) -> None:
    llm = engine(tiny, num_kv_blocks=9)
    with llm.trace() as trace:
        for name, token in (("a", 5), ("b", 6)):
            llm.add_request(name, {"prompt_token_ids": [token] * 9}, replace(GREEDY, max_tokens=15))
        last = drain(llm)
    assert [event.request_id for event in trace.of(BlocksShared)] == ["b"], "it lost its blocks and found some again"
    assert [last[name].num_cached_tokens for name in "ab"] == [0, 0]


def test_figures_of_several_completions_are_of_all_together(tiny: TinyPair) -> None:
    llm = engine(tiny)
    llm.add_request("a", {"prompt_token_ids": [5] * 10}, replace(WARM, n=3))
    metrics = drain(llm)["a"].metrics
    assert metrics.num_output_tokens == 36
    assert metrics.num_cached_tokens == 0, "sharing one's own prompt is no find"
    assert metrics.num_blocks == 0 and metrics.peak_blocks > 6


# ------------------------------------------------------------------------------------------------------------ options


def test_every_option_of_llm_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[EngineArgs] = []
    monkeypatch.setattr(minillm.llm, "LLMEngine", given.append)
    options: dict[str, Any] = {
        "dtype": "float16", "device": "cpu", "seed": 3, "quantization": "int8", "kv_cache_dtype": "int4",
        "kv_cache_config": {"layout": "paged"}, "block_size": 8, "num_kv_blocks": 33, "gpu_memory_utilization": 0.5,
        "max_model_len": 100, "max_num_seqs": 5, "max_num_batched_tokens": 77, "enable_prefix_caching": False,
        "enable_chunked_prefill": False, "scheduling_policy": "priority", "enforce_eager": True,
        "speculative_config": {"method": "ngram"}, "scheduler_cls": dict, "block_pool_cls": list, "ops": {"a": print},
        "tensor_parallel_size": 2, "distributed_executor_backend": "mp",
    }  # fmt: skip
    others = {"kv_cache_memory_bytes": 999, "long_prefill_token_threshold": 9}  # not beside some of those
    for wanted in (options, others):
        LLM("m", **wanted)
        assert given.pop() == EngineArgs("m", **wanted)
    assert {"model", *options, *others} == {field.name for field in fields(EngineArgs)}


def test_options_of_other_types_are_plain_in_the_engine(tiny: TinyPair) -> None:
    """Paths and NumPy's integers, which cannot be written to a trace."""
    args = EngineArgs(
        tiny.target,
        max_num_seqs=np.int64(5),
        seed=np.uint8(3),
        kv_cache_config={"layout": "sinks", "window": np.int32(12)},
        speculative_config={"method": "suffix", "fallback": {"method": "draft_model", "model": tiny.draft}},
    )
    assert args == EngineArgs(
        str(tiny.target),
        max_num_seqs=5,
        seed=3,
        kv_cache_config={"layout": "sinks", "window": 12},
        speculative_config={"method": "suffix", "fallback": {"method": "draft_model", "model": str(tiny.draft)}},
    )
    assert type(args.max_num_seqs) is type(args.seed) is int
    for bad in ({"max_num_seqs": True}, {"max_num_seqs": np.bool_(True)}, {"max_num_seqs": np.int64(0)}):
        with pytest.raises(ConfigError, match=r"max_num_seqs=.* must be an integer of at least 1"):
            EngineArgs("m", **bad)


def test_a_trace_of_a_model_that_is_a_path_can_be_saved(tiny: TinyPair, tmp_path: Path) -> None:
    speculative = {"method": "draft_model", "model": tiny.draft, "num_speculative_tokens": 2}
    llm = LLM(tiny.target, speculative_config=speculative, enforce_eager=True)
    with llm.trace() as trace:
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    trace.save(tmp_path / "run.jsonl")
    assert llm.model == str(tiny.target)
    [started] = Trace.load(tmp_path / "run.jsonl").of(EngineStarted)
    assert (started.model, started.draft_model) == (str(tiny.target), str(tiny.draft))


def test_none_is_the_default_where_it_is_in_vllm() -> None:
    none = EngineArgs("m", max_num_seqs=None, max_num_batched_tokens=None, enable_chunked_prefill=None)
    assert none == EngineArgs("m")
    with pytest.raises(ConfigError, match="enforce_eager=None must be True or False"):
        EngineArgs("m", enforce_eager=None)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("half", "float16"),
        ("float", "float32"),
        (torch.float16, "float16"),
        (torch.bfloat16, "bfloat16"),
        (torch.float32, "float32"),
        (torch.half, "float16"),
    ],
    ids=str,
)
def test_a_dtype_has_vllms_other_names(given: Any, dtype: str) -> None:
    assert EngineArgs("m", dtype=given).dtype == dtype


@pytest.mark.parametrize("given", [torch.float64, "double", None], ids=str)
def test_an_unknown_dtype_is_named(tiny: TinyPair, given: Any) -> None:
    with pytest.raises(ConfigError, match=f"dtype='?{given}'? must be one of auto, float32, float16, bfloat16"):
        LLM(tiny.target, dtype=given)


@pytest.mark.parametrize("prompt", [b"", b"def", bytearray(b"def"), [b"def"], ["def", b"def"]], ids=repr)
def test_bytes_are_no_prompt(tiny: TinyPair, prompt: Any) -> None:
    llm = LLM(tiny.target, enforce_eager=True)
    with pytest.raises(PromptError, match=r"a prompt must be text, .* not byte(s|array)"):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    with pytest.raises(PromptError, match="must be a sequence of token ids"):
        llm.generate({"prompt_token_ids": b"def"}, GREEDY, use_tqdm=False)


def test_priorities_may_be_one_for_all_or_a_list_and_numpys_integers(tiny: TinyPair) -> None:
    llm = LLM(tiny.target, scheduling_policy="priority", enforce_eager=True)
    priorities = [request.priority for request in llm.submit(PROMPTS, GREEDY, priority=[np.int64(2), 1, np.int8(-1)])]
    assert priorities == [2, 1, -1] and {*map(type, priorities)} == {int}
    for priority in (-2, np.int64(-2)):
        assert [request.priority for request in llm.submit(PROMPTS, GREEDY, priority=priority)] == [-2] * 3
    with pytest.raises(ConfigError, match="False are no priorities"):
        llm.submit(PROMPTS, GREEDY, priority=False)


def test_the_signature_of_llm_names_every_option() -> None:
    assert list(inspect.signature(LLM).parameters) == [field.name for field in fields(EngineArgs)]


# -------------------------------------------------------------------------------------------------------------- seams


class LastComeFirst(Scheduler):
    """Serves the newest request first."""

    def rank(self, request: Request) -> tuple[int, int]:
        return (0, -request.arrival)


class HighestFirst(BlockPool):
    """Gives out the block with the highest number."""

    def allocate(self, count: int) -> list[int] | None:
        self._empty.sort()
        return super().allocate(count)


def test_a_scheduler_of_ones_own_decides(tiny: TinyPair) -> None:
    orders = {}
    for cls in (None, LastComeFirst):
        llm = engine(tiny, max_num_seqs=1, scheduler_cls=cls)
        with llm.trace() as trace:
            for number, prompt in enumerate(PROMPTS):
                llm.add_request(str(number), prompt, GREEDY)
            last = drain(llm)
        orders[cls] = [event.request_id for event in trace.of(RequestFinished)]
        assert [[last[str(i)].outputs[0].token_ids] for i in range(3)] == expected(tiny)
        assert type(llm.engine.scheduler) is (cls or Scheduler)
    assert orders == {None: ["0", "1", "2"], LastComeFirst: ["2", "1", "0"]}


def test_a_block_pool_of_ones_own_allocates(tiny: TinyPair) -> None:
    tables = {}
    for cls in (None, HighestFirst):
        llm = engine(tiny, num_kv_blocks=20, block_pool_cls=cls)
        llm.add_request("a", {"prompt_token_ids": [5] * 9}, GREEDY)
        llm.step()
        tables[cls] = list(llm.engine.requests["a"].block_table)
        drain(llm)
    assert tables == {None: [0, 1, 2], HighestFirst: [19, 18, 17]}


def test_an_op_of_ones_own_computes(tiny: TinyPair) -> None:
    calls: list[int] = []

    def counted(q: Any, *rest: Any) -> Any:
        calls.append(len(q))
        return paged_attention(q, *rest)

    def deaf(q: Any, *rest: Any) -> Any:
        return paged_attention(q, *rest) * 0

    outputs: dict[Any, Sequence[int]] = {}
    for op in (None, counted, deaf):
        llm = engine(tiny, ops={"paged_attention": op} if op else None)
        with llm.trace() as trace:
            llm.add_request("a", PROMPTS[0], GREEDY)
            outputs[op] = drain(llm)["a"].outputs[0].token_ids
        if op is counted:
            num_layers = llm.engine.runner.model.config.num_layers
            assert sum(calls) == num_layers * sum(w.num_tokens for e in trace.of(StepRan) for w in e.work)
    assert outputs[counted] == outputs[None] != outputs[deaf]


def test_an_id_of_ones_own_is_not_that_of_completions_that_generate_runs(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target))
    stream = llm.stream(PROMPTS[0], GREEDY)
    text = next(stream)
    with pytest.raises(MinillmError, match="request id '0' is in use"):
        llm.llm_engine.add_request("0", PROMPTS[1], replace(WARM, n=2))
    llm.llm_engine.add_request("b", PROMPTS[1], replace(WARM, n=2))
    text += "".join(stream)
    assert text == LLM(str(tiny.target)).generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].text
    assert len(drain(llm.llm_engine)["b"].outputs) == 2


def test_an_id_that_is_used_again_starts_with_new_figures(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target))
    llm.submit(PROMPTS[:1], GREEDY)
    while llm.engine.has_requests:
        llm.engine.step()
    assert llm.llm_engine.metrics.requests["0"].num_output_tokens == 12  # of `submit`: nobody has taken them
    llm.llm_engine.add_request("0", PROMPTS[1], GREEDY)
    assert drain(llm.llm_engine)["0"].metrics.num_output_tokens == 12


def test_token_ids_of_numpy_are_token_ids(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target))
    ids = llm.engine.tokenizer.encode(PROMPTS[0])
    lists = [{"prompt_token_ids": given} for given in (ids, np.array(ids), list(np.array(ids, np.int32)))]
    outputs = llm.generate(lists, GREEDY, use_tqdm=False)
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids == outputs[2].prompt_token_ids == ids
    assert {type(i) for output in outputs for i in output.prompt_token_ids} == {int}


def test_numbers_of_any_type_are_plain_numbers_in_the_engine() -> None:
    params = SamplingParams(
        max_tokens=np.int8(100),
        min_tokens=np.uint8(3),
        stop_token_ids=[np.int16(4)],
        frequency_penalty=Fraction(1, 2),
        temperature=np.float16(0.5),
        seed=np.uint64(2**63),
    )
    assert type(params.max_tokens) is type(params.min_tokens) is type(params.seed) is int
    assert type(params.frequency_penalty) is type(params.temperature) is float
    assert [type(token) for token in params.stop_token_ids or ()] == [int]
    assert (params.max_tokens, params.min_tokens, params.frequency_penalty, params.seed) == (100, 3, 0.5, 2**63)


def test_lists_that_the_caller_changes_later_change_no_parameters() -> None:
    stops, tokens = ["zzz"], [7]
    params = SamplingParams(stop=stops, stop_token_ids=tokens)
    stops.append("")
    tokens.append(8)
    assert params.stop_strings == ("zzz",) and params.all_stop_token_ids == {7}
    assert replace(params, n=2).stop_strings == ("zzz",)


def test_stream_refuses_what_generate_refuses_at_once(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), block_size=4, num_kv_blocks=24)
    for prompt, params, words in (
        ("", GREEDY, "the prompt is empty"),
        (123, GREEDY, "not int"),
        ("a", replace(WARM, n=2), "n=2"),
        ("a", replace(GREEDY, detokenize=False), "detokenize=False"),
        ({"prompt_token_ids": [5] * 90}, replace(GREEDY, max_tokens=12), "needs 26 blocks .* the pool has 24"),
    ):
        with pytest.raises(MinillmError, match=words):
            llm.stream(prompt, params)  # type: ignore[arg-type]


def test_the_progress_bar_may_be_another(tiny: TinyPair) -> None:
    made: list[Any] = []

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    LLM(str(tiny.target)).generate(PROMPTS, GREEDY, use_tqdm=Bar)
    [bar] = made
    assert (bar.n, bar.total) == (3, 3)


def test_tokens_per_forward_without_a_forward_is_no_number(tiny: TinyPair) -> None:
    outputs = LLM(str(tiny.target)).generate(PROMPTS, replace(GREEDY, max_tokens=1), use_tqdm=False)
    assert math.isnan(tokens_per_forward(outputs))
