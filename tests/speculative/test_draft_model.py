"""The classic mistakes of speculative decoding, one test each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.batch import Segment
from minillm.speculative.drafter import Draft, Drafter
from minillm.trace import BlocksFreed, DraftProposed, TokensCommitted
from minillm.trace.acceptance_state import AcceptanceState
from tests.conftest import TinyPair
from tests.speculative.self_drafting import follows_the_target_unless_drafts_are_drawn_cooler

PROMPTS = ["def add(a, b):", "for line in", "import os\n\n\ndef walk(root):"]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def config(model: object, gamma: int = 4, **options: object) -> dict:
    return {"method": "draft_model", "model": str(model), "num_speculative_tokens": gamma, **options}


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_a_target_that_drafts_for_itself_is_always_right(tiny: TinyPair) -> None:
    """Catches a draft cache that is one short after full acceptance, and verify rows that are off by one: then the
    draft would see a stale row, its guesses would drift from the target's, and acceptance would fall below 1."""
    llm = LLM(str(tiny.target), speculative_config=config(tiny.target, gamma=5))
    with llm.trace() as trace:
        assert tokens(llm) == tokens(LLM(str(tiny.target)))
    rounds = [e for e in trace.of(TokensCommitted) if e.num_drafts]
    assert rounds and all(e.num_accepted == e.num_drafts for e in rounds)
    assert all(e.origins[-1] == "bonus" and len(e.token_ids) == e.num_drafts + 1 for e in rounds)


def test_a_stop_inside_the_accepted_drafts_leaves_out_those_behind_it(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), speculative_config=config(tiny.target, gamma=5))
    whole = tokens(llm)[0]
    inside = next(token for i, token in enumerate(whole[3:], start=3) if token not in whole[:i])
    with llm.trace() as trace:
        llm.generate(PROMPTS[0], replace(GREEDY, stop_token_ids=[inside]), use_tqdm=False)
    last = trace.of(TokensCommitted)[-1]
    assert last.token_ids[-1] == inside and last.origins == ["accepted"] * len(last.token_ids)
    assert len(last.token_ids) < last.num_accepted
    AcceptanceState().fold_all(trace)


def test_prompts_longer_than_the_budget_reach_the_draft_in_chunks(tiny: TinyPair) -> None:
    """And nothing is guessed before the last chunk: a target that drafts for itself is still always right."""
    llm = LLM(
        str(tiny.target), max_num_seqs=3, max_num_batched_tokens=9, speculative_config=config(tiny.target, gamma=2)
    )
    runner, num_rows = llm.engine.drafter.runner, []
    for name, forward in (("run", runner.run), ("draft", runner.draft)):

        def counting(segments: list[Segment], *rest: int, forward: Any = forward) -> Any:
            num_rows.append(sum(len(segment.token_ids) for segment in segments))
            return forward(segments, *rest)

        setattr(runner, name, counting)
    with llm.trace() as trace:
        assert tokens(llm) == tokens(LLM(str(tiny.target)))
    assert max(num_rows) == 9
    assert max(len(llm.engine.tokenizer.encode(prompt)) for prompt in PROMPTS) > 9
    rounds = [e for e in trace.of(TokensCommitted) if e.num_drafts]
    assert rounds and all(e.num_accepted == e.num_drafts for e in rounds)


def test_the_round_that_reads_a_long_prompt_leaves_out_unlikely_drafts_too(tiny: TinyPair) -> None:
    """No draft has probability 1."""
    given = config(tiny.draft, gamma=2, min_survival=1.0, adaptive=False)
    llm = LLM(str(tiny.target), max_num_seqs=3, max_num_batched_tokens=9, speculative_config=given)
    with llm.trace() as trace:
        assert tokens(llm) == tokens(LLM(str(tiny.target)))
    assert not any(event.token_ids for event in trace.of(DraftProposed))
    assert not any(event.num_drafts for event in trace.of(TokensCommitted))


