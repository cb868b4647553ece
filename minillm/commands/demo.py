"""`minillm demo`: watch the engine think, in the terminal."""

from __future__ import annotations

import argparse

from minillm.commands.command import Command
from minillm.errors import ConfigError

LONGEST_PAUSE = 60
"""Seconds."""

EXAMPLES = """\
  minillm demo
  minillm demo --pause 0.3          slow enough to follow
"""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="wait after each step (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Play the demo."""
    if not 0 <= args.pause <= LONGEST_PAUSE:
        raise ConfigError(f"--pause {args.pause:g} must be from 0 to {LONGEST_PAUSE} seconds")
    from minillm.commands.side_by_side import run_demo

    run_demo(pause=args.pause)
    return 0


COMMAND = Command(
    "demo",
    "Watch the engine think: cache pages fill, drafts are accepted or rejected.",
    EXAMPLES,
    options,
    run,
)
