"""Whether this machine can close processes in, found out without the code that does so.

A test that skipped because `sandbox` or `landlock` fails would skip for a fault of theirs. So the constants below are
written out again.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

NAMESPACES = """
import ctypes, os, sys
libc, root = ctypes.CDLL(None, use_errno=True), sys.argv[1].encode()
uid, flags = os.getuid(), 0x00020000 | 0x40000000  # CLONE_NEWNS, CLONE_NEWNET
if uid:
    flags |= 0x10000000  # CLONE_NEWUSER
if libc.unshare(flags):
    sys.exit("unshare")
if uid:
    open("/proc/self/uid_map", "w").write(f"0 {uid} 1")
if libc.mount(None, b"/", None, ctypes.c_ulong(0x4000 | 0x40000), None):  # MS_REC, MS_PRIVATE
    sys.exit("private")
if libc.mount(b"tmpfs", root, b"tmpfs", ctypes.c_ulong(0), None):
    sys.exit("tmpfs")
if libc.unshare(0x20000000):  # CLONE_NEWPID
    sys.exit("processes")
if (pid := os.fork()) == 0:  # a container that covers parts of its /proc allows no other
    os._exit(libc.mount(b"proc", root, b"proc", ctypes.c_ulong(2 | 4 | 8), None) != 0)
sys.exit(os.waitpid(pid, 0)[1] != 0)
"""
LANDLOCK = """
import ctypes, sys
sys.exit(ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1)) < 1)  # the version of the ABI
"""


@cache
def possible(mode: str) -> bool:
    """Whether the kernel and the rights of this user allow a mode of `StudentProcess`."""
    if not sys.platform.startswith("linux"):
        return False
    if mode == "limits":
        return True
    probe = {"namespaces": NAMESPACES, "landlock": LANDLOCK}[mode]
    with TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-I", "-c", probe, folder], capture_output=True)
        assert not any(Path(folder).iterdir())
    return done.returncode == 0