def test_a_block_that_a_guess_was_written_to_has_lost_its_name(tiny: TinyPair) -> None:
    """Or the draft would later skip that block as one it had filled with something else."""
    llm = LLM(str(tiny.target), block_size=2, num_kv_blocks=80, speculative_config=config(tiny.draft, 5))
    drafter, checked = llm.engine.drafter, []
    real = drafter.propose

    def propose(requests, num_drafts):
        drafter._filled = dict.fromkeys(range(80), b"of other tokens")
        first = [drafter.num_computed_tokens(request) for request in requests]
        drafts = real(requests, num_drafts)
        for request, start, draft in zip(requests, first, drafts, strict=True):
            written = range(start // 2, (request.num_tokens + len(draft.token_ids) - 2) // 2 + 1)
            checked.extend(drafter._filled.get(request.block_table[i]) for i in written)
        return drafts

    drafter.propose = propose
    tokens(llm)
    assert checked and b"of other tokens" not in checked


def test_the_drafts_cache_equals_a_fresh_recomputation(tiny: TinyPair) -> None:
    """After every round the draft proposes what a draft with no memory would: roll-back and catch-up leave no trace."""
    llm = LLM(str(tiny.target), block_size=4, speculative_config=config(tiny.draft))
    with llm.trace() as trace:
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    history = llm.engine.tokenizer.encode(PROMPTS[0])
    fresh = LLM(str(tiny.draft), block_size=4)
    for event in trace:
        if isinstance(event, DraftProposed):
            params = SamplingParams(temperature=0, max_tokens=len(event.token_ids), ignore_eos=True)
            [out] = fresh.generate({"prompt_token_ids": history}, params, use_tqdm=False)
            assert event.token_ids == out.outputs[0].token_ids
        if isinstance(event, TokensCommitted):
            history += event.token_ids


@pytest.mark.parametrize("gamma", [1, 2, 7])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_greedy_output_does_not_depend_on_the_draft(tiny: TinyPair, gamma: int, block_size: int) -> None:
    llm = LLM(str(tiny.target), block_size=block_size, speculative_config=config(tiny.draft, gamma))
    assert tokens(llm) == tokens(LLM(str(tiny.target)))
    assert llm.engine.pool.num_used == 0


def test_rolled_back_blocks_return_to_the_pool_at_once(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), block_size=1, speculative_config=config(tiny.draft, 6))
    with llm.trace() as trace:
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    freed = sum(len(e.block_ids) for e in trace.of(BlocksFreed) if e.reason == "rolled_back")
    rejected = sum(
        e.num_drafts - e.num_accepted - 1 for e in trace.of(TokensCommitted) if e.num_drafts > e.num_accepted
    )
    assert freed == rejected > 0


def test_greedy_drafts_at_a_temperature_stay_exact_in_distribution(tiny: TinyPair) -> None:
    """q is one-hot: acceptance must be p(x), which the engine only gets right if it passes no draft distribution."""
    llm = LLM(str(tiny.target), speculative_config=config(tiny.draft, draft_sample_method="greedy"))
    seen = []
    real = llm.engine.drafter.propose
    llm.engine.drafter.propose = lambda *args: seen.extend(real(*args)) or seen[-len(args[0]) :]
    tokens(llm, SamplingParams(seed=1, max_tokens=12, ignore_eos=True))
    assert seen and all(draft.probs is None for draft in seen)


class AlwaysWrong(Drafter):
    """Guesses token 1 forever, and sometimes nothing."""

    def propose(self, requests, num_drafts):
        return [Draft([1] * (k if r.num_tokens % 3 else 0)) for r, k in zip(requests, num_drafts, strict=True)]


def test_a_drafter_of_ones_own_cannot_change_the_output(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), speculative_config={"method": AlwaysWrong, "num_speculative_tokens": 3})
    assert tokens(llm) == tokens(LLM(str(tiny.target)))


