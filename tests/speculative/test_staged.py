"""Staged drafting proposes what the draft model alone would propose, in fewer forwards of the draft model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.batch import Segment
from minillm.request import Request
from minillm.speculative import staged
from minillm.speculative.drafter import Draft
from minillm.speculative.staged import StagedDrafter
from minillm.trace import DraftProposed, RequestPreempted
from tests.conftest import TinyPair
from tests.speculative.three_tokens import Expected, expected_triples, p_of_triples

PROMPTS = ["def add(a, b):", "for line in", "import os\n\n\ndef walk(root):", "def add(a, b):\n    return"]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
LOOPING = SamplingParams(temperature=0.3, top_k=2, seed=5, max_tokens=40, ignore_eos=True)


def config(model: object, method: str = "staged", **options: Any) -> dict[str, Any]:
    looked_up = {"prompt_lookup_min": 1} if method == "staged" else {}
    return {"method": method, "model": str(model), "num_speculative_tokens": 5, **looked_up, **options}


def drafts_of(llm: LLM) -> list[Draft]:
    """Fills while the engine runs."""
    seen: list[Draft] = []
    real = llm.engine.drafter.propose

    def propose(requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        drafts = real(requests, num_drafts)
        seen.extend(drafts)
        return drafts

    llm.engine.drafter.propose = propose
    return seen


def forwards_of(drafter: StagedDrafter) -> list[int]:
    """Fills with the number of requests in each forward of the draft model."""
    seen: list[int] = []
    real = drafter.runner.run

    def run(segments: Sequence[Segment]) -> Tensor:
        seen.append(len(segments))
        return real(segments)

    drafter.runner.run = run  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("sample_method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("mixed", [[GREEDY], [SAMPLED], [LOOPING], [GREEDY, SAMPLED, LOOPING, GREEDY]], ids=len)
def test_drafts_and_their_distributions_are_those_without_stages(
    tiny: TinyPair, mixed: list[SamplingParams], sample_method: str
) -> None:
    found = []
    for method in ("draft_model", "staged"):
        speculative = config(tiny.draft, method, draft_sample_method=sample_method)
        llm = LLM(str(tiny.target), block_size=4, enforce_eager=True, speculative_config=speculative)
        drafts = drafts_of(llm)
        outputs = llm.generate(PROMPTS, mixed * (4 // len(mixed)), use_tqdm=False)
        found.append((drafts, [output.outputs[0].token_ids for output in outputs]))
    (right, tokens), (got, got_tokens) = found
    assert got_tokens == tokens and [d.token_ids for d in got] == [d.token_ids for d in right]
    for mine, theirs in zip(got, right, strict=True):
        assert (mine.probs is None) == (theirs.probs is None)
        assert mine.probs is None or mine.probs.allclose(theirs.probs, atol=1e-5)


class Oracle:
    """Guesses what it was told will come."""

    def __init__(self, right: dict[int, list[int]], wrong_at: int | None = None) -> None:
        self.right, self.wrong_at = right, wrong_at

    def guess(self, request: Request, drafts: Sequence[int], most: int) -> list[int]:
        at = request.num_tokens + len(drafts)
        tokens = self.right[request.num_prompt_tokens][at : at + most]
        return [token + (i == self.wrong_at) for i, token in enumerate(tokens)]


@pytest.mark.parametrize(("wrong_at", "forwards_per_round"), [(None, 1), (0, 5), (1, 3), (3, 2)])
def test_a_right_guess_saves_a_forward_and_a_wrong_one_costs_none(
    tiny: TinyPair, wrong_at: int | None, forwards_per_round: int
) -> None:
    """Rounds of five drafts by the target itself. Without guesses, each takes five forwards."""
    plain = LLM(str(tiny.target), enforce_eager=True)
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    [output] = plain.generate(PROMPTS[0], long, use_tqdm=False)
    right = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    llm = LLM(str(tiny.target), block_size=4, enforce_eager=True, speculative_config=config(tiny.target))
    drafter = llm.engine.drafter
    drafter.guesser = Oracle({len(output.prompt_token_ids): right}, wrong_at)
    forwards = forwards_of(drafter)
    fewer = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)  # 1 + 4 rounds of 6
    with llm.trace() as trace:
        [got] = llm.generate(PROMPTS[0], fewer, use_tqdm=False)
    assert got.outputs[0].token_ids == output.outputs[0].token_ids[:25]
    assert [len(event.token_ids) for event in trace.of(DraftProposed)] == [5] * 4
    assert forwards == [1] * 4 * forwards_per_round


def test_bundled_models_need_fewer_forwards_than_drafts() -> None:
    llm = LLM("minicoder", speculative_config={"method": "staged", "model": "minicoder-draft"})
    forwards, drafts = forwards_of(llm.engine.drafter), drafts_of(llm)
    text = "def area(self):\n    return self.width * self.height\n\n\ndef volume(self):\n    return self."
    llm.generate(text, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False)
    assert 0 < len(forwards) < 0.8 * sum(len(draft.token_ids) for draft in drafts)


@pytest.mark.parametrize("block_size", [1, 5])
def test_greedy_tokens_are_the_plain_ones_whatever_happens(tiny: TinyPair, block_size: int) -> None:
    """Prompts longer than the budget, preemption, a prefix cache, two at a time."""
    options: dict[str, Any] = {"block_size": block_size, "num_kv_blocks": -(-85 // block_size), "enforce_eager": True}
    plain = LLM(str(tiny.target), enforce_eager=True).generate(PROMPTS, GREEDY, use_tqdm=False)
    right = [output.outputs[0].token_ids for output in plain]
    speculative = config(tiny.draft)
    llm = LLM(
        str(tiny.target), max_num_batched_tokens=14, max_num_seqs=2, speculative_config=speculative, **options
    )  # fmt: skip
    with llm.trace() as trace:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == right
    llm.engine.scheduler.check_integrity()
    assert trace.of(RequestPreempted) and llm.engine.pool.num_used == 0


@pytest.mark.parametrize(
    "layout", [{"layout": "contiguous"}, {"layout": "window", "window": 12}, {"layout": "sinks", "window": 12}], ids=str
)
def test_a_layout_that_drops_or_moves_rows_keeps_its_tokens(tiny: TinyPair, layout: dict[str, Any]) -> None:
    found = []
    for speculative in (None, config(tiny.draft)):
        llm = LLM(str(tiny.target), enforce_eager=True, kv_cache_config=layout, speculative_config=speculative)
        found.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)])
    assert found[0] == found[1]


def test_a_layout_that_compresses_prompts_also_compresses_those_of_the_draft_model(tiny: TinyPair) -> None:
    """It needs to know where a prompt ends. Without stages it does, so the drafts are compared with those."""
    layout = {"layout": "snapkv", "budget": 8, "window": 4, "kernel": 3}
    found = []
    for method in ("draft_model", "staged"):
        speculative = config(tiny.draft, method)
        llm = LLM(str(tiny.target), enforce_eager=True, kv_cache_config=layout, speculative_config=speculative)
        drafts = drafts_of(llm)
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        found.append([draft.token_ids for draft in drafts])
    assert found[0] == found[1]


def test_a_block_that_a_guess_was_written_to_has_lost_its_hash(tiny: TinyPair) -> None:
    llm = LLM(
        str(tiny.target), block_size=2, num_kv_blocks=80, enforce_eager=True, speculative_config=config(tiny.draft)
    )
    drafter, checked = llm.engine.drafter, []
    real = drafter.propose

    def propose(requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        drafter._filled = dict.fromkeys(range(80), b"of other tokens")
        drafts = real(requests, num_drafts)
        for request, draft in zip(requests, drafts, strict=True):
            written = range(request.num_tokens // 2, (request.num_tokens + len(draft.token_ids) - 2) // 2 + 1)
            checked.extend(drafter._filled.get(request.block_table[i]) for i in written)
        return drafts

    drafter.propose = propose
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert checked and b"of other tokens" not in checked


class Favourite:
    """Guesses the most probable completion, for each request."""

    def __init__(self, expected: Expected, num_prompt_tokens: int = 0) -> None:
        self.tokens = max(expected, key=expected.__getitem__)

    def guess(self, request: Request, drafts: Sequence[int], most: int) -> list[int]:
        return list(self.tokens[request.num_output_tokens + len(drafts) :][:most])


@pytest.fixture(scope="module")
def expected(tiny: TinyPair) -> Expected:
    return expected_triples(tiny)


def test_sampled_text_follows_the_target(tiny: TinyPair, expected: Expected) -> None:
    """χ²; a correct engine fails with probability 1e-6 over the choice of seeds, which are fixed."""
    assert p_of_triples(tiny, expected, config(tiny.draft), guesser=Favourite(expected)) > 1e-6


def test_guesses_that_are_kept_although_they_were_not_drawn_are_noticed(
    tiny: TinyPair, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = staged.StagedDraft.add

    def add(self: Any, guesses: Sequence[int], chosen: Sequence[int], q: Sequence[Tensor]) -> None:
        kept = [guess if q[i][guess] > 0 else chosen[i] for i, guess in enumerate(guesses)]
        real(self, guesses, [*kept, *chosen[len(kept) :]], q)

    monkeypatch.setattr(staged.StagedDraft, "add", add)
    assert p_of_triples(tiny, expected, config(tiny.draft), guesser=Favourite(expected)) < 1e-6
