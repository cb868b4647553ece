"""Two drafters in turn: who is asked, who is told what, and that the text stays the target's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.errors import DraftError, UnsupportedError
from minillm.request import Request
from minillm.speculative import fallback
from minillm.speculative.drafter import NO_DRAFT, Draft, Drafter
from minillm.speculative.fallback import FallbackDrafter
from minillm.speculative.rejection_sampler import Verdict
from minillm.trace import RequestPreempted
from tests.conftest import TinyPair
from tests.speculative.three_tokens import Expected, expected_triples, p_of_triples

PROMPTS = ["def add(a, b):", "for line in", "import os\n\n\ndef walk(root):", "def add(a, b):\n    return"]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


class Notes(Drafter):
    """Proposes so many drafts for each request, as far as it may, and writes down every call."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.calls: list[tuple[str, Any]] = []

    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        self.calls.append(("propose", ([r.request_id for r in requests], list(num_drafts))))
        return [Draft([7] * min(n, most)) for n, most in zip(self.lengths, num_drafts, strict=False)]

    def judged(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        self.calls.append(("judged", request.request_id))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.calls.append(("copy", pairs))

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        self.calls.append(("free", block_ids))

    def request_dropped(self, request: Request) -> None:
        self.calls.append(("dropped", request.request_id))

    def request_finished(self, request: Request) -> None:
        self.calls.append(("finished", request.request_id))


def request(name: str) -> Request:
    return Request(name, "", [1], 1, GREEDY, 8, 0)


def test_the_second_is_asked_only_for_requests_of_which_the_first_drafted_too_little() -> None:
    first, second = Notes(5, 1, 0, 1), Notes(2, 0, 2)
    both = FallbackDrafter(first, second, max_first=6, max_second=3, below=2)
    requests = [request(name) for name in "abcd"]
    drafts = both.propose(requests, [9, 9, 2, 1])
    assert first.calls == [("propose", (["a", "b", "c", "d"], [6, 6, 2, 1]))]
    assert second.calls == [("propose", (["b", "c"], [3, 2]))]  # of d, one draft was all that was asked for
    assert [len(draft.token_ids) for draft in drafts] == [5, 2, 0, 1]
    for each, draft in zip(requests, drafts, strict=True):
        both.judged(each, draft, Verdict([1], 0))
    assert [call[1] for call in first.calls[1:]] == ["a", "c", "d"] and second.calls[1:] == [("judged", "b")]


def test_of_two_short_drafts_the_seconds_is_taken_unless_it_is_empty() -> None:
    both = FallbackDrafter(Notes(2, 2), Notes(1, 0), 4, 4, below=3)
    assert [len(d.token_ids) for d in both.propose([request("a"), request("b")], [4, 4])] == [1, 2]


def test_both_are_told_what_happens_to_requests_and_blocks() -> None:
    first, second = Notes(), Notes()
    both, a = FallbackDrafter(first, second, 4, 4, 1), request("a")
    both.copy_blocks([(1, 2)])
    both.free_blocks([3])
    both.request_dropped(a)
    both.request_finished(a)
    assert first.calls == second.calls == [("copy", [(1, 2)]), ("free", [3]), ("dropped", "a"), ("finished", "a")]


def then(model: object, method: str = "draft_model", **options: Any) -> dict[str, Any]:
    return {"method": "suffix", "fallback": {"method": method, "model": str(model)}, **options}


class Script(Drafter):
    """Drafts three tokens of the right text, the second one wrong in every other round, between tokens 5 and 20."""

    right: ClassVar[dict[int, list[int]]] = {}
    """Length of the prompt → the output."""

    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: Request) -> Draft:
        at = request.num_output_tokens
        tokens = self.right[request.num_prompt_tokens][at : at + 3] if 5 <= at < 20 else []
        if tokens and at % 2:
            tokens[1] = (tokens[1] + 1) % 300
        return Draft(tokens)


