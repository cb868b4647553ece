"""What a process may forbid itself and its children. Standard library only.

`close_in` is for where namespaces are not allowed. The kernel (Linux 5.13 and later, Landlock) then refuses to open
what is not listed: Python, its packages, the system's libraries and minillm without its answers may be read, the
scratch folder written. Processes outside may not be traced, and since Linux 6.12 no signal reaches them. A filter of
system calls (seccomp) refuses sockets. What is not covered: the submission sees the numbers and command lines of other
processes, and before Linux 6.12 it can send signals to those of the same user.

`refuse_kept` is for everywhere: a filter that refuses memory that stays without being mapped, which the grader would
not count, and the kernel's keyrings, which hold keys of whoever grades.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14
RIGHTS_BY_VERSION = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many kinds of access to files each version of Landlock knows."""
NO_TCP, SCOPED = 3, 3
SET_SECCOMP, FILTER_MODE, NO_NEW_PRIVS = 22, 2, 38
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | 13  # EACCES
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
MACHINES = {
    "x86_64": (0xC000003E, {"socket": 41, "ptrace": 101, "mount": 165, "unshare": 272, "setns": 308, "vm_read": 310}),
    "aarch64": (0xC00000B7, {"socket": 198, "ptrace": 117, "mount": 40, "unshare": 97, "setns": 268, "vm_read": 270}),
}
KILL = {"x86_64": 62, "aarch64": 129}
IO_URING_SETUP = 425
KEPT = {  # shmget, semget, msgget, mq_open, memfd_create, add_key, request_key, keyctl
    "x86_64": (29, 64, 68, 240, 319, 248, 249, 250),
    "aarch64": (194, 190, 186, 180, 279, 217, 218, 219),
}
"""Calls for memory that stays without being mapped, or after the process, and for keyrings."""
MEMFD_SECRET = 447

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """The version of Landlock here; 0 without it, or where this module knows no numbers of system calls."""
    found = _libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    return max(0, found) if platform.machine() in MACHINES else 0


def close_in(readable: list[Path], hidden: list[Path], writable: Path) -> None:
    """Allow to read `readable` except `hidden`, and to write `writable`; no sockets. For good, for children too. The
    paths of `readable` and `hidden` have no links in them.

    Raises:
        OSError: the kernel has no Landlock.
    """
    have = version()
    if not have:
        raise OSError("the kernel has no Landlock")
    _libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    every = (1 << RIGHTS_BY_VERSION.get(have, 16)) - 1
    attributes = struct.pack("=QQQ", every, NO_TCP if have >= 4 else 0, SCOPED if have >= 6 else 0)
    size = 8 if have < 4 else 16 if have < 6 else 24
    ruleset = _call("landlock_create_ruleset", CREATE_RULESET, attributes[:size], ctypes.c_size_t(size), 0)
    for path, rights in [(part, right) for place in readable for part, right in _around(place, hidden)]:
        _allow(ruleset, path, rights & every)
    _allow(ruleset, writable, every)
    for name in ("null", "zero", "full", "random", "urandom"):
        _allow(ruleset, Path("/dev") / name, READ_FILE | WRITE_FILE)
    for path in (Path("/proc"), Path("/etc/ld.so.cache")):
        _allow(ruleset, path, READ_FILE | READ_DIR)
    _call("landlock_restrict_self", RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    _refuse_for_landlock()


def _around(place: Path, hidden: list[Path]) -> Iterator[tuple[Path, int]]:
    """`place` without `hidden`, as rules for its parts. Names may be listed everywhere. A rule holds for what a link
    leads to, so a link in `place` gets none: it may lead to `hidden`."""
    if any(place == path or path in place.parents for path in hidden):
        return
    if any(place in path.parents for path in hidden):
        yield place, READ_DIR
        for child in place.iterdir():
            if not child.is_symlink():
                yield from _around(child, hidden)
    else:
        yield place, READ_FILE | READ_DIR | EXECUTE


def _allow(ruleset: int, path: Path, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    rights = rights if path.is_dir() else rights & FILE_RIGHTS
    _call("landlock_add_rule", ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, opened), 0)
    os.close(opened)


def refuse_kept() -> None:
    """A filter for this process and its children: no memory that stays when no process has it mapped, no keyrings.

    Raises:
        OSError: the kernel has no such filters, or this module knows no numbers of system calls here.
    """
    machine = platform.machine()
    if machine not in KEPT:
        raise OSError(f"the system calls of {machine} are not known")
    _refuse_calls([*KEPT[machine], MEMFD_SECRET])


def _refuse_for_landlock() -> None:
    """A filter for this process and its children: no sockets, no tracing, no new namespaces, no signals to groups."""
    machine = platform.machine()
    groups = [(EQUAL, 0, 3, KILL[machine]), (LOAD, 0, 0, 16), (AT_LEAST, 0, 1, 1 << 31), (RETURN, 0, 0, REFUSE)]
    _refuse_calls([*MACHINES[machine][1].values(), IO_URING_SETUP], groups)


def _refuse_calls(numbers: list[int], last: Sequence[tuple[int, int, int, int]] = ()) -> None:
    """Refuse the system calls with these numbers, and what the steps `last` refuse: they begin with the number."""
    refuse = (RETURN, 0, 0, REFUSE)
    steps = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, MACHINES[platform.machine()][0])]  # skip one step if equal, else none
    steps += [refuse, (LOAD, 0, 0, 0), (AT_LEAST, 0, 1, 0x40000000), refuse]  # the other calling convention of x86_64
    for number in numbers:
        steps += [(EQUAL, 0, 1, number), refuse]
    steps += [*last, (RETURN, 0, 0, ALLOW)]
    program = b"".join(struct.pack("=HBBI", *step) for step in steps)
    code = ctypes.create_string_buffer(program)
    header = struct.pack("@HxxxxxxP", len(steps), ctypes.addressof(code))
    if _libc.prctl(SET_SECCOMP, FILTER_MODE, ctypes.create_string_buffer(header), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def _call(name: str, number: int, *args: object) -> int:
    found = _libc.syscall(number, *args)
    if found < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return int(found)
