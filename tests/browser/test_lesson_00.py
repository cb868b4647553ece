"""A learner opens the tour in JupyterLab, runs everything, watches it move, turns a knob, and comes back later."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import Lab

MINUTES = 60_000
NOTEBOOK = "00_tour.ipynb"

WATCH = """
() => {
  window.seen = [];
  const look = () => {
    const pages = [...document.querySelectorAll('.jp-OutputArea [data-testid="page"]')].slice(0, 24);
    const states = pages.map(page => page.dataset.state).join(' ');
    if (states && window.seen.at(-1) !== states) window.seen.push(states);
  };
  new MutationObserver(look).observe(document.body, {childList: true, subtree: true, attributes: true});
}
"""
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


def test_tour_moves_and_is_still_there_after_a_reload(browser: Browser, lab: Lab, tmp_path: Path) -> None:
    page = browser.new_page(viewport={"width": 1360, "height": 1000})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    open_notebook(page, lab)
    assert not page.locator('.jp-OutputArea [data-testid="page"]').count()

    page.evaluate(WATCH)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.wait_for_function(DONE, timeout=4 * MINUTES)
    assert not page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']").count()

    frames = page.evaluate("window.seen")
    assert len(frames) >= 5, f"pages changed state only {len(frames)} times"
    assert {"accepted", "rejected"} <= states(page, "token")

    page.locator(".widget-button", has_text="Run").click()
    expect(page.locator('.widget-html [data-testid="page"]').first).to_be_visible(timeout=MINUTES)

    page.keyboard.press("Control+s")
    page.wait_for_function("() => !document.querySelector('.jp-mod-dirty')", timeout=MINUTES)
    open_notebook(page, lab)
    expect(page.locator('.jp-OutputArea [data-testid="page"]').first).to_be_visible(timeout=MINUTES)
    assert {"accepted", "rejected"} <= states(page, "token")
    assert page.locator('.jp-OutputArea [data-testid="token"][data-state="accepted"]').count()
    assert problems == []
    page.close()
