"""Every lesson, untouched, opens in JupyterLab and runs from top to bottom; its pictures are there, also another day.

All lessons run without a browser in `make test`, and their pictures are looked at in one (`test_pictures.py`). So here
one lesson is enough for every day; `make test-long` takes all.
"""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.accessibility import violations
from tests.browser.conftest import ROOT, Lab
from tests.browser.test_lesson_00 import CONNECTED, DONE, MINUTES

EVERY_DAY = "08_triton_kernels"
OUTPUTS = ".jp-OutputArea-output"
"""What lessons print and draw; around it is JupyterLab's own page."""
PICTURES = f"{OUTPUTS}:is(:has(svg), :has(img))"
"""Outputs with a picture. A chart may be alive at first, and a picture when the notebook is opened again."""
NOT_OURS = (".jp-OutputArea-output pre span", ".js-plotly-plot .modebar")
"""JupyterLab's colours for printed text, and plotly's toolbar."""
LESSONS = sorted(path.stem for path in (ROOT / "lessons").glob("*.ipynb") if not path.name.startswith("00"))


def run_all(page: Page, lab: Lab, notebook: str) -> None:
    page.goto(lab.open(notebook))
    expect(page.locator(".jp-Notebook .jp-CodeCell").first).to_be_visible(timeout=2 * MINUTES)
    page.wait_for_function(CONNECTED, timeout=2 * MINUTES)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.wait_for_function(DONE, timeout=8 * MINUTES)


def open_again(page: Page, lab: Lab, notebook: str) -> None:
    """Save the notebook, end its kernel, and open it with a new one."""
    page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function("() => !document.querySelector('.jp-mod-dirty')", timeout=MINUTES)
    page.evaluate("window.jupyterapp.commands.execute('kernelmenu:shutdown')")
    page.goto(lab.open(notebook))
    expect(page.locator(".jp-Notebook .jp-CodeCell").first).to_be_visible(timeout=2 * MINUTES)
    page.wait_for_function(CONNECTED, timeout=2 * MINUTES)
    page.wait_for_timeout(2000)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "lesson", [pytest.param(name, marks=[pytest.mark.long] * (name != EVERY_DAY)) for name in LESSONS]
)
def test_a_lesson_runs_in_jupyterlab(browser: Browser, lab: Lab, lesson: str) -> None:
    page = browser.new_page(viewport={"width": 1360, "height": 1000})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    run_all(page, lab, f"{lesson}.ipynb")
    errors = page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']")
    assert not errors.count(), errors.first.inner_text()
    assert page.locator(".jp-OutputArea svg").count() >= 3, "a lesson without pictures"
    notices = page.locator(".jp-OutputArea", has_text="Using the reference")
    assert notices.count(), "an unsolved lesson must say that it goes on with the reference"
    for theme in ("JupyterLab Light", "JupyterLab Dark"):
        page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme)
        page.wait_for_timeout(1000)
        assert violations(page, OUTPUTS, NOT_OURS) == [], theme
    pictures = page.locator(PICTURES).count()
    open_again(page, lab, f"{lesson}.ipynb")
    expect(page.locator(PICTURES)).to_have_count(pictures, timeout=MINUTES)
    assert "Error displaying widget" not in page.locator(".jp-Notebook").inner_text()
    assert problems == []
    page.close()
