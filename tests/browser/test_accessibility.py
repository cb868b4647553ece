"""The pictures, charts and replays of a lesson meet WCAG in both themes; and the check finds what is planted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from minillm.viz import AcceptanceStrip, CachePagesView, ReplayWidget
from tests.browser.accessibility import violations
from tests.browser.test_pictures import PLOTLY, SOLUTIONS, THEMES
from tests.browser.text_boxes import THEMES as STYLES
from tests.browser.text_boxes import Shown, open_pictures, pictures_of
from tests.trace.traces import story

EVERY_DAY = "02_kv_cache"
PAGE = '<!doctype html><html lang="en"><head><title>A lesson</title></head><body></body></html>'
GOOD = '<svg role="img" aria-label="two dots" width="20" height="20"><circle cx="5" cy="5" r="2"/></svg>'


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1400, "height": 800})
    page.set_content(PAGE)
    yield page
    page.close()


def found_in(page: Page, shown: list[Shown]) -> list[str]:
    open_pictures(page, shown, PLOTLY)
    found = []
    for theme in THEMES:
        page.evaluate("style => { document.body.style.cssText = style; }", f"background:{STYLES[theme]}")
        found += violations(page, ".picture", (".modebar",))
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "notebook",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.long] * (path.stem != EVERY_DAY)) for path in SOLUTIONS],
)
def test_every_picture_of_a_lesson_meets_wcag(page: Page, notebook: Path) -> None:
    assert found_in(page, list(pictures_of(notebook))) == []


def test_a_replay_and_its_controls_meet_wcag(page: Page) -> None:
    recorded = story()
    replay = ReplayWidget(CachePagesView(recorded, narrow=True), AcceptanceStrip(recorded, narrow=True))
    page.set_content(PAGE.replace("<body>", f"<body>{replay._repr_mimebundle_()['text/html']}"))
    for theme in THEMES:
        page.evaluate("style => { document.body.style.cssText = style; }", f"background:{STYLES[theme]}")
        assert violations(page, ".minillm-replay") == []
    page.evaluate("() => document.querySelector('[data-testid=replay-slider]').removeAttribute('aria-label')")
    [found] = violations(page, ".minillm-replay")
    assert found.startswith("label: ")


@pytest.mark.parametrize(
    ("html", "rule"),
    [
        ('<svg role="img" width="9" height="9"></svg>', "svg-img-alt"),
        ('<img src="data:image/gif;base64,R0lGODlhAQABAAAAACw=">', "image-alt"),
        ("<button></button>", "button-name"),
        ('<input type="range">', "label"),
        ('<p style="color:#bbb;background:#fff">pale</p>', "color-contrast"),
        ('<ul role="list"><div>no item</div></ul>', "aria-required-children"),
    ],
)
def test_a_planted_fault_is_found(page: Page, html: str, rule: str) -> None:
    assert found_in(page, [Shown("good", GOOD)]) == []
    found = found_in(page, [Shown("bad", GOOD + html)])
    assert found and all(line.startswith(f"{rule}: ") for line in found)
