"""Lessons in JupyterLab, file 4 of 4 (see `lesson_runs`)."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser

from tests.browser.conftest import Lab
from tests.browser.lesson_runs import check_lesson, share


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lesson", share(4))
def test_a_lesson_runs_in_jupyterlab(browser: Browser, lab: Lab, lesson: str) -> None:
    check_lesson(browser, lab, lesson)
