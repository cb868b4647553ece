"""Acceptance by position: the three names are counted apart and agree with each other."""

from __future__ import annotations

import math
from itertools import accumulate
from operator import mul

import pytest

from minillm.errors import ConfigError, TraceError
from minillm.teaching.exercises.l11_speculative_speed import expected_tokens
from minillm.trace import TokensCommitted, Trace
from minillm.trace.acceptance_state import AcceptanceState
from minillm.viz.speculation.position_acceptance import PositionAcceptance
from tests.trace.traces import Script, prefill, verify
from tests.viz.pictures import description, found, text_of


def a_round(num_drafts: int, num_accepted: int, path: list[int] | None = None, ended: int = 0) -> TokensCommitted:
    count = num_accepted + 1 - ended
    return TokensCommitted("a", [1] * count, ["x"] * count, ["accepted"] * count, num_drafts, num_accepted, 9, path)


ROUNDS = Trace([a_round(3, n) for n in (0, 1, 3, 3, 2, 0, 3, 1)] + [a_round(0, 0)])
PICTURE = PositionAcceptance.of(ROUNDS, "functions")


def test_drafts_behind_a_rejected_one_were_never_judged() -> None:
    assert (PICTURE.judged, PICTURE.accepted) == ([8, 6, 4], [6, 4, 3])
    assert (PICTURE.rounds, PICTURE.drafted) == (8, 24)
    assert PICTURE.conditional == [6 / 8, 4 / 6, 3 / 4]
    assert PICTURE.marginal == [6 / 8, 4 / 8, 3 / 8]
    assert PICTURE.accepted_share == 13 / 24


def test_marginal_is_the_product_of_the_conditional_ones_and_sums_to_the_tokens_of_a_round() -> None:
    assert PICTURE.marginal == pytest.approx([*accumulate(PICTURE.conditional, mul)])
    assert PICTURE.tokens_per_round == pytest.approx(expected_tokens(PICTURE.conditional))
    assert PICTURE.accepted_share == pytest.approx((PICTURE.tokens_per_round - 1) / 3)


def test_bars_are_as_high_as_their_shares() -> None:
    svg = PICTURE.to_svg()
    for i, place in enumerate(found(svg, "position")):
        bars = {e.get("data-kind"): e for e in place.iter() if e.get("data-kind")}
        ratio = float(bars["marginal"].get("height")) / float(bars["conditional"].get("height"))
        assert ratio == pytest.approx(PICTURE.marginal[i] / PICTURE.conditional[i], abs=0.01)
    assert text_of(found(svg, "tau")[0]) == "2.62"
    assert text_of(found(svg, "share")[0]) == "54%"


def test_words_keep_the_names_apart() -> None:
    words = description(PICTURE.to_svg())
    assert words == PICTURE.describe() and repr(PICTURE) == "<PositionAcceptance>"
    assert "position 2: conditional 67% (4 of 6 judged), marginal 50%" in words
    assert "Accepted / drafted: 54%. 2.62 tokens per round." in words


def test_rounds_cut_short_by_the_end_of_a_text_are_left_out_and_counted() -> None:
    """They have no token of the target's own; the numbers are those of the strip without them."""
    cut = PositionAcceptance.of(Trace([*ROUNDS, a_round(3, 3, ended=1), a_round(3, 3, ended=3)]), "functions")
    assert (cut.left_out, cut.rounds, cut.tokens_per_round) == (2, 8, PICTURE.tokens_per_round)
    said = "2 rounds cut short by the end of a text"
    assert cut.describe() == f"{PICTURE.describe()} Left out: {said}." == description(cut.to_svg())
    assert f"8 rounds · functions · left out: {said}" in cut.to_svg() and "left out" not in PICTURE.to_svg()
    s = Script()
    s.add("a", "def f():", 4)
    s.step(prefill("a", 4))
    s.step(verify("a", ["p", "q"], 2))
    whole = PositionAcceptance.of(s.trace)
    s.step(verify("a", ["p", "q"], 2, None, finish="stop"))
    strip = AcceptanceState().fold_all(s.trace).total()
    cut = PositionAcceptance.of(s.trace)
    assert (cut.tokens_per_round + 2) / 2 == strip.tokens_per_forward and cut.accepted == whole.accepted
    with pytest.raises(TraceError, match="every round of this trace ended its text"):
        PositionAcceptance.of(Trace([a_round(3, 3, ended=1)]))


@pytest.mark.parametrize(
    ("judged", "accepted", "rounds", "drafted"),
    [([], [], 1, 0), ([3], [5], 8, 9), ([3], [1], 1, 9), ([3, 2], [1, 1], 4, 9), ([2], [1], 2, 1), ([1], [], 1, 1)],
)
def test_counts_that_contradict_each_other_are_refused(
    judged: list[int], accepted: list[int], rounds: int, drafted: int
) -> None:
    with pytest.raises(ConfigError, match="position"):
        PositionAcceptance(judged, accepted, rounds, drafted)


def test_positions_that_no_round_reached_are_left_out() -> None:
    picture = PositionAcceptance.of(Trace([a_round(4, 0), a_round(4, 1)]))
    assert (picture.judged, picture.accepted) == ([2, 1], [1, 0])
    assert math.isclose(picture.tokens_per_round, 1.5) and "0%" in text_of(found(picture.to_svg(), "position")[1])


@pytest.mark.parametrize(
    ("events", "says"), [([], "no round with drafts"), ([a_round(0, 0)], "no round"), ([a_round(2, 1, [0])], "trees")]
)
def test_a_trace_without_chains_is_refused(events: list[TokensCommitted], says: str) -> None:
    with pytest.raises(TraceError, match=says):
        PositionAcceptance.of(Trace(events))
