"""The grader's end of a template process: starts it, gives it jobs, watches what a job's processes use, ends them."""

from __future__ import annotations

import os
import pickle
import re
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

import psutil

import minillm
from minillm.errors import UnsupportedError
from minillm.teaching.grading.messages import Message, Messages
from minillm.teaching.grading.one_function import Job
from minillm.teaching.pipe_messages import BrokenMessageError

MODES = ("namespaces", "landlock", "limits")
"""How a submission is isolated, the strongest first; `limits`: by limits and an import hook only."""
POLL_SECONDS = 0.1
START_SECONDS = 120.0
REPLY_SECONDS = 30.0
"""The template may take so long to end a job whose processes are gone; then it is started anew."""
MAX_REPLY = 1 << 17
"""Bytes."""
MIN_ENTRY = 4096
"""Bytes that an empty file counts as: so many of them end a job too."""
MAX_PROCESSES = 24
"""Processes that one submission may have at a time; ours among them."""
PACKAGE = Path(minillm.__file__).resolve().parent


@dataclass
class Told:
    """What came back from one job. `stopped`: why the grader ended it, or ""."""

    messages: list[Message] = field(default_factory=list)
    stopped: str = ""
    seconds: float = 0.0


def check_system() -> None:
    """Raise `UnsupportedError` if this is not Linux."""
    if not sys.platform.startswith("linux"):
        raise UnsupportedError("submissions are graded on Linux only (a container or WSL will do)")


class StudentProcess:
    """A template process and the jobs it runs, one at a time. Use it in a `with` statement.

    Args:
        slot: which of the graders beside each other this is, from 0; each gets a user id of its own.
        mode: one of `MODES`, or "" for the strongest that works here.

    Raises:
        UnsupportedError: this is not Linux, or the mode does not work here.
    """

    def __init__(self, slot: int = 0, mode: str = "") -> None:
        check_system()
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
        with too many processes or files."""
        if self._process is None and (problem := self._start(self.mode)):  # it has died in an earlier job
            raise UnsupportedError(f"the process for submissions does not start again: {problem}")
        reader, writer = os.pipe()
        try:
            assert self._process is not None
            handed = self._hand_over(job, writer)
            told = _listen(reader, self._process.pid, wall_seconds, memory, self._folder) if handed else Told()
            if not handed or self._reply(REPLY_SECONDS) != "ended":
                self.close()
                told.stopped = told.stopped or ("" if told.messages else "process: the template has ended")
            return told
        finally:
            os.close(reader)

    def _hand_over(self, job: Job, writer: int) -> bool:
        """Send a job, in a file in memory, and the end of a pipe; False if the template has ended."""
        assert self._control is not None
        with os.fdopen(os.memfd_create("job"), "w+b") as file:
            pickle.dump(job, file)
            file.seek(0)
            try:
                socket.send_fds(self._control, [b"j"], [file.fileno(), writer])
            except OSError:
                return False
            finally:
                os.close(writer)
        return True

    def close(self) -> None:
        """End the template and whatever it has started."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            _kill(_tree(self._process.pid))
            self._process.kill()
            self._process.wait()
        self._process = self._control = None
        if self._folder.is_dir():
            from minillm.teaching.grading.sandbox import empty

            empty(self._folder)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, mode: str) -> str:
        """Start a template; "" or why it does not start."""
        self._folder.mkdir(exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
        self._control = ours
        reply = self._reply(START_SECONDS)
        return "" if reply == "ready" else reply or f"it has ended, or did not start within {START_SECONDS:g} s"

    def _reply(self, seconds: float) -> str:
        """The template's next message, of text only; "" if it has ended or says nothing for `seconds`."""
        assert self._control is not None
        self._control.settimeout(seconds)
        try:
            return self._control.recv(MAX_REPLY).decode(errors="replace")
        except OSError:
            return ""


def _listen(reader: int, template: int, wall_seconds: float, memory: int, folder: Path) -> Told:
    """Collect messages until the pipe closes; end the processes of the job if they use too much."""
    told, messages, began = Told(), Messages(), time.monotonic()
    checked = began
    while True:
        ready, _, _ = select.select([reader], [], [], POLL_SECONDS)
        if ready:
            data = os.read(reader, 1 << 16)
            if not data:
                break
            try:
                for message in messages.feed(data):
                    told.messages.append(message)
            except BrokenMessageError as problem:
                told.stopped = f"messages: its process sent {problem}"
        now = time.monotonic()
        if now - checked >= POLL_SECONDS:
            told.stopped = told.stopped or _too_much(template, now - began, wall_seconds, memory, folder)
            checked = time.monotonic()
        if told.stopped:
            _end(template)
            break
    told.seconds = time.monotonic() - began
    return told


def _too_much(template: int, seconds: float, wall_seconds: float, memory: int, folder: Path) -> str:
    from minillm.teaching.grading.sandbox import SCRATCH_BYTES

    if seconds > wall_seconds:
        return f"time: it did not end within {wall_seconds:g} s"
    processes = _of_job(template)
    if len(processes) > MAX_PROCESSES:
        return f"processes: it started more than {MAX_PROCESSES} processes"
    # Pages from the fork are shared with the template until a process writes to them, so none of them counts. To read
    # how many are still shared takes too long while the processes allocate.
    forked = _without_files(template)
    used = sum(max(0, _without_files(process.pid) - forked) for process in processes)
    if used > memory:
        return f"memory: its processes used more than {memory / (1 << 30):g} GiB together"
    if _size(folder, SCRATCH_BYTES) > SCRATCH_BYTES:
        return f"files: it wrote more than {SCRATCH_BYTES >> 20} MiB of files, or folders that cannot be counted"
    return ""


def _size(folder: Path, most: int) -> int:
    """Bytes that the files and folders below `folder` take on the disk, at least `MIN_ENTRY` each; counting ends above
    `most`. What cannot be listed counts as more than that: it may hold anything."""
    size, folders = 0, [str(folder)]
    while folders and size <= most:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # removed in the meantime
                        size += max(MIN_ENTRY, entry.stat(follow_symlinks=False).st_blocks * 512)
                    if size > most:
                        break
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return most + 1
    return size


def _without_files(pid: int) -> int:
    """Bytes of a process that are no files of a disk: its own, and those in shared mappings, which count for each
    process that touched them. 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(int(kib) << 10 for kib in re.findall(r"^Rss(?:Anon|Shmem):\s*(\d+) kB$", status, re.MULTILINE))


def _end(template: int) -> None:
    """Kill everything below the setup process, again and again until nothing is left, then that process too."""
    for _ in range(50):
        below = _of_job(template)
        if not below:
            break
        _kill(below)  # the first is the runner, pid 1 of its own numbering: with it, all the others die
        time.sleep(0.01)
    _kill(_tree(template))


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def _of_job(template: int) -> list[psutil.Process]:
    """The processes below the setup process, which is the template's only child."""
    found = []
    for process in _tree(template):
        with suppress(psutil.Error):
            found += [process] if process.ppid() != template else []
    return found


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
