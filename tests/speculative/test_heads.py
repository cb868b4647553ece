"""Heads on the target's last hidden state: the tokens are those of the target undrafted, however it is run."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.errors import CheckpointError, ConfigError, TokenizerMismatchError
from minillm.request import Request
from minillm.speculative.draft_heads import KINDS, DraftHeads
from minillm.speculative.draft_policy import FixedDrafts
from minillm.speculative.drafter import NO_DRAFT, Draft
from minillm.speculative.heads import HeadsDrafter
from minillm.trace import DraftProposed
from tests.conftest import TinyPair
from tests.speculative.self_drafting import (
    FEWER_BITS,
    GREEDY,
    PROMPTS,
    follows_the_target_unless_drafts_are_drawn_cooler,
    length_does_not_depend_on_what_is_drawn,
    lengths_after_each_token,
    stops_completions_aborts_and_later_requests_are_plain,
    survives_preemption_prefix_sharing_and_chunks,
    tokens,
    tokens_of_fewer_bits_are_those_undrafted,
)
from tests.speculative.three_tokens import PROMPT, sampled
from tests.speculative.trained_drafting import acceptance, heads_that_know_the_tests, saved

HEADS: dict[str, Any] = {"method": "heads", "num_speculative_tokens": 4, "min_survival": 0}


@pytest.fixture(scope="module")
def folder(tiny: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that are right about half the time on the tests' own text."""
    return heads_that_know_the_tests(tiny, tmp_path_factory.mktemp("tiny-heads"), steps=8)


@pytest.fixture
def speculative(folder: Path) -> dict[str, Any]:
    return {**HEADS, "model": str(folder)}


def engine(tiny: TinyPair, speculative: dict[str, Any] | None, **options: Any) -> LLM:
    return LLM(str(tiny.target), block_size=4, enforce_eager=True, speculative_config=speculative, **options)


def test_greedy_tokens_are_the_targets(tiny: TinyPair, speculative: dict[str, Any]) -> None:
    right = tokens(engine(tiny, None))
    llm = engine(tiny, speculative)
    assert tokens(llm) == right
    assert [llm.generate(p, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for p in PROMPTS] == right
    assert 0.1 < acceptance(llm) < 1


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "top-k 1"])
def test_with_preemption_prefix_sharing_and_chunks(tiny: TinyPair, speculative: dict[str, Any], sampled: bool) -> None:
    survives_preemption_prefix_sharing_and_chunks(tiny, speculative, sampled, enforce_eager=True)


def test_completions_stops_and_aborts(tiny: TinyPair, speculative: dict[str, Any]) -> None:
    stops_completions_aborts_and_later_requests_are_plain(tiny, speculative, enforce_eager=True)


