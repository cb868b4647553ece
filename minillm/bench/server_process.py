"""HTTP servers in processes of their own, for measurements: `minillm serve`, and vLLM's in its own environment."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

from minillm.bench.processes import free_port, open_own, peak_memory_of_process
from minillm.bench.vllm_peer import cpu_environment, start_vllm
from minillm.errors import ConfigError

START_SECONDS = 300
"""vLLM's CPU build compiles when it starts."""


class ServerProcess:
    """A server on a free local port. Close it."""

    def __init__(self, model: str, flags: Sequence[str] = ()) -> None:
        """Start `minillm serve` and wait until it listens. Raises `ConfigError` if it does not."""
        self.versions: dict[str, str] = {}
        """Library → version, of a server from another environment."""
        command = [sys.executable, "-m", "minillm.cli", "serve", model, "--port", "0"]
        command += ["--disable-uvicorn-access-log", "--uvicorn-log-level", "warning", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        try:
            found = re.search(r"http://\S+", self.process.stdout.readline())
        except BaseException:  # an interrupt: nobody else can close it yet
            self.close()
            raise
        if found is None:
            self.process.wait()
            raise ConfigError(f"`{' '.join(command[1:])}` ended with {self.process.returncode}; its error is above")
        self.url = found[0]

    @property
    def processes(self) -> list[psutil.Process]:
        """The process and all that it has started."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    @property
    def cpu_seconds(self) -> float:
        """Processor time that it has used, in all threads."""
        return sum(times.user + times.system for times in (process.cpu_times() for process in self.processes))

    @property
    def peak_memory(self) -> int | None:
        """Peak resident bytes, summed over its processes; None without `/proc`."""
        peaks = [peak_memory_of_process(process.pid) for process in self.processes]
        return None if peaks[0] is None else sum(peak or 0 for peak in peaks)

    def close(self) -> None:
        """Tell it to end, and wait for it."""
        self.process.terminate()
        self.process.wait()


class VllmServerProcess(ServerProcess):
    """The same for vLLM's server, whose engine runs in a second process."""

    def __init__(self, interpreter: str, folder: str, model: str, threads: int, flags: Sequence[str] = ()) -> None:
        """Start it with the model in `folder` under the name `model`, and wait until it is healthy. Raises
        `ConfigError` if the interpreter cannot be run, if the server ends, or if it does not answer in
        `START_SECONDS`."""
        port = free_port()
        root = f"http://127.0.0.1:{port}"
        self.url = f"{root}/v1"
        command = [interpreter, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
        command += ["--served-model-name", model, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--disable-uvicorn-access-log", "--uvicorn-log-level", "warning", *flags]
        self.process = start_vllm(command, cpu_environment(threads), stdout=subprocess.DEVNULL)
        began = time.monotonic()
        try:
            while not _is_healthy(f"{root}/health"):
                if self.process.poll() is not None or time.monotonic() - began > START_SECONDS:
                    raise ConfigError(f"vLLM's server under {interpreter} did not start; its error is above")
                time.sleep(0.5)
            with open_own(f"{root}/version", timeout=5) as answer:
                self.versions = {"vllm": json.load(answer)["version"]}
        except BaseException:  # also an interrupt
            self.close()
            raise


def _is_healthy(url: str) -> bool:
    try:
        with open_own(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
