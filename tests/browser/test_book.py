"""The book in a real browser, with the network off: replays play, and pictures can be read in both themes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from minillm.book.dark_theme import dark_css
from minillm.viz import AcceptanceStrip, CachePagesView, LossTiles, MovedSuffix, SplitLayer, TimelineView
from minillm.viz.speculation.overlap import OverlapBars
from minillm.viz.timeline.latency_waterfall import COLOURS, Latency, LatencyWaterfall
from tests.browser.accessibility import violations
from tests.browser.conftest import ROOT
from tests.browser.text_contrast import low_contrasts
from tests.trace.traces import story

PAGES = ("index", "glossary", "search", "lessons/index", "techniques/index", "techniques/beside-contrastive")
"""One of each kind but lessons, and the one with the replay."""
LONG_PAGES = ("lessons/02_kv_cache", "engine", "tested", "measured", "genindex", "source/minillm.batch")
LESSONS = sorted(path.stem for path in (ROOT / "solutions").glob("*.ipynb"))
TOKENS = ["def", " f", "(", "x", ")", ":", "\n", " return", " x"]
DRAWN_NOW = (
    SplitLayer([(range(i, i + 1), range(i, i + 1)) for i in range(8)], 8, 768, 288),
    SplitLayer([(range(3), range(1)), (range(3, 6), range(1, 2))], 6, 768, 288),
    MovedSuffix(TOKENS, 3, 4, ["width", ",", " height"], [1.0, 0.1, 0.001]),
    LossTiles([[0.05, 0.9, 0.05], [0.125, 0.625, 0.25], [0.2, 0.2, 0.6]], 8, at=(1, 1)),
    TimelineView(story()),
    AcceptanceStrip(story()),
    AcceptanceStrip(story(), narrow=True),
    LatencyWaterfall("Parts", [Latency("all", dict.fromkeys(COLOURS, 0.02))]),
    OverlapBars(("for", "if"), (0.7, 0.3), (0.3, 0.7)),
)
"""Pictures with tints, with white numbers on colours, and with letters on hatches."""


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest, browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1400, "height": 900}, color_scheme=request.param, offline=True)
    page = context.new_page()
    page.failed = []
    page.on("requestfailed", lambda call: page.failed.append(call.url))
    page.on("pageerror", lambda error: page.failed.append(str(error)))
    yield page
    context.close()


def test_the_front_page_plays_without_a_kernel_and_a_network(book: Path, page: Page) -> None:
    page.goto(f"file://{book}/index.html")
    replay = page.get_by_test_id("replay").first
    replay.get_by_test_id("replay-first").click()
    step = replay.get_attribute("data-step")
    replay.get_by_test_id("replay-forward").click()
    assert replay.get_attribute("data-step") != step
    replay.get_by_test_id("replay-play").click()
    page.wait_for_function("document.querySelector('[data-testid=replay]').dataset.step > 3")
    assert page.failed == []


def test_every_picture_can_be_read(book: Path, page: Page) -> None:
    for lesson in LESSONS:
        page.goto(f"file://{book}/lessons/{lesson}.html")
        page.locator("svg[data-testid]").first.wait_for()
        assert low_contrasts(page) == []
    assert page.failed == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_as_they_are_drawn_now_can_be_read(browser: Browser, theme: str) -> None:
    page = browser.new_page(viewport={"width": 1100, "height": 900})
    on_ink = CachePagesView(story()).to_svg(3)  # white numbers of blocks that are new in this step
    ended = CachePagesView(story()).to_svg(), CachePagesView(story(), narrow=True).to_svg()
    pictures = "".join([*(picture.to_svg() for picture in DRAWN_NOW), on_ink, *ended])
    page.set_content(f'<html data-theme="{theme}"><style>{dark_css()}</style><body>{pictures}</body></html>')
    assert low_contrasts(page) == []
    colour = "selector => getComputedStyle(document.querySelector(selector)).fill"
    white = 'tspan[fill="#ffffff"]'
    assert page.evaluate(colour, f'svg[data-testid="timeline"] {white}') == "rgb(255, 255, 255)"
    paper = "rgb(255, 255, 255)" if theme == "light" else "rgb(27, 32, 41)"
    assert page.evaluate(colour, f'svg[data-testid="cache-pages"] {white}') == paper
    page.close()


@pytest.mark.parametrize("faded", ['<g opacity=".45">', '<g opacity=".6"><g opacity=".75">', '<g fill-opacity=".45">'])
def test_faded_text_is_measured_as_it_is_seen(browser: Browser, faded: str) -> None:
    page = browser.new_page()
    text = '<text x="9" y="20" fill="#6b7280">done</text>'
    for drawn, least in ((text, 4.5), (f"{faded}{text}{'</g>' * faded.count('<g')}", 2.0)):
        paper = '<rect width="90" height="40" fill="#ffffff"/>'
        page.set_content(f'<svg data-testid="x" width="90" height="40">{paper}{drawn}</svg>')
        assert low_contrasts(page, least) == ([] if drawn == text else ['x: "done" has 1.83'])
    page.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*PAGES, *(pytest.param(name, marks=pytest.mark.long) for name in LONG_PAGES)])
def test_a_page_meets_wcag(book: Path, page: Page, name: str) -> None:
    page.goto(f"file://{book}/{name}.html")
    assert violations(page) == []
