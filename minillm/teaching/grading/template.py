"""The process that submissions' processes are forked from: it has imported torch and the drives, and no answer.

It is started by `minillm.teaching.grading.student_process` as a script, enters a sandbox (`sandbox.enter`), and only
then imports minillm. For every job it forks:

    template ── setup ── runner (pid 1 of its own numbering, no privileges) ── the submission's function (`guard`)

The runner is our code. It reads cells, or runs one function on the cases of one exercise through
`minillm.teaching.guard`, and writes messages to the pipe that came with the job. The job itself is a file in memory
that only the runner reads: whatever the template had in its memory, all later submissions could find in theirs.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import pkgutil
import re
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parents[1]
ANSWERS = "minillm.teaching.exercises."
"""The modules with references, cases, hints and planted mistakes. `sandbox` hides their files too."""
MAX_PROBLEM = 10_000
"""Characters of the reply that says why this process does not start."""


def main(control: socket.socket, root: Path, package: Path, slot: int, mode: str) -> None:
    """Close in, import, say so, then serve jobs until the other end closes."""
    sandbox = _standalone("sandbox")
    try:
        if mode == "namespaces":
            sandbox.enter(root, package, slot)
        if mode == "landlock" and not _standalone("landlock").version():
            raise OSError("the kernel has no Landlock")
        _imports(package.parent)
        _try_runner(sandbox, slot, mode, root)
    except BaseException:
        _reply(control, traceback.format_exc()[-MAX_PROBLEM:])
        return
    _reply(control, "ready")
    while (received := _files(control)) is not None:
        job, pipe = received
        pid = os.fork()
        if pid == 0:
            control.close()
            _setup(sandbox, job, pipe, slot, mode, root)
        os.close(job)
        os.close(pipe)
        os.waitpid(pid, 0)
        if mode != "namespaces":
            sandbox.empty(root)
        _reply(control, "ended")


def _imports(source: Path) -> None:
    """Import what submissions need, once. Nothing with an answer in it can be imported afterwards."""
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() not in (HERE, source)]
    sys.path.insert(0, str(source))
    sys.meta_path.insert(0, _Refusing())
    import torch

    torch.set_num_threads(1)
    import minillm.teaching.grading.one_function  # noqa: F401
    from minillm.teaching import drives
    from minillm.teaching.drives.triton_kernels import kernel_type

    for module in pkgutil.iter_modules(drives.__path__):
        if re.fullmatch(r"l\d\d", module.name):
            importlib.import_module(f"{drives.__name__}.{module.name}")
    with suppress(ValueError):
        kernel_type()  # imports Triton, if it is there


def _try_runner(sandbox: ModuleType, slot: int, mode: str, root: Path) -> None:
    """Read a file without cells, as a job. Raises `OSError` if the runner fails, as where it may not mount /proc."""
    from minillm.teaching.grading.messages import Ended, Messages
    from minillm.teaching.grading.one_function import ReadJob

    job = os.memfd_create("job")
    os.write(job, pickle.dumps(ReadJob(b"", "nothing.py")))
    os.lseek(job, 0, os.SEEK_SET)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _setup(sandbox, job, writer, slot, mode, root)
    os.close(job)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = list(Messages().feed(pipe.read()))
    os.waitpid(pid, 0)
    if not told:
        raise OSError("the runner has ended without a word")
    if isinstance(told[0], Ended) and told[0].death is not None:
        raise OSError(told[0].death.library_message.strip())


class _Refusing:
    """An import hook that refuses modules with answers."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raise `ImportError` for a refused module; None for any other, so that Python goes on searching."""
        if name.startswith(ANSWERS):
            raise ImportError(f"{name} is not available while a submission is graded", name=name)


def _setup(sandbox: ModuleType, job: int, pipe: int, slot: int, mode: str, root: Path) -> NoReturn:
    """In the setup process: give the runner its own process numbers, and wait for it."""
    try:
        sandbox.adopt_orphans()
        if mode == "namespaces":
            sandbox.own_processes()
        pid = os.fork()
        if pid == 0:
            _runner(sandbox, job, pipe, slot, mode, root)
        os.close(job)
        os.close(pipe)
        os.waitpid(pid, 0)
        _end_orphans()
    except BaseException:
        _tell(pipe)
    finally:
        os._exit(0)


def _end_orphans() -> None:
    """Kill what the submission has left behind: with its own process numbers nothing, for it died with the runner."""
    import psutil

    for _ in range(100):
        left = psutil.Process().children(recursive=True)
        if not left:
            return
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _runner(sandbox: ModuleType, job: int, pipe: int, slot: int, mode: str, root: Path) -> NoReturn:
    """In the runner: read the job, drop privileges, do it."""
    try:
        landlock = _standalone("landlock")
        with open(job, "rb") as file:
            read = pickle.load(file)
        sandbox.die_with_parent()
        os.setsid()
        sandbox.unreadable_memory()
        if mode == "namespaces":
            sandbox.begin_run(slot)
        else:
            scratch = sandbox.empty_folder(root)
            sandbox.drop_privileges(slot, scratch)
            if mode == "landlock":
                landlock.close_in(sandbox.needed(PACKAGE), sandbox.hidden(PACKAGE), scratch)
        with suppress(OSError):  # a machine without such filters: the processes' own memory is still counted
            landlock.refuse_kept()
        sandbox.limit_files_and_processes(mode == "namespaces")
        for name in ("HOME", "TMPDIR", "NUMBA_CACHE_DIR", "TRITON_HOME", "XDG_CACHE_HOME"):
            os.environ[name] = str(Path.cwd())
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):  # nothing that a submission writes reaches the grader's terminal
            os.dup2(nowhere, standard)
        import tempfile

        tempfile.tempdir = None
        from minillm.teaching.grading.one_function import do

        do(read, pipe)
    except BaseException:
        _tell(pipe)
    finally:
        os._exit(0)


def _tell(pipe: int) -> None:
    """Tell the grader what has just failed here."""
    from minillm.teaching.grading.one_function import fault

    fault(pipe, traceback.format_exc())


def _files(control: socket.socket) -> tuple[int, int] | None:
    """The file of the next job and the pipe for its messages; None at the end. Only the grader writes to the socket."""
    found, files, _, _ = socket.recv_fds(control, 1, 2)
    return (files[0], files[1]) if found else None


def _reply(control: socket.socket, text: str) -> None:
    """Tell the grader "ready", "ended", or why this process does not start."""
    try:
        control.sendall(text.encode(errors="replace"))
    except BrokenPipeError:  # the grader has ended, so nobody waits for an answer
        os._exit(1)


def _standalone(name: str) -> ModuleType:
    """A module of this folder, without importing its packages."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    descriptor, root_, package_, slot_, mode_ = sys.argv[1:]
    main(socket.socket(fileno=int(descriptor)), Path(root_), Path(package_), int(slot_), mode_)
