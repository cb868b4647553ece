"""How the functions of this folder are compiled, and where the machine code is kept for next time.

Compiling a step takes some ten seconds, once for each kind of weights and cache. numba keeps the result on disk, but to
tell whether it is out of date it looks at the one file that holds the entry point. A step is made of all files of this
folder; so the name of the folder that the results lie in is made of all their contents, of numba's version and of the
processor. Environments and machines that share a disk find each their own; what none has used for long is deleted.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from llvmlite import __version__ as llvm_version
from numba import __version__ as numba_version
from numba import config, njit
from numba.core import event
from numba.core.registry import cpu_target
from tqdm import tqdm

from minillm.ops.cpu.processor import has_amx

OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True, "_nrt": False}
"""For every function compiled here: dividing by zero gives infinity, and other threads go on meanwhile."""
PREFIX = "minillm-step-"
UNUSED_DAYS = 30
FUNCTIONS = 60
"""About how many functions a step is compiled from."""


def entry_point(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` with results kept on disk, in `cache_folder()`."""

    def compiled(function: Callable[..., Any]) -> Any:
        before, config.CACHE_DIR = config.CACHE_DIR, str(cache_folder())
        try:
            return njit(cache=True, **OPTIONS, **options)(function)
        finally:
            config.CACHE_DIR = before

    return compiled


@cache
def cache_folder() -> Path:
    """Where steps of these sources are kept, as this numba compiles them for this processor."""
    _, name, _ = target = cpu_target.target_context.codegen().magic_tuple()
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    digest = sha256(sources + repr((target, llvm_version, has_amx())).encode()).hexdigest()[:16]
    root = _root()
    folder = root / f"{PREFIX}numba{numba_version}-{name or 'generic'}-{digest}"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
    _delete_unused(root, folder)
    return folder


def _delete_unused(root: Path, kept: Path) -> None:
    """Delete the folders of other sources, versions and processors that nobody has asked for in `UNUSED_DAYS`."""
    oldest = time.time() - UNUSED_DAYS * 24 * 3600
    for other in root.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if other != kept and other.stat().st_mtime < oldest:
                shutil.rmtree(other, ignore_errors=True)


def _root() -> Path:
    """`NUMBA_CACHE_DIR` if that is set; else beside the compiled Python files; else, if that may not be written to, in
    the user's cache."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(chosen)
    beside = Path(__file__).parent / "__pycache__"
    with suppress(OSError):
        beside.mkdir(exist_ok=True)
    if os.access(beside, os.W_OK):
        return beside
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minillm"


@contextmanager
def showing_progress() -> Iterator[None]:
    """A progress bar for what is compiled meanwhile; nothing is shown if nothing is."""
    listener = _Bar()
    event.register("numba:compile", listener)
    try:
        yield
    finally:
        event.unregister("numba:compile", listener)
        if listener.bar is not None:
            listener.bar.total = listener.bar.n
            listener.bar.close()


class _Bar(event.Listener):
    """One tick per function."""

    bar: tqdm[Any] | None = None

    def on_start(self, event: event.Event) -> None:
        """See `numba.core.event.Listener`."""
        if self.bar is None:
            self.bar = tqdm(total=FUNCTIONS, desc="compiling for this CPU, once", unit=" functions")

    def on_end(self, event: event.Event) -> None:
        """See `numba.core.event.Listener`."""
        if self.bar is not None:
            self.bar.update()
