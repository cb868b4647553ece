"""`minillm progress`: which exercises of your copies of the lessons are done. Nothing leaves this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from minillm.commands.command import Command
from minillm.commands.lab import COPIES, user_path
from minillm.errors import ConfigError, UnsupportedError

EXAMPLES = """\
  minillm progress                  the lessons that `minillm lab` opens here
  minillm progress ~/course         the notebooks in ~/course
"""
PATTERN = "[0-9][0-9]_*.ipynb"


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    where = f"folder of notebooks (default: ./{COPIES})"
    parser.add_argument("folder", nargs="?", type=user_path, help=where)


def run(args: argparse.Namespace) -> int:
    """Check every exercise of every notebook, and print a line per lesson."""
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(
            "minillm progress runs your functions in a sandbox, which needs Linux (on a Mac a container, on Windows "
            "WSL); the checks in the notebooks say the same"
        )
    from rich.table import Table
    from tqdm import tqdm

    from minillm.commands.tables import print_table

    files = notebooks(args.folder)
    from minillm.teaching.grading.batch import grading_environment
    from minillm.teaching.grading.grades import Status
    from minillm.teaching.grading.one_submission import Grader, Rules
    from minillm.teaching.grading.student_process import StudentProcess

    table = Table("lesson", "done", "next")
    with grading_environment(), StudentProcess() as process:
        grader = Grader(process, Rules())
        for file in tqdm(files, unit="notebook", disable=None):
            graded = grader.grade(file.read_bytes(), "you", file.name, "")
            found = graded.exercises
            if graded.status is Status.UNREADABLE:
                table.add_row(file.stem, "?", f"cannot be read: {graded.reason}")
            elif found:
                left = [f"{e.exercise} ({e.status.value})" for e in found if e.status is not Status.PASSED]
                table.add_row(file.stem, f"{len(found) - len(left)} of {len(found)}", left[0] if left else "")
    print_table(table)
    return 0


def notebooks(folder: Path | None) -> list[Path]:
    """The lessons in `folder`, or where `minillm lab` opens them. Raises `ConfigError` if there are none."""
    place = folder or COPIES
    if found := sorted(file for file in place.glob(PATTERN) if file.is_file()):
        return found
    raise ConfigError(f"{place} has no notebook of a lesson; name the folder, or copy the lessons: minillm lab")


COMMAND = Command(
    "progress",
    "Show which exercises of your lessons are done (Linux or WSL: each function runs in a sandboxed process).",
    EXAMPLES,
    options,
    run,
)
