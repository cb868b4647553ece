from __future__ import annotations

from pathlib import Path

import pytest

from minillm.book.site import build_book

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole book of this clone; Sphinx had nothing to say against it."""
    site = tmp_path_factory.mktemp("book") / "site"
    assert build_book(ROOT, site, replays=()) == []
    return site
