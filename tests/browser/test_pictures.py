"""No picture of any lesson has text on text, text outside, or a cut-off edge, at two widths and in two themes."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from minillm.trace import Trace
from minillm.viz import AcceptanceStrip, CachePagesView, ReplayWidget
from minillm.viz.live.replay_frames import spread
from tests.browser.conftest import ROOT
from tests.browser.text_boxes import Shown, faults, open_pictures, pictures_of
from tests.trace.traces import busy, sharing, story

SOLUTIONS = sorted((ROOT / "solutions").glob("*.ipynb"))
WIDTHS, THEMES = (1400, 900), ("light", "dark")
PLOTLY = Path(str(importlib.resources.files("plotly") / "package_data" / "plotly.min.js"))
PAPER = '<rect width="300" height="90" fill="#ffffff"/>'
GOOD = f'<svg width="300" height="90">{PAPER}<text x="10" y="20">one</text><text x="10" y="50">two</text></svg>'


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    """One page for all pictures: reading plotly takes longer than drawing with it."""
    page = browser.new_page(viewport={"width": WIDTHS[0], "height": 800})
    page.set_content("<!doctype html><body></body>")
    yield page
    page.close()


def found_in(page: Page, shown: list[Shown], widths: tuple[int, ...] = WIDTHS) -> list[str]:
    page.set_viewport_size({"width": widths[0], "height": 800})
    open_pictures(page, shown, PLOTLY)
    return [fault for width in widths for theme in THEMES for fault in faults(page, width, theme)]


@pytest.mark.parametrize("notebook", SOLUTIONS, ids=lambda path: path.stem)
def test_every_picture_of_a_lesson_can_be_read(page: Page, notebook: Path) -> None:
    shown = list(pictures_of(notebook))
    assert shown, "a lesson without pictures"
    assert found_in(page, shown) == []


@pytest.mark.parametrize("trace", [story, sharing, busy], ids=lambda make: make.__name__)
def test_the_live_cards_can_be_read_in_every_step(page: Page, trace: Callable[[], Trace]) -> None:
    recorded = trace()
    replay = ReplayWidget(CachePagesView(recorded, narrow=True), AcceptanceStrip(recorded, narrow=True))
    chosen = [replay.steps.index(step) for step in spread(replay.steps, 9)]
    shown = [Shown(f"step {replay.steps[index]}", replay.frames[index]) for index in chosen]
    assert len(shown) > 3 and all("<svg" in one.html for one in shown)
    assert found_in(page, shown) == []


@pytest.mark.parametrize(
    ("html", "fault"),
    [
        (GOOD.replace('y="50"', 'y="24"'), "'one' lies on 'two'"),
        (GOOD.replace('x="10" y="50"', 'x="285" y="50"'), "'two' sticks out of its picture"),
        (GOOD.replace('y="20"', 'y="4"'), "'one' sticks out of its picture"),
        (GOOD.replace('width="300" height="90"', 'width="1500" height="90"'), "the picture is cut off"),
        (GOOD.replace("#ffffff", "none"), "no white paper behind it"),
    ],
)
def test_a_planted_fault_is_found(page: Page, html: str, fault: str) -> None:
    assert found_in(page, [Shown("good", GOOD)], (900,)) == []
    found = found_in(page, [Shown("bad", html)], (900,))
    assert found and all(fault in one for one in found)


def test_a_planted_overlap_in_a_plotly_figure_is_found(page: Page) -> None:
    note = {"x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper", "showarrow": False}
    layout = {
        "height": 300,
        "paper_bgcolor": "#ffffff",
        "annotations": [note | {"text": "here"}, note | {"text": "there"}],
    }
    figure = {"data": [{"type": "scatter", "x": [1, 2], "y": [1, 2]}], "layout": layout}
    found = found_in(page, [Shown("chart", figure=figure)], (900,))
    assert found and all("'here' lies on 'there'" in one for one in found)
