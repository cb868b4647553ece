"""A learner opens the tour in JupyterLab, runs everything, watches it move, turns a knob, and comes back later."""

from __future__ import annotations

import os
from pathlib import Path

from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser.conftest import Lab

MINUTES = 60_000
NOTEBOOK = "00_tour.ipynb"
FOLD = """() => {
  const notebook = document.querySelector('.jp-WindowedPanel-outer').getBoundingClientRect();
  const boxes = [...document.querySelectorAll('[data-testid=replay]')[0].querySelectorAll('svg')]
    .map(svg => svg.getBoundingClientRect());
  return {room: notebook.bottom - notebook.top, tops: boxes.map(box => box.top),
          height: Math.max(...boxes.map(box => box.bottom)) - Math.min(...boxes.map(box => box.top))};
}"""
CONNECTED = """() => {
  const session = window.jupyterapp?.shell.currentWidget?.sessionContext?.session;
  return session?.kernel?.connectionStatus === 'connected' && session.kernel.status === 'idle';
}"""
DONE = """() => {
  const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(p => p.textContent.trim());
  return prompts.length > 5 && prompts.every(p => /\\[\\d+\\]/.test(p));
}"""


def open_notebook(page: Page, lab: Lab) -> None:
    page.goto(lab.open(NOTEBOOK))
    expect(page.locator(".jp-Notebook .jp-CodeCell").first).to_be_visible(timeout=2 * MINUTES)
    page.wait_for_function(CONNECTED, timeout=2 * MINUTES)


def states(page: Page, kind: str) -> set[str]:
    """All states of pages or tokens now in the notebook's outputs."""
    script = """nodes => [...new Set(nodes.map(node => node.dataset.state))]"""
    return set(page.locator(f'.jp-OutputArea [data-testid="{kind}"]').evaluate_all(script))


def photograph(page: Page, name: str) -> None:
    """Save what is on the screen into the folder `MINILLM_SCREENSHOTS`, for people to look at."""
    if folder := os.environ.get("MINILLM_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def settled(milliseconds: int) -> int:
    """How long to wait for what is photographed: until it has settled. If nothing is, a hundredth second is enough for
    scripts to run and to fail."""
    return milliseconds if "MINILLM_SCREENSHOTS" in os.environ else 10


def test_tour_moves_and_is_still_there_after_a_reload(browser: Browser, lab: Lab) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 900}, reduced_motion="no-preference")
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    open_notebook(page, lab)
    assert not page.locator('.jp-OutputArea [data-testid="page"]').count()

    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.wait_for_function(DONE, timeout=8 * MINUTES)
    assert not page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']").count()

    replay = page.get_by_test_id("replay").first
    replay.scroll_into_view_if_needed()
    expect(replay).to_have_attribute("data-state", "playing", timeout=MINUTES)
    step = replay.get_attribute("data-step")
    expect(replay).not_to_have_attribute("data-step", str(step), timeout=MINUTES)
    replay.get_by_test_id("replay-play").click()
    expect(replay).to_have_attribute("data-state", "paused")
    fold = page.evaluate(FOLD)
    assert len(fold["tops"]) == 2 and fold["tops"][0] == fold["tops"][1], "the two cards stand side by side"
    assert fold["height"] + 40 < fold["room"], "and fit one screen with their controls"
    assert {"accepted", "rejected"} <= states(page, "token")
    photographs(page, replay)

    page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function("() => !document.querySelector('.jp-mod-dirty')", timeout=MINUTES)
    page.evaluate("window.jupyterapp.commands.execute('kernelmenu:shutdown')")
    open_notebook(page, lab)
    expect(page.locator('.jp-OutputArea [data-testid="page"]').first).to_be_visible(timeout=MINUTES)
    assert {"accepted", "rejected"} <= states(page, "token")
    assert "Error displaying widget" not in page.locator(".jp-Notebook").inner_text()
    assert problems == []
    page.close()


def photographs(page: Page, replay: Locator) -> None:
    """The cards and a chart at two widths in two themes."""
    chart = page.locator(".js-plotly-plot, [data-testid=chart]").first
    for theme in ("JupyterLab Light", "JupyterLab Dark"):
        page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme)
        page.wait_for_timeout(settled(1500))
        for width in (1400, 900):
            page.set_viewport_size({"width": width, "height": 900})
            for name, place in (("cards", replay), ("chart", chart)):
                place.scroll_into_view_if_needed()
                page.wait_for_timeout(settled(300))
                photograph(page, f"{name}_{width}_{theme.split()[1].lower()}")
    page.set_viewport_size({"width": 1400, "height": 900})
