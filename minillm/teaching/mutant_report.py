"""The report on mutants, as a table and lists for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from minillm.teaching.mutants import MutantResult, Report


def show(report: Report, console: Console) -> None:
    """Print one line per exercise, then the survivors, then the declared equivalents that no longer survive."""
    console.print(_table(report))
    survivors = [result for result in report.results if result.survived]
    if survivors:
        console.print("\n[bold]Survivors[/bold]: a case is missing, or the mutant is equivalent and should be declared")
    for exercise in dict.fromkeys(result.exercise for result in survivors):
        console.print(f"\n{exercise}")
        for result in survivors:
            if result.exercise == exercise:
                console.print(f"  {escape(result.description)}", soft_wrap=True)
    for exercise, description in report.stale:
        console.print(f"declared equivalent, but no such survivor: {exercise}: {escape(description)}", soft_wrap=True)


def summary(report: Report) -> str:
    """The counts of the whole report in one sentence."""
    made = [result for result in report.results if not result.planted]
    equivalent, survived = sum(bool(result.equivalent) for result in made), sum(result.survived for result in made)
    num_exercises = len({result.exercise for result in report.results})
    return (
        f"{len(made)} mutants of {num_exercises} reference solutions: {_caught(made)} caught, "
        f"{_named(made)} with a cause, {equivalent} declared equivalent, {survived} survived"
    )


def _table(report: Report) -> Table:
    table = Table("exercise", "planted", "mutants", "caught", "cause", "equivalent", "survived")
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for exercise in dict.fromkeys(result.exercise for result in report.results):
        table.add_row(exercise, *_counts(report.of(exercise)))
    table.add_section()
    table.add_row("all", *_counts(list(report.results)))
    return table


def _counts(results: list[MutantResult]) -> list[str]:
    """A table row: planted mistakes that were named; mutants: all, caught, with a cause, equivalent, survived."""
    planted, made = [r for r in results if r.planted], [r for r in results if not r.planted]
    equivalent, survived = sum(bool(r.equivalent) for r in made), sum(r.survived for r in results)
    return [
        f"{_named(planted)}/{len(planted)}",
        *map(str, (len(made), _caught(made), _named(made), equivalent, survived)),
    ]


def _caught(results: list[MutantResult]) -> int:
    return sum(result.caught for result in results)


def _named(results: list[MutantResult]) -> int:
    return sum(bool(result.cause) for result in results)
