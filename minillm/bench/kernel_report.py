"""The result of `bench kernels` as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

COLD, WARM = "cold", "warm"


def table(outcome: dict[str, Any]) -> Table:
    """A line for each implementation of each case. GB/s, GFLOP/s and ratio are cold ones if there is a cold time."""
    from rich.table import Table

    device = outcome["hardware"]["gpu"] or outcome["hardware"]["cpu"]
    copy = outcome["config"]["limits"]["copy bandwidth"]["median"] / 1e9
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


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _short_bytes(value: int) -> str:
    return f"{value / 1e6:.3g} MB" if value >= 1e6 else f"{value / 1e3:.3g} kB"
