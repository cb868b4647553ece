"""Live views: at most ten frames a second, the last frame always, and never in the engine's way."""

from __future__ import annotations

import re
import subprocess
import sys
import threading

import pytest

from minillm.errors import ConfigError
from minillm.trace import StepFinished, Trace
from minillm.viz import AcceptanceStrip, CachePagesView, LiveView
from minillm.viz.draw.output import place
from tests.trace.traces import story
from tests.viz.pictures import found, parse


class FakeDisplay:
    """Remembers what a notebook would show."""

    def __init__(self):
        self.frames = []

    def __call__(self, frame):
        self.frames.append(frame)
        return self

    def update(self, obj, *, raw):
        assert raw
        self.frames.append(obj)


class FakeClock:
    def __init__(self):
        self.now = 0.0
        self.slept = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def play(trace, source, clock, seconds_per_step):
    for event in source:
        trace.append(event)
        if isinstance(event, StepFinished):
            clock.now += seconds_per_step


def live(trace, clock, display, pause=0.0):
    return LiveView(CachePagesView(trace), pause=pause, show=display, clock=clock, sleep=clock.sleep)


def test_fast_engine_is_drawn_ten_times_a_second_at_most():
    trace, clock, display = Trace(), FakeClock(), FakeDisplay()
    with live(trace, clock, display):
        for _ in range(30):
            play(trace, [StepFinished(1, 0.0, 0.0, 0.0, 0)], clock, 0.01)
    # One when opened, two in 0.3 seconds (at 0.1 and 0.2), and the last.
    assert len(display.frames) == 4


def test_slow_engine_is_drawn_at_every_step():
    trace, clock, display = Trace(), FakeClock(), FakeDisplay()
    with live(trace, clock, display):
        clock.now += 1
        play(trace, story(), clock, 0.5)
    assert len(display.frames) == 1 + 9 + 1


def told_by(svg):
    """Step of a picture in HTML or SVG."""
    return re.findall(r"<title[^>]*>[^<]*step (\d+)", svg)


def test_what_stays_is_a_replay_of_every_step_that_opens_at_the_most_telling_one():
    trace, clock, display = Trace(), FakeClock(), FakeDisplay()
    with live(trace, clock, display):
        play(trace, story(), clock, 0.0)
    assert len(display.frames) == 2
    still, recording = display.frames[-1]["text/html"].split("<script>")
    assert told_by(still) == ["3"], "the step with the most used blocks"
    assert '"steps":[1,2,3,4,5,6,7,8,9]' in recording


def test_replay_plays_by_itself_only_if_a_length_is_given():
    for seconds, autoplay, speed in ((None, "false", "2.0"), (6, "true", "1.5")):
        trace, clock, display = Trace(), FakeClock(), FakeDisplay()
        with LiveView(CachePagesView(trace), seconds=seconds, show=display, clock=clock, sleep=clock.sleep):
            play(trace, story(), clock, 0.0)
        assert f'"speed":{speed},"autoplay":{autoplay}' in display.frames[-1]["text/html"]


def test_last_frame_is_drawn_even_if_the_engine_was_interrupted():
    trace, clock, display = Trace(), FakeClock(), FakeDisplay()
    with pytest.raises(KeyboardInterrupt), live(trace, clock, display):
        play(trace, story().events[:20], clock, 0.0)
        raise KeyboardInterrupt
    last = CachePagesView(Trace(story().events[:20])).trace.of(StepFinished)[-1].step
    assert f'"steps":{list(range(1, last + 1))}'.replace(" ", "") in display.frames[-1]["text/html"]


def test_pause_lets_every_step_be_seen():
    trace, clock, display = Trace(), FakeClock(), FakeDisplay()
    with live(trace, clock, display, pause=0.25):
        play(trace, story(), clock, 0.0)
    assert clock.slept == [0.25] * 9
    assert len(display.frames) == 1 + 8 + 1  # the first step ended in the instant of opening


