"""`Command`: the name, summary, examples, options and function of one subcommand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any


@dataclass(frozen=True)
class Command:
    """One command of `minillm`."""

    name: str
    summary: str
    examples: str
    """Command lines, one per line, indented by two spaces."""
    options: Callable[[argparse.ArgumentParser], None]
    """Adds the options. Called only when this command is parsed, so it may import slow modules."""
    run: Callable[[argparse.Namespace], int]
    """Does the work and returns the exit code."""


class Parser(argparse.ArgumentParser):
    """A parser that raises an error if its help cannot be written. `argparse` ignores that."""

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if message and (file := file or sys.stderr) is not None:
            file.write(message)


class CommandParser(Parser):
    """The parser of one command. It adds the command's options when it first parses."""

    def __init__(self, *, command: Command, **settings: Any) -> None:
        super().__init__(
            description=command.summary,
            epilog=f"examples:\n{command.examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **settings,
        )
        self.set_defaults(run=command.run)
        self._late_options = [command.options]

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Add the options at the first call, then parse."""
        while self._late_options:
            self._late_options.pop()(self)
        return super().parse_known_args(args, namespace)
