"""Run code that may crash, never return or use up all memory, without ending the notebook's process.

On Linux the code runs in a child process made by `os.fork`. The child has the notebook's functions with their sources,
needs no pickling, and costs a few milliseconds. It runs on one thread, because thread pools do not survive a fork, and
within limits of processor time and memory. Its messages and prints come through a pipe. A child that sends a
malformed message is ended, and so is one that never completes a message. Its exit status and `faulthandler` show how it
died, and in which line.

Elsewhere, and where a GPU is in use (CUDA does not survive a fork either), the code runs in this process. An endless
loop in Python still ends, and `SystemExit` is caught; a crash in compiled code ends the process. The poisoned arrays of
`minillm.teaching.fence` guard against such crashes.
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from types import FrameType
from typing import IO, Any, NoReturn

import msgspec
import psutil
import torch

from minillm.teaching.pipe_messages import BrokenMessageError, Frames, write_frame

GIB = 1 << 30
MAX_PRINTED = 20_000
"""Characters of the child's prints that are passed on."""
POLL_SECONDS = 0.5
CHUNK = 1 << 16
"""Bytes read at a time: as many as a pipe holds."""
_MESSAGE, _STDOUT, _STDERR, _DONE = b"m", b"o", b"e", b"d"
"""The first byte of a frame: what the rest is."""
TRACE_LINE = r'File "([^"\n]+)", line (\d+) in (\S+)'
"""A line of `faulthandler`'s output."""
Send = Callable[[object], None]
Work = Callable[[Send], None]


class OutOfTime(BaseException):
    """Raised inside code that has used up its time. No `Exception`, so that `except Exception` does not catch it."""


@dataclass(frozen=True)
class Limits:
    """`seconds`: of processor time, and of waiting without using any. `memory`: bytes beyond those in use before."""

    seconds: float = 20.0
    memory: int = 2 * GIB

    def lowered(self) -> Limits:
        """These limits, lowered to what the hard limits of this process (`ulimit`) leave to a child.

        Its time ends a second before the hard limit, where the system kills a process at once (SIGKILL).
        """
        if not sys.platform.startswith("linux"):
            return self
        import resource

        seconds, memory = self.seconds, self.memory
        most = resource.getrlimit(resource.RLIMIT_CPU)[1]
        if most != resource.RLIM_INFINITY:
            seconds = min(seconds, max(1, most - 1))
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        if most != resource.RLIM_INFINITY:
            memory = min(memory, max(0, most - psutil.Process().memory_info().vms))
        return Limits(seconds, memory)


@dataclass(frozen=True)
class ChildExit:
    """How a child process ended before its work was done.

    `signal_number`: the signal that killed it; 0 if it exited by itself, with `exit_code`. `idle_timeout`: the parent
    killed it because it waited without working. `out_of_time`: it had used up its processor time. `raised`: the
    uncaught exception. `library_message`: the last line that a library wrote to stderr. `lines`: (file, line number,
    function) of the Python stack, innermost first, if known.
    """

    signal_number: int = 0
    exit_code: int = 0
    idle_timeout: bool = False
    out_of_time: bool = False
    raised: str = ""
    library_message: str = ""
    lines: tuple[tuple[str, int, str], ...] = ()


def can_guard() -> bool:
    """Whether work can run in a child process here."""
    return sys.platform.startswith("linux") and not torch.cuda.is_initialized()


