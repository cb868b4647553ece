"""The quality charts show what was measured: every lossy system once, in its family, where its figures say."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree as ET

import pytest

from minillm.errors import ConfigError
from minillm.viz.charts.quality_chart import quality_chart


def row(system: str, kind: str, ratio: float | None, mean_kl: float) -> dict[str, Any]:
    quality = {"mean_kl": mean_kl, "mean_kl_error": mean_kl / 20}
    return {"system": system, "kind": kind, "ratio": ratio, "quality": quality if ratio else None}


OUTCOME = {
    "config": {"model": "minicoder", "scored_tokens": 3557},
    "rows": [
        row("kv auto", "cache", 1.0, 0.0),
        row("kv int4 g16", "cache", 1 / 0.375, 1e-2),
        row("kv int8", "cache", 2.0, 1e-4),
        row("kv int4", "cache", 1 / 0.3125, 2e-2),
        row("kv broken", "cache", None, 0.0),
        row("weights awq", "weights", 4.0, 3e-2),
    ],
}


def test_families_are_lines_from_small_to_large() -> None:
    chart = quality_chart(OUTCOME, "cache")
    assert {one.name: list(one.x) for one in chart.series} == {"int4": [0.3125, 0.375], "int8": [0.5]}
    assert list(chart.series[0].y) == [2e-2, 1e-2]
    assert "3557 held-out tokens" in chart.title


def test_exact_and_broken_systems_are_not_drawn_and_exact_ones_are_named() -> None:
    chart = quality_chart(OUTCOME, "cache")
    assert chart.summary.endswith("Exact: kv auto.") and "kv int8: 0.500 of float16, mean KL 1.0e-04" in chart.summary
    names = [g.get("data-series") for g in ET.fromstring(chart.to_svg()).iter() if g.get("data-testid") == "series"]
    assert names == ["int4", "int8"]


def test_plotly_gets_the_same_figures() -> None:
    [trace] = quality_chart(OUTCOME, "weights").to_plotly()["data"]
    assert (trace["name"], trace["x"], trace["y"]) == ("awq", [0.25], [3e-2])


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ConfigError, match="kind='caches'"):
        quality_chart(OUTCOME, "caches")
    with pytest.raises(ConfigError, match="nothing to draw"):
        quality_chart({**OUTCOME, "rows": OUTCOME["rows"][:1]}, "cache")
