"""Lessons in JupyterLab, file 1 of 4 (see `lesson_runs`)."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser

from tests.browser.conftest import Lab
from tests.browser.lesson_runs import FILES, NOTEBOOKS, check_lesson, share


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lesson", share(1))
def test_a_lesson_runs_in_jupyterlab(browser: Browser, lab: Lab, lesson: str) -> None:
    check_lesson(browser, lab, lesson)


def test_every_lesson_is_in_one_of_the_files() -> None:
    assert sorted(lesson for number in range(1, FILES + 1) for lesson in share(number)) == [
        name.removesuffix(".ipynb") for name in NOTEBOOKS
    ]
