"""How numba compiles the functions of this folder, and where it caches the machine code.

Compiling a step takes ten seconds to a minute, once for each kind of weights and cache. numba caches the result on
disk, but checks only the file of the entry point for changes. A step is compiled from all files of this folder, so the
name of the cache folder is a hash of all of them, numba's version and the processor. Environments and machines
that share a disk have a cache folder each; folders that were not used for `UNUSED_DAYS` are deleted.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llvmlite import __version__ as llvm_version
from numba import __version__ as numba_version
from numba import config, njit
from numba.core import event
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import cpu_target
from tqdm import tqdm

from minillm.ops.cpu.processor import has_amx

OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True, "_nrt": False, "no_cfunc_wrapper": True}
"""For every function compiled here: division by zero gives infinity, the GIL is released, and numba makes no wrapper
for callers in C, because there are none."""


class _PartLibrary(JITCodeLibrary):
    """A function as LLVM code, which is optimized and translated to machine code only together with its callers."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """The address of what runs when Python calls the function: something that raises `TypeError`."""
        return ctypes.cast(ctypes.pythonapi.PyObject_Call, ctypes.c_void_p).value or 0

    @property
    def codegen(self) -> Any:
        """numba asks it to write into the machine code."""
        return SimpleNamespace(set_env=lambda name, env: None)


class _PartCompiler(Compiler):
    def compile_extra(self, func: Callable[..., Any]) -> Any:
        """Compile `func` to a `_PartLibrary`."""
        self.state.library = _PartLibrary(self.state.targetctx.codegen(), func.__qualname__)
        return super().compile_extra(func)


PART: dict[str, Any] = {**OPTIONS, "no_cpython_wrapper": True, "pipeline_class": _PartCompiler}
"""For functions that only other compiled functions call. By itself numba would translate each to machine code, and
optimize it again in each function that calls it or one of its callers: a step would take twice as long to compile.
(Tried with numba 0.61 and 0.68. The overridden methods are not public.)"""
PREFIX = "minillm-step-"
UNUSED_DAYS = 30
LONGEST_FOLDER, LONGEST_FILE = 48, 64
"""The lengths of names that numba makes in a cache folder, or more: a folder, `bench_<40 digits>`, and in it a file,
`kernels_cpu.silu_gate_loop-80.py312.1.nbc.tmp.<16 digits>`. Windows limits paths to 260 characters."""
FUNCTIONS = 60
"""About the number of functions that a step is compiled from, for the progress bar."""


def entry_point(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` whose results are cached on disk, in `cache_folder()`, if numba can write there."""

    def compiled(function: Callable[..., Any]) -> Any:
        if not config.DISABLE_JIT and (folder := cache_folder()) is not None:
            before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
            try:
                cached = njit(cache=True, **OPTIONS, **options)(function)
            finally:
                config.CACHE_DIR = before
            if Path(cached.stats.cache_path).is_relative_to(folder):  # not a place that numba found by itself
                return cached
        return njit(**OPTIONS, **options)(function)

    return compiled


@cache
def cache_folder() -> Path | None:
    """The cache folder for these sources, this version of numba and this processor. None where no place can be written:
    then every process compiles for itself. (numba would look for a place of its own, whose name has no such hash.)"""
    target = cpu_target.target_context.codegen().magic_tuple()
    here = Path(__file__).parent
    files = [*sorted(here.glob("*.py")), here.parent / "kv_quant.py"]  # whose constants are compiled in
    sources = b"".join(path.read_bytes() for path in files)
    digest = sha256(sources + repr((target, llvm_version, numba_version, has_amx())).encode()).hexdigest()[:16]
    for root in _roots():
        folder = root / f"{PREFIX}{digest}"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            _write_as_numba_does(folder)
            os.utime(folder)
            _delete_unused(root, folder)
            return folder
    return None


def _write_as_numba_does(folder: Path) -> None:
    """Make and delete a folder and a file with the longest names that numba uses. Raises `OSError` if that fails."""
    with (
        tempfile.TemporaryDirectory(prefix="x" * (LONGEST_FOLDER - 8), dir=folder) as inner,
        tempfile.NamedTemporaryFile(prefix="x" * (LONGEST_FILE - 8), dir=inner),
    ):  # both names end in 8 random characters
        pass


def _delete_unused(root: Path, kept: Path) -> None:
    """Delete the cache folders of other sources, versions and processors that were not used for `UNUSED_DAYS`."""
    oldest = time.time() - UNUSED_DAYS * 24 * 3600
    for other in root.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if other != kept and other.stat().st_mtime < oldest:
                shutil.rmtree(other, ignore_errors=True)


def _roots() -> Iterator[Path]:
    """Where cache folders may be, the best place first: `NUMBA_CACHE_DIR` if that is set, this folder's `__pycache__`,
    the user's cache."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(chosen)
    yield Path(__file__).parent / "__pycache__"
    with suppress(RuntimeError):  # a user without a home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minillm"


@contextmanager
def showing_progress() -> Iterator[None]:
    """Show a progress bar as soon as numba compiles something."""
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
    """A progress bar with one tick per compiled function."""

    bar: tqdm[Any] | None = None

    def on_start(self, event: event.Event) -> None:
        """See `numba.core.event.Listener`."""
        if self.bar is None:
            self.bar = tqdm(total=FUNCTIONS, desc="compiling for this CPU, once", unit=" functions")

    def on_end(self, event: event.Event) -> None:
        """See `numba.core.event.Listener`."""
        if self.bar is not None:
            self.bar.update()
