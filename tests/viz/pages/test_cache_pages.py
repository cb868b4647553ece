"""The picture of the pool says what the state says: in shapes, in numbers and in words."""

from __future__ import annotations

import dataclasses
import itertools
import re
import tracemalloc
from collections import Counter, defaultdict
from string import ascii_uppercase

import pytest

from minillm import LLM, SamplingParams
from minillm.errors import TraceError
from minillm.trace import StepFinished, Trace
from minillm.trace.page import Page
from minillm.trace.replay import Replay
from minillm.trace.run_metrics import RunMetrics
from minillm.viz import CachePagesView, CacheState, TimelineView
from minillm.viz.draw import glyphs
from minillm.viz.draw.colours import owner_letter
from minillm.viz.pages.cache_words import describe
from minillm.viz.pages.page_geometry import geometry
from minillm.viz.pages.page_legend import SWATCHES
from minillm.viz.pages.page_marks import PageMarks
from tests.conftest import TinyPair
from tests.trace.traces import Script, busy, decode, prefill, sharing, slot_counts, story, verify
from tests.viz.pictures import description, found, parse, states, text_of

STEPS = range(1, 10)


def drawn_slots(svg):
    counts = Counter()
    for path in found(svg, "slots"):
        counts[path.get("data-state")] += int(path.get("data-count"))
    return counts


def squares(svg, state):
    """Sub-paths of the slots in `state`, when slots are drawn one by one."""
    return sum(path.get("d").count("M") for path in found(svg, "slots") if path.get("data-state") == state)


def state_at(trace, step):
    return Replay(trace, CacheState).at(step)


@pytest.mark.parametrize("step", STEPS)
def test_pages_and_slots_in_the_picture_are_those_of_the_state(step):
    trace = story()
    svg, pages = CachePagesView(trace).to_svg(step), state_at(trace, step).pages()
    assert Counter(states(svg, "page")) == Counter(page.state for page in pages)
    expected = slot_counts(pages)
    del expected["free"]
    assert drawn_slots(svg) == expected
    assert all(squares(svg, state) == count for state, count in expected.items())


def test_rolled_back_slots_are_hatched_exactly_in_the_step_of_the_roll_back():
    view = CachePagesView(story())
    hatched = {step: drawn_slots(view.to_svg(step))["rolled_back"] for step in STEPS}
    assert hatched == {1: 0, 2: 1, 3: 0, 4: 3, 5: 0, 6: 4, 7: 2, 8: 0, 9: 0}
    for path in found(view.to_svg(6), "slots"):
        assert ("url(#void-" in path.get("fill")) == (path.get("data-state") == "rolled_back")


def test_description_holds_the_numbers_of_the_picture():
    words = description(CachePagesView(story()).to_svg(4))
    assert "24 blocks of 16 slots: 10 used, 14 free; waste 21 of 160 slots (13%)" in words
    assert "Request B (verify 4 drafts, 1 right): 39 of 40 tokens in the cache, 3 blocks" in words
    assert "B rolled back 3 slots" in words


@pytest.mark.parametrize("narrow", [False, True])
def test_a_finished_request_is_not_said_to_be_in_the_cache(narrow):
    view = CachePagesView(story(), narrow=narrow)
    for words in (description(view.to_svg()), view.describe()):
        assert words.count("(done: ") == 3
        assert "in the cache" not in words and ", 0 blocks" not in words


def test_title_and_description_name_the_picture_for_screen_readers():
    root = parse(CachePagesView(story()).to_svg(4))
    ids = {element.get("id"): text_of(element) for element in root.iter() if element.get("id")}
    title, desc = root.get("aria-labelledby").split()
    assert root.get("role") == "img"
    assert ids[title] == "KV cache pages, step 4"
    assert ids[desc].startswith("KV cache pages, step 4. ")


def test_every_letter_stands_on_its_pages():
    svg = CachePagesView(story()).to_svg(4)
    written = Counter(text_of(element) for element in parse(svg).iter() if element.get("font-weight") == "700")
    # One on the chip, the others on the pages.
    assert (written["A"], written["B"], written["C"]) == (1 + 4, 1 + 3, 1 + 3)


