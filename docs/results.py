"""Committed results of `minillm bench`, as the other scripts of this folder print them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from minillm.bench.provenance import weights_of

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"

Result = dict[str, Any]

FEWEST_ROUNDS = 6
"""Fewer rounds give no interval (`minillm.bench.harness.median_interval`)."""
EARLIER = "with an earlier version of the model's weights"


@cache
def load(file: str) -> Result:
    """A committed result of `minillm bench`. Raises `ValueError` if it says that its run has not ended. (A result of
    `bench gpu` says which stages were asked for; `gpu_page.py` names those that it lacks.)"""
    result: Result = json.loads((BENCHMARKS / f"{file}.json").read_text(encoding="utf-8"))
    if missing := result.get("config", {}).get("unfinished"):
        raise ValueError(f"the run that wrote {file}.json was ended before {', '.join(missing)}; measure again")
    return result


def is_of_bundled_weights(file: str, result: Result | None = None) -> bool:
    """Whether a result was measured with the weights that are bundled now, or with none of a bundled model."""
    result = load(file) if result is None else result
    if "weights" in result:
        return bool(result["weights"] == weights_of(result["weights"]))
    model = result.get("config", {}).get("model", result.get("target"))
    return not weights_of([model])  # a shape with random weights


def revision(result: Result) -> str:
    """The revision that a result was measured at, and what is known of further changes."""
    changes = {
        True: " with changes that were not committed",
        False: "",
        None: " (whether with further changes was not recorded)",
    }
    return f"{result['revision']}{changes[result.get('dirty')]}"


def has_extremes_for_intervals(file: str) -> bool:
    """Whether ratios of six or more rounds lack their intervals, as in results written before there were any."""
    result = load(file)
    compared = [row for row in result["rows"] if row["baseline"]]
    return result["config"]["rounds"] >= FEWEST_ROUNDS and not all(row.get("interval") for row in compared)


def ratio(row: Result) -> str:
    """The speed over the baseline, with the interval of its median; without one, with the lowest and the highest."""
    bounds = row.get("interval") or (row["ratio_min"], row["ratio_max"])
    median, low, high = (f"{value:.{1 if value >= 10 else 2}f}" for value in (row["ratio"], *bounds))
    return f"{median}× ({low} to {high})"


def number(value: float | None) -> str:
    """A number for a table, empty for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2f}"


def table_head(names: list[str]) -> list[str]:
    """The first two lines of a table in markdown."""
    return ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]


def row_of(file: str, system: str, baseline: str | None = None) -> Result:
    """The row of a system, with this baseline if one is given."""
    rows = [r for r in load(file)["rows"] if r["system"] == system and baseline in (None, r["baseline"])]
    if not rows:
        raise ValueError(f"{file}.json has no row of {system!r} over {baseline!r}")
    return rows[0]
