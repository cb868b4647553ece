"""`minillm build`: build the notebooks from their sources."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from minillm.commands.command import Command
from minillm.commands.output_checks import check_new_file
from minillm.errors import ConfigError
from minillm.extras import need

EXAMPLES = """\
  minillm build                     all lessons
  minillm build 02                  one lesson
  minillm build --check             fail if a notebook is older than its source (runs nothing)
  minillm build --check --run       also run the solutions; fail if a printed or drawn number differs
  minillm build --mutants 07        mutation testing for lesson 7: change the reference solutions in small ways and
                                    report which mistakes its checkers miss, and for how many they name a cause
  minillm build --mutants l07.admit --jobs 1
  minillm build --nbgrader course 02
                                    write course/source/02_kv_cache/02_kv_cache.ipynb for nbgrader
  minillm build --otter course 02 --secret-file course-secret.txt
                                    write the autograder zip of otter-grader, with hidden cases
  minillm build --classroom course 02 06
                                    write a repository for students: notebooks, requirements, a workflow with nbval
"""
NEEDED = ("ipykernel", "jupytext", "nbclient", "nbformat")


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("names", nargs="*", metavar="LESSON", help="which lessons (default: all)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if anything is stale")
    rerun_help = "with --check: run the solutions and compare all outputs except measurements"
    parser.add_argument("--run", dest="rerun", action="store_true", help=rerun_help)
    jobs_help = "with --run: lessons at a time (default: 1); with --mutants: processes (default: all cores)"
    parser.add_argument("--jobs", type=int, metavar="N", help=jobs_help)
    parser.add_argument("--remeasure", action="store_true", help="replace recorded measurements by new ones")
    parser.add_argument(
        "--mutants",
        action="store_true",
        help="build nothing; test the checkers of exercises with mutated reference solutions, and exit 1 if a mutant "
        "passes that is not declared equivalent in minillm/teaching/exercises/_lNN_equivalent.py",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="with --mutants: write every trial to a JSON file")
    parser.add_argument("--nbgrader", type=Path, metavar="DIR", help="build nothing; write nbgrader's source notebooks")
    parser.add_argument("--otter", type=Path, metavar="DIR", help="build nothing; write otter's autograder zips")
    classroom_help = "build nothing; write a repository for students, whose workflow checks every push with nbval"
    parser.add_argument("--classroom", type=Path, metavar="DIR", help=classroom_help)
    secret_help = "with --nbgrader or --otter: file with the course's secret, for hidden cases"
    parser.add_argument("--secret-file", type=Path, metavar="FILE", help=secret_help)
    parser.add_argument("--root", type=Path, help="the clone to work in (default: here)")


def run(args: argparse.Namespace) -> int:
    """Build, or check and list what is stale. Returns 1 if anything is stale."""
    if args.jobs is not None and args.jobs < 1:
        raise ConfigError(f"--jobs {args.jobs}: at least 1 must run at a time")
    _refuse_useless(args)
    if args.mutants:
        return _try_mutants(args)
    args.root = args.root or Path()
    if not (args.root / "solutions").is_dir():
        raise ConfigError(
            f"{args.root.resolve()} has no folder 'solutions'; run this in a clone, or name one with --root"
        )
    need("dev", *NEEDED)
    if args.rerun and not args.check:
        raise ConfigError("--run needs --check; without both, the lessons run and their outputs are recorded")
    if args.nbgrader or args.otter or args.classroom:
        return _write_assignments(args)
    from minillm.teaching.build import build

    stale = build(args.root, args.names or None, check=args.check, remeasure=args.remeasure)
    if args.rerun and not stale:
        from minillm.teaching.rerun import rerun

        stale = rerun(args.root, args.names or None, jobs=args.jobs or 1)
    for notebook in stale:
        print(f"minillm: {notebook}", file=sys.stderr)
    return 1 if stale else 0


ALONE = "cannot be combined with another task; run the two one after the other"


def _refuse_useless(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for an option that would be ignored."""
    assignments = args.nbgrader or args.otter or args.classroom
    for given, needed, words in (
        (args.secret_file, args.nbgrader or args.otter, "--secret-file needs --nbgrader or --otter"),
        (args.report, args.mutants, "--report needs --mutants"),
        (args.jobs, args.rerun or args.mutants, "--jobs needs --run or --mutants"),
        (args.rerun, not args.mutants, f"--run {ALONE}"),
        (
            args.check,
            not (assignments or args.mutants),
            f"--check {ALONE}",
        ),
        (
            args.remeasure,
            not (assignments or args.mutants or args.check),
            f"--remeasure {ALONE}",
        ),
        (
            assignments,
            not args.mutants,
            f"--mutants {ALONE}",
        ),
        (args.root, not args.mutants, "--root cannot be combined with --mutants, which tests the installed exercises"),
    ):
        if given and not needed:
            raise ConfigError(words)


def _write_assignments(args: argparse.Namespace) -> int:
    from minillm.teaching.assignments import write_nbgrader, write_otter
    from minillm.teaching.grading.hidden_cases import read_secret

    secret = read_secret(args.secret_file) if args.secret_file else b""
    for target, write in ((args.nbgrader, write_nbgrader), (args.otter, write_otter)):
        for path in write(args.root, args.names or None, target, secret) if target else ():
            print(path)
    if args.classroom:
        from minillm.teaching.classroom import write_classroom

        for path in write_classroom(args.root, args.names or None, args.classroom):
            print(path)
    return 0


def _try_mutants(args: argparse.Namespace) -> int:
    if args.report:
        check_new_file("--report", args.report)
    from rich.console import Console
    from tqdm import tqdm

    from minillm.teaching import mutant_report, mutants

    report = mutants.run(args.names, args.jobs, lambda done, total: tqdm(done, total=total, unit="dozen", disable=None))
    mutant_report.show(report, Console())
    print(mutant_report.summary(report))
    if args.report:
        report.write(args.report)
    return 1 if report.stale or any(result.survived for result in report.results) else 0


COMMAND = Command(
    "build",
    "Make lessons/*.ipynb and solutions/*.ipynb from solutions/*.py, the same bytes on every run.",
    EXAMPLES,
    options,
    run,
)
