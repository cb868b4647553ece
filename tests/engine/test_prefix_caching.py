"""Shared prefixes: the same tokens as without sharing, and every shared token computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from minillm import LLM, RequestOutput, SamplingParams
from minillm.models.held_out import held_out_prompts
from minillm.runtime.runner import ModelRunner
from minillm.trace import (
    BlockCopied,
    BlocksEvicted,
    BlocksShared,
    RequestPreempted,
    StepRan,
    Trace,
)
from tests.conftest import TinyPair

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
WARM = replace(GREEDY, temperature=0.9, seed=5)
TEXT = "def add(a, b):\n    return a + b\n\n\nclass Stack:\n    def push(self, item):\n"


def drafted(tiny: TinyPair, gamma: int = 3) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(tiny.draft), "num_speculative_tokens": gamma}


def tokens(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize("index", [0, 1], ids=["with prompt_logprobs", "a fork"])
def test_a_preempted_request_finds_what_accepted_drafts_have_filled(tiny: TinyPair, index: int) -> None:
    config = {"method": "draft_model", "model": str(tiny.target), "num_speculative_tokens": 5, "adaptive": False}
    llm = LLM(str(tiny.target), block_size=4, speculative_config=config)
    params = replace(GREEDY, temperature=1.0, top_k=1, n=2, max_tokens=60, prompt_logprobs=0)
    expected = tokens(llm.generate([TEXT], params, use_tqdm=False))
    llm.reset_prefix_cache()
    request = llm.submit([TEXT], params)[index]
    while request.num_output_tokens < 40:
        llm.engine.step()
    before = request.num_computed_tokens
    llm.engine.scheduler._preempt(request)
    with llm.trace() as trace:
        while not request.finished:
            llm.engine.step()
    [found] = trace.of(BlocksShared)
    assert found.num_tokens == before // 4 * 4
    assert request.output_token_ids == expected[0][index]


def test_a_running_request_shares_the_blocks_that_accepted_drafts_have_filled(tiny: TinyPair) -> None:
    config = {"method": "draft_model", "model": str(tiny.target), "num_speculative_tokens": 5, "adaptive": False}
    llm = LLM(str(tiny.target), block_size=4, speculative_config=config)
    [first] = llm.submit([TEXT], replace(GREEDY, max_tokens=60))
    while first.num_output_tokens < 40:
        llm.engine.step()
    computed_tokens = first.num_computed_tokens
    [second] = llm.submit([{"prompt_token_ids": first.token_ids[: computed_tokens + 1]}], GREEDY)
    with llm.trace() as trace:
        while not (first.finished and second.finished):
            llm.engine.step()
    [found] = trace.of(BlocksShared)
    assert found.num_tokens == computed_tokens // 4 * 4
    assert second.token_ids[: first.num_tokens] == first.token_ids[: second.num_tokens]


def computed(trace: Trace, kind: str = "prefill") -> int:
    """Tokens that went through the target as `kind`."""
    return sum(work.num_tokens for step in trace.of(StepRan) for work in step.work if work.kind == kind)


def settled(llm: LLM) -> None:
    llm.engine.scheduler.check_integrity()
    assert llm.engine.pool.num_used == 0


def prompts_with_prefix(llm: LLM, prefix: int, count: int, suffix: int = 3) -> list[dict[str, list[int]]]:
    vocab = llm.engine.runner.model.config.vocab_size
    head = [7 + i * 31 % (vocab - 8) for i in range(prefix)]
    return [{"prompt_token_ids": head + [1 + (i * 13 + j * 7) % 200 for j in range(suffix)]} for i in range(count)]


@pytest.mark.parametrize(
    "params, speculative, num_kv_blocks",
    [
        (GREEDY, False, None),
        (GREEDY, True, None),
        (GREEDY, False, 26),
        (GREEDY, True, 26),
        (WARM, False, None),
        (WARM, True, None),
        (WARM, False, 26),
        # Sampled drafts under preemption are left out: who gets how many drafts then differs, and with it which of
        # the equally likely tokens is drawn.
    ],
    ids=lambda value: {GREEDY: "greedy", WARM: "sampled", True: "drafted", False: "plain", 26: "preempting"}.get(value),
)
def test_caching_changes_no_token(
    tiny: TinyPair, params: SamplingParams, speculative: bool, num_kv_blocks: int | None
) -> None:
    config = drafted(tiny) if speculative else None
    engines = [
        LLM(
            str(tiny.target),
            block_size=4,
            num_kv_blocks=num_kv_blocks,
            enable_prefix_caching=caching,
            max_num_batched_tokens=64,
            speculative_config=config,
        )
        for caching in (True, False)
    ]
    prompts = [TEXT[:cut] for cut in (40, 60, 60, 75, 20)]
    for _ in range(2):  # the second time the cache is full of the first
        with engines[0].trace() as trace:
            cached = engines[0].generate(prompts, params, use_tqdm=False)
        assert tokens(cached) == tokens(engines[1].generate(prompts, params, use_tqdm=False))
        assert sum(event.num_tokens for event in trace.of(BlocksShared)) > 0
        settled(engines[0])
    assert bool(trace.of(RequestPreempted)) == bool(num_kv_blocks)


def test_caching_changes_no_token_of_the_bundled_model() -> None:
    """Held-out prompts asked three times over, in one batch and again: as if each had been asked alone."""
    prompts = [p.prompt for p in held_out_prompts(8)]
    plain = LLM("minicoder", enable_prefix_caching=False).generate(prompts, GREEDY, use_tqdm=False)
    llm = LLM("minicoder")
    for _ in range(2):
        assert tokens(llm.generate(prompts * 2, GREEDY, use_tqdm=False)) == tokens(plain) * 2
    settled(llm)


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "drafted"])
def test_64_requests_compute_a_shared_prefix_once(speculative: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All arrive at once: the blocks are shared in the very step that fills them, by the draft model too."""
    config = {"model": "minicoder-draft", "num_speculative_tokens": 2} if speculative else None
    llm = LLM("minicoder", speculative_config=config)
    drafted_tokens = count_tokens(monkeypatch, llm.engine.drafter.runner) if speculative else []
    prompts = prompts_with_prefix(llm, 512, 64)
    with llm.trace() as trace:
        outputs = llm.generate(prompts, replace(GREEDY, max_tokens=3), use_tqdm=False)
    assert computed(trace) == 512 + 64 * 3
    assert [output.num_cached_tokens for output in outputs] == [0] + [512] * 63
    if speculative:
        # Each request drafts in rounds of at most 2; what lies beyond that is catching up with the prompt.
        assert 512 + 64 * 3 <= sum(drafted_tokens) <= 512 + 64 * 3 + 64 * 3 * 2
    settled(llm)