def test_plain_text_is_constant_so_that_saved_notebooks_compare_equal():
    trace, clock, display = Trace(), FakeClock(), FakeDisplay()
    with LiveView(CachePagesView(trace), AcceptanceStrip(trace), show=display, clock=clock, sleep=clock.sleep):
        play(trace, story(), clock, 0.2)
    assert {frame["text/plain"] for frame in display.frames} == {"<CachePagesView> <AcceptanceStrip>"}


def test_only_the_last_frame_carries_a_still_picture_of_all_views():
    trace, clock, display = Trace(), FakeClock(), FakeDisplay()
    with LiveView(CachePagesView(trace), AcceptanceStrip(trace), show=display, clock=clock, sleep=clock.sleep):
        play(trace, story(), clock, 0.2)
    assert [("image/svg+xml" in frame) for frame in display.frames[:-1]] == [False] * (len(display.frames) - 1)
    still = display.frames[-1]["image/svg+xml"]
    root = parse(still)
    heights = [float(svg.get("height")) for svg in root]
    assert [svg.get("data-testid") for svg in root] == ["cache-pages", "token-acceptance"]
    assert float(root[1].get("y")) == heights[0] + 10
    assert float(root.get("height")) == sum(heights) + 10
    assert len(found(still, "page")) == 24


def test_views_of_two_traces_end_with_the_last_pictures_of_both():
    one, two, clock, display = Trace(), Trace(), FakeClock(), FakeDisplay()
    with LiveView(CachePagesView(one), CachePagesView(two), show=display, clock=clock, sleep=clock.sleep):
        play(one, story(), clock, 0.0)
        play(two, story(), clock, 0.0)
    assert told_by(display.frames[-1]["image/svg+xml"]) == ["9", "9"]


def test_nothing_is_drawn_after_the_block():
    trace, clock, display = Trace(), FakeClock(), FakeDisplay()
    with live(trace, clock, display):
        pass
    before = len(display.frames)
    clock.now += 10
    play(trace, story(), clock, 1.0)
    assert len(display.frames) == before


def test_one_trace_behind_two_views_is_watched_once():
    trace, clock, display = Trace(), FakeClock(), FakeDisplay()
    with LiveView(CachePagesView(trace), AcceptanceStrip(trace), pause=1, show=display, clock=clock, sleep=clock.sleep):
        play(trace, story(), clock, 0.0)
    assert clock.slept == [1] * 9


def test_large_frames_are_sent_less_often():
    trace, clock, display = Trace(), FakeClock(), FakeDisplay()

    class Huge(CachePagesView):
        def to_svg(self, step=None):
            return "x" * 250_000

    with LiveView(Huge(trace), show=display, clock=clock, sleep=clock.sleep):
        for _ in range(20):
            clock.now += 0.1
            trace.append(StepFinished(1, 0.0, 0.0, 0.0, 0))
        # Each frame of 250 KB is worth half a second: at 0.1, 0.6 (or 0.7), … of two seconds.
        assert len(display.frames) - 1 <= 4


def test_slow_pictures_take_a_fifth_of_the_time_at_most():
    """The engine waits while one is drawn."""
    trace, clock, display = Trace(), FakeClock(), FakeDisplay()

    class Slow(CachePagesView):
        def to_svg(self, step=None):
            clock.now += 0.5
            return super().to_svg(step)

    with LiveView(Slow(trace), show=display, clock=clock, sleep=clock.sleep):
        started = clock.now
        for _ in range(100):
            clock.now += 0.1
            trace.append(StepFinished(1, 0.0, 0.0, 0.0, 0))
        drawing = 0.5 * (len(display.frames) - 1)
        assert len(display.frames) >= 3 and drawing <= (clock.now - started) / 5 + 0.5


def test_view_that_cannot_be_drawn_does_not_stop_the_engine():
    trace, clock, display = Trace(), FakeClock(), FakeDisplay()
    with (
        pytest.warns(RuntimeWarning, match="the live picture stopped.*nobody"),
        LiveView(AcceptanceStrip(trace, "nobody"), show=display, clock=clock, sleep=clock.sleep),
    ):
        clock.now += 1
        play(trace, story(), clock, 1.0)
    assert len(trace) == len(story())
    assert len(display.frames) == 1


