"""The `minillm` command: runs one command, and puts whatever goes wrong into one line and an exit code.

Nothing is imported here that takes time, so that an interrupt finds `main` at work almost from the start.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from minillm.errors import MinillmError

ERROR, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code, 2 for what cannot be done (said in one line), 130 if it was interrupted.

    A reader that has seen enough (`| head`) is no error. A mistake of minillm's own keeps its traceback.
    """
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return _end("interrupted", INTERRUPTED)
    except BrokenPipeError:
        return _end("", 0)
    except MinillmError as problem:
        return _end(str(problem), ERROR)
    except OSError as problem:  # a full disk, a folder that may not be written to, …
        where = f"{problem.filename}: " if problem.filename else ""
        return _end(f"{where}{problem.strerror or problem}", ERROR)


def _run(argv: Sequence[str] | None) -> int:
    from minillm.streams import check_streams

    check_streams()
    from minillm.commands.parser import parser

    try:
        args = parser().parse_args(argv)
        code: int = args.run(args)
    finally:
        sys.stdout.flush()  # here a full disk can still be told of; at exit it could not
    return code


def _end(message: str, code: int) -> int:
    """Say why it ends, if there is anyone to say it to. Nothing more may be written, not even at exit."""
    from contextlib import suppress

    from minillm.streams import close_quietly

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
