"""A learner scrubs through a recorded run in JupyterLab: with buttons, with keys, in words, and without a kernel."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, expect

from minillm.viz import AcceptanceStrip, CachePagesView, ReplayWidget
from tests.browser.conftest import Lab
from tests.browser.test_lesson_00 import CONNECTED
from tests.trace.traces import Script, prefill, sharing, story

MINUTE = 60_000
NOTEBOOK = "replay.ipynb"
CELL = """from minillm.llm import tqdm
from minillm.trace import Trace
from minillm.viz import CachePagesView, ReplayWidget, show
for _ in tqdm(range(3), desc="generating"):
    pass
widget = ReplayWidget(CachePagesView(Trace.load("sharing.jsonl")), speed=8)
show(widget.views[0])
widget"""
LAST = 13
"""The last step of the trace."""


def notebook(source: str) -> str:
    heading = {"cell_type": "markdown", "id": "h", "source": "# A heading that arrow keys could go to", "metadata": {}}
    cell = {"cell_type": "code", "id": "a", "source": source, "metadata": {}, "outputs": [], "execution_count": None}
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": kernel, "cells": [heading, cell]})


@pytest.fixture(scope="module")
def page(browser: Browser, lab: Lab) -> Iterator[Page]:
    """JupyterLab with the widget on the screen; one kernel for all tests of this file."""
    sharing().save(lab.folder / "sharing.jsonl")
    (lab.folder / NOTEBOOK).write_text(notebook(CELL))
    page = browser.new_page(viewport={"width": 1300, "height": 1000}, reduced_motion="no-preference")
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(lab.open(NOTEBOOK))
    expect(page.locator(".jp-Notebook .jp-CodeCell").first).to_be_visible(timeout=2 * MINUTE)
    page.wait_for_function(CONNECTED, timeout=2 * MINUTE)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    expect(page.get_by_test_id("replay")).to_be_visible(timeout=MINUTE)
    yield page
    page.close()
    assert problems == []


def shown(page: Page) -> int:
    """The step that the picture itself says it shows."""
    title = page.locator('[data-testid="replay-frame"] svg title').text_content() or ""
    step = int(title.removeprefix("KV cache pages, step "))
    assert page.get_by_test_id("replay").get_attribute("data-step") == str(step)
    return step


def rewind(page: Page) -> None:
    page.get_by_test_id("replay").focus()
    page.keyboard.press("Home")
    assert shown(page) == 1


def test_buttons_step_and_jump(page: Page) -> None:
    rewind(page)
    page.get_by_test_id("replay-forward").click()
    page.get_by_test_id("replay-forward").click()
    assert shown(page) == 3
    page.get_by_test_id("replay-back").click()
    assert shown(page) == 2
    expect(page.get_by_test_id("replay-count")).to_have_text(f"step 2 of {LAST}")
    page.get_by_test_id("replay-last").click()
    assert shown(page) == LAST
    expect(page.get_by_test_id("replay-forward")).to_be_disabled()
    page.get_by_test_id("replay-first").click()
    expect(page.get_by_test_id("replay-back")).to_be_disabled()


def test_keys_step_while_the_focus_is_inside_and_jupyter_does_not_take_them(page: Page) -> None:
    rewind(page)
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert shown(page) == 4
    page.keyboard.press("ArrowLeft")
    assert shown(page) == 3
    page.keyboard.press("End")
    assert shown(page) == LAST
    page.keyboard.press("Home")
    assert shown(page) == 1
    # In command mode, the arrow keys are JupyterLab's way to the next heading.
    expect(page.locator(".jp-Notebook .jp-CodeCell")).to_have_class(re.compile("jp-mod-active"))
    expect(page.locator(".jp-Notebook .jp-MarkdownCell")).not_to_have_class(re.compile("jp-mod-active"))
    page.get_by_test_id("replay-slider").focus()
    page.keyboard.press("ArrowRight")
    assert shown(page) == 2, "one step, not the slider's and ours"


def test_slider_moves_the_picture(page: Page) -> None:
    page.get_by_test_id("replay-slider").fill("7")
    assert shown(page) == 8
    assert page.get_by_test_id("replay-slider").get_attribute("aria-valuetext") == "step 8"


def when(page: Page, condition: str) -> None:
    """Wait until `condition` holds for the `step` shown."""
    step = "Number(document.querySelector('[data-testid=replay]').dataset.step)"
    page.wait_for_function(f"() => {{ const step = {step}; return {condition}; }}", timeout=MINUTE)


def test_space_plays_to_the_end_and_pauses(page: Page) -> None:
    rewind(page)
    replay, speed = page.get_by_test_id("replay"), page.get_by_test_id("replay-speed")
    speed.select_option("2")
    replay.focus()
    page.keyboard.press(" ")
    expect(replay).to_have_attribute("data-state", "playing")
    when(page, "step >= 3")
    page.keyboard.press(" ")
    expect(replay).to_have_attribute("data-state", "paused")
    at = shown(page)
    page.wait_for_timeout(800)
    assert 3 <= shown(page) == at < LAST
    speed.select_option("8")
    page.get_by_test_id("replay-play").click()
    when(page, f"step === {LAST}")
    expect(replay).to_have_attribute("data-state", "paused")
    page.get_by_test_id("replay-play").click()
    when(page, f"step < {LAST}")
    page.keyboard.press("Home")
    expect(replay).to_have_attribute("data-state", "paused")


def test_words_follow_the_picture(page: Page) -> None:
    rewind(page)
    words = page.get_by_test_id("replay-text")
    expect(words).to_be_hidden()
    page.get_by_test_id("replay-describe").click()
    expect(words).to_be_visible()
    expect(page.get_by_test_id("replay-describe")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("ArrowRight")
    expect(words).to_contain_text("This step: C found 48 tokens, computed 10; B forked from A")
    page.get_by_test_id("replay-describe").click()
    expect(words).to_be_hidden()


def test_same_picture_elsewhere_keeps_its_hatches_when_this_one_is_hidden(page: Page) -> None:
    """Two elements with one id: the browser takes the first, and a hatch of a hidden picture paints nothing."""
    ids = page.evaluate("() => [...document.querySelectorAll('.jp-OutputArea svg [id]')].map(node => node.id)")
    assert len(ids) == len(set(ids)) >= 8
    used = page.evaluate(
        """() => [...document.querySelectorAll('.jp-OutputArea svg [fill^="url("]')]
                   .map(node => [node.getAttribute('fill').slice(5, -1), node.closest('svg')])
                   .map(([id, svg]) => document.getElementById(id)?.closest('svg') === svg)"""
    )
    assert used and all(used), "each hatch comes from its own picture"


def test_frames_outlive_the_kernel(page: Page) -> None:
    rewind(page)
    page.evaluate("window.jupyterapp.commands.execute('kernelmenu:shutdown')")
    page.wait_for_function(
        "() => !window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel", timeout=MINUTE
    )
    rewind(page)
    page.keyboard.press("ArrowRight")
    assert shown(page) == 2


def test_saved_notebook_opened_with_a_new_kernel_shows_no_error_and_still_plays(page: Page) -> None:
    """Widgets show "model not found" there, and so do progress bars that are widgets."""
    page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function("() => !document.querySelector('.jp-mod-dirty')", timeout=MINUTE)
    page.reload()
    expect(page.get_by_test_id("replay")).to_be_visible(timeout=2 * MINUTE)
    assert "Error displaying widget" not in page.locator(".jp-Notebook").inner_text()
    expect(page.locator(".jp-OutputArea", has_text="generating").first).to_contain_text("100%")
    rewind(page)
    page.keyboard.press("ArrowRight")
    assert shown(page) == 2


@pytest.mark.parametrize(("motion", "moves"), [("reduce", False), ("no-preference", True)])
def test_autoplay_starts_in_view_and_is_off_for_readers_who_want_less_motion(
    browser: Browser, motion: Literal["reduce", "no-preference"], moves: bool
) -> None:
    """On a bare page, below the fold: nothing moves before it can be seen."""
    widget = ReplayWidget(CachePagesView(sharing()), autoplay=True, speed=30)
    html = widget._repr_mimebundle_()["text/html"]
    page = browser.new_page(reduced_motion=motion, viewport={"width": 1000, "height": 700})
    page.set_content(f"<div style='height:2000px'></div>{html}")
    expect(page.get_by_test_id("replay")).to_have_count(1)
    telling = widget.steps[widget.start]
    page.wait_for_timeout(400)
    assert shown(page) == telling
    page.get_by_test_id("replay").scroll_into_view_if_needed()
    if moves:
        when(page, f"step === {LAST}")
    else:
        page.wait_for_timeout(800)
        assert shown(page) == telling
    page.close()


EVALUATE = """([html, parent]) => {
  const output = document.createElement("div");
  output.innerHTML = html;
  document.body.append(output);
  for (const script of [...output.getElementsByTagName("script")]) {
    const copy = document.createElement("script");
    copy.text = script.innerText;
    (parent === "head" ? document.head : output).appendChild(copy).parentNode.removeChild(copy);
  }
}"""
"""How VS Code runs the scripts of an output (in the output), and the classic notebook (in the head of the page)."""


@pytest.mark.parametrize("parent", ["output", "head"])
def test_each_replay_plays_in_its_own_place_wherever_a_copy_of_its_script_runs(browser: Browser, parent: str) -> None:
    page = browser.new_page()
    page.set_content("<!doctype html><body></body>")
    one = ReplayWidget(CachePagesView(sharing()))._repr_mimebundle_()["text/html"]
    two = ReplayWidget(AcceptanceStrip(story()))._repr_mimebundle_()["text/html"]
    for html in (one, two, one, two + one):  # one output may be shown several times
        page.evaluate(EVALUATE, [html, parent])
    pictures = page.locator(".minillm-replay-place > [data-testid=replay] > [data-testid=replay-frame] > div > svg")
    drawn = [pictures.nth(i).get_attribute("data-testid") for i in range(pictures.count())]
    assert drawn == ["cache-pages", "token-acceptance", "cache-pages", "token-acceptance", "cache-pages"]
    assert page.locator("script").count() == 0 and page.get_by_test_id("replay").count() == 5
    page.close()


@pytest.fixture
def bare(browser: Browser) -> Iterator[Page]:
    """A replay on a page without JupyterLab."""
    page = browser.new_page(reduced_motion="no-preference", viewport={"width": 1000, "height": 700})
    page.set_content(ReplayWidget(CachePagesView(sharing()), speed=30)._repr_mimebundle_()["text/html"])
    yield page
    page.close()


@pytest.mark.parametrize(("button", "at", "back"), [("last", LAST, "ArrowLeft"), ("first", 1, "ArrowRight")])
def test_the_keyboard_goes_on_after_a_button_at_the_end_was_pressed(
    bare: Page, button: str, at: int, back: str
) -> None:
    """A disabled button loses the focus."""
    bare.get_by_test_id("replay-forward").click()
    bare.get_by_test_id(f"replay-{button}").focus()
    bare.keyboard.press("Enter")
    assert shown(bare) == at
    expect(bare.get_by_test_id("replay")).to_be_focused()
    bare.keyboard.press(back)
    assert shown(bare) == at + (1 if at == 1 else -1)


def test_the_name_and_the_tooltip_of_the_play_button_change_together(bare: Page) -> None:
    play, replay = bare.get_by_test_id("replay-play"), bare.get_by_test_id("replay")
    bare.get_by_test_id("replay-speed").select_option("0.5")
    for state, name in (("playing", "Pause (Space)"), ("paused", "Play (Space)")):
        play.click()
        expect(replay).to_have_attribute("data-state", state)
        assert (play.get_attribute("aria-label"), play.get_attribute("title")) == (name, name)


def test_the_last_step_of_playing_is_announced(bare: Page) -> None:
    """A screen reader is not told of each step while it plays: the last one comes when it is told again."""
    bare.get_by_test_id("replay-last").click()
    bare.keyboard.press("ArrowLeft")
    changes = bare.evaluate(
        """() => new Promise(resolve => {
          const count = document.querySelector('[data-testid=replay-count]');
          new MutationObserver(records => {
            if (count.getAttribute('aria-live') === 'polite') resolve(records.map(record => record.type));
          }).observe(count, {attributes: true, childList: true});
          document.querySelector('[data-testid=replay-play]').click();
        })"""
    )
    assert changes == ["attributes", "childList"]


def test_a_replay_whose_output_is_removed_stops(bare: Page) -> None:
    rewind(bare)
    bare.get_by_test_id("replay-play").click()
    state = bare.evaluate_handle(
        "() => { const root = document.querySelector('[data-testid=replay]'); root.remove(); return root; }"
    )
    bare.wait_for_function("root => root.dataset.state === 'paused'", arg=state)
    assert int(state.evaluate("root => root.dataset.step")) < LAST


def test_a_text_that_looks_like_an_id_stays_as_it_is(browser: Browser) -> None:
    s = Script()
    s.add("a", "-placement- x", 4)
    s.step(prefill("a", 4))
    page = browser.new_page()
    page.set_content(ReplayWidget(CachePagesView(s.trace))._repr_mimebundle_()["text/html"])
    expect(page.get_by_test_id("replay-frame").get_by_test_id("request")).to_contain_text("-placement- x")
    assert all(
        "\ue000" not in name for name in page.evaluate("() => [...document.querySelectorAll('[id]')].map(n => n.id)")
    )
    page.close()
