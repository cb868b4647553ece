"""The book in a real browser, with the network off: replays play, and pictures can be read in both themes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.accessibility import violations
from tests.browser.text_contrast import low_contrasts

PAGES = ("index", "glossary", "search", "lessons/index", "techniques/index", "techniques/beside-contrastive")
"""One of each kind but lessons, and the one with the replay."""
LONG_PAGES = ("lessons/02_kv_cache", "engine", "tested", "measured", "genindex", "source/minillm.batch")
LESSONS = ("00_tour", "02_kv_cache", "04_kv_quantisation", "06_paged_blocks", "07_continuous_batching")


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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*PAGES, *(pytest.param(name, marks=pytest.mark.long) for name in LONG_PAGES)])
def test_a_page_meets_wcag(book: Path, page: Page, name: str) -> None:
    page.goto(f"file://{book}/{name}.html")
    assert violations(page) == []