def test_a_view_that_cannot_be_drawn_at_the_start_or_told_at_the_end_does_not_stop_the_engine():
    """The trace has a request already, so this view of another one fails at once."""
    for show in (FakeDisplay(), lambda frame: None):
        trace = Trace(story())
        warned = pytest.warns(RuntimeWarning, match="the live picture stopped.*nobody")
        with warned, LiveView(AcceptanceStrip(trace, "nobody"), show=show):
            trace.append(StepFinished(99, 0.0, 0.0, 0.0, 0))
        assert len(trace) == len(story()) + 1


def test_a_view_that_is_closed_is_forgotten_by_its_trace():
    trace, display = Trace(), FakeDisplay()
    view = CachePagesView(trace)
    before = len(trace._watchers)
    with LiveView(view, show=display):
        assert len(trace._watchers) == before + 1
    assert len(trace._watchers) == before


def test_outside_a_notebook_the_end_is_told_in_words(capsys):
    trace = Trace()
    with LiveView(CachePagesView(trace)):
        for event in story():
            trace.append(event)
    printed = capsys.readouterr().out
    assert printed.startswith("KV cache pages, step 9. 24 blocks of 16 slots: 0 used, 24 free")
    assert "\x1b" not in printed


def test_views_show_themselves_as_the_last_expression_of_a_cell():
    view = CachePagesView(story())
    bundle = view._repr_mimebundle_()
    assert bundle["text/plain"] == repr(view) == "<CachePagesView>"
    [name] = set(re.findall(r' id="t-([-0-9a-f]{36})"', bundle["image/svg+xml"]))
    assert bundle["image/svg+xml"] == place(view.to_svg(), name)
    assert bundle["text/html"] == f"<div>{place(view.to_svg(), name)}</div>"


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="at least one view"):
        LiveView()
    with pytest.raises(ConfigError, match="pause = -1 seconds"):
        LiveView(CachePagesView(Trace()), pause=-1)
    with pytest.raises(ConfigError, match="seconds = 0 for the replay"):
        LiveView(CachePagesView(Trace()), seconds=0)


def test_ipython_display_keeps_one_output(monkeypatch):
    """Through IPython's own `display`: one display id, updated in place."""
    pytest.importorskip("IPython")
    from IPython.core import display_functions
    from IPython.core.interactiveshell import InteractiveShell

    sent = []
    shell = InteractiveShell.instance()
    monkeypatch.setattr(shell, "kernel", object(), raising=False)
    monkeypatch.setattr(display_functions, "publish_display_data", lambda **message: sent.append(message))
    trace = Trace()
    try:
        with LiveView(CachePagesView(trace)):
            for event in story():
                trace.append(event)
    finally:
        InteractiveShell.clear_instance()
    assert len({message["transient"]["display_id"] for message in sent}) == 1
    assert [message.get("update", False) for message in sent] == [False] + [True] * (len(sent) - 1)
    assert '"steps":[1,2,3,4,5,6,7,8,9]' in sent[-1]["data"]["text/html"]


def test_pictures_need_no_heavy_import():
    code = "import sys, minillm.viz; print([m for m in ('torch', 'IPython', 'plotly', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"\[('torch')?\]", done.stdout.strip())


def test_a_frame_of_another_thread_is_not_shown_after_the_last_one():
    trace, display, drawing, may_go_on = Trace(), FakeDisplay(), threading.Event(), threading.Event()

    class Slow(CachePagesView):
        def to_svg(self, step=None):
            if threading.current_thread() is engine:
                drawing.set()
                may_go_on.wait(10)
            return super().to_svg(step)

    clock = FakeClock()
    engine = threading.Thread(target=play, args=(trace, story().events[:20], clock, 1.0))
    with LiveView(Slow(trace), show=display, clock=clock, sleep=clock.sleep):
        clock.now += 1
        engine.start()
        assert drawing.wait(10)
        threading.Timer(0.3, may_go_on.set).start()
    engine.join(10)
    assert "<script>" in display.frames[-1]["text/html"]