def test_same_trace_gives_the_same_bytes_and_ids_differ_between_pictures():
    first, again = (CachePagesView(story()).to_svg(5) for _ in range(2))
    assert first == again
    view = CachePagesView(story())
    assert view.to_svg(9) and view.to_svg(5) == first, "going back in time must not change a picture"
    ids = [{e.get("id") for e in parse(view.to_svg(step)).iter() if e.get("id")} for step in STEPS]
    assert len(set().union(*ids)) == sum(map(len, ids))


def test_references_inside_the_picture_lead_somewhere():
    svg = CachePagesView(story()).to_svg(6)
    ids = {element.get("id") for element in parse(svg).iter()}
    assert {part.split(")")[0] for part in svg.split("url(#")[1:]} <= ids


def test_prompt_cannot_break_out_of_the_picture():
    s = Script()
    s.add("<id>&\"'", '</text><script>alert("&")</script>\x00\x1b\ud800', 5)
    s.step(prefill("<id>&\"'", 5))
    svg = CachePagesView(s.trace).to_svg()
    assert "<script" not in svg
    svg.encode("utf-8")
    assert any("</text><scrip" in text_of(element) for element in found(svg, "request"))


@pytest.mark.parametrize("num_blocks", [256, 300, 4096])
def test_a_frame_stays_below_fifty_kilobytes(num_blocks):
    s = Script(16, num_blocks, 4)
    for i in range(12):
        s.add(f"r{i}", f"def function_{i}(first, second):\n    return", 200)
    s.step(*(prefill(f"r{i}", 200) for i in range(12)))
    n = 0
    while len(s.free) >= 12:
        s.step(*(verify(f"r{i}", [" a", " b", " c", " d"], (n + i) % 5) for i in range(12)))
        n += 1
        if n > 60:
            break
    svg = CachePagesView(s.trace).to_svg()
    assert len(svg.encode()) < 50_000
    assert len(found(svg, "page")) == 256
    if num_blocks > 256:
        assert f"256 of {num_blocks} drawn" in svg


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(
    ("block_size", "num_blocks", "layout"), [(2**24, 64, "contiguous"), (4096, 2**24, "paged"), (2**24, 2**24, "paged")]
)
def test_the_largest_pool_that_a_trace_may_name_is_drawn_at_once(block_size, num_blocks, layout, narrow):
    """Not slot by slot, nor block by block: that would take gigabytes and minutes."""
    s = Script(block_size, 8, layout=layout)
    s.add("a", "def f():", 4)
    s.step(prefill("a", 4))
    s.trace.events[0] = dataclasses.replace(s.trace.events[0], num_blocks=num_blocks)
    tracemalloc.start()
    parse(CachePagesView(s.trace, narrow=narrow).to_svg())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10**7


def test_dense_picture_counts_the_same_slots():
    trace = busy()
    svg, state = CachePagesView(trace).to_svg(14), state_at(trace, 14)
    expected = slot_counts(state.pages())
    del expected["free"]
    assert drawn_slots(svg) == expected
    assert Counter(states(svg, "page")) == Counter(page.state for page in state.pages())


def test_dashes_cover_exactly_the_slots_they_stand_for():
    trace = busy(4, 100, steps=3)
    svg = CachePagesView(trace).to_svg(5)
    (group,) = (element for element in parse(svg).iter() if element.get("stroke-dasharray", "").count(" ") > 1)
    pattern = [float(length) for length in group.get("stroke-dasharray").split()]
    for path in found(svg, "slots"):
        lengths = [float(part.split("h")[1]) for part in path.get("d").split("M")[1:]]
        assert sum(dashes(length, pattern) for length in lengths) == int(path.get("data-count"))


def dashes(length, pattern):
    """Dashes begun along a line of `length`, as a renderer walks the pattern."""
    count = position = 0
    for i in range(10_000):
        if position >= length - 0.05:
            return count
        count += i % len(pattern) % 2 == 0
        position += pattern[i % len(pattern)]
    raise AssertionError("the pattern does not advance")


