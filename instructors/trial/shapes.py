"""What happens to a notebook between a course and its grader: cells moved, split, doubled, renamed; files broken."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

Notebook = dict[str, Any]


def code(source: str) -> Notebook:
    """A code cell."""
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": source}


def with_cell(notebook: Notebook, name: str, source: str) -> Notebook:
    """A copy in which the cell that defines `name` has another source."""
    changed = copy.deepcopy(notebook)
    for cell in changed["cells"]:
        if cell["cell_type"] == "code" and f"def {name}(" in text(cell):
            cell["source"] = source
    return changed


def text(cell: Notebook) -> str:
    """The source of a cell as one text."""
    source = cell["source"]
    return "".join(source) if isinstance(source, list) else source


def _reordered(notebook: Notebook) -> Notebook:
    random.Random(5).shuffle(notebook["cells"])
    return notebook


def _reversed(notebook: Notebook) -> Notebook:
    notebook["cells"].reverse()
    return notebook


def _split(notebook: Notebook) -> Notebook:
    """A cell per top-level statement."""
    import ast

    cells = []
    for cell in notebook["cells"]:
        try:
            parts = ast.parse(text(cell)).body if cell["cell_type"] == "code" else []
        except SyntaxError:
            parts = []
        cells += [code(ast.unparse(part)) for part in parts] or [cell]
    notebook["cells"] = cells
    return notebook


def _merged(notebook: Notebook) -> Notebook:
    """All cells without magics in one."""
    sources = [text(cell) for cell in notebook["cells"] if cell["cell_type"] == "code" and "%pip" not in text(cell)]
    notebook["cells"] = [code("\n\n".join(sources))]
    return notebook


def _doubled(notebook: Notebook) -> Notebook:
    notebook["cells"] = [cell for cell in notebook["cells"] for _ in "12"]
    return notebook


def _stubs_again(notebook: Notebook) -> Notebook:
    """Behind each function its unwritten stub, as where a learner copies the fresh cell back."""
    cells = []
    for cell in notebook["cells"]:
        cells.append(cell)
        if cell["cell_type"] == "code" and text(cell).startswith("def "):
            head = text(cell).partition("\n")[0]
            if head.endswith(":"):
                cells.append(code(f"{head}\n    raise NotImplementedError('write it')"))
    notebook["cells"] = cells
    return notebook


def _without_metadata(notebook: Notebook) -> Notebook:
    notebook["metadata"] = {}
    for cell in notebook["cells"]:
        cell.pop("id", None)
        cell["metadata"] = {}
    return notebook


def _other_ids(notebook: Notebook) -> Notebook:
    for number, cell in enumerate(notebook["cells"]):
        cell["id"], cell["metadata"] = f"renamed-{number}", {"nbgrader": {"grade_id": "x"}, "tags": ["mine"]}
    return notebook


def _false_outputs(notebook: Notebook) -> Notebook:
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "PASS 5/5\n" * 20_000}]
    return notebook


def _magics(notebook: Notebook) -> Notebook:
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and text(cell).startswith("def "):
            cell["source"] = "%%time\n%matplotlib inline\n!echo hello\n" + text(cell)
    return notebook


def _old_format(notebook: Notebook) -> Notebook:
    """nbformat 3."""
    cells = [{**cell, "input": text(cell)} for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return {"nbformat": 3, "worksheets": [{"cells": cells}]}


def _broken_cell_too(notebook: Notebook) -> Notebook:
    notebook["cells"] += [
        code("def half(:\n"),
        code("this is no Python"),
        {"cell_type": "code"},
        {"source": 3},
        7,
        None,
    ]
    return notebook


def _ends_at_once(notebook: Notebook) -> Notebook:
    """Cells that would end, block or break a notebook that is run from the top."""
    first = [
        "import sys; sys.exit()",
        "while True: pass",
        "1 / 0",
        "raise SystemExit",
        "import torch; torch.softmax = None",
    ]
    notebook["cells"] = [*map(code, first), *notebook["cells"]]
    return notebook


SAME_MEANING: dict[str, Callable[[Notebook], Notebook]] = {
    "unchanged": lambda notebook: notebook,
    "cells in another order": _reordered,
    "cells in reverse": _reversed,
    "cells split": _split,
    "cells merged into one": _merged,
    "every cell twice": _doubled,
    "stubs behind the functions": _stubs_again,
    "no metadata and no ids": _without_metadata,
    "other ids, tags and grader's metadata": _other_ids,
    "false saved outputs": _false_outputs,
    "magics and shell lines": _magics,
    "notebook format 3": _old_format,
    "cells that are not Python, not cells": _broken_cell_too,
    "cells that end or block a run from the top": _ends_at_once,
}
"""Notebooks that must get the grades of the original."""


def unreadable(notebook: Notebook) -> dict[str, bytes]:
    """Files that are no notebook."""
    whole = json.dumps(notebook).encode()
    return {
        "broken JSON": whole[: len(whole) // 2],
        "an empty file": b"",
        "not text": bytes(range(256)) * 100,
        "a list": b"[1, 2, 3]",
        "no cells": b'{"nbformat": 4}',
        "brackets a hundred thousand deep": b'{"cells": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    }
