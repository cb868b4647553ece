"""Compare the counted parts of a notebook's outputs: those that must be the same on every run and every machine.

pytest's nbval compares printed text but not pictures: of a live picture it sees only the first frame, and an SVG holds
ids and coordinates without meaning. So a picture is reduced here to the words and numbers that a reader sees, the
`data-…` attributes with the state of each page and token, and the values of a chart.

In a cell tagged `nbval-ignore-output` everything may be measured, so only the names of the drawn parts are compared,
with every number masked. To compare more, put the counted outputs into a cell of their own, without the tag.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from html.parser import HTMLParser
from typing import Any

from nbformat import NotebookNode

PICTURES = ("image/svg+xml", "text/html")
CHART = "application/vnd.plotly.v1+json"
CHART_TOLERANCE = 1e-3
"""Relative; the last digits of a sum depend on the processor."""
SHOWN = 60
"""Characters of a difference that are shown."""
NAMES = ("data-series", "data-system", "data-testid")
"""The attributes that name a drawn part and hold no measurement."""
BY_TIME = ("data-testid=lost", "data-testid=saved")
"""Drawn parts that a measurement decides on: a waterfall shows what was saved or lost where something became quicker or
slower."""
_NUMBER = re.compile(r"\d[\d,.]*(?:e[+-]?\d+)?")
_DECIMAL = re.compile(r"\d+\.\d+")
_SPACES = re.compile(r"\s+")

Part = str | float


def difference(recorded: Sequence[NotebookNode], fresh: Sequence[NotebookNode], measured: bool) -> str:
    """The first counted difference between two runs of a cell, as `'2.42' is recorded, '2.35' is computed`; or "".

    `measured`: the cell is tagged `nbval-ignore-output`.
    """
    if measured:
        missing = sorted(_names(fresh) ^ _names(recorded))
        return f"what is drawn differs in {missing[0]!r}" if missing else ""
    return _first_difference(list(_printed(recorded)), list(_printed(fresh))) or _first_difference(
        list(_drawn(recorded)), list(_drawn(fresh))
    )


def parts_of(picture: str) -> list[str]:
    """The words, numbers and `data-…` attributes of an SVG or of HTML, in the order of the document."""
    reader = _Reader()
    reader.feed(picture)
    reader.close()
    return reader.parts


class _Reader(HTMLParser):
    """Collects visible text and `data-…` attributes; skips scripts and style sheets."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._hidden_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden_depth += tag in ("script", "style")
        self.parts += [f"{name}={value}" for name, value in attrs if name.startswith("data-") and value is not None]

    def handle_endtag(self, tag: str) -> None:
        self._hidden_depth -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._hidden_depth and data.strip():
            self.parts.append(_SPACES.sub(" ", data.strip()))


def _printed(outputs: Sequence[NotebookNode]) -> Iterator[str]:
    """Every line of printed text and of text values, in order."""
    for output in outputs:
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        yield from text.splitlines()


def _drawn(outputs: Sequence[NotebookNode]) -> Iterator[Part]:
    for output in outputs:
        data: Mapping[str, Any] = output.get("data", {})
        for kind in PICTURES:
            yield from parts_of(data.get(kind, ""))
        yield from _values(data.get(CHART, {}).get("data", []))


def _values(value: Any, key: str = "") -> Iterator[Part]:
    """The names and numbers of a chart's series, without their styling."""
    if isinstance(value, Mapping):
        for name in ("name", "x", "y", "z", "text"):
            yield from _values(value.get(name), name)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _values(each, key)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)
    elif isinstance(value, str):
        yield value


def _names(outputs: Sequence[NotebookNode]) -> set[str]:
    """The kinds and names of the drawn parts, with numbers masked."""
    parts = {part for output in outputs for kind in PICTURES for part in parts_of(output.get("data", {}).get(kind, ""))}
    return {_NUMBER.sub("#", part) for part in parts if part.partition("=")[0] in NAMES and part not in BY_TIME}


def _first_difference(recorded: list[Part], fresh: list[Part]) -> str:
    for before, after in zip(recorded, fresh, strict=False):
        if not _same(before, after):
            return _in_words(before, after)
    if len(recorded) > len(fresh):
        return f"{recorded[len(fresh)]!r} is recorded and not computed"
    return f"{fresh[len(recorded)]!r} is computed and not recorded" if len(fresh) > len(recorded) else ""


def _in_words(before: Part, after: Part) -> str:
    """Both parts in one sentence; of long texts, only the surroundings of the first difference."""
    if isinstance(before, str) and isinstance(after, str):
        same = next((n for n, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), 0)
        before, after = (_around(text, same) for text in (before, after))
    return f"{before!r} is recorded, {after!r} is computed"


def _around(text: str, place: int) -> str:
    start, end = max(0, place - SHOWN // 2), place + SHOWN
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"


def _same(before: Part, after: Part) -> bool:
    if isinstance(before, float) and isinstance(after, float):
        close = math.isclose(before, after, rel_tol=CHART_TOLERANCE, abs_tol=1e-9)
        return close or _same_up_to_rounding(repr(before), repr(after))  # a chart may show rounded values
    if isinstance(before, str) and isinstance(after, str):
        return before == after or _same_up_to_rounding(before, after)
    return before == after


def _same_up_to_rounding(before: str, after: str) -> bool:
    """Whether the texts differ only in decimals, each by at most one in its last digit. 1.149 and 1.151 print as 1.1
    and 1.2, and the last digits of a sum depend on the processor. Whole numbers are counts and must be equal."""
    if _DECIMAL.sub("#", before) != _DECIMAL.sub("#", after):
        return False
    for one, other in zip(_DECIMAL.findall(before), _DECIMAL.findall(after), strict=True):
        digits = len(one.partition(".")[2])
        if digits != len(other.partition(".")[2]) or abs(float(one) - float(other)) > 1.01 * 10**-digits:
            return False
    return True
