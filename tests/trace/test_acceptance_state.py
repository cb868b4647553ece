"""Rounds of speculative decoding: verdicts, and the three figures that must agree with each other."""

from __future__ import annotations

import pytest

from minillm.errors import TraceError
from minillm.trace import (
    DraftProposed,
    EngineStarted,
    RequestAdded,
    StepStarted,
    TokenOrigin,
    TokensCommitted,
    Trace,
)
from minillm.trace.acceptance_state import AcceptanceState
from minillm.trace.replay import Replay
from minillm.viz import AcceptanceStrip

from .traces import Script, busy, decode, prefill, story, verify


def request_of(trace, request_id="req-1", step=None):
    return Replay(trace, AcceptanceState).at(step).requests[request_id]


def test_twelve_of_sixteen_kept_and_four_added_are_four_tokens_per_forward():
    request = request_of(story(), step=5)
    assert (request.num_accepted, request.drafted, request.added, len(request.rounds)) == (12, 16, 4, 4)
    assert request.tokens_per_forward == 4.0
    assert request.acceptance_rate == 0.75


def test_verdicts_of_full_partial_and_zero_acceptance():
    rounds = request_of(story()).rounds
    assert rounds[1].verdicts == ("accepted",) * 4
    assert rounds[2].verdicts == ("accepted", "rejected", "discarded", "discarded")
    assert rounds[4].verdicts == ("rejected", "discarded", "discarded", "discarded")
    assert [r.added_origin for r in rounds] == ["recovered", "bonus", "recovered", "bonus", "recovered", "recovered"]


def test_position_rates_are_marginal_and_never_rise():
    assert request_of(story(), step=5).accepted_by_position() == [(4, 4), (3, 4), (3, 4), (2, 4)]
    rates = [
        accepted / judged for accepted, judged in Replay(busy(), AcceptanceState).at().total().accepted_by_position()
    ]
    assert rates == sorted(rates, reverse=True)


def test_accepted_by_position_adds_up_to_kept():
    for request in Replay(busy(), AcceptanceState).at().requests.values():
        assert sum(accepted for accepted, _ in request.accepted_by_position()) == request.num_accepted
        assert sum(judged for _, judged in request.accepted_by_position()) == request.drafted


def test_shorter_drafts_do_not_count_at_positions_they_do_not_have():
    s = Script()
    s.add("a", "a", 4)
    s.step(prefill("a", 4))
    s.step(verify("a", ["1", "2", "3"], 3))
    s.step(verify("a", ["1"], 1))
    assert request_of(s.trace, "a").accepted_by_position() == [(2, 2), (1, 1), (1, 1)]


def test_stop_inside_an_accepted_run_discards_the_rest_and_adds_nothing():
    s = Script()
    s.add("a", "a", 4)
    s.step(prefill("a", 4))
    s.step(verify("a", ["1", "2", "3"], 2, None, finish="stop"))
    request = request_of(s.trace, "a")
    (judged,) = request.rounds
    assert request.tokens_per_forward == 2.0
    assert judged.verdicts == ("accepted", "accepted", "discarded")
    assert (judged.target_token, judged.tokens) == (None, 2)


def test_plain_steps_give_text_but_no_round():
    s = Script(gamma=0)
    s.add("a", "a", 4)
    s.step(prefill("a", 4, "x"))
    s.step(decode("a", "y"))
    request = request_of(s.trace, "a")
    assert (request.rounds, request.tokens_per_forward, request.acceptance_rate) == ([], None, None)
    assert [(token.text, token.origin) for token in request.tokens] == [("x", "sampled"), ("y", "sampled")]


def test_a_forward_without_a_draft_counts_and_a_prefill_does_not():
    """Of a drafter that has nothing to propose now and then, the rounds alone would tell too good a story."""
    s = Script(gamma=2)
    s.add("a", "a", 4)
    s.step(prefill("a", 4, "x"))
    s.step(verify("a", ["y", "z"], 2, "w"))
    s.step(decode("a", "u"))
    s.step(preempt=["a"])
    s.step(prefill("a", 9, "v"))
    request = request_of(s.trace, "a")
    assert (len(request.rounds), request.undrafted_forwards, request.forwards, request.gained) == (1, 1, 2, 4)
    assert request.tokens_per_forward == 2.0 and Replay(s.trace, AcceptanceState).at().total().forwards == 2
    arithmetic = "+ 1 added by the target + 1 without a draft = 4 tokens in 2 target forwards: 2.00"
    assert f"2 of 2 drafts accepted (100%) {arithmetic}" in AcceptanceStrip(s.trace).describe()
    picture = AcceptanceStrip(s.trace).to_svg()
    assert "2 of 2 accepted + 1 added<" in picture and "+ 1 without a draft = 4 tokens in 2 forwards" in picture


def test_committed_tokens_of_rounds_equal_kept_plus_added():
    for request in Replay(busy(), AcceptanceState).at().requests.values():
        spoken = [token for token in request.tokens if token.origin != "sampled"]
        assert len(spoken) == request.num_accepted + request.added == sum(r.tokens for r in request.rounds)


def test_verdict_on_drafts_that_nobody_proposed_is_refused():
    events = [event for event in story() if not isinstance(event, DraftProposed)]
    with pytest.raises(TraceError, match="4 drafts were verified, but only 0 were proposed"):
        Replay(Trace(events), AcceptanceState).at()


# ---------------------------------------------------------------------------------------------------------- draft trees

TREE = [-1, -1, 0, 0, 1, 1]
"""Two guesses, two after each."""


def judged(path: list[int], texts: list[str], origins: list[TokenOrigin]) -> AcceptanceState:
    """One round over `TREE`, whose guesses are called a to f."""
    started = EngineStarted("m", "d", 16, 8, 64, 6, "paged", True, 4, 64, "draft_tree")
    return AcceptanceState().fold_all(
        [
            started,
            RequestAdded("0", "p", [1], 0),
            StepStarted(1, 1, 0),
            DraftProposed("0", list(range(6)), list("abcdef"), TREE),
            TokensCommitted("0", [9] * len(texts), texts, origins, 6, len(path), 3, path),
        ]
    )


@pytest.mark.parametrize(
    ("path", "origins", "verdicts", "places"),
    [
        ([], ["recovered"], "xx····", [[0, 1]]),
        ([1], ["accepted", "recovered"], "x✓··xx", [[0, 1], [4, 5]]),
        ([0], ["accepted", "recovered"], "✓·xx··", [[0, 1], [2, 3]]),
        ([1, 5], ["accepted", "accepted", "bonus"], "x✓··x✓", [[0, 1], [4, 5]]),
        ([1, 5], ["accepted"], "x✓····", [[0, 1], [4, 5]]),  # the text ended there
    ],
)
def test_a_tree_is_judged_along_one_branch(path, origins, verdicts: str, places) -> None:
    state = judged(path, ["t"] * len(origins), origins)
    [judgement] = state.requests["0"].rounds
    signs = {"accepted": "✓", "rejected": "x", "discarded": "·"}
    assert "".join(signs[verdict] for verdict in judgement.verdicts) == verdicts
    assert (judgement.candidates_by_position, judgement.num_positions) == (places, 2)
    assert judgement.tokens == len(origins)


def test_positions_of_a_tree_are_counted_by_depth() -> None:
    state = judged([1], ["b", "t"], ["accepted", "recovered"])
    assert state.requests["0"].accepted_by_position() == [(1, 1), (0, 1)]
    assert state.requests["0"].tokens_per_forward == 2