def run_guarded(work: Work, receive: Send, limits: Limits | None = None, only_bytes: bool = False) -> ChildExit | None:
    """Run `work(send)` in a child process and pass its messages to `receive`. None if it finished, else how it died.

    The limits are `limits.lowered()`. Its prints appear on this process's `sys.stdout` and `sys.stderr`. Interrupting
    this process ends the child. `only_bytes`: messages are bytes, and nothing is unpickled here. Otherwise they are
    pickled: only for code that may run in this process too, because unpickling can run code that the child chose.
    """
    limits = (limits or Limits()).lowered()
    reader, writer = Pipe(duplex=False)
    with tempfile.TemporaryFile() as noise:
        sys.stdout.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later warn about threads; see above
            pid = os.fork()
        if pid == 0:
            _run_child(work, writer.fileno(), noise, limits, only_bytes)
        writer.close()
        finished, stuck, death = False, False, None
        try:
            load = bytes if only_bytes else pickle.loads
            finished, stuck, death = _listen(reader, receive, psutil.Process(pid), limits, load)
        finally:
            if not finished:
                os.kill(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
            reader.close()
        if finished or death is not None:
            return death
        death = _death(status, noise)
        killed = death.signal_number == signal.SIGKILL  # else it had died before, and a child of it kept the pipe open
        used = usage.ru_utime + usage.ru_stime
        return replace(death, idle_timeout=stuck and killed, out_of_time=used >= limits.seconds)


def _listen(
    reader: Connection, receive: Send, child: psutil.Process, limits: Limits, load: Callable[[bytes], object]
) -> tuple[bool, bool, ChildExit | None]:
    """Listen until the child is done, has closed its pipe, sends a malformed message, or is stuck: (done, stuck, how it
    ended if that is known). An incomplete message does not count as activity."""
    frames, used, since = Frames(), -1.0, time.monotonic()
    while True:
        if reader.poll(POLL_SECONDS):
            data = os.read(reader.fileno(), CHUNK)
            if not data:  # it has died, or closed its files
                return False, False, None
            try:
                for frame in frames.feed(data):
                    tag, content = _read(frame, load)
                    if tag == _DONE:
                        return True, False, content
                    if tag == _MESSAGE:
                        receive(content)
                    else:
                        (sys.stdout if tag == _STDOUT else sys.stderr).write(content)
                    since = time.monotonic()
            except BrokenMessageError:
                return False, False, ChildExit(raised="a malformed message")
        now = _cpu_seconds(child)
        if now > used + 0.01:
            used, since = now, time.monotonic()
        elif time.monotonic() - since > limits.seconds:
            return False, True, None


def _read(frame: bytes, load: Callable[[bytes], object]) -> tuple[bytes, Any]:
    """What a frame is, and what it holds. Raises `BrokenMessageError`."""
    tag, data = frame[:1], frame[1:]
    try:
        if tag == _DONE:
            return tag, msgspec.msgpack.decode(data, type=ChildExit | None)
        if tag == _MESSAGE:
            return tag, load(data)
        if tag in (_STDOUT, _STDERR):
            return tag, data.decode(errors="replace")
    except Exception as problem:  # what pickle raises for broken bytes is not known
        raise BrokenMessageError(f"a message that cannot be read: {problem}") from problem
    raise BrokenMessageError(f"a message that begins with {tag!r}")


def _cpu_seconds(child: psutil.Process) -> float:
    try:
        times = child.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _death(status: int, noise: IO[bytes]) -> ChildExit:
    """How a child died, from its exit `status` and its stderr."""
    noise.seek(0)
    text = noise.read().decode(errors="replace")
    lines = tuple((file, int(line), name) for file, line, name in re.findall(TRACE_LINE, text))
    library_lines = [line.strip() for line in text.partition("Fatal Python error")[0].splitlines() if line.strip()]
    said = library_lines[-1] if library_lines else ""
    code = os.waitstatus_to_exitcode(status)
    return ChildExit(signal_number=max(0, -code), exit_code=max(0, code), lines=lines, library_message=said)


# ------------------------------------------------------------------------------------------------ in the child process


def _run_child(work: Work, pipe: int, noise: IO[bytes], limits: Limits, only_bytes: bool) -> NoReturn:
    """Run `work`, send how it ended, and exit without the parent's clean-up."""
    parent_output = sys.stdout, sys.stderr
    try:
        _set_up_child(noise, limits)
        sys.stdout, sys.stderr = _Forwarding(pipe, _STDOUT), _Forwarding(pipe, _STDERR)
        dump: Callable[[Any], bytes] = bytes if only_bytes else pickle.dumps
        death = None
        try:
            work(lambda message: write_frame(pipe, _MESSAGE + dump(message)))
        except BaseException as error:  # which `work` does not catch, such as KeyboardInterrupt
            out_of_time = isinstance(error, OutOfTime)
            death = ChildExit(raised=type(error).__name__, out_of_time=out_of_time, lines=_lines_of(error))
        write_frame(pipe, _DONE + msgspec.msgpack.encode(death))
    finally:
        sys.stdout, sys.stderr = parent_output
        os._exit(0)


def _set_up_child(noise: IO[bytes], limits: Limits) -> None:
    """Set signals, standard streams, one thread and the limits."""
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the stop button also interrupts the parent, which kills this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(noise.fileno(), 1)
    os.dup2(noise.fileno(), 2)
    faulthandler.enable(noise.fileno(), all_threads=False)
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = max(1, round(limits.seconds))
    signal.signal(signal.SIGXCPU, _out_of_time)
    _set_limit(resource.RLIMIT_CPU, seconds, seconds + 3)
    size = psutil.Process().memory_info().vms + limits.memory
    _set_limit(resource.RLIMIT_AS, size, resource.getrlimit(resource.RLIMIT_AS)[1])


def _set_limit(kind: int, soft: int, hard: int) -> None:
    """Set a limit of this process, but never above its present hard limit (`ulimit`), which only root may raise."""
    import resource

    most = resource.getrlimit(kind)[1]
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(kind, (soft, hard))


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise OutOfTime


def _lines_of(error: BaseException) -> tuple[tuple[str, int, str], ...]:
    frames = traceback.extract_tb(error.__traceback__)
    return tuple((frame.filename, frame.lineno or 0, frame.name) for frame in reversed(frames))


class _Forwarding(io.TextIOBase):
    """Sends the child's prints to the parent, at most `MAX_PRINTED` characters."""

    encoding = "utf-8"

    def __init__(self, pipe: int, tag: bytes) -> None:
        self._pipe, self._tag, self._left = pipe, tag, MAX_PRINTED

    def writable(self) -> bool:
        """Always True."""
        return True

    def write(self, text: str) -> int:
        """Send `text` to the parent; the number of its characters."""
        if self._left > 0:
            shown = text[: self._left]
            self._left -= len(shown)
            end = "" if self._left else "\n… (further prints are left out)\n"
            write_frame(self._pipe, self._tag + (shown + end).encode(errors="replace"))
        return len(text)


# --------------------------------------------------------------------------------------------------- in this process


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in this thread if the block has not ended after `seconds` of wall-clock time.

    Works on every system, but only for Python code: compiled code that never returns is not interrupted.
    """
    thread, over = threading.get_ident(), threading.Event()

    def watch() -> None:
        wait = seconds
        while not over.wait(wait):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(OutOfTime))
            wait = 1.0  # raise it again in case a bare `except` caught it

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        try:
            over.set()
            watcher.join()
            _raise_pending_exception()
        except OutOfTime:  # raised after the block had ended
            over.set()
            watcher.join()


def _raise_pending_exception() -> None:
    """Raise an exception that is pending for this thread: Python checks for one at the start of a function.

    Cancelling it instead does not work: after `PyThreadState_SetAsyncExc(thread, None)` Python 3.11 checks for it for
    ever. Every function then starts more slowly, and under a debugger none starts at all.
    """
