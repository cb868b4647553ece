"""The quality cost of fewer bits as a chart: size against KL divergence from float32, one line per family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minillm.errors import ConfigError
from minillm.viz.charts.line_chart import Axis, LineChart, Series

EXACT = 1e-6
"""A mean KL below this is float32 rounding; such a system is exact, and is not drawn on the logarithmic axis."""
TITLES = {
    "cache": "What a smaller KV cache costs",
    "weights": "What smaller weights cost",
}


def quality_chart(outcome: Mapping[str, Any], kind: str) -> LineChart:
    """The rows of one kind (`cache` or `weights`) of what `minillm.bench.quality.run` returns.

    Lower and further left is better. Systems of one family (`kv int4 g64`, `kv int4`, `kv int4 g16`) are joined by a
    line; bars are standard errors. Exact systems appear only in the summary. Raises `ConfigError` if no system is left
    to draw.
    """
    if kind not in TITLES:
        raise ConfigError(f"kind={kind!r} must be one of {', '.join(TITLES)}")
    measured = [row for row in outcome["rows"] if row["kind"] == kind and row["quality"]]
    lossy = [row for row in measured if row["quality"]["mean_kl"] >= EXACT]
    families: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(lossy, key=lambda row: -row["ratio"]):
        families.setdefault(row["system"].split()[1], []).append(row)
    if not families:
        raise ConfigError(f"every system of kind {kind!r} is exact; there is nothing to draw")
    return LineChart(
        f"{TITLES[kind]}: {outcome['config']['model']}, {outcome['config']['scored_tokens']} held-out tokens",
        Axis("bytes, as a share of float16"),
        Axis("mean KL to float32, nats per token", log=True),
        [kl_series(name, [1 / row["ratio"] for row in rows], rows) for name, rows in families.items()],
        _summary(lossy, [row["system"] for row in measured if row not in lossy]),
    )


def kl_series(name: str, shares: Sequence[float], rows: Sequence[Mapping[str, Any]]) -> Series:
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


def _summary(lossy: list[Mapping[str, Any]], exact: list[str]) -> str:
    figures = [f"{r['system']}: {1 / r['ratio']:.3f} of float16, mean KL {r['quality']['mean_kl']:.1e}" for r in lossy]
    return "; ".join(figures) + (f". Exact: {', '.join(exact)}." if exact else ".")
