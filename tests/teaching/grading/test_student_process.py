"""The grader never waits for ever, and keeps little of what a submission's process sends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from minillm.errors import UnsupportedError
from minillm.teaching.grading import messages, student_process
from minillm.teaching.grading.messages import Answered, Loaded, Message, Messages, pack
from minillm.teaching.grading.one_function import ReadJob
from minillm.teaching.grading.student_process import StudentProcess
from minillm.teaching.pipe_messages import BrokenMessageError

TEMPLATE = """
import os, pathlib, pickle, socket, sys, time

class Reaching:
    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path({reached!r}),)

control = socket.socket(fileno=int(sys.argv[1]))
control.send(b"ready")
_, (job, pipe), _, _ = socket.recv_fds(control, 1, 2)
{then}
time.sleep(1_000)
"""


@pytest.mark.parametrize(
    ("then", "stopped"),
    [
        ("", "time"),
        ("os.close(pipe)", "process"),
        ("os.close(pipe); control.close()", "process"),
        ("os.close(pipe); control.send(pickle.dumps(Reaching()))", "process"),
        ("while True: control.send(b'ended' * 1_000)", "time"),
    ],
    ids=["keeps the job", "says nothing", "hangs up", "sends a pickle", "talks without end"],
)
@pytest.mark.skipif("sys.platform != 'linux'", reason="submissions are graded on Linux only")
def test_a_template_that_is_stuck_or_taken_over_is_ended(
    then: str, stopped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = tmp_path / "reached"
    (tmp_path / "template.py").write_text(TEMPLATE.format(reached=str(reached), then=then))
    monkeypatch.setattr(student_process, "__file__", str(tmp_path / "student_process.py"))
    monkeypatch.setattr(student_process, "REPLY_SECONDS", 0.3)
    with StudentProcess(0, "limits") as process:
        template = process._process
        told = process.run(ReadJob(b"", "x.py"), wall_seconds=0.3, memory=1 << 30)
        assert told.stopped.partition(":")[0] == stopped
        assert template.poll() is not None
    assert not reached.exists()


CHOOSY = """
import socket, sys, time
control, mode = socket.socket(fileno=int(sys.argv[1])), sys.argv[5]
control.send(b"ready" if mode in {works!r} else b"no " + mode.encode())
time.sleep(1_000)
"""
"""A template that starts in some modes only."""


@pytest.mark.parametrize(
    ("works", "refused"),
    [
        (("namespaces", "landlock", "limits"), []),
        (("landlock", "limits"), ["namespaces"]),
        (("namespaces", "limits"), []),
        (("limits",), ["namespaces", "landlock"]),
    ],
    ids=str,
)
@pytest.mark.skipif("sys.platform != 'linux'", reason="submissions are graded on Linux only")
def test_the_first_mode_that_starts_is_taken_and_what_the_others_said_is_kept(
    works: tuple[str, ...], refused: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "template.py").write_text(CHOOSY.format(works=works))
    monkeypatch.setattr(student_process, "__file__", str(tmp_path / "student_process.py"))
    with StudentProcess(0, "") as process:
        assert (process.mode, process.refused) == (works[0], {mode: f"no {mode}" for mode in refused})
    for mode in refused:
        with pytest.raises(UnsupportedError, match=f"can be started: no {mode}"):
            StudentProcess(0, mode)


WITHOUT_PROC = """
import sys
sys.path.insert(0, {grading!r})
import template
real = template._standalone

def standalone(name):
    module = real(name)
    if name == "sandbox":
        def {fails}(*args):
            raise PermissionError(1, "Operation not permitted", "/proc")
        module.{fails} = {fails}
    return module

