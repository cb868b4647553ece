"""Bars are as long as the ratios are, and only those of one baseline are drawn."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from minillm.errors import ConfigError
from minillm.viz.charts.bench_chart import BarChart, bench_chart

SVG = "{http://www.w3.org/2000/svg}"


def row(system: str, baseline: str | None, ratio: float | None, prompt: int | None = None) -> dict[str, Any]:
    spread = (None, None) if ratio is None else (ratio - 0.2, ratio + 0.4)
    config = {} if prompt is None else {"prompt_tokens": prompt}
    return {
        "system": system,
        "baseline": baseline,
        "ratio": ratio,
        "ratio_min": spread[0],
        "ratio_max": spread[1],
        "config": config,
    }


OUTCOME = {
    "name": "decode",
    "hardware": {"cpu": {"name": "some chip"}},
    "config": {"threads": 2},
    "rows": [
        row("transformers fp32", None, None),
        row("llama.cpp f32", "transformers fp32", 4.0),
        row("minillm fp32", "transformers fp32", 8.0),
        row("minillm fp32", "llama.cpp f32", 2.0),
        row("minillm <int8>", "transformers fp32", 0.5),
    ],
}


def bars(svg: str) -> dict[str, ET.Element]:
    found = [g for g in ET.fromstring(svg).iter(f"{SVG}g") if g.get("data-testid") == "bar"]
    return {g.get("data-system"): g for g in found}


def test_bars_are_as_long_as_their_ratios_and_inside() -> None:
    svg = bench_chart(OUTCOME).to_svg()
    found = bars(svg)
    widths = {name: float(g.find(f"{SVG}rect").get("width")) for name, g in found.items()}
    assert list(widths) == ["llama.cpp f32", "minillm fp32", "minillm <int8>"]
    assert widths["minillm fp32"] == pytest.approx(2 * widths["llama.cpp f32"], abs=0.2)
    assert widths["minillm fp32"] == pytest.approx(16 * widths["minillm <int8>"], abs=1)
    width = float(ET.fromstring(svg).get("viewBox").split()[2])
    assert all(0 <= float(x.get("x", 0)) <= width for x in ET.fromstring(svg).iter(f"{SVG}text"))


def test_own_bars_are_filled_and_others_are_not() -> None:
    fills = {name: g.find(f"{SVG}rect").get("fill") for name, g in bars(bench_chart(OUTCOME).to_svg()).items()}
    assert fills["minillm fp32"] == fills["minillm <int8>"] != fills["llama.cpp f32"]


def test_a_chart_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="'t' has no bars and shows nothing; give it at least one Bar"):
        BarChart("t", "times as fast", [], "d")


def test_another_baseline_has_other_bars() -> None:
    chart = bench_chart(OUTCOME, "llama.cpp f32")
    assert [(bar.name, bar.ratio) for bar in chart.bars] == [("minillm fp32", 2.0)]
    assert chart.summary == "Against llama.cpp f32: minillm fp32: 2.00 times (1.80 to 2.40)."
    assert chart.title == "decode: some chip, 2 threads"


def test_lengths_of_prompts_are_told_apart() -> None:
    rows = [row("a", None, None, 128), row("minillm", "a", 2.0, 128), row("minillm", "a", 3.0, 512)]
    names = [bar.name for bar in bench_chart({**OUTCOME, "rows": rows}).bars]
    assert names == ["minillm, 128 tokens", "minillm, 512 tokens"]


def test_plotly_accepts_the_figure_and_shows_the_spread() -> None:
    import plotly.graph_objects as go

    bundle = bench_chart(OUTCOME)._repr_mimebundle_()
    json.dumps(bundle, allow_nan=False)
    figure = go.Figure(bundle["application/vnd.plotly.v1+json"])
    assert figure.data[0].x == (0.5, 8.0, 4.0) and figure.data[0].error_x.array[1] == pytest.approx(0.4)


def test_what_nothing_was_compared_with_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"compared with 'vLLM'; there are: llama\.cpp f32, transf"):
        bench_chart(OUTCOME, "vLLM")
    with pytest.raises(ConfigError, match="no comparisons"):
        bench_chart({**OUTCOME, "rows": OUTCOME["rows"][:1]})
