"""Drafting by looking back: what is found, held to the plainest search there is, and what comes of it in the engine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm import LLM, SamplingParams
from minillm.models.held_out import held_out_prompts
from minillm.request import Request
from minillm.speculative.ngram import NgramDrafter
from minillm.trace import DraftProposed, TokensCommitted
from tests.conftest import TinyPair

STRADDLING = [1, 2, 256, 65_536, 65_537, 2**24, 2**24 + 1, 2**24 + 256]
"""Ids whose bytes also occur across the border of two ids."""


def request(token_ids: Sequence[int]) -> Request:
    return Request("r", "", list(token_ids), len(token_ids), SamplingParams(), 100, 0)


def plainest(token_ids: Sequence[int], shortest: int, longest: int, most: int) -> list[int]:
    """Compare every place with the end, token by token; write the guesses down behind the text and go on from there."""
    size = len(token_ids)
    for n in range(longest, shortest - 1, -1):
        for at in range(size - n - 1, -1, -1):
            if list(token_ids[at : at + n]) == list(token_ids[size - n :]):
                text = list(token_ids)
                for i in range(most):
                    text.append(text[at + n + i])
                return text[size:]
    return []


@given(
    token_ids=st.one_of(
        st.lists(st.integers(0, 2), min_size=1, max_size=24),
        st.lists(st.sampled_from(STRADDLING), min_size=1, max_size=24),
    ),
    sizes=st.tuples(st.integers(1, 4), st.integers(0, 3)),
    most=st.integers(1, 9),
)
def test_it_finds_what_the_plainest_search_finds(token_ids: list[int], sizes: tuple[int, int], most: int) -> None:
    shortest, longest = sizes[0], sum(sizes)
    [draft] = NgramDrafter(shortest, longest).propose([request(token_ids)], [most])
    assert draft.token_ids == plainest(token_ids, shortest, longest, most) and draft.probs is None


def test_a_match_across_the_borders_of_tokens_is_none() -> None:
    """Little-endian bytes of 1, 0 are 01 00 00 00 00 00 00 00; 256, 1 hold the same eight from their second byte on."""
    text = [256, 0, 7, 1, 0]
    assert NgramDrafter(2, 2).propose([request(text)], [3])[0].token_ids == []
    assert NgramDrafter(2, 2).propose([request([1, 0, 9, *text])], [3])[0].token_ids == [9, 256, 0]


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=8))
def test_a_text_that_grows_is_searched_as_one_that_was_there_at_once(pieces: list[list[int]]) -> None:
    drafter, grown = NgramDrafter(1, 3), request([0])
    for piece in pieces:
        grown.token_ids += piece
        [draft] = drafter.propose([grown], [5])
        assert draft.token_ids == plainest(grown.token_ids, 1, 3, 5)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.lists(st.integers(0, 2), max_size=6))
def test_drafts_behind_a_text_are_searched_like_the_text_and_not_remembered(text: list[int], drafts: list[int]) -> None:
    drafter, asked = NgramDrafter(1, 3), request(text)
    assert drafter.guess(asked, drafts, 5) == plainest([*text, *drafts], 1, 3, 5)
    assert drafter.guess(asked, [], 5) == plainest(text, 1, 3, 5)


def test_it_remembers_nothing_of_a_request_that_is_gone() -> None:
    drafter, gone = NgramDrafter(1, 1), request([1, 2, 1])
    drafter.propose([gone], [1])
    assert len(drafter._texts) == 1
    del gone
    assert len(drafter._texts) == 0


@pytest.mark.parametrize("together", [True, False])
def test_the_tokens_are_those_of_the_plain_engine(together: bool) -> None:
    """Greedy, in fp32, of the bundled target: the same, and in fewer forwards."""
    config = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    prompts = [prompt.prompt for prompt in held_out_prompts(12)]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    plain, drafted = LLM("minicoder"), LLM("minicoder", speculative_config=config)
    with drafted.trace() as trace:
        for part in [prompts] if together else [[prompt] for prompt in prompts]:
            expected = [o.outputs[0].token_ids for o in plain.generate(part, params, use_tqdm=False)]
            assert [o.outputs[0].token_ids for o in drafted.generate(part, params, use_tqdm=False)] == expected
    accepted = sum(event.num_accepted for event in trace.of(TokensCommitted))
    assert accepted > 12 * 48 // 5
    drafted.engine.scheduler.check_integrity()
    assert drafted.engine.pool.num_used == 0


def test_sampled_tokens_are_drawn_from_the_target(tiny: TinyPair) -> None:
    """At temperature 0.0005 the target says its most likely token, so a rule that keeps any guess would be seen here.

    That the rule keeps the distribution for drafts without chance is for `test_rejection_sampler`.
    """
    config = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2, "num_speculative_tokens": 3}
    plain, drafted = LLM(str(tiny.target)), LLM(str(tiny.target), speculative_config=config)
    params = SamplingParams(temperature=0.0005, max_tokens=40, ignore_eos=True, seed=3)
    prompts = ["def add(a, b):\n    return a", "for line in path:\n    for line in"]
    expected = [o.outputs[0].token_ids for o in plain.generate(prompts, params, use_tqdm=False)]
    with drafted.trace() as trace:
        assert [o.outputs[0].token_ids for o in drafted.generate(prompts, params, use_tqdm=False)] == expected
    assert any(event.token_ids for event in trace.of(DraftProposed))


def test_where_nothing_repeats_nothing_is_proposed(tiny: TinyPair) -> None:
    """A step without a guess is a plain one: one token goes through the model."""
    config = {"method": "ngram", "prompt_lookup_min": 30, "num_speculative_tokens": 3}
    drafted = LLM(str(tiny.target), speculative_config=config)
    with drafted.trace() as trace:
        drafted.generate("def", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert {tuple(event.token_ids) for event in trace.of(DraftProposed)} <= {()}
    assert all(event.num_drafts == 0 and len(event.token_ids) == 1 for event in trace.of(TokensCommitted))