template._standalone = standalone
control, root, package, slot, mode = sys.argv[1:]
template.main(template.socket.socket(fileno=int(control)), *map(template.Path, (root, package)), int(slot), mode)
"""


@pytest.mark.skipif("sys.platform != 'linux'", reason="submissions are graded on Linux only")
@pytest.mark.parametrize("fails", ["drop_privileges", "adopt_orphans"])
def test_a_mode_whose_runner_fails_is_refused_with_the_reason(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Namespaces may be allowed and a new /proc in them not. `limits` stands for every mode here."""
    grading = str(Path(student_process.__file__).parent)
    (tmp_path / "template.py").write_text(WITHOUT_PROC.format(grading=grading, fails=fails))
    monkeypatch.setattr(student_process, "__file__", str(tmp_path / "student_process.py"))
    with pytest.raises(UnsupportedError, match=r"PermissionError: .* Operation not permitted: '/proc'"):
        StudentProcess(0, "limits")


def framed(message: Message) -> bytes:
    data = pack(message)
    return len(data).to_bytes(4, "big") + data


def test_messages_come_out_whole_however_they_arrive() -> None:
    sent = [Answered(n, b"x" * n, None, []) for n in range(40)]
    data, reader = b"".join(map(framed, sent)), Messages()
    got = [message for at in range(0, len(data), 7) for message in reader.feed(data[at : at + 7])]
    assert got == sent


def test_all_that_one_job_sends_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_BYTES", 1 << 20)
    reader, data = Messages(), framed(Answered(0, pack(["bytes", bytes(1 << 18)]), None, []))
    assert sum(len(list(reader.feed(data))) for _ in range(3)) == 3
    with pytest.raises(BrokenMessageError, match="more than 1 MiB"):
        list(reader.feed(data))


@pytest.mark.parametrize(
    "message", [Loaded(["x"] * 400), Answered(0, pack(["list", [0] * 400]), None, [])], ids=["texts", "an answer"]
)
def test_all_values_that_one_job_sends_have_a_limit(message: Message, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_ITEMS", 1_000)
    reader, data = Messages(), framed(message)
    assert [*reader.feed(data), *reader.feed(data)] == [message] * 2
    with pytest.raises(BrokenMessageError, match="more than 1,000 values"):
        list(reader.feed(data))


@pytest.mark.parametrize("data", [b"\xff" * 8, (4).to_bytes(4, "big") + b"PASS", (0).to_bytes(4, "big")], ids=bytes.hex)
def test_a_malformed_message_ends_the_job(data: bytes) -> None:
    with pytest.raises(BrokenMessageError):
        list(Messages().feed(data))


FOUR_PROCESSES = """
import mmap, os, signal, sys
ballast = bytearray(b"x") * (200 << 20)
if os.fork() == 0:
    for _ in range(4):
        if os.fork() == 0:
            size = int(sys.argv[1]) << 20
            if sys.argv[2] == "private":
                own = bytearray(b"x") * size
            else:
                file = os.memfd_create("own") if sys.argv[2] == "memfd" else -1
                if file >= 0:
                    os.ftruncate(file, size)
                own = mmap.mmap(file, size, mmap.MAP_SHARED)
                own.write(bytes(size))
            print(flush=True)
            signal.pause()
signal.pause()
"""
"""A template of more than 200 MiB, and a setup process with four below it, which have so many MiB of their own: private
ones, or shared mappings without a name or of a file in memory."""


@pytest.mark.skipif("sys.platform != 'linux'", reason="submissions are graded on Linux only")
@pytest.mark.parametrize("kind", ["private", "shared", "memfd"])
@pytest.mark.parametrize(("own", "stopped"), [(1, ""), (100, "memory: its processes used more than 0.3 GiB together")])
def test_what_processes_have_from_the_fork_is_not_counted_for_each(
    own: int, stopped: str, kind: str, tmp_path: Path
) -> None:
    most = int(0.3 * (1 << 30))
    command = [sys.executable, "-c", FOUR_PROCESSES, str(own), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as template:
        try:
            assert template.stdout is not None
            for _ in range(4):
                template.stdout.readline()
            assert student_process._too_much(template.pid, 0.0, 60.0, most, tmp_path) == stopped
        finally:
            os.killpg(template.pid, signal.SIGKILL)