def test_sampled_text_follows_the_target(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """χ²; a correct engine fails with probability 1e-6 over the engine's seed."""
    follows_the_target_unless_drafts_are_drawn_cooler(tiny, config(tiny.draft, 3), monkeypatch)


@pytest.mark.parametrize("eager", [True, False])
def test_requests_with_different_numbers_get_the_first_of_the_same_drafts(eager: bool) -> None:
    given = {"model": "minicoder-draft", "num_speculative_tokens": 4}
    llm = LLM("minicoder", num_kv_blocks=24, enforce_eager=eager, speculative_config=given)
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for i, prompt in enumerate(["def add(", "import os", "class Stack:"]):
        engine.add_request(str(i), prompt, params)
    engine.step()
    requests, drafter = list(llm.engine.requests.values()), llm.engine.drafter
    whole = [draft.token_ids for draft in drafter.propose(requests, [4, 4, 4])]
    for counts in ([4, 1, 2], [1, 3, 3], [2, 4, 1]):
        drafts = [draft.token_ids for draft in drafter.propose(requests, counts)]
        assert drafts == [tokens[:count] for tokens, count in zip(whole, counts, strict=True)]
        assert [drafter.num_computed_tokens(r) for r in requests] == [r.num_tokens - 1 for r in requests]


@pytest.mark.parametrize("eager", [True, False])
def test_unlikely_drafts_are_left_out_and_nothing_is_computed_twice(eager: bool) -> None:
    given = {"model": "minicoder-draft", "num_speculative_tokens": 6, "adaptive": False, "min_survival": 0.2}
    llm = LLM("minicoder", max_num_seqs=1, enforce_eager=eager, speculative_config=given)
    runner, computed = llm.engine.drafter.runner, []
    draft = runner.draft_while_confident

    def counted(segments: list[Segment], *others):
        computed.append([len(segment.token_ids) for segment in segments])
        return draft(segments, *others)

    runner.draft_while_confident = counted
    prompt, params = "class Stack:\n    def __init__(self):\n", SamplingParams(temperature=0, max_tokens=60)
    with llm.trace() as trace:
        [drafted] = llm.generate(prompt, params, use_tqdm=False)
    [plain] = LLM("minicoder", enforce_eager=eager).generate(prompt, params, use_tqdm=False)
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    rounds = trace.of(TokensCommitted)[1:]
    lengths = [e.num_drafts for e in rounds]
    assert {0, 6} <= set(lengths) and any(0 < length < 6 for length in lengths)
    # A chain that ended early was computed to its last draft, a whole one up to the last but one.
    for before, [count] in zip(rounds, computed[1:], strict=False):
        known = min(before.num_drafts, 5)
        assert count == len(before.token_ids) - min(before.num_accepted, known)


def test_requests_with_different_numbers_get_the_first_of_the_same_likely_drafts() -> None:
    given = {"model": "minicoder-draft", "num_speculative_tokens": 5, "min_survival": 0.15}
    llm = LLM("minicoder", block_size=64, num_kv_blocks=12, speculative_config=given)
    engine, drafter = llm.llm_engine, llm.engine.drafter
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    for i, prompt in enumerate(["def add(", "import os", "class Stack:", "for line in", "while True:", "return"]):
        engine.add_request(str(i), prompt, params)
    seen = set()
    for _ in range(6):
        engine.step()
        requests = list(llm.engine.requests.values())
        whole = [draft.token_ids for draft in drafter.propose(requests, [5] * 6)]
        seen |= set(map(len, whole))
        for counts in ([4, 1, 2, 5, 3, 3], [1, 3, 3, 1, 5, 2]):
            drafts = [draft.token_ids for draft in drafter.propose(requests, counts)]
            assert drafts == [tokens[:count] for tokens, count in zip(whole, counts, strict=True)]
        for_timing = drafter.propose_for_timing(requests, [3] * 6)
        assert [len(draft.token_ids) for draft in for_timing] == [3] * 6 and drafter.min_survival == 0.15
    assert len(seen) > 2


def test_what_the_target_forgets_the_draft_model_computes_anew(tiny: TinyPair) -> None:
    """Else a prompt is not cold after `reset_prefix_cache`."""
    config = {"model": str(tiny.draft), "num_speculative_tokens": 2, "adaptive": False}
    llm = LLM(str(tiny.target), block_size=4, enforce_eager=True, speculative_config=config)
    runner, computed = llm.engine.drafter.runner, []
    run = runner.run

    def counted(segments: list[Segment]) -> torch.Tensor:
        computed.append(sum(len(segment.token_ids) for segment in segments))
        return run(segments)

    runner.run = counted
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    totals = []
    for _ in range(2):
        computed.clear()
        llm.generate([{"prompt_token_ids": [7] * 30}], params, use_tqdm=False)
        totals.append(sum(computed))
        assert llm.reset_prefix_cache()
    assert totals[0] == totals[1] >= 30
