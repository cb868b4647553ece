"""The zoo's chart shows what was measured, and its front is what nothing beats."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from minillm.errors import ConfigError
from minillm.viz.charts.zoo_chart import FRONT, pareto_front, zoo_chart

ROOT = Path(__file__).parents[3]


def row(technique: str, share: float | None, mean_kl: float) -> dict[str, Any]:
    quality = {"mean_kl": mean_kl, "mean_kl_error": mean_kl / 20} if share else None
    return {"system": f"{technique} {share}", "technique": technique, "share": share, "quality": quality}


OUTCOME = {
    "config": {"model": "minicoder", "scored_tokens": 252},
    "rows": [
        row("plain", 1.0, 0.0),
        row("snapkv", 0.5, 5e-2),
        row("snapkv", 0.25, 1e-1),
        row("kivi", 0.375, 4e-3),
        row("int8", 0.516, 2e-4),
        row("window", 0.25, 3e-1),
        row("int8", None, 0.0),
    ],
}


def test_techniques_are_lines_and_exact_or_missing_systems_are_not_drawn() -> None:
    chart = zoo_chart(OUTCOME)
    lines = {one.name: (list(one.x), list(one.y)) for one in chart.series}
    assert lines["snapkv"] == ([0.25, 0.5], [1e-1, 5e-2]) and lines["int8"] == ([0.516], [2e-4])
    assert set(lines) == {"snapkv", "kivi", "int8", "window", FRONT}
    names = [g.get("data-series") for g in ET.fromstring(chart.to_svg()).iter() if g.get("data-testid") == "series"]
    assert set(names) == set(lines)


def test_the_front_is_drawn_and_said() -> None:
    chart = zoo_chart(OUTCOME)
    front = next(one for one in chart.series if one.name == FRONT)
    assert list(zip(front.x, front.y, strict=True)) == [(0.25, 1e-1), (0.375, 4e-3), (0.516, 2e-4)]
    assert front.style == "modelled" and "kivi 0.375: 0.375 of float16, mean KL 4.0e-03" in chart.summary
    assert "window" not in chart.summary and "snapkv 0.5" not in chart.summary


def test_no_point_beats_one_of_the_front_and_one_of_the_front_beats_every_other() -> None:
    rng = random.Random(0)
    for _ in range(50):
        points = [(rng.randint(1, 8) / 8, rng.randint(1, 8) / 8) for _ in range(rng.randint(1, 12))]
        front = pareto_front(points)
        for x, y in front:
            assert not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
        for x, y in set(points) - set(front):
            assert any(a <= x and b <= y for a, b in front)


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to draw"):
        zoo_chart({**OUTCOME, "rows": OUTCOME["rows"][:1]})


def test_there_is_room_for_more_techniques_than_the_recorded_zoo_has() -> None:
    recorded = json.loads((ROOT / "benchmarks" / "zoo.json").read_text(encoding="utf-8"))
    number = len(zoo_chart(recorded).series)
    more = [row(f"new layout {i}", 0.3, 1e-2) for i in range(4)]
    assert len(zoo_chart({**recorded, "rows": [*recorded["rows"], *more]}).series) == number + 4


def test_a_long_legend_takes_more_lines_and_covers_nothing() -> None:
    many = [row(f"technique number {i}", 0.1 + i / 20, 1e-3 + i / 1000) for i in range(9)]
    root = ET.fromstring(zoo_chart({**OUTCOME, "rows": many}).to_svg())
    width, height = map(float, root.get("viewBox").split()[2:])
    names = [e for e in root.iter() if e.tag.endswith("text") and (e.text or "").startswith("technique number")]
    places = [(float(e.get("x")), float(e.get("y"))) for e in names]
    assert len({y for _, y in places}) > 1 and max(x for x, _ in places) + 120 < width
    [moved] = [e for e in root.iter() if (e.get("transform") or "").startswith("translate(0 ")]
    assert max(y for _, y in places) < 84 + float(moved.get("transform").split()[1].rstrip(")")) < height
