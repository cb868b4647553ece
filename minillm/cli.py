"""The `minillm` command. It only parses: a command's own imports wait until that command runs, so help is instant."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from minillm import __version__
from minillm.commands import bench, build, demo, doctor, export, generate, lab, quantize, train
from minillm.commands.command import CommandParser
from minillm.errors import MinillmError

COMMANDS = tuple(module.COMMAND for module in (demo, lab, generate, quantize, export, train, doctor, build, bench))
ERROR, INTERRUPTED = 2, 130


def parser() -> argparse.ArgumentParser:
    """The command line of all commands together."""
    top = argparse.ArgumentParser(
        prog="minillm",
        description="An LLM inference engine small enough to read, with lessons that show it think.",
        epilog="minillm COMMAND --help tells more about one command, with examples.",
    )
    top.add_argument("--version", action="version", version=f"minillm {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=CommandParser)
    for command in COMMANDS:
        commands.add_parser(command.name, help=command.summary, command=command)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, 2 for a mistake in the call (said in one line), or 130 if it was interrupted."""
    try:
        args = parser().parse_args(argv)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except MinillmError as problem:
        print(f"minillm: {problem}", file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:
        print("minillm: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader (`| head`) has seen enough; nothing more may be written, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
