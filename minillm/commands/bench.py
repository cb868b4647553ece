"""`minillm bench`: measure something against the plain way of doing it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.bench.registry import BENCHMARKS, find, find_table
from minillm.commands.command import Command
from minillm.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLES = """\
  minillm bench decode
  minillm bench decode --json decode.json
  minillm bench quality
"""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    listing = "; ".join(f"{name}: {what}" for name, what in BENCHMARKS.items())
    parser.add_argument("name", choices=BENCHMARKS, help=listing)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")


def run(args: argparse.Namespace) -> int:
    """Run one benchmark, print its table, keep its JSON."""
    if args.json and not args.json.parent.is_dir():
        raise ConfigError(f"--json {args.json}: there is no folder {args.json.parent}; make it first")
    from rich.console import Console

    from minillm.bench.harness import save

    result = find(args.name)()
    Console().print((find_table(args.name) or speed_table)(result))
    if args.json:
        save(result, args.json)
    return 0


def speed_table(result: dict[str, Any]) -> Table:
    """The rows of a result for the terminal: each system, and its speed over that of its baseline."""
    from rich.table import Table

    table = Table(title=f"{result['name']} on {result['hardware']['cpu']['name']}")
    for heading in ("system", "baseline", "ratio", "spread", "tokens/s", "ms per token", "peak MB", "same tokens"):
        table.add_column(heading, justify="left" if heading in ("system", "baseline") else "right")
    for row in result["rows"]:
        table.add_row(*_cells(row))
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    alone = row["baseline"] is None
    peak = row["peak_memory_bytes"]
    return [
        row["system"],
        "" if alone else row["baseline"],
        "" if alone else f"{row['ratio']:.2f}×",
        "" if alone else f"{row['ratio_min']:.2f} to {row['ratio_max']:.2f}",
        f"{row['tokens_per_s']:.1f}",
        f"{row['p50_ms']:.2f}",
        "" if peak is None else f"{peak / 1e6:.0f}",
        "" if alone else ("yes" if row["outputs_equal"] else "no"),
    ]


COMMAND = Command(
    "bench",
    "Measure: ratios inside one run, medians of pairs taken in turn, with their spread.",
    EXAMPLES,
    options,
    run,
)
