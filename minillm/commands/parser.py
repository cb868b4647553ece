"""The parser of all subcommands. A command's own imports wait until it runs, so `--help` is instant."""

from __future__ import annotations

import argparse

from minillm.commands import (
    bench,
    book,
    build,
    cluster,
    demo,
    doctor,
    export,
    generate,
    grade,
    lab,
    progress,
    quantize,
    serve,
    train,
)
from minillm.commands.command import CommandParser, Parser
from minillm.version import __version__

_MODULES = (demo, lab, progress, generate, serve, quantize, export, train, doctor, build, book, grade, bench, cluster)
COMMANDS = tuple(module.COMMAND for module in _MODULES)


def parser() -> argparse.ArgumentParser:
    """The parser of `minillm` with all its commands."""
    top = Parser(
        prog="minillm",
        description="An LLM inference engine small enough to read, with lessons that show it at work.",
        epilog="minillm COMMAND --help describes one command, with examples.",
    )
    top.add_argument("--version", action="version", version=f"minillm {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=CommandParser)
    for command in COMMANDS:
        commands.add_parser(command.name, help=command.summary, command=command)
    return top
