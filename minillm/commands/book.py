"""`minillm book`: the solved lessons, techniques and the engine's code as a static site."""

from __future__ import annotations

import argparse
from pathlib import Path

from minillm.commands.command import Command
from minillm.commands.output_checks import check_new_file, check_writable
from minillm.errors import ConfigError
from minillm.extras import need

EXAMPLES = """\
  minillm book                      into the folder site/
  minillm book --no-run             quicker: replays are still pictures
  minillm book --out public --root ../minillm --jobs 2
"""
NEEDED = ("ipykernel", "jupytext", "latex2mathml", "myst_nb", "nbclient", "nbformat", "pydata_sphinx_theme", "sphinx")


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--out", type=Path, default=Path("site"), help="the folder of the site (default: %(default)s)")
    parser.add_argument("--root", type=Path, default=Path(), help="the clone to read (default: here)")
    parser.add_argument("--no-run", action="store_true", help="run no lesson; replays are still pictures")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="lessons that run at a time (default: 1)")
    parser.add_argument("--sources", type=Path, metavar="FOLDER", help="keep the pages as markdown and notebooks here")


def run(args: argparse.Namespace) -> int:
    """Build the site. Returns 1 if Sphinx gave a warning, such as a link that leads nowhere."""
    need("book", *NEEDED)
    from minillm.book.site import build_book

    if args.jobs < 1:
        raise ConfigError(f"--jobs {args.jobs}: at least 1 must run at a time")
    for option, folder in (("--out", args.out), ("--sources", args.sources)):
        if folder is not None:
            (check_writable if folder.exists() else check_new_file)(option, folder)
    warnings = build_book(args.root, args.out, () if args.no_run else None, args.jobs, args.sources)
    for line in warnings:
        print(line)
    print(f"open {args.out / 'index.html'}")
    return 1 if warnings else 0


COMMAND = Command(
    "book",
    "Build the solved lessons, the techniques and the engine's code as a static site whose replays play offline.",
    EXAMPLES,
    options,
    run,
)
