"""A cell of a lesson can be run again after all others: none of them takes away or replaces the names that it reads."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from symtable import SymbolTable, symtable

import jupytext
import pytest

LESSONS = sorted((Path(__file__).parents[2] / "solutions").glob("*.py"))
every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)


@dataclass
class Cell:
    """Names of one cell's top level."""

    assigned: set[str]
    """Loop variables, functions and imports among them."""
    taken: set[str]
    """Those that it deletes and has not made."""
    read: set[str]
    """Those that come from other cells."""


def cells_of(lesson: Path) -> list[Cell]:
    return [names_of(cell.source) for cell in jupytext.read(lesson).cells if cell.cell_type == "code"]


def names_of(source: str) -> Cell:
    [top, *inner] = tables(symtable(source, "cell", "exec"))
    names = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    made, deleted = ({name.id for name in names if isinstance(name.ctx, kind)} for kind in (ast.Store, ast.Del))
    assigned = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    read = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}
    read |= {symbol.get_name() for table in inner for symbol in table.get_symbols() if symbol.is_global()}
    return Cell(assigned, deleted - made, read - assigned)


def tables(table: SymbolTable) -> Iterator[SymbolTable]:
    yield table
    for child in table.get_children():
        yield from tables(child)


@every_lesson
def test_a_cell_deletes_only_what_it_has_made(lesson: Path):
    assert [cell.taken for cell in cells_of(lesson) if cell.taken] == []


@every_lesson
def test_a_name_that_other_cells_read_is_assigned_by_one_cell(lesson: Path):
    cells = cells_of(lesson)
    read = set().union(*(cell.read for cell in cells))
    assert [name for name in sorted(read) if sum(name in cell.assigned for cell in cells) > 1] == []
