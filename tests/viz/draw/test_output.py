"""Pictures as notebook outputs: ids of their own, a size that gives way, one way for all of them."""

from __future__ import annotations

import re

import pytest

from minillm.errors import ConfigError
from minillm.viz import AcceptanceStrip, CachePagesView, ErrorMap, show
from minillm.viz.charts import Axis, LineChart, Series
from minillm.viz.draw.output import NARROW, as_html, output, place, stack
from tests.trace.traces import story
from tests.viz.pictures import parse

CHART = LineChart("t", Axis("x"), Axis("y"), [Series("s", (1, 2), (3, 4))], "d")


def ids(html):
    return re.findall(r' id="([^"]+)"', html)


def references(html):
    return {found[0] or found[1] for found in re.findall(r'url\(#([^)]+)\)|aria-labelledby="(\S+) ', html)}


def box(width, height=10):
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}"></svg>'


def test_the_same_picture_shown_twice_shares_no_id():
    """A browser takes the first element with an id, and a hatch of an output that is hidden paints nothing."""
    view = CachePagesView(story())
    pages = view._repr_mimebundle_()["text/html"] + view._repr_mimebundle_()["text/html"]
    assert len(ids(pages)) == len(set(ids(pages))) >= 6
    assert references(pages) <= set(ids(pages)), "every hatch refers to a pattern that is there"


def test_the_same_picture_has_the_same_bytes_in_files():
    assert CachePagesView(story()).to_svg() == CachePagesView(story()).to_svg()
    picture = CHART.to_svg()
    assert place(picture, "a") == place(picture, "a") != place(picture, "b")


@pytest.mark.parametrize("picture", [CachePagesView(story()), ErrorMap({"e": [[1.0, 2.0]]}), CHART])
def test_every_picture_comes_as_html_that_scales_and_as_svg(picture):
    data = picture._repr_mimebundle_()
    assert {"text/plain", "text/html", "image/svg+xml"} <= set(data)
    assert "max-width:100%;height:auto" in data["text/html"]
    assert data["image/svg+xml"] in data["text/html"]


def test_show_displays_a_picture_in_the_middle_of_a_cell_at_any_step(monkeypatch):
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda data, raw=False: shown.append((data, raw)))
    view = CachePagesView(story())
    show(view, step=3)
    show(CHART)
    (bundle, raw), (chart, _) = shown
    assert raw and "step 3" in bundle["text/html"] and bundle["text/plain"] == "<CachePagesView>"
    assert chart is CHART
    with pytest.raises(ConfigError, match=f"step=3 of {CHART!r}, which has no steps"):
        show(CHART, step=3)


def test_narrow_pictures_stand_beside_each_other_and_wide_ones_below():
    assert "flex-wrap:wrap" in as_html([box(NARROW), box(NARROW)])
    assert "flex" not in as_html([box(NARROW + 1), box(NARROW)]) + as_html([box(NARROW)])
    assert 'viewBox="0 0 810 30"' in stack([box(400, 30), box(400, 20)])
    assert 'viewBox="0 0 900 60"' in stack([box(900, 30), box(400, 20)])


def test_pictures_in_one_output_share_no_id():
    trace = story()
    data = output("both", [CachePagesView(trace).to_svg(), AcceptanceStrip(trace).to_svg()])
    assert len(ids(data["text/html"])) == len(set(ids(data["text/html"])))
    parse(data["image/svg+xml"])
