"""Draw the expected and the given answer as two grids of cells: for masks, block tables and coverage.

A cell is a number or a truth value. A wrong cell has a cross, so that colour is never the only cue. The card is white,
so that it is readable on light and dark pages.
"""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
import torch

MAX_ROWS, MAX_COLUMNS = 24, 32
MIN_CELLS = 6
Cells = list[list["int | bool"]]
Got = list[list["int | bool | None"]]
"""`Cells` with None at each place that only the expected ones have."""


def cells_of(value: Any) -> Cells | None:
    """`value` as rows of cells, or None if it cannot be drawn.

    Matrices and rows of integers or truth values can be drawn, masks of 0 and -inf (true where the mask is 0), and
    lists of integers. Leading dimensions of size 1 are dropped.
    """
    if isinstance(value, (list, tuple)):
        rows = list(value) if value and all(isinstance(row, (list, tuple)) for row in value) else [list(value)]
        whole = all(isinstance(cell, (bool, int, np.integer)) for row in rows for cell in row)
        return _fitting([list(row) for row in rows]) if whole else None
    if not isinstance(value, (torch.Tensor, np.ndarray)):
        return None
    tensor = torch.as_tensor(value).detach().cpu()
    if tensor.is_floating_point():
        if tensor.numel() == 0 or not ((tensor == 0) | (tensor == -torch.inf)).all() or not tensor.isinf().any():
            return None
        tensor = tensor == 0
    while tensor.dim() > 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    return _fitting(torch.atleast_2d(tensor).tolist()) if tensor.dim() <= 2 and not tensor.is_complex() else None


def _fitting(rows: Cells) -> Cells | None:
    widest = max(map(len, rows), default=0)
    return rows if 0 < len(rows) <= MAX_ROWS and 0 < widest <= MAX_COLUMNS else None


def worth_drawing(expected: Cells | None, got: Cells | None) -> bool:
    """Whether both are grids, differ, and are too large for a line of text."""
    if expected is None or got is None or expected == got:
        return False
    return max(_num_cells(expected), _num_cells(got)) >= MIN_CELLS


def _num_cells(rows: Cells | Got) -> int:
    return sum(map(len, rows))


def _with_gaps(got: Cells, expected: Cells) -> Got:
    rows: Got = [list(row) for row in got] + [[] for _ in expected[len(got) :]]
    for row, other in zip(rows, expected, strict=False):
        row += [None] * (len(other) - len(row))
    return rows


# -------------------------------------------------------------------------------------------------------------- as text


def as_text(expected: Cells, got: Cells) -> str:
    """Both grids side by side: `✓` true, `·` false, numbers as they are; `✗` marks what differs or is missing."""
    left, right = _marked(expected, None), _marked(_with_gaps(got, expected), expected)
    width = max(len("expected"), *map(len, left))
    lines = [f"{'expected':<{width}}    got (✗ differs)"]
    for i in range(max(len(left), len(right))):
        lines.append(f"{left[i] if i < len(left) else '':<{width}}    {right[i] if i < len(right) else ''}".rstrip())
    return "\n".join(lines)


def _marked(rows: Cells | Got, other: Cells | None) -> list[str]:
    def text(i: int, j: int) -> str:
        return _cell_text(rows[i][j]) + ("✗" if _differs(rows, other, i, j) else "")

    texts = [[text(i, j) for j in range(len(row))] for i, row in enumerate(rows)]
    width = max((len(text) for row in texts for text in row), default=1)
    return [" ".join(f"{text:<{width}}" for text in row).rstrip() for row in texts]


def _cell_text(cell: int | bool | None) -> str:
    if cell is None:
        return ""
    return ("✓" if cell else "·") if isinstance(cell, bool) else str(cell)


def _differs(rows: Cells | Got, other: Cells | None, i: int, j: int) -> bool:
    return other is not None and (i >= len(other) or j >= len(other[i]) or other[i][j] != rows[i][j])


# --------------------------------------------------------------------------------------------------------------- as SVG

CELL, GAP, TITLE = 24, 34, 20
CARD = "display: inline-block; background: #ffffff; border: 1px solid #c8c8c8; padding: 8px; margin: 4px 0"
INK, LINE = "#1a1a1a", "#c8c8c8"
TRUE, SPOILT, WRONG = "#cfe3f3", "#fbe3d5", "#D55E00"


def as_html(expected: Cells, got: Cells) -> str:
    """Both grids as one SVG on a white card. A place without a value is dashed."""
    answer = _with_gaps(got, expected)
    size = CELL + 8 * max(0, max(len(_cell_text(cell)) for rows in (expected, got) for row in rows for cell in row) - 1)
    left = max(max(map(len, expected)) * size, 70)
    right = max(max(map(len, answer)) * size, 110)
    width, height = left + GAP + right + 2, TITLE + len(answer) * CELL + 2
    wrong = sum(_differs(answer, expected, i, j) for i, row in enumerate(answer) for j in range(len(row)))
    words = f"expected and got: {wrong} of {_num_cells(answer)} cells differ, each marked with a cross"
    body = _grid("expected", expected, None, 1, size) + _grid("got (✗ differs)", answer, expected, left + GAP, size)
    return (
        f'<div style="{CARD}"><svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(words)}" '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
        f"<title>{escape(words)}</title>{body}</svg></div>"
    )


def _grid(title: str, rows: Cells | Got, other: Cells | None, left: int, size: int) -> str:
    parts = [f'<text x="{left}" y="13" fill="{INK}">{escape(title)}</text>']
    for i, row in enumerate(rows):
        for j, cell in enumerate(row):
            x, y, bad = left + j * size, TITLE + i * CELL, _differs(rows, other, i, j)
            fill = SPOILT if bad else TRUE if cell is True else "#ffffff"
            box = f'x="{x}" y="{y}" width="{size}" height="{CELL}"'
            if cell is None:
                parts.append(f'<rect {box} fill="#ffffff" stroke="{WRONG}" stroke-dasharray="3 2"/>')
            else:
                parts.append(f'<rect {box} fill="{fill}" stroke="{LINE}"/>')
                place = f'x="{x + size / 2:g}" y="{y + 17}"'
                parts.append(f'<text {place} text-anchor="middle" fill="{INK}">{_cell_text(cell)}</text>')
            if bad:
                parts.append(f'<path d="M{x + size - 8} {y + 3}l5 5m0 -5l-5 5" stroke="{WRONG}" stroke-width="2"/>')
    return "".join(parts)
