"""The `minillm` command: runs one subcommand and turns errors into one line and an exit code.

This module imports nothing slow, so that `main` handles an interrupt almost from the start.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from minillm.errors import MinillmError

ERROR, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code, 2 after an error (printed as one line), 130 after an interrupt.

    A closed pipe (`| head`) is not an error. A bug in minillm keeps its traceback.
    """
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return _end("interrupted", INTERRUPTED)
    except MinillmError as problem:
        return _end(str(problem), ERROR)
    except OSError as problem:  # a full disk, a folder that may not be written to, …
        if _is_of_a_pipe(problem) and _reader_has_left():
            return _end("", 0)
        where = f"{problem.filename}: " if problem.filename else ""
        return _end(f"{where}{problem.strerror or problem}", ERROR)


def _run(argv: Sequence[str] | None) -> int:
    from minillm.commands.streams import check_streams

    check_streams()
    from minillm.commands.parser import parser

    try:
        args = parser().parse_args(argv)
        code: int = args.run(args)
    except SystemExit as stop:  # after --help
        if isinstance(stop.__context__, BrokenPipeError):  # rich stops a program whose output nobody reads any more
            return _end("", 0)
        sys.stdout.flush()
        raise
    sys.stdout.flush()  # a full disk is reported here; at interpreter exit it could not be
    return code


def _is_of_a_pipe(problem: OSError) -> bool:
    """Whether the error may be that nobody reads a pipe, which Windows may report as an invalid argument. Python gives
    that number to most other Windows errors, too, but those have one of their own, `winerror`."""
    is_invalid = os.name == "nt" and problem.errno == errno.EINVAL and problem.filename is None
    return (is_invalid and getattr(problem, "winerror", None) is None) or isinstance(problem, BrokenPipeError)


def _reader_has_left() -> bool:
    from minillm.commands.streams import reader_has_left

    return reader_has_left(sys.stdout)


def _end(message: str, code: int) -> int:
    """Print `message` to standard error if it is open. Return `code`. Nothing more is written, not even at exit."""
    from contextlib import suppress

    from minillm.commands.streams import close_quietly

    close_quietly(sys.stdout)
    try:
        if message:
            print(f"minillm: {' '.join(message.split())}", file=sys.stderr, flush=True)
    except OSError:
        with suppress(OSError):
            close_quietly(sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