@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 40), (4, 80), (7, 30), (32, 24), (128, 10), (256, 70)])
def test_every_block_size_draws_all_its_pages(block_size, num_blocks):
    s = Script(block_size, num_blocks)
    s.add("a", "a", 20)
    s.step(prefill("a", 20))
    s.step(decode("a"))
    svg = CachePagesView(s.trace).to_svg()
    counts = drawn_slots(svg)
    assert counts["written"] + counts["fresh"] == 21
    assert len(found(svg, "page")) == num_blocks


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("block_size", "num_blocks"), [(5, 100), (10, 80), (7, 100), (11, 70), (17, 40), (29, 20)])
def test_slots_of_small_pages_have_a_size(block_size, num_blocks, narrow):
    """A page whose block size has few divisors has its slots in one row."""
    s = Script(block_size, num_blocks)
    s.add("a", "a", 12)
    s.step(prefill("a", 12))
    s.step(decode("a"))
    for path in found(CachePagesView(s.trace, narrow=narrow).to_svg(), "slots"):
        assert "--" not in path.get("d") and "h0v" not in path.get("d")


def test_more_requests_than_rows_leaves_out_the_finished_ones_first():
    s = Script(16, 64)
    for i in range(15):
        s.add(f"r{i}", f"prompt {i}", 5)
    s.step(*(prefill(f"r{i}", 5) for i in range(15)))
    s.step(*(decode(f"r{i}", finish="stop" if i in (2, 5) else None) for i in range(15)))
    svg = CachePagesView(s.trace).to_svg()
    assert len(found(svg, "request")) == 12
    assert "finished" not in states(svg, "request")
    assert "and 3 more" in svg


def test_a_narrow_picture_says_what_it_leaves_out():
    s = Script(1, 300)
    for i in range(9):
        s.add(f"r{i}", f"prompt {i}", 30 if i else 5)
    s.step(*(prefill(f"r{i}", 30 if i else 5) for i in range(9)))
    s.step(*(decode(f"r{i}", finish=None if i else "stop") for i in range(9)))
    svg = CachePagesView(s.trace, narrow=True).to_svg()
    assert len(found(svg, "request")) == 6 and states(svg, "request") == ["decode"] * 6
    assert "and 3 more requests" in svg
    assert "256 of 300 drawn; left out: " in svg


@pytest.mark.parametrize("narrow", [False, True])
def test_a_row_of_pages_with_gaps_says_so(narrow):
    s = Script(1, 300)
    s.add("a", "a", 260)
    s.add("b", "b", 20)
    s.step(prefill("a", 260), prefill("b", 20))
    s.step(decode("a", finish="stop"), decode("b"))
    s.step(decode("b"))
    pages = Replay(s.trace, CacheState).at()
    assert pages.page(100).state == "free" and pages.page(262).owners
    svg = CachePagesView(s.trace, narrow=narrow).to_svg()
    assert ">224…<" in svg and ">192<" in svg


def test_shared_pages_show_how_many_share_them():
    s = Script(4, 8)
    s.add("a", "a", 10)
    s.step(prefill("a", 10))
    s.add("b", "b", 11)
    s.share("b", "a")
    s.step(prefill("b", 3))
    svg = CachePagesView(s.trace).to_svg()
    assert Counter(states(svg, "page"))["shared"] == 2
    assert svg.count("A B ×2") == 2


@pytest.mark.parametrize(
    ("num_blocks", "narrow", "two", "signs"),
    [
        (24, True, "×2", "A ×12"),
        (96, False, "×2", "A×12A×12A×12ABCDEFGHIJKL"),
        (96, True, "2", "121212ABCDEFGHIJKL"),
    ],
)
def test_a_shared_page_without_room_for_a_letter_names_the_number_of_its_owners(num_blocks, narrow, two, signs):
    s = Script(num_blocks=num_blocks, caching=True, gamma=0, seqs=12)
    s.add("a", "a", 60)
    s.step(prefill("a", 60))
    others = [f"b{i}" for i in range(11)]
    for other in others:
        s.add(other, "b", 62)
        s.share(other, "a")
    s.step(*(prefill(other, 62 - 48) for other in others))
    svg = CachePagesView(s.trace, narrow=narrow).to_svg()
    assert f"shared, {two}: two owners" in text_of(found(svg, "legend")[0])
    assert f">{signs}<" in svg


