"""Return freed memory to the system, so that a lesson needs no more memory than it uses at one time."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress


def give_back_freed_memory() -> None:
    """Ask the C library to return its free memory; glibc keeps freed tensors of up to 32 MB each for later.

    Does nothing where the C library has no `malloc_trim`.
    """
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
