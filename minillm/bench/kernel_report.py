"""The result of `bench kernels` as a table for the terminal and as a bar chart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minillm.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from minillm.viz.charts.bench_chart import BarChart

COLD, WARM = "cold", "warm"


def table(outcome: dict[str, Any]) -> Table:
    """A line for each implementation of each case. GB/s, GFLOP/s and ratio are cold ones if there is a cold time."""
    from rich.table import Table

    device = outcome["hardware"]["gpu"] or outcome["hardware"]["cpu"]
    copy = outcome["config"]["ceilings"]["copy bandwidth"]["median"] / 1e9
    table = Table(title=f"kernels on {device['name']}, copy {copy:.1f} GB/s; bytes are modelled")
    for heading in ("op", "implementation"):
        table.add_column(heading)
    for heading in ("cold µs", "warm µs", "bytes", "GB/s", "of copy", "GFLOP/s", "ratio", "equal"):
        table.add_column(heading, justify="right")
    for row in outcome["rows"]:
        table.add_row(*_cells(row))
    return table


def _cells(row: Mapping[str, Any]) -> list[str]:
    c = row["config"]
    kind = COLD if "cold_us" in c else WARM
    first = row["system"].rpartition(", ")[0] if row["baseline"] is None else ""
    flops = c.get(f"{kind}_gflop_per_s")
    return [
        first,
        c["implementation"],
        _short(c["cold_us"]) if kind == COLD else "",
        _short(c["warm_us"]),
        _short_bytes(c["modelled_bytes"]),
        f"{c[f'{kind}_gb_per_s']:.1f}",
        f"{c['cold_of_copy']:.0%}" if kind == COLD else "",
        "" if flops is None else f"{flops:,.1f}",
        "" if row["ratio"] is None else f"{row['ratio']:.2f}×",
        "" if row["outputs_equal"] is None else "yes" if row["outputs_equal"] else f"no, {c['error']:.1g}",
    ]


def chart(outcome: dict[str, Any], op: str, shape: str, tokens: int = 1) -> BarChart:
    """A bar chart for one op, shape and number of tokens: how many times as fast as the reference.

    Raises `ConfigError` if only the reference was measured for them.
    """
    from minillm.viz.charts.bench_chart import Bar, BarChart

    found = [
        row
        for row in outcome["rows"]
        if row["ratio"]
        and (row["config"]["op"], row["config"]["shape"], row["config"]["tokens"]) == (op, shape, tokens)
    ]
    if not found:
        raise ConfigError(f"no {op!r} of shape {shape!r} with {tokens} tokens was compared with the reference")
    bars = [Bar(_bar_name(row["config"]), row["ratio"], row["ratio_min"], row["ratio_max"]) for row in found]
    summary = "; ".join(f"{bar.name}: {bar.ratio:.2f} times ({bar.low:.2f} to {bar.high:.2f})" for bar in bars)
    device = outcome["hardware"]["gpu"] or outcome["hardware"]["cpu"]
    title = f"{op}, {tokens} new token{'s' if tokens != 1 else ''}, {shape}: {device['name']}"
    return BarChart(title, "times as fast as the reference in PyTorch", bars, f"Against the reference: {summary}.")


def _bar_name(config: Mapping[str, Any]) -> str:
    past = "" if config["context"] is None else f" after {config['context']}"
    ours = "minillm " if config["implementation"] != "pytorch" else ""
    return f"{ours}{config['implementation']} {config['kind']}{past}".replace("  ", " ").strip()


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _short_bytes(value: int) -> str:
    return f"{value / 1e6:.3g} MB" if value >= 1e6 else f"{value / 1e3:.3g} kB"
