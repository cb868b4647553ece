"""The replay widget in Python: its frames, its limits, and what a notebook keeps of it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from minillm.errors import ConfigError
from minillm.trace import Trace
from minillm.viz import AcceptanceStrip, CachePagesView, TimelineView
from minillm.viz.live import replay_widget
from minillm.viz.live.replay_frames import MAX_BYTES, MAX_TEXT, pack
from minillm.viz.live.replay_script import SCRIPT
from minillm.viz.live.replay_widget import ReplayWidget, draw_fitting
from minillm.viz.pages.cache_rows import CacheRowsView, RowsWritten
from tests.trace.traces import Script, busy, decode, prefill, sharing, story


def without_ids(html):
    """Ids and references differ from placement to placement, and nothing else does."""
    return re.sub(r"-(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})-\d|-\ue000\d|-[0-9a-f]{8}(?=[ \")])", "-ID", html)


def test_frames_are_the_pictures_of_all_steps():
    view = CachePagesView(story())
    widget = ReplayWidget(view)
    assert widget.steps == list(range(1, 10))
    expected = [without_ids(f"<div>{view.to_svg(step)}</div>") for step in widget.steps]
    assert [without_ids(frame) for frame in widget.frames] == expected
    assert widget.texts == [view.describe(step) for step in widget.steps]
    assert (widget.note, widget.name) == ("", "CachePagesView")


def unpacked(packed):
    """The original texts, as the script in the browser computes them."""
    return ["".join("".join(packed.parts[first : first + count]) for first, count in runs) for runs in packed.frames]


def test_frames_are_packed_without_loss_and_much_smaller():
    frames = ReplayWidget(CachePagesView(busy())).frames
    packed = pack(frames)
    assert unpacked(packed) == frames
    assert packed.num_bytes < 0.7 * sum(len(frame.encode()) for frame in frames)
    assert unpacked(pack(["one\ntwo\n", "one\nthree\n", ""])) == ["one\ntwo\n", "one\nthree\n", ""]


def test_several_views_of_one_trace_move_together():
    trace = story()
    widget = ReplayWidget(CachePagesView(trace), AcceptanceStrip(trace), TimelineView(trace))
    assert widget.frames[3].count("<svg") == 3
    assert repr(widget) == "<Replay of CachePagesView and AcceptanceStrip and TimelineView>"


def test_saved_notebook_keeps_the_most_telling_frame_and_nothing_that_needs_a_kernel():
    """Widget views show an error instead of a picture once their kernel is gone."""
    trace = sharing()
    view = CachePagesView(trace)
    widget = ReplayWidget(view)
    data = widget._repr_mimebundle_()
    telling = view.to_svg(view.most_informative_step())
    assert set(data) == {"text/plain", "text/html", "image/svg+xml"}
    assert data["text/plain"] == "<Replay of CachePagesView>"
    assert widget.steps[widget.start] == view.most_informative_step()
    assert without_ids(data["image/svg+xml"]) == without_ids(telling)
    assert without_ids(telling) in without_ids(data["text/html"].partition("<script>")[0])


def test_a_still_picture_does_not_depend_on_how_quickly_frames_are_drawn(monkeypatch):
    quick = ReplayWidget(CachePagesView(sharing()))
    monkeypatch.setattr(replay_widget, "draw_fitting", lambda draw, every: [(step, draw(step)) for step in (1, 13)])
    slow = ReplayWidget(CachePagesView(sharing()))
    assert slow.steps == [1, 13] and quick.steps[quick.start] not in slow.steps
    stills = [without_ids(widget._repr_mimebundle_()["image/svg+xml"]) for widget in (quick, slow)]
    assert stills[0] == stills[1]


def test_recording_cannot_end_its_script_early():
    data = ReplayWidget(AcceptanceStrip(story()))._repr_mimebundle_()
    script = data["text/html"].partition("<script>")[2]
    assert script.count("</script>") == 1 and script.endswith("</script></div>")
    assert "<!--" not in script


def test_long_runs_are_sampled_evenly_and_say_so(monkeypatch):
    monkeypatch.setattr(replay_widget, "MAX_FRAMES", 5)
    widget = ReplayWidget(CachePagesView(sharing()))
    assert widget.steps == [1, 4, 7, 10, 13]
    assert widget.note == "5 of 13 steps, evenly spread"


def test_frames_stay_within_their_limit(monkeypatch):
    monkeypatch.setattr(replay_widget, "MAX_BYTES", 100_000)
    widget = ReplayWidget(CachePagesView(busy()))
    assert 60_000 < pack(widget.frames).num_bytes <= 100_000
    assert (widget.steps[0], widget.steps[-1]) == (1, 15)
    assert widget.note == f"{len(widget.frames)} of 15 steps, evenly spread"


def test_each_frame_is_drawn_once_however_few_fit(monkeypatch):
    monkeypatch.setattr(replay_widget, "MAX_BYTES", 100_000)
    drawn, to_svg = [], CachePagesView.to_svg
    monkeypatch.setattr(CachePagesView, "to_svg", lambda view, step=None: drawn.append(step) or to_svg(view, step))
    widget = ReplayWidget(CachePagesView(busy()))
    assert sorted(drawn) == list(range(1, 16)) and len(widget.frames) < 15


@pytest.mark.parametrize(("seconds", "gap"), [(0.0, 1), (0.1, 8), (0.02, 1), (0.03, 2), (100.0, 32)])
def test_no_more_frames_are_drawn_than_time_allows(seconds, gap):
    """For 225 steps; they are evenly spaced whenever the drawing ends."""
    drawn = []
    shown = draw_fitting(
        lambda step: drawn.append(step) or f"frame {step}", range(1, 226), lambda: seconds * len(drawn)
    )
    assert shown == [(step, f"frame {step}") for step in range(1, 226, gap)]
    assert sorted(drawn) == list(range(1, 226, gap))


def test_texts_stay_within_their_limit_and_keep_beginning_and_end():
    """The block tables of a long prompt are in the text of every step."""
    s = Script(num_blocks=5000)
    s.step()
    s.add("a", "a", 16 * 4000)
    s.step(prefill("a", 16 * 4000))
    for _ in range(28):
        s.step(decode("a"))
    view = CachePagesView(s.trace)
    first, last = view.describe(1), view.describe(30)
    assert len(last) * 28 > MAX_BYTES
    texts = ReplayWidget(view).texts
    assert pack(texts).num_bytes <= MAX_BYTES
    assert max(map(len, texts)) <= MAX_TEXT + 3
    assert texts[0] == first
    beginning, end = texts[-1].split(" … ")
    assert beginning.startswith("KV cache pages, step 30.") and end.endswith("This step: A wrote 1 slot.")
    assert last.startswith(beginning) and last.endswith(end)


def test_a_run_can_be_asked_to_take_a_number_of_seconds():
    widget = ReplayWidget(CachePagesView(sharing()), seconds=10)
    assert widget.speed == 1.3
    assert len(widget.steps) / widget.speed == pytest.approx(10, rel=0.05)


def test_views_without_step_events_replay_their_own_steps():
    rows = [RowsWritten("grow", past, 1, past, past + 1) for past in range(4)]
    assert ReplayWidget(CacheRowsView(Trace(rows))).steps == [1, 2, 3, 4]


@pytest.mark.parametrize("speed", [0, -1, 31, float("nan")])
def test_impossible_speed_is_refused(speed):
    with pytest.raises(ConfigError, match="speed="):
        ReplayWidget(CachePagesView(story()), speed=speed)


@pytest.mark.parametrize("seconds", [0, -1, 601, float("nan")])
def test_impossible_length_is_refused(seconds):
    with pytest.raises(ConfigError, match=f"seconds = {seconds} for the replay"):
        ReplayWidget(CachePagesView(story()), seconds=seconds)


def test_speeds_are_in_frames_because_steps_may_be_left_out(monkeypatch):
    monkeypatch.setattr(replay_widget, "MAX_FRAMES", 5)
    html = ReplayWidget(CachePagesView(sharing()))._repr_mimebundle_()["text/html"]
    assert "frames/s`" in html and "steps/s" not in html


def test_nothing_to_replay_is_refused():
    with pytest.raises(ConfigError, match="got no view"):
        ReplayWidget()
    with pytest.raises(ConfigError, match="views of 2 traces"):
        ReplayWidget(CachePagesView(story()), CachePagesView(story()))
    with pytest.raises(ConfigError, match="no step of the trace has finished"):
        ReplayWidget(CachePagesView(Trace()))


def test_pictures_do_not_import_widgets():
    code = "import sys, minillm.viz; sys.exit('anywidget' in sys.modules or 'ipywidgets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ids_of_frames_hold_what_no_text_can_hold():
    """The script replaces it, and must not change a prompt."""
    s = Script()
    s.add("a", "-placement- \ue000", 4)
    s.step(prefill("a", 4))
    widget = ReplayWidget(CachePagesView(s.trace))
    [frame] = widget.frames
    assert frame.count("\ue000") == len(re.findall(r'(?:id="|url\(#|aria-labelledby="| d-)[a-z-]*\ue0000', frame)) > 4
    assert "-placement-" in frame and "-placement-" not in SCRIPT
