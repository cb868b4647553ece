"""What will run on this machine, what will not, and what to do about it: `minillm doctor`.

Each check gives one row. `ok`: all of it works. `limited`: a fallback works instead. `missing`: a part of the lessons
does not run until the fix is made. The checks load what they look at only when they run, so importing this file costs
nothing, and the first cell of a lesson can call `minillm.doctor()`.
"""

from __future__ import annotations

import html
import json
import shutil
import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from minillm.errors import UnsupportedError

if TYPE_CHECKING:
    from minillm.ceilings import Ceiling

Status = Literal["ok", "limited", "missing"]
MARKS: dict[str, str] = {"ok": "✓", "limited": "~", "missing": "✗"}
COLOURS: dict[str, str] = {"ok": "#009E73", "limited": "#B87A00", "missing": "#D55E00"}


@dataclass(frozen=True)
class Row:
    """One finding."""

    name: str
    status: Status
    found: str
    meaning: str
    """One sentence: what this means for the lessons."""
    fix: str = ""
    """What to type or change; empty if nothing needs to be."""


@dataclass(frozen=True, repr=False)
class Report:
    """All findings; shows itself as text in a terminal and as a table in a notebook."""

    rows: tuple[Row, ...]
    ceilings: tuple[Ceiling, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether nothing is missing."""
        return all(row.status != "missing" for row in self.rows)

    @property
    def text(self) -> str:
        """The report for a terminal: one finding, its meaning and its fix after the other."""
        width = max(len(row.name) for row in self.rows)
        lines = [line for row in self.rows for line in _row_lines(row, width)]
        if self.ceilings:
            lines += ["", "Measured here, just now (median, lowest to highest):"]
            lines += [f"  {c.device:<4}  {c.name:<24}  {c}" for c in self.ceilings]
        return "\n".join([*lines, "", self.summary])

    @property
    def summary(self) -> str:
        """One line: how many findings of each kind."""
        counts = {status: sum(row.status == status for row in self.rows) for status in MARKS}
        return f"{counts['ok']} ok, {counts['limited']} limited, {counts['missing']} missing."

    def to_json(self) -> str:
        """The report as JSON: `rows`, and `ceilings` if they were measured."""
        value = {"rows": [asdict(row) for row in self.rows], "ceilings": [asdict(c) for c in self.ceilings]}
        return json.dumps(value, indent=2, ensure_ascii=False)

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        rows = "".join(_row_html(row) for row in self.rows)
        measured = "".join(
            f"<tr><td></td><td>{html.escape(c.name)} ({c.device})</td><td>{html.escape(str(c))}</td>"
            "<td>measured here, just now</td></tr>"
            for c in self.ceilings
        )
        head = "<tr><th></th><th>part</th><th>found</th><th>what it means</th></tr>"
        return (
            '<table class="minillm-doctor" style="text-align:left">'
            f"<caption>What runs on this machine: {self.summary}</caption>{head}{rows}{measured}</table>"
        )


def doctor(measure: bool = False) -> Report:
    """Look at this machine. With `measure`, also time copies and matrix products, which takes a few seconds.

    Raises `UnsupportedError` if there is no PyTorch to measure with.
    """
    from minillm.checks import run_checks

    rows = tuple(run_checks())
    if not measure:
        return Report(rows)
    try:
        from minillm.ceilings import measure as measure_ceilings
    except ImportError as problem:
        raise UnsupportedError(f"measuring needs PyTorch ({problem}); without measuring, the doctor works") from None
    return Report(rows, tuple(measure_ceilings()))


def _row_lines(row: Row, width: int) -> list[str]:
    indent = " " * (width + 13)
    columns = max(40, min(120, shutil.get_terminal_size().columns) - len(indent))
    body = [row.found, row.meaning, *([f"fix: {row.fix}"] if row.fix else [])]
    first, *others = [line for part in body for line in textwrap.wrap(part, columns)]
    return [f"{MARKS[row.status]} {row.status:<7}  {row.name:<{width}}  {first}", *(indent + line for line in others)]


def _row_html(row: Row) -> str:
    fix = f"<br><b>fix:</b> <code>{html.escape(row.fix)}</code>" if row.fix else ""
    return (
        f'<tr data-status="{row.status}"><td style="color:{COLOURS[row.status]};white-space:nowrap">'
        f"<b>{MARKS[row.status]} {row.status}</b></td><td><b>{html.escape(row.name)}</b></td>"
        f"<td>{html.escape(row.found)}</td><td>{html.escape(row.meaning)}{fix}</td></tr>"
    )
