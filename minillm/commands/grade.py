"""`minillm grade`: grade a folder of notebooks."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from minillm.commands.command import Command
from minillm.errors import ConfigError

if TYPE_CHECKING:
    from minillm.teaching.grading.batch import Graders

EXAMPLES = """\
  minillm grade submissions/ --out report/
  minillm grade submissions/ --out report/ --lessons 02 06 --jobs 2
  minillm grade submissions/ --out report/ --secret-file course-secret.txt
                                    also other cases for every student, which the notebook's own check does not have
"""
GIB = 1 << 30
MOST = 1e6
"""Of seconds, GiB and processes."""
ISOLATION = ("namespaces", "landlock", "limits")
"""The modes of `minillm.teaching.grading.student_process`, repeated here so that `--help` imports nothing slow."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_what_to_grade(parser)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="notebooks at a time (default: 1)")


def add_what_to_grade(parser: argparse.ArgumentParser) -> None:
    """Add the options that `minillm cluster grade` has too."""
    parser.add_argument("submissions", type=Path, help="folder of notebooks, one folder or one file per student")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the reports")
    student_help = (
        "whose a file is: the first group of this expression, matched at the beginning of the file's name below the "
        "folder (default: the folder or file there)"
    )
    parser.add_argument("--student", default="", metavar="REGEX", help=student_help)
    lessons_help = "lessons to grade (default: those that each notebook has functions of)"
    parser.add_argument("--lessons", nargs="+", default=[], metavar="NUMBER", help=lessons_help)
    secret_help = "file with the course's secret, at least 16 bytes: hidden cases that differ from student to student"
    parser.add_argument("--secret-file", type=Path, metavar="FILE", help=secret_help)
    parser.add_argument("--seconds", type=float, default=10.0, help="processor time per exercise (default: 10)")
    parser.add_argument("--wall-seconds", type=float, default=60.0, help="time per exercise, waiting too (default: 60)")
    parser.add_argument("--memory", type=float, default=2.0, metavar="GIB", help="memory per process (default: 2)")
    alike_help = "list pairs of students whose functions are at least this alike, from 0 to 1 (default: 0.95)"
    parser.add_argument("--alike", type=float, default=0.95, metavar="SHARE", help=alike_help)
    isolation_help = "how submissions are isolated (default: the strongest of these that works here)"
    parser.add_argument("--isolation", choices=ISOLATION, default="", help=isolation_help)


def run(args: argparse.Namespace, graders: Graders | None = None) -> int:
    """Grade and write the reports. Returns 0 whatever the grades are.

    `graders`: in place of processes here (`minillm.teaching.grading.batch.grade_all`).
    """
    from tqdm import tqdm

    if graders is None:
        from minillm.teaching.grading.student_process import check_system

        check_system()
    from minillm.teaching.grading import batch, reports

    rules = rules_of(args)
    _refuse_out_of_submissions(args)
    _refuse_shown(args)
    files = batch.find(args.submissions, _student_pattern(args.student))
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ConfigError(f"--out {args.out}: {problem.strerror or problem}") from None

    def bar(iterable: object, total: int) -> object:
        return tqdm(iterable, total=total, unit="notebook", disable=None)

    graded = batch.grade_all(files, args.out, rules, args.jobs, args.isolation, bar, graders)
    for line in reports.write_all(graded, args.out, args.alike):
        print(line)
    sys.stdout.flush()
    return 0


def _refuse_out_of_submissions(args: argparse.Namespace) -> None:
    """Raise `ConfigError` if the reports would lie among the submissions: the next run would take them for students."""
    out, submissions = args.out.resolve(), args.submissions.resolve()
    if submissions in out.parents:
        raise ConfigError(f"--out {args.out} is in the submissions {args.submissions}; name another folder")
    if out in (submissions, *submissions.parents):
        raise ConfigError(f"--out {args.out} has the submissions {args.submissions} in it; name another folder")


def _student_pattern(text: str) -> re.Pattern[str] | None:
    """The expression of `--student`. Raises `ConfigError` if it is none, or has no group."""
    try:
        pattern = re.compile(text)
    except re.error as problem:
        raise ConfigError(f"--student {text!r}: {problem}") from None
    if text and not pattern.groups:
        raise ConfigError(f"--student {text!r}: put round brackets around the student's part")
    return pattern if text else None


def _refuse_shown(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for files of the course that lie in a folder which every submission may read."""
    if sys.platform != "linux" or args.isolation == "limits":
        return
    from minillm.teaching.grading.sandbox import needed
    from minillm.teaching.grading.student_process import PACKAGE

    asked = {"submissions": args.submissions, "--out": args.out, "--secret-file": args.secret_file}
    for name, path in asked.items():
        for shown in needed(PACKAGE) if path else ():
            if shown in (path.resolve(), *path.resolve().parents):
                raise ConfigError(
                    f"{name} {path} is in {shown}, which submissions may read because Python or minillm is there; "
                    "name a folder elsewhere"
                )


def rules_of(args: argparse.Namespace) -> object:
    """The rules that the options name. Raises `ConfigError` for a bad one."""
    for name, least in (("jobs", 1), ("seconds", 1.0), ("wall_seconds", 1.0), ("memory", 0.25)):
        if not least <= getattr(args, name) <= MOST:  # nan is in no range
            asked = f"--{name.replace('_', '-')} {getattr(args, name):g}"
            raise ConfigError(f"{asked}: it must be at least {least:g} and at most {MOST:g}")
    if not 0 <= args.alike <= 1:
        raise ConfigError(f"--alike {args.alike:g}: it must be from 0 to 1")
    from minillm.teaching import registry
    from minillm.teaching.grading.hidden_cases import read_secret
    from minillm.teaching.grading.one_submission import Rules
    from minillm.teaching.guard import Limits

    lessons: dict[str, None] = {}  # each once, in the order given
    for name in args.lessons:
        lesson = f"l{name.removeprefix('l').split('_')[0].zfill(2)}"
        lessons[lesson] = None
        if not registry.of_lesson(lesson):
            first, *_, last = (known[1:] for known in registry.lessons())
            raise ConfigError(
                f"--lessons {name}: there is no such lesson with exercises; numbers are {first} to {last}"
            )
    secret = read_secret(args.secret_file) if args.secret_file else b""
    limits = Limits(args.seconds, int(args.memory * GIB))
    return Rules(limits, args.wall_seconds, tuple(lessons), secret)


COMMAND = Command(
    "grade",
    "Grade a folder of notebooks: each in its own sandboxed process, without the answers; write reports.",
    EXAMPLES,
    options,
    run,
)
