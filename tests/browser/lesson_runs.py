"""Every lesson, untouched, opens in JupyterLab and runs from top to bottom; its pictures are there.

A test file is run by one worker from its first test to its last, so the lessons are dealt out to four files:
`test_lessons_1.py` to `test_lessons_4.py`.
"""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import ROOT, Lab
from tests.browser.test_lesson_00 import CONNECTED, DONE, MINUTES

FILES = 4
NOTEBOOKS = sorted(path.name for path in (ROOT / "lessons").glob("*.ipynb") if not path.name.startswith("00"))


def share(number: int) -> list[str]:
    """Every fourth lesson, from the first, second, third or fourth on: those of file `number`."""
    return [Path(name).stem for name in NOTEBOOKS[number - 1 :: FILES]]


def run_all(page: Page, lab: Lab, notebook: str) -> None:
    page.goto(lab.open(notebook))
    expect(page.locator(".jp-Notebook .jp-CodeCell").first).to_be_visible(timeout=2 * MINUTES)
    page.wait_for_function(CONNECTED, timeout=2 * MINUTES)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.wait_for_function(DONE, timeout=8 * MINUTES)


def check_lesson(browser: Browser, lab: Lab, lesson: str) -> None:
    """Open `lesson` (`"02_kv_cache"`), run all of it, and look at the page."""
    page = browser.new_page(viewport={"width": 1360, "height": 1000})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    run_all(page, lab, f"{lesson}.ipynb")
    errors = page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']")
    assert not errors.count(), errors.first.inner_text()
    assert page.locator(".jp-OutputArea svg").count() >= 3, "a lesson without pictures"
    notices = page.locator(".jp-OutputArea", has_text="Using the reference")
    assert notices.count(), "an unsolved lesson must say that it goes on with the reference"
    assert problems == []
    page.close()
