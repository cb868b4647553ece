"""Sweeps: every combination once, over stops, with the figures of `minillm bench speculation`. Without Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minillm.cluster.sweep import Point, SweepSettings, sweep, table
from minillm.errors import ConfigError
from tests.cluster.test_generation import Stops
from tests.cluster.this_process import ThisProcess
from tests.conftest import TinyPair


@pytest.fixture(scope="module")
def settings(tiny: TinyPair) -> SweepSettings:
    one = {"slices": ("edits",), "rounds": 1, "prompts": 2, "new_tokens": 12}
    grid = {"methods": ("ngram", "suffix"), "drafts": (2, 3), "block_sizes": (4,)}
    return SweepSettings(str(tiny.target), str(tiny.draft), **grid, **one)


def test_points_are_all_combinations(settings: SweepSettings) -> None:
    points = replace(settings, block_sizes=(4, 8)).points
    assert len(points) == len(set(points)) == 8
    assert Point("ngram", 3, 8) in points


def test_results_of_another_draft_are_not_kept(settings: SweepSettings, tiny: TinyPair) -> None:
    assert settings.job() == settings.job()
    assert settings.job()["identities"] != replace(settings, draft=str(tiny.target)).job()["identities"]


def test_every_point_is_measured_once_and_shown(tmp_path: Path, settings: SweepSettings) -> None:
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, settings, Stops(1))
    pool = Stops(99)
    rows = sweep(tmp_path, settings, pool)
    assert pool.given == 3
    assert [(row["method"], row["drafts"]) for row in rows] == [(p.method, p.drafts) for p in settings.points]
    assert all(row["outputs_equal"] and row["baseline"] == "plain" for row in rows)
    assert all(1 <= row["config"]["tau"] <= row["drafts"] + 1 for row in rows)
    assert all(len(row["config"]["alpha"]) <= row["drafts"] for row in rows)
    shown = Console(width=160, record=True)
    shown.print(table(rows))
    assert shown.export_text().count("suffix") == 2


def test_the_block_size_reaches_the_engine(
    tmp_path: Path, settings: SweepSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    import minillm

    seen: list[Any] = []
    real = minillm.LLM

    def noting(model: str, **options: Any) -> minillm.LLM:
        seen.append(options["block_size"])
        return real(model, **options)

    monkeypatch.setattr(minillm, "LLM", noting)
    sweep(tmp_path, replace(settings, methods=("ngram",), drafts=(2,), block_sizes=(4, 8)), ThisProcess())
    assert set(seen) == {4, 8}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("guess",)}, "there is no method 'guess'"),
        ({"methods": ()}, "methods"),
        ({"drafts": (2, 2)}, "each once"),
        ({"block_sizes": (0,)}, "block_sizes=0"),
        ({"slices": ("poems",)}, "there is no slice 'poems'"),
        ({"weights": "fp4"}, "there is no kind of weights 'fp4'"),
        ({"rounds": 0}, "rounds=0"),
        ({"new_tokens": 1}, "new_tokens=1"),
        ({"new_tokens": 256}, "leaves 0 of 256 tokens for a prompt"),
        ({"prompts": 1000}, "--prompts 1000 is more than the"),
        ({"draft": None, "methods": ("ngram", "draft_model")}, "method 'draft_model' needs a draft model"),
        ({"methods": ("spire",)}, "no weights of method 'spire'"),
        ({"drafts": (2, 2000)}, "drafts=2000, method 'ngram': .* would propose up to 2000 drafts per round"),
        ({"methods": ("self_sparse",), "block_sizes": (16, 512)}, "must be above block_size=512"),
        (
            {"model": "minicoder", "methods": ("suffix or draft_model", "heads"), "drafts": (2, 4, 8)},
            "drafts=8, method 'heads': num_speculative_tokens=8 is more than .* per round, 5; lower it",
        ),
    ],
)
def test_a_bad_sweep_is_refused(settings: SweepSettings, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(settings, **change)
