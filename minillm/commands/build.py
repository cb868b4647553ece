"""`minillm build`: make the notebooks from their sources."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from minillm.commands.command import Command
from minillm.errors import ConfigError

EXAMPLES = """\
  minillm build                     all lessons
  minillm build 02                  one lesson
  minillm build --check             fail if a notebook is older than its source
"""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("names", nargs="*", metavar="LESSON", help="which lessons (default: all)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if anything is stale")
    parser.add_argument("--remeasure", action="store_true", help="replace recorded measurements by new ones")
    parser.add_argument("--root", type=Path, default=Path(), help="the clone to work in (default: here)")


def run(args: argparse.Namespace) -> int:
    """Build, or check and say what is stale. The exit code is 1 if anything is."""
    if not (args.root / "solutions").is_dir():
        raise ConfigError(
            f"{args.root.resolve()} has no folder 'solutions'; run this in a clone, or name one with --root"
        )
    from minillm.teaching.build import build

    stale = build(args.root, args.names or None, check=args.check, remeasure=args.remeasure)
    for notebook in stale:
        print(f"minillm: {notebook}", file=sys.stderr)
    return 1 if stale else 0


COMMAND = Command(
    "build",
    "Make lessons/*.ipynb and solutions/*.ipynb from solutions/*.py, the same bytes on every run.",
    EXAMPLES,
    options,
    run,
)
