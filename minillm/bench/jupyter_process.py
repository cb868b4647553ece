"""`JupyterProcess`: a Jupyter server with code completion in a process of its own, for measurements."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

import psutil

from minillm.bench.processes import free_port, open_own, peak_memory_of_process
from minillm.complete import EXTENSION
from minillm.errors import ConfigError

START_S = 60


class JupyterProcess:
    """A server on a free local port, without a front end and without the user's settings. Close it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Start it with these variables and wait until it answers. Raises `ConfigError` if it does not."""
        self.token = secrets.token_hex(16)
        self._folder = tempfile.TemporaryDirectory()
        self.port = free_port()
        command = [sys.executable, "-m", "jupyter_server", f"--port={self.port}", "--ServerApp.port_retries=0"]
        command += ["--no-browser", "--allow-root", "--ip=127.0.0.1", f"--ServerApp.root_dir={self._folder.name}"]
        command += [f"--ServerApp.jpserver_extensions={EXTENSION}=True", "--Application.log_level=40"]
        own = {"JUPYTER_TOKEN": self.token, "JUPYTER_CONFIG_DIR": self._folder.name}
        self.process = subprocess.Popen(command, env={**os.environ, **own, **environ})
        try:
            self._wait()
        except BaseException:  # also an interrupt
            self.close()
            raise

    @property
    def cpu_seconds(self) -> float:
        """Processor time that it has used, in all threads."""
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    @property
    def peak_memory(self) -> int | None:
        """Peak resident bytes; None without `/proc`."""
        return peak_memory_of_process(self.process.pid)

    def close(self) -> None:
        """Tell it to end, and wait for it."""
        self.process.terminate()
        self.process.wait()
        self._folder.cleanup()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                open_own(f"http://127.0.0.1:{self.port}/api", timeout=2).close()
            except OSError:
                time.sleep(0.2)
            else:
                return
        raise ConfigError("the Jupyter server did not start; its error is above. Is the extra `lab` installed?")
