"""`ServerProcess`: `minillm serve` in a process of its own, for measurements."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from minillm.errors import ConfigError


class ServerProcess:
    """A server on a free local port. Close it."""

    def __init__(self, model: str, flags: Sequence[str] = ()) -> None:
        """Start it and wait until it listens. Raises `ConfigError` if it does not."""
        command = [sys.executable, "-m", "minillm.cli", "serve", model, "--port", "0"]
        command += ["--disable-uvicorn-access-log", "--uvicorn-log-level", "warning", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = re.search(r"http://\S+", self.process.stdout.readline())
        if found is None:
            self.process.wait()
            raise ConfigError(f"`{' '.join(command[1:])}` ended with {self.process.returncode}; its error is above")
        self.url = found[0]

    @property
    def cpu_seconds(self) -> float:
        """Processor time that it has used, in all threads."""
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    @property
    def peak_memory(self) -> int | None:
        """Peak resident bytes; None without `/proc`."""
        status = Path(f"/proc/{self.process.pid}/status")
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024 if status.exists() else None

    def close(self) -> None:
        """Tell it to end, and wait for it."""
        self.process.terminate()
        self.process.wait()
