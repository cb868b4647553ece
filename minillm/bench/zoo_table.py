"""The result of `bench zoo` as a table for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def table(outcome: dict[str, Any]) -> Table:
    """The result of `zoo.run`: systems by budget, those that cannot reach it left out."""
    from rich.table import Table

    facts = outcome["config"]
    guesses = ", ".join(f"{one['tokens']:.0%} at {one['distance']}" for one in facts["recall_without_definition"])
    missing = "; ".join(f"{row['system']} ({row['error']})" for row in outcome["rows"] if row["error"])
    made = Table(
        title=f"{facts['model']}: {facts['scored_tokens']} held-out tokens behind prompts of {facts['prompt_tokens']}",
        caption=f"Right tokens without the definition: {guesses}. Best per budget: {_best_in_words(facts['best'])}. "
        f"Not measured: {missing or 'none'}.",
    )
    distances = [one["distance"] for one in outcome["rows"][0]["recall"]]
    headings = ["system", "of fp16", "perplexity", "mean KL", "same top-1"]
    headings += [f"recall at {distance}" for distance in distances] + ["speed"]
    for heading in headings:
        made.add_column(heading, justify="left" if heading == "system" else "right")
    measured = [row for row in outcome["rows"] if row["quality"]]
    order = sorted(measured, key=lambda row: (row["budget"] is not None, row["budget"] or 0, row["quality"]["mean_kl"]))
    budget = None
    for row in order:
        if row["budget"] != budget:
            made.add_section()
        budget = row["budget"]
        made.add_row(*_cells(row))
    return made


def _cells(row: dict[str, Any]) -> list[str]:
    quality = row["quality"]
    return [
        row["system"],
        f"{row['share']:.3f}",
        f"{quality['perplexity']:.2f}",
        f"{quality['mean_kl']:.1e} ± {quality['mean_kl_error']:.0e}",
        f"{quality['top1']:.1%}",
        *(f"{one['tokens']:.0%} ({one['exact']:.0%} exact)" for one in row["recall"]),
        f"{row['speed']:.2f}×",
    ]


def _best_in_words(found: dict[str, dict[str, str]]) -> str:
    return "; ".join(f"{budget}: KL {one['mean_kl']}, recall {one['recall']}" for budget, one in found.items())
