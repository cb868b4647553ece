"""The strip of accepted tokens: boxes, bars, arithmetic and words agree with the state."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import TraceError
from minillm.trace import DraftProposed, StepStarted, TokensCommitted, Trace
from minillm.trace.acceptance_state import AcceptanceState
from minillm.trace.replay import Replay
from minillm.viz import AcceptanceStrip
from minillm.viz.draw.svg import MONO_EM
from tests.trace.traces import Script, busy, decode, prefill, story, verify
from tests.viz.pictures import SVG, description, found, parse, states, text_of


def strip_of(drafts, accepted=0, token="x", prompt="p"):
    s = Script(gamma=len(drafts))
    s.add("a", prompt, 4)
    s.step(prefill("a", 4))
    s.step(verify("a", drafts, accepted, token))
    return AcceptanceStrip(s.trace).to_svg()


def test_headline_sum_and_words_tell_the_same_numbers():
    svg = AcceptanceStrip(story()).to_svg(5)
    assert [text_of(element) for element in found(svg, "tau")] == ["4.00"]
    whole = text_of(parse(svg))
    assert "12 of 16 accepted + 4 added" in whole
    assert "= 16 tokens in 4 forwards" in whole
    assert "75% of drafts accepted" in whole
    arithmetic = "+ 4 added by the target = 16 tokens in 4 target forwards: 4.00 tokens per forward"
    assert f"12 of 16 drafts accepted (75%) {arithmetic}" in description(svg)


def test_boxes_are_the_verdicts_and_the_added_tokens():
    trace = story()
    svg, request = AcceptanceStrip(trace).to_svg(), Replay(trace, AcceptanceState).at().requests["req-1"]
    expected = Counter(verdict for judged in request.rounds for verdict in judged.verdicts)
    expected.update(judged.added_origin for judged in request.rounds)
    assert Counter(states(svg, "token")) == expected
    assert expected["accepted"] == request.num_accepted


@pytest.mark.parametrize("narrow", [False, True])
def test_accepted_drafts_after_the_end_of_the_text_are_not_said_to_have_no_verdict(narrow):
    s = Script()
    s.add("a", "a", 4)
    s.step(prefill("a", 4))
    committed = TokensCommitted("a", [1, 2], ["w", "x"], ["accepted", "accepted"], 4, 4, 6)
    drafts = DraftProposed("a", [1, 2, 3, 4], list("wxyz"))
    svg = AcceptanceStrip(Trace([*s.trace, StepStarted(2, 1, 0), drafts, committed]), narrow=narrow).to_svg()
    assert states(svg, "token") == ["accepted", "accepted", "discarded", "discarded"]
    assert "not judged" not in text_of(parse(svg))
    assert "discarded" in text_of(parse(svg))


def test_bars_are_the_counts_by_position():
    svg = AcceptanceStrip(story()).to_svg(5)
    bars = [(int(b.get("data-accepted")), int(b.get("data-judged"))) for b in found(svg, "position")]
    assert bars == [(4, 4), (3, 4), (3, 4), (2, 4)]
    assert "Accepted at position 1: 4 of 4, 2: 3 of 4, 3: 3 of 4, 4: 2 of 4." in description(svg)


def test_text_so_far_keeps_every_token_and_where_it_came_from():
    svg = AcceptanceStrip(story()).to_svg(3)
    runs = [(run.get("data-state"), text_of(run).replace("\u00a0", " ")) for run in found(svg, "text")]
    assert runs == [
        ("prompt", "for line in path.read_text()"),
        ("sampled", "    "),
        ("accepted", "for line in"),
        ("recovered", " path"),
        ("accepted", ".read_text()"),
        ("bonus", "."),
    ]


def test_origin_of_text_has_a_cue_beside_colour():
    looks = {run.get("data-state"): run for run in found(AcceptanceStrip(story()).to_svg(3), "text")}
    assert looks["recovered"].get("text-decoration") == "underline"
    assert looks["bonus"].get("font-style") == "italic"
    assert looks["accepted"].get("font-weight") is None


def test_whitespace_shows_in_the_boxes():
    words = [text_of(token) for token in found(AcceptanceStrip(story()).to_svg(5), "token")]
    assert "✓·line" in words
    assert "✓⏎" in words
    assert "✓·×8" in words


@settings(max_examples=80)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=12), st.text(max_size=20))
def test_no_token_breaks_the_picture_or_leaves_its_box(drafts, token):
    """Any text at all: well-formed XML, and as wide as its box at the most."""
    svg = strip_of(drafts, token=token, prompt=token)
    svg.encode("utf-8")
    for group in found(svg, "token"):
        box, *texts = (group.find(f"{SVG}rect"), *group.findall(f"{SVG}text"))
        right = float(box.get("x")) + float(box.get("width"))
        for text in texts[1:]:
            columns = sum(2 if ord(c) > 0x1100 and _wide(c) else 1 for c in text_of(text) if not _mark(c))
            assert float(text.get("x")) + columns * MONO_EM * float(text.get("font-size")) <= right


def _wide(char):
    import unicodedata

    return unicodedata.east_asian_width(char) in "WF"


def _mark(char):
    import unicodedata

    return unicodedata.category(char) in ("Mn", "Me", "Cf")


def test_the_placeholder_of_ids_cannot_be_smuggled_in():
    svg = strip_of(["\ue000", "@uid@"], 2, "x", prompt="\ue000")
    assert [text_of(token) for token in found(svg, "token")] == ["✓\ufffd", "✓@uid@", "★x"]


def test_markup_in_tokens_is_text():
    svg = strip_of(["<b>", "&amp;", '"q"', "\x08"], 4, "</svg>")
    words = [text_of(token) for token in found(svg, "token")]
    assert words == ["✓<b>", "✓&amp;", '✓"q"', "✓␈", "★</svg>"]


@pytest.mark.parametrize("gamma", [1, 2, 4, 8, 16, 32])
def test_every_gamma_fits_on_the_card(gamma):
    svg = strip_of([f"token{i}" for i in range(gamma)], gamma // 2)
    boxes = [token.find(f"{SVG}rect") for token in found(svg, "token")]
    rights = [float(box.get("x")) + float(box.get("width")) for box in boxes]
    assert max(rights) <= 956
    assert len(boxes) == min(gamma, 20) + 1
    assert len(svg.encode()) < 50_000


def test_only_the_last_rounds_are_drawn_and_all_are_counted():
    trace = busy()
    svg = AcceptanceStrip(trace).to_svg(14)
    assert len(found(svg, "round")) == 6
    assert "6 EARLIER ROUNDS" in svg
    assert "Round 12:" in description(svg)
    assert "Round 6:" not in description(svg)
    assert "12 target forwards" in description(svg)
    assert len(svg.encode()) < 50_000


def test_strip_of_a_chosen_request_and_refusal_of_an_unknown_one():
    trace = busy()
    assert "request C" in AcceptanceStrip(trace, "req-2").to_svg()
    with pytest.raises(TraceError, match="request 'nobody' is not in this trace; it has req-0, req-1"):
        AcceptanceStrip(trace, "nobody").to_svg()
    assert "waiting for a request" in AcceptanceStrip(Trace(), "later").to_svg()


def test_first_request_with_judged_drafts_is_the_default():
    assert "request B" in AcceptanceStrip(story()).to_svg()


def test_plain_decoding_says_that_there_is_nothing_to_judge():
    s = Script(gamma=0)
    s.add("a", "a", 4)
    s.step(prefill("a", 4))
    s.step(decode("a", "y"))
    svg = AcceptanceStrip(s.trace).to_svg()
    assert "decoded without drafts" in svg
    assert found(svg, "tau") == []


def test_same_trace_gives_the_same_bytes():
    assert AcceptanceStrip(story()).to_svg() == AcceptanceStrip(story()).to_svg()


def test_every_moment_of_a_trace_can_be_drawn():
    for end in range(len(story()) + 1):
        parse(AcceptanceStrip(Trace(story().events[:end])).to_svg())


@pytest.mark.parametrize("narrow", [False, True])
def test_columns_are_as_many_as_the_rounds_need_and_what_is_left_out_is_counted(narrow):
    def strip(*rounds):
        s = Script(num_blocks=99, gamma=24)
        s.add("a", "p", 4)
        s.step(prefill("a", 4))
        for drafts, accepted in rounds:
            s.step(verify("a", [f" t{i}" for i in range(drafts)], accepted))
        return AcceptanceStrip(s.trace, narrow=narrow).to_svg()

    most = 12 if narrow else 20
    few = strip((3, 1), (4, 4))
    widths = [float(token.find(f"{SVG}rect").get("width")) for token in found(few, "token")]
    assert min(widths) > (50 if narrow else 100) and not found(few, "more")
    many = strip((24, 22), (3, 0))
    assert len(found(many, "token")) == most + 1 + 3 + 1
    assert [text_of(more) for more in found(many, "more")] == [f"+{24 - most} ✗"]
    assert [text_of(more) for more in found(strip((24, 2)), "more")] == [f"+{24 - most}"]
    assert "23: 0 of 1, 24: 0 of 1." in description(many)
    texts = [text_of(e) for e in parse(strip((24, 24), *[(3, 1)] * 8)).iter() if e.tag == f"{SVG}text"]
    assert "+21" in texts, "bars without a column, which only an earlier round has"
