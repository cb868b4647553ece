"""A programmer types in JupyterLab: ghost text appears, Tab takes it, and the panel shows how it was made."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import nbformat
import pytest
from playwright.sync_api import Browser, Page, Response, Route, expect

from tests.browser.conftest import TOKEN, Lab, wait_until_up
from tests.browser.test_lesson_00 import CONNECTED, photograph
from tests.conftest import TinyPair

MINUTES = 60_000
LOAD_S = 300
NOTEBOOK, FILE = "typed.ipynb", "typed.py"
FIRST_CELL = "class Stack:\n    def push(self, item):\n        self.items.append(item)"
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
SOURCE = "() => window.jupyterapp.shell.currentWidget.content.activeCell.model.sharedModel.source"
SHOW = "() => window.jupyterapp.commands.execute('minillm:show-completion')"
CLOSE = """() => [...window.jupyterapp.shell.widgets('main')]
  .find(widget => widget.id === 'minillm-completion-panel').close()"""


@pytest.fixture(scope="module")
def completing_lab(tmp_path_factory: pytest.TempPathFactory, tiny: TinyPair) -> Iterator[Lab]:
    """`minillm lab --complete` with the tiny pair, which has been loaded."""
    folder = tmp_path_factory.mktemp("completing")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [f"--port={port}", f"--IdentityProvider.token={TOKEN}", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
    options += [f"--LabApp.user_settings_dir={folder / 'settings'}", f"--LabApp.workspaces_dir={folder / 'workspaces'}"]
    options += ["--LabApp.news_url=None", "--LabApp.expose_app_in_browser=True"]
    command = [sys.executable, "-m", "minillm.cli", "lab", "--complete", "--dir", str(folder)]
    command += [f"--jupyter={option}" for option in options]
    environ = {**os.environ, "MINILLM_MODEL": str(tiny.target), "MINILLM_DRAFT": str(tiny.draft)}
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environ)
        try:
            running = Lab(f"http://127.0.0.1:{port}", folder)
            wait_until_up(f"{running.url}/api?token={TOKEN}", server, folder / "server.log")
            load_model(running)
            yield running
        finally:
            server.terminate()
            server.wait(30)


def load_model(lab: Lab) -> None:
    """Complete once, outside the browser: on a new machine the engine is compiled first."""
    body, headers = json.dumps({"prefix": "x = "}).encode(), {"Authorization": f"token {TOKEN}"}
    urllib.request.urlopen(urllib.request.Request(f"{lab.url}/minillm/complete", body, headers), timeout=LOAD_S)


@pytest.fixture
def page(browser: Browser, completing_lab: Lab) -> Iterator[Page]:
    """A page, an empty file, and a notebook with a cell of code and an empty one. Errors of scripts fail the test."""
    cells = [nbformat.v4.new_code_cell(FIRST_CELL), nbformat.v4.new_code_cell("")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=KERNEL), completing_lab.folder / NOTEBOOK)
    (completing_lab.folder / FILE).write_text("")
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.set_default_timeout(2 * MINUTES)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    yield page
    page.close()
    assert problems == []


def open_and_type(page: Page, lab: Lab, document: str, text: str) -> list[Response]:
    """Type at the end of a document. Returns the answers of the completer, of which more may come."""
    answers: list[Response] = []
    page.on("response", lambda r: answers.append(r) if is_completion(r) else None)
    page.goto(lab.open(document))
    editor = page.locator(".jp-Document .cm-content").last
    editor.wait_for()
    if document == NOTEBOOK:
        page.wait_for_function(CONNECTED)
    page.evaluate("() => window.jupyterapp.restored")
    page.wait_for_timeout(2000)  # JupyterLab reads the settings of its completer after that
    editor.click()
    page.keyboard.type(text, delay=50)
    return answers


def is_completion(response: Response) -> bool:
    return response.request.method == "POST" and "/minillm/complete" in response.url


def asked(response: Response) -> dict[str, Any]:
    return json.loads(response.request.post_data or "{}")


def test_ghost_text_appears_and_tab_takes_it(page: Page, completing_lab: Lab) -> None:
    answers = open_and_type(page, completing_lab, NOTEBOOK, "def add(")
    ghost = page.locator(".jp-GhostText").first
    expect(ghost).to_be_visible(timeout=MINUTES)
    page.wait_for_timeout(500)
    photograph(page, "completion_1_suggested")
    assert asked(answers[-1]) == {"prefix": f"{FIRST_CELL}\n\ndef add(", "suffix": "", "max_tokens": 24}
    text = answers[-1].json()["text"]
    assert text.strip()

    page.keyboard.press("Tab")
    page.wait_for_function(f"text => ({SOURCE})() === text", arg=f"def add({text}")
    photograph(page, "completion_2_accepted")

    page.evaluate(SHOW)
    panel = page.get_by_test_id("minillm-panel")
    expect(panel.get_by_test_id("token-acceptance")).to_be_visible(timeout=MINUTES)
    expect(panel.get_by_test_id("cache-pages")).to_be_attached()
    before = panel.inner_html()
    page.locator(".jp-CodeCell .cm-content").nth(1).click()
    page.keyboard.press("Control+End")
    page.keyboard.type(" ab", delay=20)
    page.wait_for_function(
        "before => document.querySelector('[data-testid=minillm-panel]').innerHTML !== before", arg=before
    )
    photograph(page, "completion_3_panel")

    page.evaluate(SHOW)  # a panel that is open comes to the front
    page.wait_for_function("() => window.jupyterapp.shell.currentWidget.id === 'minillm-completion-panel'")


def test_the_text_around_the_cursor_is_whole_behind_an_emoji_and_inside_a_line(page: Page, completing_lab: Lab) -> None:
    text = "# 🙂🙂 of a name"
    answers = open_and_type(page, completing_lab, FILE, text)
    expect(page.locator(".jp-FileEditor .cm-content")).to_contain_text(text)
    page.wait_for_timeout(500)
    assert (asked(answers[-1])["prefix"], asked(answers[-1])["suffix"]) == (text, "")
    page.keyboard.press("ArrowLeft")
    with page.expect_response(is_completion) as inside:
        page.keyboard.type("s")
    assert (asked(inside.value)["prefix"], asked(inside.value)["suffix"]) == ("# 🙂🙂 of a nams", "e")


def test_markdown_is_not_completed(page: Page, completing_lab: Lab) -> None:
    cells = [nbformat.v4.new_code_cell(FIRST_CELL), nbformat.v4.new_markdown_cell("")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=KERNEL), completing_lab.folder / NOTEBOOK)
    answers: list[Response] = []
    page.on("response", lambda r: answers.append(r) if is_completion(r) else None)
    page.goto(completing_lab.open(NOTEBOOK))
    page.locator(".jp-MarkdownCell").dblclick()
    page.evaluate("() => window.jupyterapp.restored")
    page.wait_for_timeout(2000)
    page.keyboard.type("The class above", delay=50)
    expect(page.locator(".jp-MarkdownCell .cm-content")).to_have_text("The class above")
    page.wait_for_timeout(1000)
    assert answers == []


def test_where_suggestions_are_off_nothing_is_asked(page: Page, completing_lab: Lab) -> None:
    """As in a JupyterLab that was not started with `--complete`: a learner writes the answers."""

    def turn_off(route: Route) -> None:
        answer = route.fetch()
        page_without = answer.text().replace('"minillmComplete": "on"', '"minillmComplete": "off"')
        assert page_without != answer.text()
        route.fulfill(response=answer, body=page_without)

    page.route("**/lab/tree/**", turn_off)
    answers = open_and_type(page, completing_lab, FILE, "def add(")
    page.wait_for_timeout(1000)
    expect(page.locator(".jp-FileEditor .cm-content")).to_have_text("def add(")
    assert answers == []


def test_trouble_is_told_once_and_the_open_panel_names_a_missing_server_extension(
    page: Page, completing_lab: Lab
) -> None:
    numbers = count()

    def fail(route: Route) -> None:
        route.fulfill(status=503, json={"error": f"request completion-{next(numbers)} failed"})

    def answer(route: Route) -> None:
        missing = bool(answers)
        route.fulfill(status=404 if missing else 200, json={} if missing else {"html": "<p>Nothing yet.</p>"})

    answers = open_and_type(page, completing_lab, FILE, "")
    page.route("**/minillm/complete*", fail)
    page.route("**/minillm/complete/**", answer)
    page.evaluate(SHOW)
    panel = page.get_by_test_id("minillm-panel")
    expect(panel).to_have_text("Nothing yet.")
    page.locator(".jp-FileEditor .cm-content").click()
    page.keyboard.type("def add(", delay=50)
    told = page.get_by_text("Code completion: request completion-")
    expect(told).to_have_count(1, timeout=MINUTES)
    photograph(page, "completion_4_trouble")
    assert len(answers) > 1 and not page.locator(".jp-GhostText").count()
    expect(panel).to_contain_text("jupyter server extension enable", timeout=MINUTES)


def test_an_older_answer_does_not_replace_a_newer_one_and_the_panel_does_not_ask_while_typing_or_closed(
    page: Page, completing_lab: Lab
) -> None:
    asked_for: list[Route] = []
    keys: list[tuple[Route, int]] = []

    def hold(route: Route) -> None:
        keys.append((route, len(asked_for)))
        if len(keys) == 1:  # the request of the second key is running when the panel would be drawn
            route.fulfill(json={"text": ""})

    def answer(route: Route) -> None:
        asked_for.append(route)
        if len(asked_for) != 2:  # the second answer comes last
            route.fulfill(json={"html": f"<p>answer {len(asked_for)}</p>"})

    open_and_type(page, completing_lab, FILE, "")
    page.route("**/minillm/complete/panel**", answer)
    page.evaluate(SHOW)
    panel = page.get_by_test_id("minillm-panel")
    expect(panel).to_have_text("answer 1")
    for number in (2, 3):
        page.locator(".jp-FileEditor .cm-content").click()
        page.keyboard.type("x")
        wait_until(page, lambda number=number: len(asked_for) == number)
    expect(panel).to_have_text("answer 3")
    asked_for[1].fulfill(json={"html": "<p>answer 2</p>"})
    page.wait_for_timeout(500)
    expect(panel).to_have_text("answer 3")

    page.route("**/minillm/complete*", hold)
    page.keyboard.type("xy", delay=100)
    wait_until(page, lambda: len(keys) == 2)
    page.wait_for_timeout(600)
    running, before = keys[1]
    assert len(asked_for) == before, "drawing would delay the suggestion"
    running.fulfill(json={"text": ""})
    wait_until(page, lambda: len(asked_for) == before + 1)
    page.unroute("**/minillm/complete*")

    page.evaluate(CLOSE)
    expect(panel).to_have_count(0)
    page.locator(".jp-FileEditor .cm-content").click()
    with page.expect_response(is_completion):
        page.keyboard.type("y")
    page.wait_for_timeout(1000)
    assert len(asked_for) == before + 1


def wait_until(page: Page, happened: Callable[[], bool]) -> None:
    """Fails after 30 seconds."""
    for _ in range(300):
        if happened():
            return
        page.wait_for_timeout(100)
    pytest.fail("the panel was not asked for")
