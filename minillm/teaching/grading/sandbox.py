"""A process without network, without the answers and without other people's files. Standard library only.

`enter` closes the process in before it imports anything of a notebook's: new namespaces without a network, and a root
directory that holds only Python, its packages, the system's libraries (all read-only) and minillm without
`teaching/exercises`. `begin_run` gives one submission its own process numbers and an empty scratch folder, and drops
every privilege. It needs root or unprivileged user namespaces; `landlock.py` serves where there are none.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
NO_NEW_PRIVS, CAPBSET_DROP, SET_PDEATHSIG, SET_DUMPABLE, SET_CHILD_SUBREAPER = 38, 24, 1, 4, 36
CAPABILITY_VERSION = 0x20080522
SCRATCH = "/scratch"
SCRATCH_BYTES = 256 << 20
"""Of files that a submission writes: in a file system of this size, or else the grader counts them."""
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/opt/intel", "/sys/devices/system/cpu")
DEVICES = ("null", "zero", "full", "random", "urandom")
READ_ONCE = ("/etc/ld.so.cache", "/proc/cpuinfo")
"""Copied in: the loader reads the first; PyTorch reads the other once, and without it some operations fail for good."""
UNUSED_UID = 61_000
"""The first of the user ids that submissions run under if the grader is root; no account should have them."""
MAX_PROCESSES = 64
"""Processes and threads of a submission, where the kernel counts them by user."""
MAX_FILE = 64 << 20
MAX_OPEN = 256

_libc = ctypes.CDLL(None, use_errno=True)


def enter(root: Path, package: Path, slot: int) -> None:
    """Close this process in, for good. `root`: an empty folder; `package`: the folder of minillm; `slot`: which of the
    graders beside each other this is.

    Raises:
        OSError: the system does not allow it. The process may then be half isolated, and must end.
    """
    uid, gid = os.geteuid(), os.getegid()
    if uid != 0:
        _call("unshare", NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    _call("unshare", NEWNS | NEWNET | NEWIPC | NEWUTS)
    _mount(None, "/", None, REC | PRIVATE)
    _mount("tmpfs", str(root), "tmpfs", NOSUID | NODEV, "size=16m,mode=755")
    for source in needed(package):
        _bind(root, source)
    for link in links(package):
        _link(root, link)
    for answers in hidden(package):
        _mount("tmpfs", str(root / str(answers).lstrip("/")), "tmpfs", RDONLY | NOSUID | NODEV, "size=4k,mode=755")
    for name in ("proc", "tmp", "dev/shm", "etc", SCRATCH.lstrip("/")):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in DEVICES:
        (root / "dev" / name).touch()
        _mount(f"/dev/{name}", str(root / "dev" / name), None, BIND)
    for file in filter(Path.exists, map(Path, READ_ONCE)):
        (root / str(file).lstrip("/")).write_bytes(file.read_bytes())
    user = UNUSED_UID + slot if uid == 0 else 0
    (root / "etc/passwd").write_text(f"student:x:{user}:{user}::{SCRATCH}:/bin/false\n")
    (root / "etc/group").write_text(f"student:x:{user}:\n")
    _mount(None, str(root), None, BIND | REMOUNT | RDONLY | NOSUID | NODEV)  # no note for the next submission
    os.chroot(root)
    os.chdir("/")


def hidden(package: Path) -> list[Path]:
    """The folders with answers among those that are shown (`needed`): exercises and solved lessons of `package`, and of
    every other copy of minillm that is installed; and what lies beside `package` in a clone, such as its history."""
    copies = [package, *(place / "minillm" for place in _wanted(package))]
    answers = [copy / part for copy in copies for part in ("teaching/exercises", "_solutions")]
    real = {path.resolve() for path in (*answers, *_rest_of_clone(package)) if path.is_dir()}
    shown = needed(package)
    return [path for path in sorted(real) if any(place in path.parents for place in shown)]


def _rest_of_clone(package: Path) -> list[Path]:
    """If `package` lies in a clone: the folders there that neither Python nor minillm needs, and the solved lessons."""
    clone, solved = package.parent, package.parent / "solutions"
    if not (solved.is_dir() or (clone / ".git").exists()):
        return []
    used = [path.resolve() for path in _wanted(package)]
    others = [path for path in clone.iterdir() if path.is_dir() and not path.is_symlink()]
    return [solved, *(path for path in others if not any(path.resolve() in (use, *use.parents) for use in used))]


def begin_run(slot: int) -> None:
    """In a fresh child of a sandboxed process whose next `fork` has pid 1: see `own_processes`. An empty scratch
    folder, no privileges, and limits that do not depend on the submission."""
    _mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
    if not any(Path("/tmp").iterdir()):  # else minillm or Python itself lives there
        _mount("tmpfs", "/tmp", "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    _mount("tmpfs", "/dev/shm", "tmpfs", NOSUID | NODEV, f"size={SCRATCH_BYTES},mode=1777")
    _mount("tmpfs", SCRATCH, "tmpfs", NOSUID | NODEV, f"size={SCRATCH_BYTES},mode=1777")
    os.chdir(SCRATCH)
    drop_privileges(slot)


def own_processes() -> None:
    """Before `fork`: the child is the first process of a new numbering, and whatever it leaves behind, shared memory
    included, dies with it."""
    _call("unshare", NEWPID | NEWNS | NEWIPC)


def empty_folder(root: Path) -> Path:
    """A new folder below `root`, which is emptied first, as the current one: for a process without namespaces."""
    empty(root)
    folder = Path(tempfile.mkdtemp(dir=root))
    os.chdir(folder)
    return folder


def empty(root: Path) -> None:
    """Remove all that is in `root`, as far as that is possible: by programs of the system, for folders may be nested
    more deeply than Python's recursion goes, or be closed to their owner, as may `root`."""
    delete = ["find", root, "-mindepth", "1", "-delete"]
    for command in (delete, ["chmod", "-R", "u+rwx", root], delete):
        with suppress(OSError):
            root.chmod(0o711)
            if not any(root.iterdir()):
                return
        subprocess.run(command, stderr=subprocess.DEVNULL)