def count_tokens(monkeypatch: pytest.MonkeyPatch, runner: ModelRunner) -> list[int]:
    counted: list[int] = []
    run: Callable[..., Any] = runner.run
    monkeypatch.setattr(
        runner, "run", lambda segments: counted.append(sum(len(s.token_ids) for s in segments)) or run(segments)
    )
    return counted


def test_a_prompt_that_is_wholly_cached_computes_its_last_block(tiny: TinyPair) -> None:
    """Its last token must go through the model, or there would be nothing to choose from."""
    llm = LLM(str(tiny.target), block_size=4)
    prompt = {"prompt_token_ids": list(range(1, 17))}
    first = llm.generate(prompt, GREEDY, use_tqdm=False)
    with llm.trace() as trace:
        again = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert tokens(again) == tokens(first)
    assert again[0].num_cached_tokens == 12 and computed(trace) == 4


def test_partial_blocks_are_never_shared(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), block_size=4)
    llm.generate({"prompt_token_ids": list(range(1, 8))}, replace(GREEDY, max_tokens=1), use_tqdm=False)
    [output] = llm.generate({"prompt_token_ids": [*range(1, 8), 99, 98]}, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 4


def test_the_next_turn_of_a_chat_finds_the_last_answer(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), block_size=4, speculative_config=drafted(tiny))
    [first] = llm.generate(TEXT, replace(GREEDY, max_tokens=21), use_tqdm=False)
    history = [*first.prompt_token_ids, *first.outputs[0].token_ids]
    [second] = llm.generate({"prompt_token_ids": [*history, 5, 6, 7]}, GREEDY, use_tqdm=False)
    assert second.num_cached_tokens == (len(history) - 1) // 4 * 4  # the last token was never computed
    fresh = LLM(str(tiny.target), block_size=4, enable_prefix_caching=False)
    alone = fresh.generate({"prompt_token_ids": [*history, 5, 6, 7]}, GREEDY, use_tqdm=False)
    assert tokens([second]) == tokens(alone)


def test_only_computed_and_judged_tokens_get_a_hash(tiny: TinyPair) -> None:
    """After every step, every hash in the pool is that of committed tokens whose keys are written."""
    llm = LLM(str(tiny.target), block_size=2, speculative_config=drafted(tiny, 5))
    requests = llm.submit([TEXT[:30], TEXT[:50]], WARM)
    pool, checked, behind_the_prompt = llm.engine.pool, 0, set()
    while llm.engine.has_requests:
        llm.engine.step()
        for request in requests:
            hashes = request.block_hashes(2)
            for index, block_id in enumerate(request.block_table):
                if block_id in pool._hash_of:
                    assert pool._hash_of[block_id] == hashes[index]
                    assert (index + 1) * 2 <= request.num_computed_tokens
                    checked += 1
                    if index * 2 >= request.num_prompt_tokens:
                        behind_the_prompt.add(request.request_id)
    assert checked and len(behind_the_prompt) == len(requests)


