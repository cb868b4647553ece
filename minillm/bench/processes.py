"""What benchmarks ask about processes: their peak memory, a port for a server, and an answer of one."""

from __future__ import annotations

import os
import socket
import sys
from http.client import HTTPResponse
from pathlib import Path
from urllib.request import ProxyHandler, build_opener


def peak_memory_of_process(pid: int) -> int | None:
    """Peak resident bytes of a running process; None without `/proc`."""
    status = Path(f"/proc/{pid}/status")
    return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024 if status.exists() else None


def own_peak_memory() -> int:
    """Peak resident bytes of this process. On Linux not `ru_maxrss`, which a process inherits from its parent."""
    found = peak_memory_of_process(os.getpid())
    if found is None:
        import resource

        found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return found


def open_own(url: str, timeout: float) -> HTTPResponse:
    """Ask a server of this machine, without the proxy that the environment may name. Raises `OSError`."""
    answer: HTTPResponse = build_opener(ProxyHandler({})).open(url, timeout=timeout)
    return answer


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