@pytest.fixture(scope="module")
def sampling_folder(tiny: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that are right more than half the time on sampled text after `PROMPT`."""
    texts = [sampled(seed) for seed in range(1000, 1020)]
    folder = tmp_path_factory.mktemp("sampling-heads")
    return heads_that_know_the_tests(tiny, folder, steps=8, prompts=[PROMPT] * len(texts), params=texts)


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_sampled_text_follows_the_target(
    tiny: TinyPair, sampling_folder: Path, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """χ²; a correct engine fails with probability 1e-6 over the engine's seed."""
    options = {**HEADS, "model": str(sampling_folder), "rejection_sample_method": rule, "min_survival": 0.4}
    follows_the_target_unless_drafts_are_drawn_cooler(tiny, options, monkeypatch)


def test_the_length_of_a_chain_does_not_depend_on_what_is_drawn(tiny: TinyPair, speculative: dict[str, Any]) -> None:
    length_does_not_depend_on_what_is_drawn(engine(tiny, {**speculative, "min_survival": 0.2}, max_num_seqs=64))


def test_drafts_that_are_dropped_after_they_were_drawn_are_seen(
    tiny: TinyPair, speculative: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted mistake: the chain is cut at the first drawn token that looks unlikely, which changes q."""
    real = HeadsDrafter._propose

    def cut(self: HeadsDrafter, requests: Any, num_drafts: Any) -> Any:
        drafts = []
        for draft in real(self, requests, num_drafts):
            q = [float(row[token]) for row, token in zip(draft.probs, draft.token_ids, strict=True)]
            keep = next((i for i, value in enumerate(q) if value < 0.5), len(q))
            drafts.append(type(draft)(draft.token_ids[:keep], draft.probs[:keep]))
        return drafts

    monkeypatch.setattr(HeadsDrafter, "_propose", cut)
    assert any(len(seen) > 1 for seen in lengths_after_each_token(engine(tiny, speculative, max_num_seqs=64)).values())


def test_a_request_without_a_hidden_state_gets_no_draft(tiny: TinyPair, speculative: dict[str, Any]) -> None:
    """As after an interrupt between the commit and the end of the step."""
    llm = engine(tiny, speculative)
    right = tokens(engine(tiny, None))
    drafter, is_shown, without = llm.engine.drafter, cycle((True, True, False)), set[Request]()
    observe, propose, drafted = drafter.observe_hidden, drafter.propose, list[bool]()

    def forgets(requests: Sequence[Request], hidden: torch.Tensor) -> None:
        if next(is_shown):
            observe(requests, hidden)
            without.difference_update(requests)
        else:
            without.update(requests)

    def noted(requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        drafts = propose(requests, num_drafts)
        assert [draft is NO_DRAFT for draft in drafts] == [request in without for request in requests]
        drafted.extend(draft is not NO_DRAFT for draft in drafts)
        return drafts

    drafter.observe_hidden, drafter.propose = forgets, noted
    assert tokens(llm) == right
    assert set(drafted) == {True, False}


def test_rounds_count_if_the_heads_ran(
    tiny: TinyPair, speculative: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are never as sure as `min_survival` wants, and every other step they are not shown the hidden state."""
    llm = engine(tiny, {**speculative, "min_survival": 1.0, "adaptive": False})
    drafter, told, ran, shown = llm.engine.drafter, list[tuple[int, int]](), list[Request](), list[bool]()
    propose, observe = drafter._propose, drafter.observe_hidden

    def every_other(requests: Any, hidden: Any) -> None:
        shown.append(len(shown) % 2 == 0)
        if shown[-1]:
            observe(requests, hidden)

    drafter.observe_hidden = every_other
    drafter._propose = lambda requests, most: ran.extend(requests) or propose(requests, most)
    monkeypatch.setattr(FixedDrafts, "judged", lambda policy, request, asked, *counts: told.append(counts))
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert not all(shown) and told == [(0, 0)] * len(ran) != []


@pytest.mark.parametrize(
    "plant",
    ["the hidden state of another request", "a stale hidden state", "the token before the last", "no token read"],
)
def test_planted_mistakes_cost_acceptance(
    tiny: TinyPair, folder: Path, speculative: dict[str, Any], plant: str
) -> None:
    """The output stays exact, so only the share of accepted drafts tells."""
    llm = engine(tiny, speculative)
    right = acceptance(llm)
    drafter, heads = llm.engine.drafter, llm.engine.drafter.heads
    observe, begin, following = drafter.observe_hidden, heads.begin, heads.next_logits
    if plant == "the hidden state of another request":
        drafter.observe_hidden = lambda requests, hidden: observe(requests, hidden.roll(1, 0))
    elif plant == "a stale hidden state":
        last: dict[Any, Any] = {}

        def stale(requests: Any, hidden: Any) -> None:
            observe(requests, torch.stack([last.get(r, row) for r, row in zip(requests, hidden, strict=True)]))
            last.update(zip(requests, hidden, strict=True))

        drafter.observe_hidden = stale
    elif plant == "the token before the last":
        heads.begin = lambda hidden, tokens, *rest: begin(hidden, tokens.roll(1, 0), *rest)
    else:
        heads.next_logits = lambda logits, context, previous, state: following(
            logits, context, torch.zeros_like(previous), state
        )
    assert acceptance(llm) < 0.8 * right


def test_the_chain_ends_where_survival_falls_below_the_limit(tiny: TinyPair, speculative: dict[str, Any]) -> None:
    llm = engine(tiny, speculative)
    heads = llm.engine.drafter.heads
    hidden, last = torch.randn(6, 48), torch.arange(6)
    c = heads.heads.trunk(hidden, heads.embedding[last])
    survival = heads.heads.survival(c)[:, KINDS.index("sampled")]
    limit = survival[:, 1].median().item()
    begun = heads.begin(hidden, last, [4, 4, 4, 2, 1, 4], KINDS.index("sampled"), limit)
    for most, count, chances in zip([4, 4, 4, 2, 1, 4], begun.num_drafts, survival.tolist(), strict=True):
        assert count == min(most, sum(chance >= limit for chance in chances))
    assert len(set(begun.num_drafts)) > 1
    assert heads.begin(hidden, last, [4] * 6, 0, 1.0).num_drafts == [0] * 6


def test_chains_of_requests_that_sample_are_as_long_as_sampling_lets_them_survive(
    tiny: TinyPair, speculative: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(tiny, {**speculative, "min_survival": 0.4})
    heads, kinds = llm.engine.drafter.heads, set()
    begin = heads.begin

    def noted(hidden: Any, tokens: Any, num_drafts: Any, kind: int, min_survival: float) -> Any:
        kinds.add(KINDS[kind])
        return begin(hidden, tokens, num_drafts, kind, min_survival)

    monkeypatch.setattr(heads, "begin", noted)
    tokens(llm, replace(GREEDY, temperature=1.0))
    assert kinds == {"sampled"}


def test_a_high_limit_drafts_less_and_is_right_more_often(tiny: TinyPair, speculative: dict[str, Any]) -> None:
    def drafted(llm: LLM) -> int:
        with llm.trace() as trace:
            assert tokens(llm) == right
        return sum(len(event.token_ids) for event in trace.of(DraftProposed))

    right = tokens(engine(tiny, None))
    careless, careful = (engine(tiny, {**speculative, "min_survival": limit}) for limit in (0, 0.5))
    assert 0 < drafted(careful) < drafted(careless)
    assert acceptance(careful) > acceptance(careless)


def test_drawing_gives_the_argmax_where_chance_has_one_outcome(tiny: TinyPair, speculative: dict[str, Any]) -> None:
    """The greedy chain and the sampled one are different code."""
    llm = engine(tiny, speculative)
    found = []
    for params in (GREEDY, SamplingParams(top_k=1, seed=3, max_tokens=30, ignore_eos=True)):
        with llm.trace() as trace:
            tokens(llm, params)
        found.append([event.token_ids for event in trace.of(DraftProposed)])
    assert found[0] == found[1]


def test_a_prompt_of_mixed_requests_is_drafted_for_together(tiny: TinyPair, speculative: dict[str, Any]) -> None:
    params = [GREEDY, SamplingParams(top_k=1, seed=1, max_tokens=30, ignore_eos=True)] * 2
    assert tokens(engine(tiny, speculative), params) == tokens(engine(tiny, None))


def test_it_is_a_fallback_and_adapts(tiny: TinyPair, speculative: dict[str, Any]) -> None:
    right = tokens(engine(tiny, None))
    for config in ({"method": "suffix", "fallback": speculative}, {**speculative, "adaptive": True}):
        llm = engine(tiny, config)
        with llm.trace() as trace:
            assert tokens(llm) == right
        assert trace.of(DraftProposed)


@pytest.mark.parametrize("options", FEWER_BITS, ids=str)
def test_with_fewer_bits_the_tokens_are_those_of_the_same_bits_undrafted(
    tiny: TinyPair, speculative: dict[str, Any], options: dict[str, Any]
) -> None:
    tokens_of_fewer_bits_are_those_undrafted(tiny, speculative, **options)


def changed(folder: Path, to: Path, **entries: Any) -> str:
    shutil.copytree(folder, to)
    stored = json.loads((to / "config.json").read_text())
    for name, value in entries.items():
        (stored["shape"] if name in stored["shape"] else stored)[name] = value
    (to / "config.json").write_text(json.dumps(stored))
    return str(to)


@pytest.mark.parametrize(
    ("entries", "error", "words"),
    [
        ({"method": "prompt_tokens"}, CheckpointError, "'prompt_tokens', not 'heads'"),
        ({"hidden_size": 64}, ConfigError, "hidden size 64, this target has 48"),
        ({"vocab_size": 4096}, TokenizerMismatchError, "4096 tokens, the target has 300"),
        ({"inner_size": 60_000}, CheckpointError, "its config.json implies"),
        ({"num_drafts": 0}, CheckpointError, "num_drafts"),
        ({"num_drafts": 10**9}, CheckpointError, "num_drafts"),
        ({"token_rank": "many"}, CheckpointError, "token_rank"),
        ({"shape": []}, CheckpointError, "shape"),
    ],
    ids=str,
)
def test_weights_for_something_else_are_refused(
    tiny: TinyPair, folder: Path, tmp_path: Path, entries: dict, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        engine(tiny, {**HEADS, "model": changed(folder, tmp_path / "other", **entries)})


def test_weights_of_a_target_that_was_trained_further_are_warned_of(
    tiny: TinyPair, folder: Path, tmp_path: Path
) -> None:
    other = changed(folder, tmp_path / "other", target_fingerprint="0123456789abcdef")
    with pytest.warns(UserWarning, match="0123456789abcdef, but the target.*the output stays exact"):
        llm = engine(tiny, {**HEADS, "model": other})
    assert tokens(llm) == tokens(engine(tiny, None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine(tiny, {**HEADS, "model": str(folder)})


def test_weights_with_nan_are_refused(tiny: TinyPair, tmp_path: Path) -> None:
    def poison(heads: Any) -> None:
        with torch.no_grad():
            heads.up.weight[0, 0] = float("nan")

    bad = saved(tiny, "heads", tmp_path, poison)
    with pytest.raises(CheckpointError, match=r"up\.weight has NaN"):
        engine(tiny, {**HEADS, "model": str(bad)})


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"model": None}, ConfigError, "'heads' needs 'model', a folder of weights"),
        ({"model": "nowhere"}, CheckpointError, "'nowhere' of speculative method 'heads' is not a folder"),
        ({"model": 5}, CheckpointError, "model=5 of speculative method 'heads' is not a folder"),
        ({"model": "~nobody-here/heads"}, CheckpointError, "is not a folder"),
        ({"model": "x" * 300}, CheckpointError, "is not a folder"),
        ({"min_survival": 1.5}, ConfigError, "min_survival=1.5"),
        ({"draft_sample_method": "random"}, ConfigError, "draft_sample_method='random'"),
        ({"budget": 8}, ConfigError, "budget=8.*'self_sparse'.*'heads'"),
    ],
    ids=str,
)
def test_bad_options_name_themselves(
    tiny: TinyPair, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        engine(tiny, {**HEADS, **options})


def test_a_checkpoint_of_a_model_is_no_drafter(tiny: TinyPair) -> None:
    with pytest.raises(CheckpointError, match="method"):
        engine(tiny, {**HEADS, "model": str(tiny.draft)})


def test_a_million_parameters_at_most_for_the_bundled_target() -> None:
    from minillm.speculative.draft_heads import HeadsShape

    assert sum(p.numel() for p in DraftHeads(HeadsShape(384)).parameters()) <= 1_000_000


def test_more_drafts_than_there_are_positions_are_refused(tiny: TinyPair, speculative: dict[str, Any]) -> None:
    most = engine(tiny, speculative).engine.drafter.max_drafts
    assert tokens(engine(tiny, {**speculative, "num_speculative_tokens": most})) == tokens(engine(tiny, None))
    told = f"num_speculative_tokens={most + 1} is more than this HeadsDrafter can propose per round, {most}; lower it"
    wrong = {**speculative, "num_speculative_tokens": most + 1}
    for given in (wrong, {"method": "suffix", "fallback": wrong}):
        with pytest.raises(ConfigError, match=told):
            engine(tiny, given)


def test_the_cost_of_drafts_is_measured_with_as_many_as_it_is_divided_by(
    tiny: TinyPair, speculative: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the heads think of the made-up text."""
    made: list[tuple[Sequence[int], list[int]]] = []
    propose = HeadsDrafter.propose

    def noted(self: HeadsDrafter, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        drafts = propose(self, requests, num_drafts)
        made.append((num_drafts, [len(draft.token_ids) for draft in drafts]))
        return drafts

    monkeypatch.setattr(HeadsDrafter, "propose", noted)
    llm = engine(tiny, {**speculative, "min_survival": 1.0, "adaptive": True})
    assert made and all(list(asked) == found for asked, found in made)
    assert llm.engine.drafter.min_survival == 1.0


def test_an_interrupt_while_drafts_are_timed_changes_no_option(
    tiny: TinyPair, speculative: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = engine(tiny, {**speculative, "min_survival": 0.5}).engine.drafter

    def interrupted(*given: Any) -> list[Draft]:
        raise KeyboardInterrupt

    monkeypatch.setattr(drafter, "propose", interrupted)
    with pytest.raises(KeyboardInterrupt):
        drafter.propose_for_timing([], [])
    assert drafter.min_survival == 0.5