@pytest.mark.parametrize("step", range(1, 14))
def test_sharing_caching_and_copying_are_drawn_as_the_state_has_them(step):
    svg, pages = CachePagesView(sharing()).to_svg(step), state_at(sharing(), step).pages()
    assert Counter(states(svg, "page")) == Counter(page.state for page in pages)
    expected = slot_counts(pages)
    del expected["free"], expected["cached"]
    assert drawn_slots(svg) == expected
    assert len(found(svg, "copy")) == sum(page.copied_from is not None for page in pages)
    assert counted(svg, "reused") == sum(page.reused for page in pages)
    bands = {band.get("data-state"): int(band.get("data-count")) for band in found(svg, "band")}
    assert bands.get("evicted", 0) == sum(page.evicted for page in pages)
    assert bands.get("findable", 0) == sum(page.in_prefix_cache for page in pages if page.state != "cached")
    assert bool(found(svg, "usage-cached")) == any(page.state == "cached" for page in pages)


def test_the_legend_explains_all_fills_of_the_usage():
    """Also those of earlier steps only, which the history shows."""
    kinds_drawn = set()
    for trace, narrow in itertools.product((story(), sharing()), (False, True)):
        for step in trace.of(StepFinished):
            svg = CachePagesView(trace, narrow=narrow).to_svg(step.step)
            legend = text_of(found(svg, "legend")[0])
            for part, kind in itertools.product(("usage", "history"), ("written", "empty", "cached")):
                for shape in found(svg, f"{part}-{kind}"):
                    assert SWATCHES[kind][0] in legend, (part, kind, step.step)
                    assert shape.get("fill-opacity") is None
                    assert kind == "cached" or shape.get("fill") == SWATCHES[kind][1]["fill"]
                    kinds_drawn.add((part, kind))
    assert len(kinds_drawn) == 6


def test_where_nothing_is_wasted_no_empty_slots_are_drawn_or_explained():
    s = Script(block_size=4, gamma=0)
    s.add("a", "def f", 8)
    s.step(prefill("a", 8))
    svg = CachePagesView(s.trace).to_svg()
    assert found(svg, "usage-written") and found(svg, "history-written")
    assert not found(svg, "usage-empty") and not found(svg, "history-empty")
    assert "empty slot" not in text_of(found(svg, "legend")[0])


def counted(svg, testid):
    return sum(int(element.get("data-count")) for element in found(svg, testid))


def test_legend_explains_what_is_there_and_nothing_else():
    first, last = (text_of(found(CachePagesView(sharing()).to_svg(step), "legend")[0]) for step in (2, 8))
    assert "reused, not computed" in first and "copied" in first and "shared" in first
    assert "cached" not in first and "evicted" not in first
    assert "cached" in last and "written this step" not in last and "shared" not in last
    assert "written slot" in last, "in the history"


def test_legend_explains_the_outline_of_pages_that_were_freed_full_and_stay_cached():
    s = Script(num_blocks=4, caching=True)
    s.add("a", "a", 31)
    s.step(prefill("a", 31))
    s.step(decode("a", finish="length"))
    assert [page.state for page in state_at(s.trace, 2).pages()] == ["cached", "cached", "free", "free"]
    assert "freed this step" in text_of(found(CachePagesView(s.trace).to_svg(), "legend")[0])


def test_copied_page_names_its_source_and_cached_pages_are_hatched():
    assert "4←3" in CachePagesView(sharing()).to_svg(2)
    svg = CachePagesView(sharing()).to_svg(8)
    groups = [group for group in parse(svg).iter() if any(e.get("data-testid") == "page" for e in group)]
    for group in groups[1:] if groups[0].get("fill") is None else groups:
        hatched = {e.get("data-state") for e in group if e.get("data-testid") == "page"} == {"cached"}
        assert ("url(#cached-" in (group.get("fill") or "")) == hatched


def bow(arrow, share):
    """A point of the bow of an arrow between two blocks of a row."""
    sx, sy, mx, my, tx, ty = map(float, re.findall(r"-?[\d.]+", arrow[0].get("d")))
    a, b, c = (1 - share) ** 2, 2 * share * (1 - share), share**2
    return a * sx + b * mx + c * tx, a * sy + b * my + c * ty


