"""Checks of a lesson's source: measured claims only in measured cells, no dead links, no absent lessons."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from pathlib import Path

from nbformat import NotebookNode

from minillm.errors import LessonError
from minillm.teaching.glossary import FILE as GLOSSARY
from minillm.teaching.glossary import terms

_LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_CITED = re.compile(r"\blessons?\s+(\d+(?:\s*(?:,\s*and|,\s*or|,|and|or|to)\s*\d+\b)*)", re.IGNORECASE)


def refuse_measured_claims(source: str, where: str) -> None:
    """A cell whose output is compared must not hold a measured claim, which prints differently on another machine.

    Claims inside functions are ignored: they print where the function is called.

    Raises:
        LessonError: `claim(..., measured=True)` is in `source`, the code of a cell without `nbval-ignore-output`.
    """
    try:
        tree = ast.parse("\n".join("" if re.match(r"\s*[%!]", line) else line for line in source.splitlines()))
    except SyntaxError:  # running the cell gives a better error
        return
    for call in _calls(tree):
        if call.func.id == "claim" and _is_measured(call):
            raise LessonError(
                f"{where}, line {call.lineno}: claim(…, measured=True) prints another sentence where it does not hold, "
                'but this cell\'s output is compared; add tags=["nbval-ignore-output"] to the cell, or move the claim '
                "into a cell that has this tag"
            )


def refuse_dead_links(text: str, where: str, folder: Path) -> None:
    """Every relative link of a markdown cell must point to something that exists.

    That is a term of the glossary (`[panel](glossary.md#panel)`), or a notebook whose source is in `folder`.

    Raises:
        LessonError: a link points to nothing.
    """
    for target in _LINK.findall(_FENCE.sub("", text)):
        if re.match(r"[a-z][a-z0-9+.-]*:|#", target, re.IGNORECASE):
            continue
        file, _, anchor = target.partition("#")
        if file == GLOSSARY:
            _refuse_unknown_term(anchor, where)
        elif not file.endswith(".ipynb") or not (folder / file).with_suffix(".py").exists():
            raise LessonError(
                f"{where}: the link to {target!r} points to nothing; a lesson may link to other lessons "
                f"(02_kv_cache.ipynb), to {GLOSSARY}#term, and to full addresses"
            )


def cited_but_absent(notebook: NotebookNode, numbers: set[int]) -> list[str]:
    """`cell 5 cites lesson 11, which does not exist`, for lessons not in `numbers`; markdown only."""
    return [
        f"cell {place} cites lesson {number}, which does not exist"
        for place, cell in enumerate(notebook.cells, 1)
        if cell.cell_type == "markdown"
        for number in sorted(set(_cited(cell.source)) - numbers)
    ]


def _refuse_unknown_term(anchor: str, where: str) -> None:
    known = [term.anchor for term in terms()]
    if anchor and anchor not in known:
        near = difflib.get_close_matches(anchor.lower(), known, n=3, cutoff=0.5)
        advice = f"did you mean {' or '.join(map(repr, near))}?" if near else "add it to minillm/teaching/glossary.toml"
        raise LessonError(f"{where}: the glossary has no term {anchor!r}; {advice}")


def _cited(text: str) -> Iterator[int]:
    """The numbers of the lessons that a text cites: "lessons 4, 6 and 13", and all from 2 to 5 in "lessons 2 to 5"."""
    for match in _CITED.finditer(_FENCE.sub("", text)):
        words = re.findall(r"\d+|to", match[1])
        for place, word in enumerate(words):
            if word == "to":
                yield from range(int(words[place - 1]), int(words[place + 1]))
            else:
                yield int(word)


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    """Calls of plain names, outside of functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Name):
            yield child
        yield from _calls(child)


def _is_measured(call: ast.Call) -> bool:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "measured"] + call.args[2:3]
    return bool(given) and not (isinstance(given[0], ast.Constant) and given[0].value is False)
