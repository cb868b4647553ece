"""How nbval reads the notebooks of lessons/ and solutions/: what it does not compare, and how long a cell may take."""

from __future__ import annotations

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
