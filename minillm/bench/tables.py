"""Results of speed benchmarks as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def speed_table(
    result: dict[str, Any], also: Mapping[str, str] | None = None, unit: str = "token", rate: str | None = None
) -> Table:
    """A table with a row for each system and baseline: the ratio of their speeds and the system's own figures.

    `also` adds columns: key of a row's `config` → heading. `unit` is what `p50_ms` is the time of, `rate` the unit of
    `tokens_per_s`; by default, as many of the former as there are in a second.
    """
    from rich.table import Table

    also = also or {}
    table = Table(title=f"{result['name']} on {result['hardware']['cpu']['name']}")
    headings = ("ratio", "spread", rate or f"{unit}s/s", f"ms per {unit}", "peak MB", "same tokens")
    for heading in ("system", *also.values(), "baseline", *headings):
        table.add_column(heading, justify="left" if heading in ("system", "baseline") else "right")
    before: list[str] | None = None
    for row in result["rows"]:
        name = [row["system"], *(_text(row["config"].get(key)) for key in also)]
        comparison, figures = _comparison(row), _figures(row)
        if name == before:  # one system with several baselines: print its name and figures once
            name, figures = ["" for _ in name], ["", "", ""]
        else:
            before = name
        table.add_row(*name, *comparison[:3], *figures, comparison[3])
    for system, reason in result.get("config", {}).get("left_out", {}).items():
        table.add_row(system, *("" for _ in also), reason)
    return table


def same_tokens(row: Mapping[str, Any]) -> str:
    """Whether a row's system gave the baseline's tokens; if not, the share of them before the first difference."""
    if row["outputs_equal"] is None:
        return ""
    if row["outputs_equal"]:
        return "yes"
    return "no" if row.get("same_start") is None else f"no, first {row['same_start']:.0%}"


def _comparison(row: Mapping[str, Any]) -> list[str]:
    if row["baseline"] is None:
        return ["", "", "", ""]
    spread = f"{row['ratio_min']:.2f} to {row['ratio_max']:.2f}"
    return [row["baseline"], f"{row['ratio']:.2f}×", spread, same_tokens(row)]


def _figures(row: Mapping[str, Any]) -> list[str]:
    peak = row["peak_memory_bytes"]
    return [f"{row['tokens_per_s']:.1f}", f"{row['p50_ms']:.2f}", "" if peak is None else f"{peak / 1e6:.0f}"]


def _text(value: Any) -> str:
    return "" if value is None else f"{value:,.4g}" if isinstance(value, float) else str(value)
