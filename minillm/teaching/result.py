"""The result of a check, as text for terminals and as HTML for notebooks; it is the same on every run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from html import escape


class Status(Enum):
    """The four ways a check ends."""

    PASSED = "PASS"
    FAILED = "FAIL"
    NOT_DONE = "NOT DONE YET"
    MISSING = "NOT FOUND"


@dataclass(frozen=True)
class Counterexample:
    """The first case that failed, with every value as text.

    `problem` says how the answer is wrong, `where` which line of the learner raised, `cause` the likely cause; the last
    two may be empty. `picture` and `drawing` compare expected and got as text and as HTML, or are empty. With a
    `drawing`, the rows `expected` and `got` are left out.
    """

    label: str
    inputs: Mapping[str, str]
    expected: str
    got: str
    problem: str
    where: str = ""
    cause: str = ""
    picture: str = ""
    drawing: str = ""

    def findings(self) -> list[tuple[str, str]]:
        """(heading, text) of the rows that a learner needs first: the likely cause, what is wrong, and where."""
        rows = [("likely", self.cause)] if self.cause else []
        rows += [("wrong", self.problem)]
        return rows + ([("your code", self.where)] if self.where else [])

    def numbers(self) -> list[tuple[str, str]]:
        """(heading, text) of the values: the inputs and, unless they are drawn, the expected and the given answer."""
        rows = [(f"input {name}", text) for name, text in self.inputs.items()]
        return rows if self.drawing else [*rows, ("expected", self.expected), ("got", self.got)]


@dataclass(frozen=True)
class CheckResult:
    """Outcome of one check; `str()` of it is the whole report."""

    name: str
    status: Status
    num_passed: int
    num_cases: int
    counterexample: Counterexample | None = None
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether every case passed."""
        return self.status is Status.PASSED

    def headline(self) -> str:
        """The first line of the report: `PASS 5/5  l02.append_kv`."""
        bare = self.name.partition(".")[2]
        if self.status is Status.PASSED:
            return f"PASS {self.num_passed}/{self.num_cases}  {self.name}"
        if self.status is Status.NOT_DONE:
            todo = self.note or f"write {bare}, run its cell, then run this one again"
            return f"NOT DONE YET  {self.name}: {todo}"
        if self.status is Status.MISSING:
            return f"NOT FOUND  {self.name}: there is no function {bare} here; run the cell that defines it"
        return f"FAIL {self.num_passed}/{self.num_cases}  {self.name}"

    def advice(self) -> str:
        """The line after a failure: where to get help."""
        return "" if self.passed else f'For a hint: hint("{self.name}", 1), then 2, and so on.'

    def __str__(self) -> str:
        lines = [self.headline()]
        if self.counterexample:
            lines.append(f"The first case that fails: {self.counterexample.label}")
            shown = self.counterexample
            rows = shown.findings() + shown.numbers() + ([("compared", shown.picture)] if shown.picture else [])
            width = max(len(heading) for heading, _ in rows)
            for heading, text in rows:
                first, *rest = text.splitlines() or [""]
                lines.append(f"  {heading:<{width}}  {first}")
                lines += [f"  {'':<{width}}  {line}" for line in rest]
        return "\n".join(lines + ([self.advice()] if self.advice() else []))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """A box with a coloured edge; its first word says the same, so that colour is not the only cue."""
        edge = {Status.PASSED: "#009E73", Status.FAILED: "#D55E00"}.get(self.status, "#0072B2")
        parts = [f'<div role="status" style="border-left: 6px solid {edge}; padding: 4px 10px; margin: 4px 0">']
        parts.append(f"<strong>{escape(self.headline())}</strong>")
        if self.counterexample:
            parts.append(f"<div>The first case that fails: {escape(self.counterexample.label)}</div>")
            parts.append('<table style="text-align: left; border-collapse: collapse">')
            shown = self.counterexample
            parts += [_row(heading, text) for heading, text in shown.findings() + shown.numbers()]
            parts.append("</table>" + shown.drawing)
        if self.advice():
            parts.append(f"<div>{escape(self.advice())}</div>")
        return "".join(parts) + "</div>"


def _row(heading: str, text: str) -> str:
    cell = 'style="text-align: left; vertical-align: top; padding: 2px 8px; font-size: inherit; white-space: nowrap"'
    return (
        f'<tr><th scope="row" {cell}>{escape(heading)}</th>'
        f'<td {cell}><pre style="margin: 0; white-space: pre-wrap">{escape(text)}</pre></td></tr>'
    )
