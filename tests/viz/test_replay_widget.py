"""The replay widget in Python: its frames, its limits, and what a notebook keeps of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from minillm.errors import ConfigError
from minillm.trace import Trace
from minillm.viz import AcceptanceStrip, CachePagesView, TimelineView, replay_widget
from minillm.viz.cache_rows import CacheRowsView, RowsWritten
from minillm.viz.replay_widget import ReplayWidget

from .traces import busy, sharing, story


def test_frames_are_the_pictures_of_all_steps():
    view = CachePagesView(story())
    widget = ReplayWidget(view)
    assert widget.steps == list(range(1, 10))
    assert widget.frames == [view.to_svg(step) for step in widget.steps]
    assert widget.texts == [view.describe(step) for step in widget.steps]
    assert (widget.index, widget.note, widget.name) == (0, "", "CachePagesView")


def test_several_views_of_one_trace_move_together():
    trace = story()
    widget = ReplayWidget(CachePagesView(trace), AcceptanceStrip(trace), TimelineView(trace))
    assert widget.frames[3].count("<svg") == 3
    assert repr(widget) == "<Replay of CachePagesView and AcceptanceStrip and TimelineView>"


def test_saved_notebook_keeps_the_last_frame_and_a_constant_text():
    trace = sharing()
    data, _ = ReplayWidget(CachePagesView(trace))._repr_mimebundle_()
    last = CachePagesView(trace).to_svg()
    assert data["text/plain"] == "<Replay of CachePagesView>"
    assert last in data["text/html"]
    assert data["image/svg+xml"] == last
    assert "application/vnd.jupyter.widget-view+json" in data


def test_display_goes_through_the_bundle_with_old_ipywidgets_too():
    """ipywidgets 7 has `_ipython_display_`, which IPython prefers to the bundle if it can be called."""
    assert not callable(getattr(ReplayWidget(CachePagesView(story())), "_ipython_display_", None))


def test_long_runs_are_sampled_evenly_and_say_so(monkeypatch):
    monkeypatch.setattr(replay_widget, "MAX_FRAMES", 5)
    widget = ReplayWidget(CachePagesView(sharing()))
    assert widget.steps == [1, 4, 7, 10, 13]
    assert widget.note == "5 of 13 steps, evenly spread"


def test_frames_stay_within_their_limit(monkeypatch):
    monkeypatch.setattr(replay_widget, "MAX_BYTES", 150_000)
    widget = ReplayWidget(CachePagesView(busy()))
    size = sum(len(part.encode()) for part in (*widget.frames, *widget.texts))
    assert 100_000 < size <= 150_000
    assert (widget.steps[0], widget.steps[-1]) == (1, 15)
    assert widget.note == f"{len(widget.frames)} of 15 steps, evenly spread"


def test_views_without_step_events_replay_their_own_steps():
    rows = [RowsWritten("grow", past, 1, past, past + 1) for past in range(4)]
    assert ReplayWidget(CacheRowsView(Trace(rows))).steps == [1, 2, 3, 4]


@pytest.mark.parametrize("speed", [0, -1, 31, float("nan")])
def test_impossible_speed_is_refused(speed):
    with pytest.raises(ConfigError, match="speed="):
        ReplayWidget(CachePagesView(story()), speed=speed)


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
    code = "from minillm.viz import ReplayWidget; import minillm.viz; minillm.viz.nonsense"
    assert b"has no attribute 'nonsense'" in subprocess.run([sys.executable, "-c", code], capture_output=True).stderr
