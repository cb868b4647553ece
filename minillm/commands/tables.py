"""Print a table: as wide as a terminal, or as wide as it needs to be in a file or pipe."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

FILE_WIDTH = 200
"""Characters of a line if the output is no terminal: the table is not squeezed."""


def print_table(table: Table) -> None:
    """Print to standard output."""
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(table)