@pytest.mark.parametrize("method", ["draft_model", "staged"])
@pytest.mark.parametrize("block_size", [2, 16])
def test_a_model_that_was_not_asked_for_some_rounds_catches_up(
    tiny: TinyPair, block_size: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is the target itself, so whenever it is asked, all of its drafts must be accepted: with a stale or
    missing row in its cache, it would drift from the target."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    plain = LLM(str(tiny.target), enforce_eager=True).generate(PROMPTS, params, use_tqdm=False)
    monkeypatch.setattr(Script, "right", {len(o.prompt_token_ids): o.outputs[0].token_ids for o in plain})
    speculative = {"method": Script, "fallback": {"method": method, "model": str(tiny.target)}}
    llm = LLM(str(tiny.target), block_size=block_size, enforce_eager=True, speculative_config=speculative)
    model, behind, told = llm.engine.drafter.second, [], []
    real = model.propose

    def propose(requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        behind.extend(r.num_tokens - model.num_computed_tokens(r) for r in requests)
        return real(requests, num_drafts)

    model.propose = propose
    model.judged = lambda request, draft, verdict: told.append((len(draft.token_ids), verdict.num_accepted))
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert len(told) >= 8 and all(accepted == drafted for drafted, accepted in told)
    assert sum(count >= 14 for count in behind[4:]) >= 4  # the first four are prompts


@pytest.mark.parametrize("method", ["draft_model", "staged", "draft_tree"])
@pytest.mark.parametrize("below", [1, 3])
def test_greedy_tokens_are_the_plain_ones_whatever_happens(tiny: TinyPair, method: str, below: int) -> None:
    """Chunks, preemption, a prefix cache; chains of one drafter beside trees of the other."""
    options: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 40, "max_num_seqs": 4, "enforce_eager": True}
    plain = LLM(str(tiny.target), enforce_eager=True).generate(PROMPTS, GREEDY, use_tqdm=False)
    right = [output.outputs[0].token_ids for output in plain]
    speculative = then(tiny.draft, method, fallback_below=below)
    llm = LLM(str(tiny.target), num_kv_blocks=22, speculative_config=speculative, **options)
    with llm.trace() as trace:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == right
    llm.engine.scheduler.check_integrity()
    assert trace.of(RequestPreempted) and llm.engine.pool.num_used == 0


class Sometimes(Drafter):
    """Drafts up to two tokens for every third request, always the same ones."""

    tokens: ClassVar[Sequence[int]] = ()

    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        return [
            Draft(list(self.tokens[r.num_output_tokens :][:2])[:k] if r.seed % 3 == 0 else [])
            for r, k in zip(requests, num_drafts, strict=True)
        ]


@pytest.fixture(scope="module")
def expected(tiny: TinyPair) -> Expected:
    return expected_triples(tiny)


def sometimes(tiny: TinyPair) -> dict[str, Any]:
    return {"method": Sometimes, "fallback": {"method": "draft_model", "model": str(tiny.draft)}}


def test_sampled_text_follows_the_target(tiny: TinyPair, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    """χ²; a correct engine fails with probability 1e-6 over the choice of seeds, which are fixed."""
    monkeypatch.setattr(Sometimes, "tokens", max(expected, key=expected.__getitem__))
    assert p_of_triples(tiny, expected, sometimes(tiny)) > 1e-6


def test_a_choice_by_what_was_drafted_is_noticed(
    tiny: TinyPair, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of the model that are not its favourite are thrown away: what is left was not drawn from q."""
    real = fallback.FallbackDrafter.propose

    def propose(self: FallbackDrafter, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        drafts = real(self, requests, num_drafts)
        return [Draft([]) if d.probs is not None and int(d.probs[0].argmax()) != d.token_ids[0] else d for d in drafts]

    monkeypatch.setattr(fallback.FallbackDrafter, "propose", propose)
    assert p_of_triples(tiny, expected, sometimes(tiny)) < 1e-6


def test_a_fallback_that_drafts_trees_needs_a_layout_that_keeps_them(tiny: TinyPair) -> None:
    speculative = then(tiny.draft, "draft_tree")
    with pytest.raises(UnsupportedError, match="'suffix, then draft_tree' drafts trees"):
        LLM(str(tiny.target), kv_cache_config={"layout": "contiguous"}, speculative_config=speculative)


def test_a_sampled_tree_is_replaced_only_if_it_is_empty() -> None:
    """Its size depends on what was drawn: to choose by it would change the distribution of the output."""

    class Tree(Notes):
        def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
            return [Draft([7] * n, torch.ones(n, 9) / 9, range(-1, n - 1)) for n in self.lengths]

    both = FallbackDrafter(Tree(1, 0), Notes(4, 4), 4, 4, below=3)
    assert [len(d.token_ids) for d in both.propose([request("a"), request("b")], [4, 4])] == [1, 4]


def test_as_many_as_the_policy_allows_the_first_are_not_too_few() -> None:
    first, second = Notes(2), Notes(4)
    both, a = FallbackDrafter(first, second, 4, 4, below=3), request("a")
    both.limits[a] = 2, 4
    assert [len(draft.token_ids) for draft in both.propose([a], [4])] == [2] and not second.calls
    both.limits[a] = 0, 4
    assert [len(draft.token_ids) for draft in both.propose([a], [4])] == [4]


class TooMany(Notes):
    """Ignores what it is asked for."""

    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        return [Draft([7] * n) for n in self.lengths]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [((3,), "TooMany proposed 3 drafts where at most 2 were asked for"), ((1, 1), "2 drafts for 1 requests")],
)
def test_a_drafter_that_breaks_its_contract_is_named(lengths: tuple[int, ...], message: str) -> None:
    both = FallbackDrafter(TooMany(*lengths), Notes(4), 2, 4, below=1)
    with pytest.raises(DraftError, match=message):
        both.propose([request("a")], [4])


def test_a_sampled_chain_that_ended_early_is_used() -> None:
    """It may have ended because of a token that was drawn: to draw again would change the distribution."""
    sampled, shorter = Draft([1], probs=torch.ones(1, 4) / 4), Draft([1])
    assert [fallback._is_short(draft, 4) for draft in (sampled, shorter, NO_DRAFT)] == [False, True, True]