def test_salts_keep_tenants_apart(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), block_size=4)
    found = []
    for salt in ("alice", "bob", "alice", "", "\udc80", None):  # "\udc80": how Python reads a byte that is no UTF-8
        [output] = llm.generate({"prompt": TEXT, "cache_salt": salt}, GREEDY, use_tqdm=False)
        found.append(output.num_cached_tokens)
    assert found[0] == found[1] == found[3] == found[4] == 0 and found[2] > 0
    assert found[5] > 0, "None is as good as left out"


def test_what_was_used_longest_ago_is_evicted_first(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), block_size=4, num_kv_blocks=12)
    one = replace(GREEDY, max_tokens=1)
    prompts = [{"prompt_token_ids": [first] * 17} for first in (1, 2, 3)]  # four full blocks each, one partial

    def ask(number: int) -> int:
        return llm.generate(prompts[number], one, use_tqdm=False)[0].num_cached_tokens

    assert [ask(0), ask(1), ask(0)] == [0, 0, 16]  # eight blocks are cached, those of prompt 1 the older ones
    with llm.trace() as trace:
        assert ask(2) == 0  # takes five: four that were never used, and one of prompt 1, the end of its prefix
    [evicted] = trace.of(BlocksEvicted)
    assert len(evicted.block_ids) == 1
    assert ask(0) == 16
    assert 0 < ask(1) < 16


def test_prompt_logprobs_are_computed_not_remembered(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), block_size=4)
    params = replace(GREEDY, prompt_logprobs=0)
    _, again = (llm.generate(TEXT, params, use_tqdm=False)[0] for _ in range(2))
    assert again.num_cached_tokens == 0 and all(again.prompt_logprobs[1:])


def test_caching_can_be_switched_off(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), block_size=4, enable_prefix_caching=False)
    for _ in range(2):
        assert llm.generate(TEXT, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    assert not llm.engine.pool.cached_blocks


def test_the_cache_can_be_emptied(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), block_size=4)
    llm.generate(TEXT, GREEDY, use_tqdm=False)
    assert llm.engine.pool.cached_blocks
    llm.reset_prefix_cache()
    assert not llm.engine.pool.cached_blocks
    assert llm.generate(TEXT, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


# ------------------------------------------------------------------------------------------------------------- forks


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize("length", [15, 16, 17], ids=["partial block", "full blocks", "one over"])
def test_completions_share_the_prompt_and_write_into_copies(
    tiny: TinyPair, caching: bool, speculative: bool, length: int
) -> None:
    config = drafted(tiny) if speculative else None
    llm = LLM(str(tiny.target), block_size=4, enable_prefix_caching=caching, speculative_config=config)
    prompt = {"prompt_token_ids": [3 + i * 17 % 250 for i in range(length)]}
    with llm.trace() as trace:
        [output] = llm.generate(prompt, replace(WARM, n=4), use_tqdm=False)
    alone = LLM(str(tiny.target), block_size=4, enable_prefix_caching=False, speculative_config=config)
    unforked = alone.submit(prompt, replace(WARM, n=4))
    for request in unforked:
        request.fork_of = None
    while alone.engine.has_requests:
        alone.engine.step()
    assert tokens([output]) == [[request.output_token_ids for request in unforked]]
    assert computed(trace) == length + 3, "the prompt once, and its last token once for each of the other three"
    assert len(trace.of(BlockCopied)) == 3
    assert {event.source for event in trace.of(BlocksShared)} == {"fork"}
    settled(llm)


def test_a_fork_whose_parent_has_gone_computes_for_itself(tiny: TinyPair) -> None:
    """max_tokens=1: the first completion ends in the step that fills the prompt."""
    llm = LLM(str(tiny.target), block_size=4)
    [output] = llm.generate(TEXT, replace(WARM, n=3, max_tokens=1), use_tqdm=False)
    assert [len(completion.token_ids) for completion in output.outputs] == [1, 1, 1]
    settled(llm)


def test_aborting_a_parent_frees_its_forks(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), block_size=4)
    parent, *forks = llm.submit(TEXT, replace(WARM, n=3))
    llm.engine.abort(parent.request_id)
    while llm.engine.has_requests:
        llm.engine.step()
        llm.engine.scheduler.check_integrity()
    assert all(len(fork.output_token_ids) == WARM.max_tokens for fork in forks)
    settled(llm)
