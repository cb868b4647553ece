"""How nbval reads the notebooks of lessons/ and solutions/: what it does not compare, and how long a cell may take; and
how lessons and tests are divided among workers."""

from __future__ import annotations

from typing import Any

import pytest

NOT_COMPARED = ("text/html", "image/svg+xml", "application/vnd.plotly.v1+json", "stderr")
"""Pictures are tested as pictures elsewhere; in a notebook their text/plain stands for them."""
CELL_TIMEOUT_S = 300
NBVAL_DEFAULT_TIMEOUT_S = 2000


def pytest_configure(config: pytest.Config) -> None:
    """Shorten nbval's patience, unless the command line chose another."""
    if getattr(config.option, "nbval_cell_timeout", None) == NBVAL_DEFAULT_TIMEOUT_S:
        config.option.nbval_cell_timeout = CELL_TIMEOUT_S


def pytest_collectstart(collector: pytest.Collector) -> None:
    """nbval's notebooks carry what to skip as an attribute; nothing else has it."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += NOT_COMPARED


TOGETHER = ("tests/book/", "tests/browser/test_book.py")
"""Files that share what is slow to make, here the book of all lessons: one worker runs them."""
APART = "tests/notebooks/test_solutions.py::"
"""A file whose tests share nothing: any worker runs any of them."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, a worker takes a whole file, with these exceptions."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Queue(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(TOGETHER):
                return TOGETHER[0]
            return nodeid if nodeid.startswith(APART) else super()._split_scope(nodeid)

    return Queue(config, log)
