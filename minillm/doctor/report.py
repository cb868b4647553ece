"""The doctor's report: one row per check, as text, HTML or JSON.

A row is `ok`: everything works; `limited`: a fallback works instead; or `missing`: a part of the lessons does not run
until the fix is made.

A lesson shows one line, and below it only the rows that need a fix. `minillm.doctor(full=True)` and the command show
the whole table.
"""

from __future__ import annotations

import html
import json
import shutil
import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from minillm.doctor.machine_limits import MachineLimit

Status = Literal["ok", "limited", "missing"]
MARKS: dict[str, str] = {"ok": "✓", "limited": "~", "missing": "✗"}
LEFT = "text-align:left"
COLOURS: dict[str, str] = {"ok": "#009E73", "limited": "#B87A00", "missing": "#D55E00"}


@dataclass(frozen=True)
class Row:
    """The result of one check."""

    name: str
    status: Status
    found: str
    meaning: str
    """One sentence: what this means for the lessons."""
    fix: str = ""
    """The command or change that fixes it; empty if there is nothing to fix."""

    @property
    def trouble(self) -> bool:
        """Whether a learner should act: a limit with a fix, or a missing part."""
        return self.status == "missing" or (self.status == "limited" and bool(self.fix))


@dataclass(frozen=True, repr=False)
class Report:
    """All rows. Displayed as one line and the rows that need a fix, or with `full` as the whole table."""

    rows: tuple[Row, ...]
    limits: tuple[MachineLimit, ...] = ()
    machine: str = ""
    """A short description of the machine (see `checks.machine`)."""
    full: bool = True

    @property
    def troubles(self) -> tuple[Row, ...]:
        """The rows that a learner should act on."""
        return tuple(row for row in self.rows if row.trouble)

    @property
    def line(self) -> str:
        """One line: the machine, and whether everything that lessons need is installed."""
        count = len(self.troubles)
        state = f"{count} thing{'s' if count > 1 else ''} to fix" if count else "everything needed is here"
        return f"{self.machine} · {state}. doctor(full=True) shows the table."

    @property
    def healthy(self) -> bool:
        """Whether no row is `missing`."""
        return all(row.status != "missing" for row in self.rows)

    @property
    def text(self) -> str:
        """The whole report for a terminal: each row with its meaning and its fix."""
        lines = _lines(self.rows)
        if self.limits:
            lines += ["", "Measured here, just now (median, lowest to highest):"]
            lines += [f"  {c.device:<4}  {c.name:<24}  {c}" for c in self.limits]
        return "\n".join([*lines, "", self.summary])

    @property
    def summary(self) -> str:
        """One line: the number of rows of each status."""
        counts = {status: sum(row.status == status for row in self.rows) for status in MARKS}
        return f"{counts['ok']} ok, {counts['limited']} limited, {counts['missing']} missing."

    def to_json(self) -> str:
        """The report as JSON: `rows`, and `limits`, which is empty if they were not measured."""
        value = {"rows": [asdict(row) for row in self.rows], "limits": [asdict(c) for c in self.limits]}
        return json.dumps(value, indent=2, ensure_ascii=False)

    def __repr__(self) -> str:
        return self.text if self.full else "\n".join([self.line, *_lines(self.troubles)])

    def _repr_html_(self) -> str:
        return self._table() if self.full else f"<div>{html.escape(self.line)}</div>{_table_html(self.troubles)}"

    def _table(self) -> str:
        measured = "".join(
            f"<tr>{_cell('')}{_cell(f'{c.name} ({c.device})')}{_cell(str(c))}{_cell('measured here, just now')}</tr>"
            for c in self.limits
        )
        return _table_html(self.rows, measured, f"What runs on this machine: {self.summary}")


def _lines(rows: tuple[Row, ...]) -> list[str]:
    width = max((len(row.name) for row in rows), default=0)
    return [line for row in rows for line in _row_lines(row, width)]


def _row_lines(row: Row, width: int) -> list[str]:
    indent = " " * (width + 13)
    columns = max(40, min(120, shutil.get_terminal_size().columns) - len(indent))
    body = [row.found, row.meaning, *([f"fix: {row.fix}"] if row.fix else [])]
    first, *others = [line for part in body for line in textwrap.wrap(part, columns)]
    return [f"{MARKS[row.status]} {row.status:<7}  {row.name:<{width}}  {first}", *(indent + line for line in others)]


def _table_html(rows: tuple[Row, ...], more: str = "", caption: str = "") -> str:
    """A table, or "" for no rows. JupyterLab aligns cells to the right unless the cell's own style overrides it."""
    if not rows and not more:
        return ""
    head = "".join(_cell(word, "th") for word in ("", "part", "found", "what it means"))
    title = f'<caption style="{LEFT}">{html.escape(caption)}</caption>' if caption else ""
    body = "".join(map(_row_html, rows)) + more
    return f'<table class="minillm-doctor" style="margin-left:0">{title}<tr>{head}</tr>{body}</table>'


def _row_html(row: Row) -> str:
    colour = f"color:{COLOURS[row.status]};white-space:nowrap;font-weight:bold"
    fix = f"<br><b>fix:</b> <code>{html.escape(row.fix)}</code>" if row.fix else ""
    cells = _cell(f"{MARKS[row.status]} {row.status}", style=colour) + _cell(row.name, style="font-weight:bold")
    return f'<tr data-status="{row.status}">{cells}{_cell(row.found)}{_cell(row.meaning, more=fix)}</tr>'


def _cell(text: str, name: str = "td", style: str = "", more: str = "") -> str:
    styles = ";".join(filter(None, [LEFT, style]))
    return f'<{name} style="{styles}">{html.escape(text)}{more}</{name}>'