def test_two_arrows_from_one_block_do_not_cross():
    pages = [Page(block, "used", ("r",), ("written",), copied_from=0 if block else None) for block in range(3)]
    svg = f'<svg xmlns="http://www.w3.org/2000/svg">{PageMarks(pages, geometry(len(pages), 1)).arrows()}</svg>'
    outer, inner = found(svg, "copy")
    for share in (0.0, 0.1, 0.3, 0.5, 0.8):
        x, y = bow(inner, share)
        above = min((bow(outer, i / 200) for i in range(201)), key=lambda point: abs(point[0] - x))
        assert above[1] < y - 0.4, f"at {x} the longer arrow is at {above[1]}, the shorter at {y}"


def test_outline_of_a_shared_page_has_a_stripe_per_owner():
    svg = CachePagesView(sharing()).to_svg(3)
    stripes = [e for e in parse(svg).iter() if e.get("stroke-dashoffset") or e.get("stroke-dasharray") == "6 18"]
    assert {e.get("stroke-dasharray") for e in stripes} == {"6 18"}
    assert len({e.get("stroke") for e in stripes}) == 4
    assert {float(e.get("stroke-dashoffset", 0)) for e in stripes} == {0, -6, -12, -18}, "they take turns"
    assert svg.count("A–D ×4") == 3


@pytest.mark.parametrize("narrow", [False, True])
def test_names_on_pages_do_not_run_into_each_other(narrow):
    """Requests after Z have names of two letters, and a shared page also has its number of owners. On a narrow page
    there is room for one letter."""
    s = Script(num_blocks=64)
    for i in range(30):
        s.add(str(i), "prompt", 20)
    s.step(prefill("0", 20))
    for i in range(1, 30):
        s.share(str(i), "0")
    s.step(*(prefill(str(i), 4) for i in range(1, 30)))
    svg = CachePagesView(s.trace, narrow=narrow).to_svg()
    [letters] = [e for e in parse(svg).iter() if e.get("font-size") == "9" and e.get("font-weight") == "700"]
    pages, names = geometry(64, 16, narrow=narrow), defaultdict(str)
    for text in letters:
        for x, sign in zip(map(float, text.get("x").split()), text.text, strict=True):
            place, start = divmod(x - pages.left, pages.pitch)
            names[place] += sign
            assert start + 0.6 * float(text.get("font-size", 9)) <= pages.page_width
    shown, beyond_z = [names[place] for place in sorted(names)], ["AA", "AB", "AC", "AD"]
    assert shown == (["30", "A", *ascii_uppercase[1:]] if narrow else ["A×30", "A", *ascii_uppercase[1:], *beyond_z])


def test_whole_places_are_bars_with_the_same_counts():
    s = Script(1024, 8, layout="contiguous")
    s.add("a", "def f():", 300)
    s.add("b", "class A:", 20)
    s.step(prefill("a", 300), prefill("b", 20))
    s.step(decode("a"), verify("b", ["x", "y"], 1, "z"))
    svg = CachePagesView(s.trace).to_svg()
    assert drawn_slots(svg) == {"written": 320, "fresh": 3, "rolled_back": 1, "empty": 2 * 1024 - 324}
    assert states(svg, "page") == ["used", "used", *["free"] * 6]
    order = [path.get("data-state") for path in found(svg, "slots")]
    # What is widened to be seen must not be covered by the empty part beside it.
    assert order == ["empty", "written", "fresh", "empty", "written", "fresh", "rolled_back"]
    assert len(svg) < 10_000
    assert "2 used, 6 free; waste 1725 of 2048 slots (84%)" in description(svg)
    assert "8 places of 1024 slots" in description(svg)


def test_pictures_exist_before_anything_has_happened():
    assert "waiting for the engine" in CachePagesView(Trace()).to_svg()
    assert "nothing has run yet" in CachePagesView(Trace(story().events[:1])).to_svg()
    for end in range(1, len(story())):
        parse(CachePagesView(Trace(story().events[:end])).to_svg())


