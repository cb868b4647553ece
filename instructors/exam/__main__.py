"""`python -m instructors.exam`: write exams whose numbers differ from student to student, and their keys."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from instructors.exam import paper
from minillm.commands.streams import check_streams
from minillm.errors import ConfigError, MinillmError
from minillm.teaching.grading.hidden_cases import read_secret

EXAMPLES = """\
examples:
  python -m instructors.exam --list
  python -m instructors.exam --secret-file course-secret.txt --student alice --questions 02 06.slots
  python -m instructors.exam --secret-file course-secret.txt --student alice --questions 02 06.slots --key
  python -m instructors.exam --secret-file course-secret.txt --class students.txt --exam final --out exams/
"""


def parser() -> argparse.ArgumentParser:
    """The options."""
    form = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(
        "python -m instructors.exam", description=__doc__, epilog=EXAMPLES, formatter_class=form
    )
    made.add_argument("--list", action="store_true", help="list the questions and stop")
    made.add_argument("--secret-file", type=Path, metavar="FILE", help="the course's secret, as for `minillm grade`")
    who = made.add_mutually_exclusive_group()
    who.add_argument("--student", metavar="NAME", help="print the paper of one student")
    who.add_argument("--class", dest="students", type=Path, metavar="FILE", help="a file with one name per line")
    made.add_argument("--questions", nargs="+", default=[], metavar="NAME", help="questions or lessons (default: all)")
    made.add_argument("--exam", default="exam", help="another name gives other numbers (default: exam)")
    made.add_argument("--key", action="store_true", help="with --student: print the key instead")
    made.add_argument("--out", type=Path, metavar="DIR", help="with --class: the folder for papers and keys")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns 2 if an option is wrong."""
    args = parser().parse_args(arguments)
    try:
        check_streams()
        return _run(args)
    except (MinillmError, OSError) as problem:
        print(f"exam: {problem}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    chosen = paper.choose(args.questions)
    if args.list:
        for question in chosen:
            print(f"{question.name:18} {question.minutes:2} minutes  {question.exercise}")
        return 0
    if args.secret_file is None or not (args.student or args.students):
        print("exam: name --secret-file, and --student or --class; or --list", file=sys.stderr)
        return 2
    if args.student and args.out:
        raise ConfigError("--out is not used with --student, whose paper is printed; leave it out")
    if args.students and args.key:
        raise ConfigError("--key is not used with --class, which writes the keys, too; leave it out")
    secret = read_secret(args.secret_file)
    if args.student:
        write = paper.key if args.key else paper.paper
        print(write(paper.variants(chosen, secret, args.student, args.exam), args.student, args.exam), end="")
        return 0
    if args.out is None:
        print("exam: --class needs --out, a folder for the papers and the keys", file=sys.stderr)
        return 2
    try:
        students = args.students.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{args.students} is not UTF-8 ({problem.reason}); save it as UTF-8") from None
    names = [name.strip() for name in students if name.strip()]
    for path in paper.write_class(chosen, secret, names, args.exam, args.out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
