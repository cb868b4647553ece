"""The picture of a decision shows what was decided, and says why."""

from __future__ import annotations

import pytest

from minillm.request import Request
from minillm.sampling import SamplingParams
from minillm.speculative.adaptive_drafts import AdaptiveDrafts
from minillm.speculative.step_costs import StepCosts
from minillm.trace import DraftReason, DraftsPlanned, RequestAdded, Trace
from minillm.viz.speculation.draft_decision import MAX_REQUESTS, DraftDecision
from tests.viz.pictures import description, found, parse, states, text_of


def decided(row: float, rates: tuple[int, ...] = (4, 0), most: int = 4) -> DraftsPlanned:
    """The decision for a request per rate, of whose drafts so many were accepted in each of 40 rounds."""
    policy = AdaptiveDrafts(most, StepCosts({1: 1.0, 65: 1 + 64 * row}, 0.0, 0.02, 0.02))
    requests = [Request(str(i), "", [1, 2], 2, SamplingParams(temperature=0), 9, seed=0) for i in range(len(rates))]
    for _ in range(40):
        for request, accepted in zip(requests, rates, strict=True):
            policy.judged(request, most, most, accepted)
    plan = policy.plan(requests, len(requests))
    return DraftsPlanned([r.request_id for r in requests], plan.num_drafts, plan.survival, plan.speedups)


def test_chosen_slots_are_those_of_the_plan() -> None:
    event = decided(0.1)
    svg = DraftDecision(event).to_svg()
    assert event.num_drafts[0] == 4 and event.num_drafts[1] == 0
    slots = states(svg, "slot")[:8]
    assert slots == ["drafted"] * 4 + ["left out"] * 4
    assert text_of(found(svg, "slot")[0]) == f"✓ {event.survival[0][0]:.2f}"


def test_requests_have_the_letters_of_their_trace_or_their_ids() -> None:
    event = DraftsPlanned(["5", "7"], [1, 0], [[0.9], [0.2]], [1.0, 1.2])
    trace = Trace([RequestAdded(str(i), "", [1]) for i in (3, 5, 6, 7)])
    assert "B 1 (0.90), D 0 (0.20)" in DraftDecision(event, trace).describe()
    assert "5 1 (0.90), 7 0 (0.20)" in DraftDecision(event).describe()
    assert ">D<" in DraftDecision(event, trace).to_svg()


def test_the_ring_lies_on_the_chosen_number() -> None:
    event = decided(0.1)
    picture = DraftDecision(event)
    svg = picture.to_svg()
    ring, points = found(svg, "chosen")[0], found(svg, "number")
    point = next(p for p in points if int(p.get("data-drafts")) == picture.chosen)
    assert (ring.get("cx"), ring.get("cy")) == (point.get("cx"), point.get("cy"))
    assert min(float(p.get("cy")) for p in points) == float(point.get("cy")), "no other number is higher"


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (decided(0.0, (4,)), "4 drafts: the most tokens per second, predicted"),
        (decided(0.9, (0,)), "every number of drafts is predicted to be slower"),
        (DraftsPlanned(["a"], [0], [[0.5]], [1.0, 1.01]), "1 draft would give 1.01× plain decoding, a gain too small"),
        (DraftsPlanned(["a"], [1], [[0.1]], [1.0, 0.7]), "1 draft: a trial, "),
        (DraftsPlanned(["a"], [8], [[0.9] * 4], [1.0, 1.2, 1.5]), "or room for the longer draft of two methods; the"),
    ],
)
def test_the_reason_is_the_one_that_holds(event: DraftsPlanned, says: str) -> None:
    picture = DraftDecision(event)
    assert says in picture.reason
    assert picture.reason in description(picture.to_svg()) and description(picture.to_svg()) == picture.describe()
    assert repr(picture) == "<DraftDecision>"
    assert ("the chosen number" in picture.to_svg()) == (picture.chosen < len(event.speedups))


def test_many_requests_are_counted_where_there_is_no_room() -> None:
    svg = DraftDecision(decided(0.05, (2,) * 12)).to_svg()
    assert f"and {12 - MAX_REQUESTS} more requests" in svg


def test_many_positions_fit() -> None:
    assert len(found(DraftDecision(decided(0.0, (9,), most=20)).to_svg(), "slot")) == 8 + 2


def test_whole_trees_leave_gaps_in_the_curve() -> None:
    event = DraftsPlanned(["a"], [3], [[0.4] * 3], [1.0, 0.0, 0.0, 1.3])
    assert [int(p.get("data-drafts")) for p in found(DraftDecision(event).to_svg(), "number")] == [0, 3]


@pytest.mark.parametrize(
    ("reason", "num_drafts", "says"),
    [
        ("compared", [0, 0], "no drafts: a few plain steps are timed, "),
        ("loss", [0, 4], "4 drafts: drafting has cost more time than it saved and rests, except for requests with"),
        ("batch_size", [0, 0], "no drafts: more requests run and wait than disable_by_batch_size allows"),
        ("fixed", [2, 2], "4 drafts: the number is fixed"),
        ("predicted", [1, 0], "1 draft: decided without a new prediction"),
    ],
)
def test_without_a_prediction_there_are_the_reason_and_the_numbers(
    reason: DraftReason, num_drafts: list[int], says: str
) -> None:
    picture = DraftDecision(DraftsPlanned(["a", "b"], num_drafts, [], [], reason))
    svg = picture.to_svg()
    given = f"Drafts by request: a {num_drafts[0]}, b {num_drafts[1]}"
    assert picture.reason.startswith(says) and description(svg) == f"{picture.reason}. {given}."
    assert [text_of(e) for e in parse(svg).iter() if e.tag.endswith("text")][1:] == [picture.reason, given]


def test_a_prediction_for_another_number_is_drawn_under_the_reason_that_holds() -> None:
    """While drafting rests, only a request with its own seed drafts."""
    picture = DraftDecision(DraftsPlanned(["a"], [1], [[0.9]], [1.0, 1.2], "loss"))
    assert picture.describe().startswith("1 draft: drafting has cost more time than it saved")
    assert states(picture.to_svg(), "slot")[0] == "drafted"


def test_a_long_list_of_requests_without_a_prediction_fits() -> None:
    names = [f"{i}-a-long-name-of-a-request" for i in range(40)]
    words = DraftDecision(DraftsPlanned(names, [0] * 40, [], [], "batch_size")).describe()
    assert words.endswith(f", +{40 - MAX_REQUESTS} more.") and words.count("…") == MAX_REQUESTS


def test_a_request_keeps_its_letter_when_its_id_is_used_again() -> None:
    event = DraftsPlanned(["x"], [1], [[0.5]], [1.0, 1.2])
    trace = Trace([RequestAdded("x", "first", [1]), event, RequestAdded("x", "second", [1])])
    assert "A 1 (0.50)" in DraftDecision(event, trace).describe()
    again = DraftsPlanned(["x"], [1], [[0.5]], [1.0, 1.2])
    assert "B 1 (0.50)" in DraftDecision(again, Trace([*trace, again])).describe()


def test_positions_without_room_are_counted_in_the_picture_and_in_words() -> None:
    event = DraftsPlanned(["a", "b"], [10, 1], [[0.9] * 12, [0.5] * 3], [1.0] * 30)
    picture = DraftDecision(event)
    assert "+4" in [text_of(e) for e in parse(picture.to_svg()).iter() if e.tag.endswith("text")]
    words = picture.describe()
    assert "a 10 (" + "0.90, " * 8 + "+4 more), b 1 (0.50, 0.50, 0.50)" in words
    assert words.endswith("24: 1.00, +5 more.")
