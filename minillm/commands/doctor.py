"""`minillm doctor`: report what runs on this machine, what does not, and the fix."""

from __future__ import annotations

import argparse

from minillm.commands.command import Command

EXAMPLES = """\
  minillm doctor
  minillm doctor --measure          also time copies and matrix products
  minillm doctor --json | jq .rows
"""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--measure", action="store_true", help="measure memory bandwidth and matrix rates (seconds)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the report. Returns 1 if a part of the lessons cannot run."""
    from minillm.doctor.doctor import doctor

    report = doctor(measure=args.measure)
    print(report.to_json() if args.json else report.text)
    return 0 if report.healthy else 1


COMMAND = Command(
    "doctor",
    "Say what will run on this machine, what will not, and the fix.",
    EXAMPLES,
    options,
    run,
)
