"""`minillm train`: train models like the bundled ones from scratch."""

from __future__ import annotations

import argparse

from minillm.commands.command import Command

EXAMPLES = """\
  minillm train                     all stages; an interrupted run continues where it stopped
  minillm train --stages corpus target --target-minutes 5
  minillm train --stages distill export --export-to my-models        default: runs/models
  minillm train --stages heads --target my-models/minicoder --export-to my-models
  minillm train --stages corpus spire --target minicoder --export-to my-drafters
  minillm train --ablations spire long --target minicoder      after the stage corpus
"""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the training module."""
    from minillm.training.run import add_arguments

    add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Train."""
    from minillm.training.run import run_from_args

    return run_from_args(args)


COMMAND = Command(
    "train",
    "Train models like the bundled ones on the Python source found on this machine: collect, pretrain, distil, export, "
    "and drafters for the target. The bundled models stay as they are, unless --export-to names their folder.",
    EXAMPLES,
    options,
    run,
)
