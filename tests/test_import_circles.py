"""No file of the package imports, directly or through others, a file that imports it: in a function or not."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def modules() -> dict[str, Path]:
    """Every file of the package by its module name."""
    files = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in (ROOT / "minillm").rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in files.items()}


def imported(tree: ast.Module) -> Iterator[str]:
    """The names that a file imports; `from a import b` gives `a.b` and `a`, because `b` may be a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module


def circle(sources: dict[str, str]) -> list[str] | None:
    """One circle of imports between these files, as names; None if there is none. Packages themselves are left out."""
    graph = {name: {m for m in imported(ast.parse(text)) if m in sources} - {name} for name, text in sources.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def test_no_circle_between_files() -> None:
    found = {name: path.read_text(encoding="utf-8") for name, path in modules().items() if path.name != "__init__.py"}
    assert len(found) > 300
    assert circle(found) is None


@pytest.mark.parametrize(
    "back", ["import a.x", "from a.x import f", "from a import x", "def f():\n    from a import x"]
)
def test_a_circle_is_found(back: str) -> None:
    assert circle({"a.x": "from a.y import g", "a.y": "import a.z", "a.z": back})
    assert circle({"a.x": "from a.y import g", "a.y": "import a.z", "a.z": "import os"}) is None
