"""`minillm demo`: watch the engine think, in the terminal."""

from __future__ import annotations

import argparse

from minillm.commands.command import Command

EXAMPLES = """\
  minillm demo
"""


def options(parser: argparse.ArgumentParser) -> None:
    """The demo has no options."""


def run(args: argparse.Namespace) -> int:
    """Play the demo."""
    from minillm.demo import run_demo

    run_demo()
    return 0


COMMAND = Command(
    "demo",
    "Watch the engine think: cache pages fill, drafts are kept or thrown away.",
    EXAMPLES,
    options,
    run,
)
