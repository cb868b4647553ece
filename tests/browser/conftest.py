"""A real JupyterLab on a free port, and a real Chromium that opens it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).parents[2]
TOKEN = "minillm"
START_SECONDS = 240
BROWSERS = (
    *("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge"),
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)


def chromium() -> Path:
    """The browser to use: `$CHROME`, else one on the PATH, else macOS's own place for it. Without one these tests fail;
    they are never skipped."""
    named = os.environ.get("CHROME")
    found = next(filter(None, map(shutil.which, [named] if named else BROWSERS)), None)
    if found is None:
        pytest.fail(
            f"no Chromium found (CHROME={named or ''}); install it (Debian: apt-get install chromium) or name one with "
            "CHROME=/path"
        )
    return Path(found)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium that asks nothing of the network but this machine.

    Per file, because while Playwright is open its event loop counts as running in this thread, and tests of other files
    that the same worker runs afterwards start loops of their own.
    """
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=[*quiet, "--disable-sync"])
        yield browser
        browser.close()


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab and the folder it shows."""

    url: str
    folder: Path

    def open(self, notebook: str) -> str:
        """Address of a notebook in single-document mode."""
        return f"{self.url}/lab/tree/{notebook}?token={TOKEN}&reset"


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on copies of the lessons; every cell is kept in the page, so that a test can look at all of them."""
    folder = tmp_path_factory.mktemp("lab")
    for lesson in (ROOT / "lessons").glob("*.ipynb"):
        shutil.copy(lesson, folder)
    settings = folder / "settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text(json.dumps({"windowingMode": "none"}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [f"--port={port}", f"--IdentityProvider.token={TOKEN}", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
    options += [f"--ServerApp.root_dir={folder}", f"--LabApp.user_settings_dir={folder / 'settings'}"]
    options += [f"--LabApp.workspaces_dir={folder / 'workspaces'}", "--LabApp.news_url=None", "--expose-app-in-browser"]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen([sys.executable, "-m", "jupyterlab", *options], stdout=log, stderr=log, cwd=folder)
        try:
            running = Lab(f"http://127.0.0.1:{port}", folder)
            wait_until_up(f"{running.url}/api?token={TOKEN}", server, folder / "server.log")
            yield running
        finally:
            server.terminate()
            server.wait(30)


def wait_until_up(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers; fail with the end of its log if it does not."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=2)
        except OSError:
            time.sleep(0.3)
        else:
            return
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")
