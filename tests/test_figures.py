"""The measured figures of the documentation are those of `benchmarks/*.json`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def script(name: str) -> ModuleType:
    """A script of `docs/`, which is in no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return script("figures")


@pytest.fixture(scope="module")
def techniques() -> ModuleType:
    return script("techniques")


def test_the_readme_shows_what_was_measured(figures: ModuleType) -> None:
    readme = figures.README.read_text(encoding="utf-8")
    assert figures.with_table(readme) == readme, "run `python docs/figures.py`"


def test_the_page_of_measurements_is_written_from_the_results(figures: ModuleType) -> None:
    assert figures.MEASURED.read_text(encoding="utf-8") == figures.measured(), "run `python docs/figures.py`"


def test_the_page_of_clusters_shows_what_was_measured(figures: ModuleType) -> None:
    page = figures.RAY.read_text(encoding="utf-8")
    assert figures.with_cluster_tables(page) == page, "run `python docs/figures.py`"


def test_a_readme_without_its_marks_is_refused(figures: ModuleType) -> None:
    with pytest.raises(ValueError, match="once"):
        figures.with_table("# minillm\n")


def test_a_figure_is_taken_from_its_own_row(figures: ModuleType) -> None:
    """Decoding in float32 against llama.cpp: the row with this baseline, not the system's first."""
    rows = figures.load("decode")["rows"]
    [row] = [row for row in rows if (row["system"], row["baseline"]) == ("minillm fp32", "llama.cpp f32")]
    [line] = [line for line in figures.headline_table().splitlines() if line.startswith("| decoding, fp32 |")]
    assert f"{row['ratio']:.2f}× ({row['ratio_min']:.2f} to {row['ratio_max']:.2f}) llama.cpp f32" in line


def test_the_page_of_techniques_is_written_from_results_cards_and_lessons(techniques: ModuleType) -> None:
    assert techniques.PAGE.read_text(encoding="utf-8") == techniques.page(), "run `python docs/techniques.py`"


def test_no_technique_lacks_a_command_a_figure_or_a_verdict(techniques: ModuleType) -> None:
    assert all(row.command and row.figure() and row.verdict for row in techniques.ROWS)
    assert len({row.name for row in techniques.ROWS}) == len(techniques.ROWS) >= 30


def test_a_verdict_that_no_longer_holds_is_not_written(techniques: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(techniques, "kl", lambda technique, budget: 1.0)
    with pytest.raises(ValueError, match="verdict on ThinK is no longer true"):
        techniques.page()


def test_a_line_that_a_lesson_does_not_print_is_not_made_up(techniques: ModuleType) -> None:
    with pytest.raises(ValueError, match="lesson 02 prints nothing like"):
        techniques.lesson("02", "no such line", "{0}")