def test_telling_step_is_the_frame_for_print():
    view = CachePagesView(story())
    assert view.most_informative_step() == 3
    assert CachePagesView(Trace()).most_informative_step() is None


def test_unknown_step_is_refused():
    with pytest.raises(TraceError, match="steps 1 to 9"):
        CachePagesView(story()).to_svg(10)


def test_words_alone_tell_the_block_tables():
    told = CachePagesView(story()).describe(4)
    assert "B 'for·line·in·path.read_text()'" in told
    assert "[2, 3, 9]" in told


def test_growing_trace_gives_the_same_pictures_as_a_complete_one():
    """A live view folds event by event; nothing may be lost or counted twice on the way."""
    whole, growing = story(), Trace()
    view, reference = CachePagesView(growing), CachePagesView(whole)
    for event in whole:
        growing.append(event)
        if isinstance(event, StepFinished):
            assert view.to_svg() == reference.to_svg(event.step)


@pytest.mark.parametrize("layout", [{"layout": "window", "window": 16}, {"layout": "sinks", "window": 16}], ids=str)
def test_a_layout_that_drops_tokens_is_not_said_to_waste_slots(tiny: TinyPair, layout: dict[str, object]) -> None:
    """A place has room for the whole context, but the layout uses memory for the window only."""
    llm = LLM(str(tiny.target), kv_cache_config=layout)
    with llm.trace() as trace:
        [request] = llm.submit("import os", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        while request.num_output_tokens < 30:
            llm.engine.step()
        state = CacheState().fold_all(trace)
        words = describe(state)
        while not request.finished:
            llm.engine.step()
    assert f"{request.num_prompt_tokens + 29} of {request.num_prompt_tokens + 30} tokens computed" in words
    assert "waste" not in words and "in the cache" not in words and "not all are kept" in words
    svg = CachePagesView(trace).to_svg(state.step)
    assert "empty slot" in svg and "waste" not in svg and "IN CACHE" not in svg and "COMPUTED" in svg
    assert RunMetrics.of(trace).waste_share == 0


def test_a_prompt_that_is_computed_again_after_a_preemption_is_a_recomputation(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), block_size=4, enable_prefix_caching=False)
    with llm.trace() as trace:
        [request] = llm.submit("import os", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        llm.engine.step()
        first = describe(CacheState().fold_all(trace))
        while request.num_output_tokens < 20:
            llm.engine.step()
        llm.engine.scheduler._preempt(request)
        llm.engine.step()
        again = describe(CacheState().fold_all(trace))
    llm.engine.abort(request.request_id)
    prompt = request.num_prompt_tokens
    assert f"(prefill {prompt} of {prompt})" in first
    assert f"(recompute {prompt + 20} of {prompt + 21})" in again


@pytest.mark.parametrize(("narrow", "rows"), [(False, 12), (True, 6)])
def test_of_many_requests_the_description_of_the_picture_names_those_that_are_drawn(narrow, rows):
    s = Script(num_blocks=120)
    for i in range(100):
        s.add(f"req-{i}", "for i in range(...):", 10)
    s.step(*(prefill(f"req-{i}", 10) for i in range(100)))
    view = CachePagesView(s.trace, narrow=narrow)
    words = description(view.to_svg())
    assert words.count("Request ") == rows and f". And {100 - rows} more requests. This step: " in words
    assert all(owner_letter(i) + " 'for·i·in·range(...):'" in view.describe() for i in range(100))


def test_long_prompts_are_not_read_to_their_end_in_every_frame(monkeypatch):
    s, read, real = Script(num_blocks=64, budget=1024), [], glyphs.printable
    for name in ("a", "b"):
        s.add(name, "def f(x):\n" * 20_000 + name, 200)
    s.step(prefill("a", 200), prefill("b", 200))
    monkeypatch.setattr(glyphs, "printable", lambda char: read.append(char) or real(char))
    for view in (CachePagesView(s.trace), CachePagesView(s.trace, narrow=True), TimelineView(s.trace)):
        assert "…a" in view.to_svg() and "…b" in view.to_svg()
        assert "def·f(x):⏎def" in view.describe()
    assert len(read) < 20_000
