"""The grader's end of a template process: starts it, gives it jobs, watches what a job's processes use, ends them."""

from __future__ import annotations

import os
import pickle
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import msgspec
import psutil

import minillm
from minillm.errors import UnsupportedError
from minillm.teaching.grading.messages import Frames, Message
from minillm.teaching.grading.one_function import Job

MODES = ("namespaces", "landlock", "limits")
"""How a submission is closed in, the strongest first; `limits`: by limits and an import hook only."""
POLL_SECONDS = 0.1
START_SECONDS = 120.0
MAX_PROCESSES = 24
"""Processes that one submission may have at a time; ours among them."""
PACKAGE = Path(minillm.__file__).resolve().parent


@dataclass
class Told:
    """What came back from one job. `stopped`: why the grader ended it, or ""."""

    messages: list[Message] = field(default_factory=list)
    stopped: str = ""
    seconds: float = 0.0


class StudentProcess:
    """A template process and the jobs it runs, one at a time. Use it in a `with` statement.

    Args:
        slot: which of the graders beside each other this is, from 0; each gets a user id of its own.
        mode: one of `MODES`, or "" for the strongest that works here.

    Raises:
        UnsupportedError: this is not Linux, or the mode does not work here.
    """

    def __init__(self, slot: int = 0, mode: str = "") -> None:
        if not sys.platform.startswith("linux"):
            raise UnsupportedError("submissions are graded on Linux only (a container or WSL will do)")
        self.slot, self.mode = slot, mode
        self._folder = Path(tempfile.mkdtemp(prefix="minillm-grade-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.refused: dict[str, str] = {}
        for tried in [mode] if mode else MODES:
            if not (problem := self._start(tried)):
                self.mode = tried
                return
            self.refused[tried] = problem
            self.close()
        raise UnsupportedError(f"no process for submissions can be started: {problem.strip().splitlines()[-1]}")

    def __enter__(self) -> StudentProcess:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def run(self, job: Job, wall_seconds: float, memory: int) -> Told:
        """Run one job. Ends it after `wall_seconds`, with more than `memory` bytes in all its processes together, or
        with too many processes."""
        if self._process is None and (problem := self._start(self.mode)):  # it has died in an earlier job
            raise UnsupportedError(f"the process for submissions does not start again: {problem}")
        reader, writer = os.pipe()
        try:
            setup = self._hand_over(job, writer)
            if setup is None:
                self.close()
                return Told(stopped="process: the template has ended")
            told = _listen(reader, setup, wall_seconds, memory)
            if self._reply() is None:
                self.close()
            return told
        finally:
            os.close(reader)

    def _hand_over(self, job: Job, writer: int) -> int | None:
        """Send a job, in a file in memory, and the end of a pipe; the process id of its setup process, or None if the
        template has ended."""
        assert self._control is not None
        with os.fdopen(os.memfd_create("job"), "w+b") as file:
            pickle.dump(job, file)
            file.seek(0)
            try:
                socket.send_fds(self._control, [b"j"], [file.fileno(), writer])
            except OSError:
                return None
            finally:
                os.close(writer)
        reply = self._reply()
        return reply[1] if reply else None

    def close(self) -> None:
        """End the template and whatever it has started."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            for process in _tree(self._process.pid):
                with suppress(psutil.Error):
                    process.kill()
            self._process.kill()
            self._process.wait()
        self._process = self._control = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, mode: str) -> str:
        """Start a template; "" or why it does not start."""
        self._folder.mkdir(exist_ok=True)
        ours, theirs = socket.socketpair()
        names = str(theirs.fileno()), str(self._folder), str(PACKAGE), str(self.slot), mode
        script = str(Path(__file__).with_name("template.py"))
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", script, *names],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=_environment(),
            start_new_session=True,
            cwd="/",
        )
        theirs.close()
        ours.settimeout(START_SECONDS)
        self._control = ours
        reply = self._reply()
        if reply is None:
            return "the process ended"
        ours.settimeout(None)
        return "" if reply[0] == "ready" else str(reply[1])

    def _reply(self) -> tuple[str, int] | None:
        """The template's next message; None if it has ended. The template runs our code only."""
        assert self._control is not None
        head = self._exactly(8)
        data = self._exactly(int.from_bytes(head, "big")) if head else b""
        return pickle.loads(data) if data else None

    def _exactly(self, size: int) -> bytes:
        assert self._control is not None
        data = b""
        while len(data) < size:
            try:
                part = self._control.recv(size - len(data))
            except OSError:
                return b""
            if not part:
                return b""
            data += part
        return data


def _listen(reader: int, setup: int, wall_seconds: float, memory: int) -> Told:
    """Collect messages until the pipe closes; end the processes that `setup` started if they use too much."""
    told, frames, began = Told(), Frames(), time.monotonic()
    checked = began
    while True:
        ready, _, _ = select.select([reader], [], [], POLL_SECONDS)
        if ready:
            data = os.read(reader, 1 << 16)
            if not data:
                break
            try:
                told.messages += frames.feed(data)
            except (ValueError, msgspec.MsgspecError):
                told.stopped = "its process sent what is no answer"
        now = time.monotonic()
        if now - checked >= POLL_SECONDS:
            told.stopped = told.stopped or _too_much(setup, now - began, wall_seconds, memory)
            checked = time.monotonic()
        if told.stopped:
            _end(setup)
            break
    told.seconds = time.monotonic() - began
    return told


def _too_much(setup: int, seconds: float, wall_seconds: float, memory: int) -> str:
    if seconds > wall_seconds:
        return f"time: it did not end within {wall_seconds:g} s"
    processes = _tree(setup)
    if len(processes) > MAX_PROCESSES:
        return f"processes: it started more than {MAX_PROCESSES}"
    used = 0
    for process in processes:
        with suppress(psutil.Error):
            info = process.memory_info()
            used += info.rss - info.shared
    return f"memory: its processes used more than {memory / (1 << 30):g} GiB together" if used > memory else ""


def _end(setup: int) -> None:
    """Kill everything below the setup process, again and again until nothing is left, then itself."""
    for _ in range(50):
        below = _tree(setup)
        if not below:
            break
        for process in below:  # the first is the runner, pid 1 of its own numbering: with it, all the others die
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.01)
    with suppress(OSError):
        os.kill(setup, 9)


def _tree(pid: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return [child for child in psutil.Process(pid).children(recursive=True) if child.status() != "zombie"]
    return []


def _environment() -> dict[str, str]:
    """One thread each, no GPU, no proxies, keys or names of the grader's machine."""
    kept = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    set_here = dict.fromkeys(threads, "1") | {
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
    }
    return {name: os.environ[name] for name in kept if name in os.environ} | set_here
