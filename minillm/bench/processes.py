"""What benchmarks ask about processes: their peak memory, and a port for a server."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path


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


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
