"""Quality over bytes of every cache technique, and the Pareto front: what nothing beats in both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minillm.errors import ConfigError
from minillm.viz.charts.line_chart import LineChart, Series
from minillm.viz.draw.plot import Axis

FRONT = "Pareto front"
EXACT = 1e-6
"""A mean KL below this is float32 rounding; such a system is exact, and is not drawn on the logarithmic axis."""
Point = tuple[float, float]
"""Share of float16's bytes, mean KL."""


def zoo_chart(outcome: Mapping[str, Any]) -> LineChart:
    """What `minillm.bench.zoo.run` returns: one line per technique, lower and further left is better.

    Bars are standard errors. The dashed line joins the systems that no other beats in bytes and KL at once. Exact
    systems are not drawn. Raises `ConfigError` if no system is left to draw.
    """
    lossy = [row for row in outcome["rows"] if row["quality"] and row["quality"]["mean_kl"] >= EXACT]
    if not lossy:
        raise ConfigError("the result has no lossy system that could be measured; there is nothing to draw")
    techniques: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(lossy, key=lambda row: row["share"]):
        techniques.setdefault(row["technique"], []).append(row)
    front = pareto_front([(row["share"], row["quality"]["mean_kl"]) for row in lossy])
    facts = outcome["config"]
    return LineChart(
        f"Cache techniques at equal bytes: {facts['model']}, {facts['scored_tokens']} held-out tokens",
        Axis("bytes of the prompt, as a share of float16 (squeezed: bytes read)"),
        Axis("mean KL to the plain cache, nats per token", log=True),
        [
            *(_kl_series(name, [row["share"] for row in rows], rows) for name, rows in techniques.items()),
            Series(FRONT, [x for x, _ in front], [y for _, y in front], style="modelled"),
        ],
        _summary(lossy, front),
    )


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats or equals in both coordinates, by their first one. Of equal points one stays."""
    front: list[Point] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def _kl_series(name: str, shares: Sequence[float], rows: Sequence[Mapping[str, Any]]) -> Series:
    """The mean KL of `rows` over their `shares` of the bytes, with standard errors."""
    found = [(row["quality"]["mean_kl"], row["quality"]["mean_kl_error"]) for row in rows]
    return Series(
        name,
        shares,
        [mean for mean, _ in found],
        # The axis is logarithmic: a bar ends above 0.
        low=[max(mean - error, mean / 10) for mean, error in found],
        high=[mean + error for mean, error in found],
    )


def _summary(lossy: Sequence[Mapping[str, Any]], front: Sequence[Point]) -> str:
    best = [row for row in lossy if (row["share"], row["quality"]["mean_kl"]) in front]
    best.sort(key=lambda row: row["share"])
    figures = [
        f"{row['system']}: {row['share']:.3f} of float16, mean KL {row['quality']['mean_kl']:.1e}" for row in best
    ]
    return f"On the Pareto front: {'; '.join(figures)}."
