"""Starts the processes of ranks 1 to size - 1, sends them their orders, and finds out which of them has died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

from minillm.errors import EngineDeadError
from minillm.parallel.messages import Failed, Message, Ready, Setup, frame, receive
from minillm.parallel.worker import LOST_ANOTHER_RANK

PROGRAM = """
import os, sys
sys.path[:] = sys.argv[1:]
from minillm.parallel.worker import main
os._exit(main())  # without the seconds that PyTorch's threads may take to end: rank 0 waits for this process
"""
PATIENCE_S = 5.0
"""How long to look for the process that died, and how long a process may take to end when it is asked to."""


class Workers:
    """Worker processes, each with a pipe for orders and one for answers."""

    def __init__(self, setups: Sequence[Setup]) -> None:
        """Start one process for each setup; they begin to load at once."""
        self._lock = Lock()
        self._dead: str | None = None
        """Why these workers can no longer be used."""
        self.processes: list[subprocess.Popen[bytes]] = []
        """Of ranks 1, 2, …"""
        try:
            for setup in setups:
                self.processes.append(_start(setup.num_threads))
            self._ranks = dict(zip(self.processes, (setup.rank for setup in setups), strict=True))
            for process, setup in zip(self.processes, setups, strict=True):
                self._write(process, frame(setup))
        except BaseException:
            self.close()  # a notebook keeps the traceback, which would keep the processes alive
            raise

    def wait_until_ready(self) -> None:
        """Wait for the answer of every worker. Raises `EngineDeadError` with the reason if one ends instead."""
        for process in self.processes:
            answer = receive(process.stdout)
            if not isinstance(answer, Ready):
                raise self.failure((process, answer.reason) if isinstance(answer, Failed) else None)

    def send(self, message: Message) -> None:
        """Send an order to all workers. Raises `EngineDeadError` if one of them has ended."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        data = frame(message)
        for process in self.processes:
            self._write(process, data)

    def _write(self, process: subprocess.Popen[bytes], data: bytes) -> None:
        try:
            process.stdin.write(data)
            process.stdin.flush()
        except (OSError, ValueError):
            raise self.failure() from None

    @property
    def has_lost_one(self) -> bool:
        """Whether a worker has ended."""
        return any(process.poll() is not None for process in self.processes)

    def failure(
        self, known: tuple[subprocess.Popen[bytes], str] | None = None, lost: Exception | None = None
    ) -> EngineDeadError:
        """End all workers, and return the error that says which one ended first and why. `known`: both, if known.
        `lost`: what rank 0 said when it lost the others, which is returned if none of them ended by itself."""
        culprit, reason = known or self._culprit()
        if culprit is not None:
            what = f"the process of rank {self._ranks[culprit]} (pid {culprit.pid}) has ended: {reason}"
            self._dead = f"{what}; the other ranks were stopped, build the engine again"
        else:
            self._dead = str(lost) if lost else reason
        self.close()
        return EngineDeadError(self._dead)

    def _culprit(self) -> tuple[subprocess.Popen[bytes] | None, str]:
        """The worker that ended by itself, and why. Without such a worker: None, and what one says that ended because
        it lost another rank."""
        give_up = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up and any(process.poll() != LOST_ANOTHER_RANK for process in self.processes):
            for process in self.processes:
                if process.poll() not in (None, LOST_ANOTHER_RANK):
                    return process, _last_words(process) or _status(process.returncode)
            time.sleep(0.01)
        said = (_last_words(process) for process in self.processes if process.poll() is not None)
        return None, next(filter(None, said), "a process of this engine stopped answering; build the engine again")

    def close(self) -> None:
        """End all workers. May be called again."""
        with self._lock:
            self._dead = self._dead or "the processes of this engine were stopped; build the engine again"
            for process in self.processes:
                with suppress(OSError, ValueError):
                    process.stdin.close()
            give_up = time.monotonic() + PATIENCE_S
            for process in self.processes:
                try:
                    process.wait(max(0.0, give_up - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                process.stdout.close()


def import_path() -> list[str]:
    """The `sys.path` of a process that imports what this one imports: without the current folder (""), which may have a
    torch.py or a queue.py of its own."""
    return [str(Path(__file__).parents[2]), *(entry for entry in sys.path if entry and isinstance(entry, str))]


def _start(num_threads: int) -> subprocess.Popen[bytes]:
    """Start one worker. It has its own limit of threads."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *import_path()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )


def _last_words(process: subprocess.Popen[bytes]) -> str | None:
    """The reason that a process sent before it ended."""
    with suppress(OSError, ValueError):
        while (answer := receive(process.stdout)) is not None:
            if isinstance(answer, Failed):
                return answer.reason
    return None


def _status(returncode: int) -> str:
    if returncode >= 0:
        return f"exit status {returncode}"
    with suppress(ValueError):
        return f"killed by {signal.Signals(-returncode).name}"
    return f"killed by signal {-returncode}"
