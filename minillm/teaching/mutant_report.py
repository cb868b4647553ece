"""The report on mutants, as a table and lists for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from minillm.teaching.mutants import MutantResult, Report


def show(report: Report, console: Console) -> None:
    """Print one line per exercise, then the survivors, then the declared equivalents that no longer survive."""
    console.print(_table(report))
    survivors = [trial for trial in report.trials if trial.survived]
    if survivors:
        console.print("\n[bold]Survivors[/bold]: a case is missing, or the mutant is equivalent and should be declared")
    for exercise in dict.fromkeys(trial.exercise for trial in survivors):
        console.print(f"\n{exercise}")
        for trial in survivors:
            if trial.exercise == exercise:
                console.print(f"  {escape(trial.description)}", soft_wrap=True)
    for exercise, description in report.stale:
        console.print(f"declared equivalent, but no such survivor: {exercise}: {escape(description)}", soft_wrap=True)


def summary(report: Report) -> str:
    """The counts of the whole report in one sentence."""
    made = [trial for trial in report.trials if not trial.planted]
    equivalent, survived = sum(bool(trial.equivalent) for trial in made), sum(trial.survived for trial in made)
    num_exercises = len({trial.exercise for trial in report.trials})
    return (
        f"{len(made)} mutants of {num_exercises} reference solutions: {_caught(made)} caught, "
        f"{_named(made)} with a cause, {equivalent} declared equivalent, {survived} survived"
    )


def _table(report: Report) -> Table:
    table = Table("exercise", "planted", "mutants", "caught", "cause", "equivalent", "survived")
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for exercise in dict.fromkeys(trial.exercise for trial in report.trials):
        table.add_row(exercise, *_counts(report.of(exercise)))
    table.add_section()
    table.add_row("all", *_counts(list(report.trials)))
    return table


def _counts(trials: list[MutantResult]) -> list[str]:
    """A table row: planted mistakes that were named; mutants: all, caught, with a cause, equivalent, survived."""
    planted, made = [t for t in trials if t.planted], [t for t in trials if not t.planted]
    equivalent, survived = sum(bool(t.equivalent) for t in made), sum(t.survived for t in trials)
    return [
        f"{_named(planted)}/{len(planted)}",
        *map(str, (len(made), _caught(made), _named(made), equivalent, survived)),
    ]


def _caught(trials: list[MutantResult]) -> int:
    return sum(trial.caught for trial in trials)


def _named(trials: list[MutantResult]) -> int:
    return sum(bool(trial.cause) for trial in trials)