def die_with_parent() -> None:
    """Have this process killed when its parent ends."""
    _libc.prctl(SET_PDEATHSIG, 9, 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parents end."""
    _libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def unreadable_memory() -> None:
    """Forbid other processes of the same user to read this one's memory."""
    _libc.prctl(SET_DUMPABLE, 0, 0, 0, 0)


def limit_files_and_processes(processes: bool) -> None:
    """Limits for everything that the submission starts; a hard limit that is lower stays. `processes`: count them by
    user."""
    import resource

    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: MAX_FILE, resource.RLIMIT_NOFILE: MAX_OPEN}
    if processes:
        limits[resource.RLIMIT_NPROC] = MAX_PROCESSES
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (limit, limit))


def needed(package: Path) -> list[Path]:
    """The folders that Python needs, and minillm's own: where they really are, outermost only."""
    real = {path.resolve() for path in _wanted(package)}
    return [path for path in sorted(real) if not any(other in path.parents for other in real)]


def links(package: Path) -> list[Path]:
    """The links on the ways to these folders, each where it really is."""
    found = set()
    for path in _wanted(package):
        while link := next((part for part in (*reversed(path.parents), path) if part.is_symlink()), None):
            found.add(link)
            path = link.resolve() / path.relative_to(link)
    return sorted(found)


def _wanted(package: Path) -> list[Path]:
    """The folders that Python needs, and minillm's own, under the names that they are asked for by."""
    python = [sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(sys.executable).resolve().parent)]
    wanted = [Path(name) for name in (*SYSTEM, *python)]
    for path in sys.path:  # packages that are installed outside of Python's own folders
        if path and Path(path).name in ("site-packages", "dist-packages"):
            wanted.append(Path(path))
    return [path for path in (*wanted, package) if path.is_dir()]


def _link(root: Path, link: Path) -> None:
    """Make the same link under `root`, unless it is in a folder that is shown there."""
    target = root / str(link).lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.is_symlink():
        target.symlink_to(link.resolve())


def _bind(root: Path, source: Path) -> None:
    """Show `source` at the same place under `root`, read-only."""
    target = root / str(source).lstrip("/")
    target.mkdir(parents=True, exist_ok=True)
    _mount(str(source), str(target), None, BIND | REC)
    kept = os.statvfs(target).f_flag & (NOSUID | NODEV | NOEXEC)
    _mount(None, str(target), None, BIND | REMOUNT | RDONLY | NOSUID | NODEV | kept)


def drop_privileges(slot: int, scratch: Path | None = None) -> None:
    """No capability, no way to get one, and if this is root another user, who owns `scratch`."""
    _libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(64):
        _libc.prctl(CAPBSET_DROP, capability, 0, 0, 0)
    uid = UNUSED_UID + slot
    if _is_first_root() and (scratch is None or _others_may_read(sys.prefix, sys.base_prefix, __file__, str(scratch))):
        if scratch is not None:
            os.chown(scratch, uid, uid)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = ctypes.create_string_buffer(struct.pack("=Ii", CAPABILITY_VERSION, 0))
    _call("capset", header, ctypes.create_string_buffer(24))


def _others_may_read(*paths: str) -> bool:
    """Whether every folder on the way to these is open to all users."""
    return all(parent.stat().st_mode & 1 for path in paths for parent in Path(os.path.realpath(path)).parents)


def _is_first_root() -> bool:
    """Whether this is root outside of any user namespace of ours."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split()[2] != "1"


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    _call("mount", *texts, ctypes.c_ulong(flags), data.encode() or None, about=target)


def _call(name: str, *args: object, about: str = "") -> None:
    if getattr(_libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}", about or None)
