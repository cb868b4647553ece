"""A wrong answer never hurts the notebook: whatever it does, the check says so and the process goes on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from numba import njit

from minillm.teaching import crash_messages, guard
from minillm.teaching.check_function import check_function
from minillm.teaching.exercise import Case, Exercise, WrongVersion
from minillm.teaching.fence import Fences
from minillm.teaching.guard import Limits

SHORT, LONG = (Limits(seconds, memory=guard.GIB // 2) for seconds in (1.0, 60.0))
"""For answers that never end, and for those that do: on a busy machine a second is soon over."""
linux = pytest.mark.skipif(
    not guard.can_guard(), reason="no child processes here: the other tests say what holds instead"
)


def plus_one(x):
    return x + 1


EXERCISE = Exercise(
    name="l90.plus_one",
    reference=plus_one,
    cases=[Case("two ones", (torch.ones(2),)), Case("three zeros", (torch.zeros(3),))],
    hints=("a", "b", "c", "d"),
    wrong=(WrongVersion("adds two", lambda x: x + 2), WrongVersion("adds nothing", lambda x: x)),
)


def endless(x):
    while True:
        pass


def endless_and_stubborn(x):
    while True:
        with contextlib.suppress(BaseException):
            endless(x)


def reads_address_zero_on_the_second_case(x):
    if len(x) == 3:
        ctypes.string_at(0)
    return x + 1


def hoards(x):
    kept = []
    while True:
        kept.append(torch.zeros(1_000_000))


def hoards_lists(x):
    kept = [0]
    while True:
        kept = kept + kept


def waits(x):
    time.sleep(1_000)


def ends_the_process(x):
    os._exit(3)


def aborts(x):
    os.abort()


def hoards_on_windows(x):
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: not enough memory: you tried")


def interrupts(x):
    raise KeyboardInterrupt


def exits(x):
    sys.exit(2)


@linux
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (endless, "did not return within 1 s (an endless loop?)"),
        (endless_and_stubborn, "did not return within 1 s (an endless loop?)"),
        (reads_address_zero_on_the_second_case, "crashed (SIGSEGV): it read or wrote memory outside its arrays"),
        (hoards, "asked for more than 0.5 GiB of memory"),
        (hoards_lists, "asked for more than 0.5 GiB of memory"),
        (hoards_on_windows, "asked for more than 0.5 GiB of memory"),
        (waits, "waits for something and did nothing for 1 s"),
        (ends_the_process, "ended the whole process (os._exit, exit code 3)"),
        (aborts, "crashed (SIGABRT)"),
        (interrupts, "stopped the check with KeyboardInterrupt"),
        (exits, "ends the program (sys.exit, exit or quit)"),
    ],
)
def test_whatever_a_wrong_answer_does_to_its_process_the_check_says_so(answer, says):
    text = str(check_function(EXERCISE, answer, SHORT if "1 s" in says else LONG))
    assert says in text
    assert "it looks as if" not in text


def crashes_while_a_child_of_it_waits(x):
    if os.fork() == 0:
        time.sleep(3)
        os._exit(0)
    ctypes.string_at(0)


@linux
def test_a_crash_is_one_even_if_a_child_keeps_the_pipe_open():
    text = str(check_function(EXERCISE, crashes_while_a_child_of_it_waits, SHORT))
    assert "crashed (SIGSEGV)" in text and "waits for something" not in text


@pytest.mark.parametrize("slow", ["idle_timeout", "out_of_time"])
def test_a_function_that_took_too_long_is_told_nothing_of_indices(slow):
    crashed = guard.ChildExit(signal_number=signal.SIGSEGV)
    assert crash_messages.cause(crashed)
    assert not crash_messages.cause(replace(crashed, **{slow: True}))


def write_past_the_messages(data: bytes) -> None:
    """In the child: write into the pipe of its messages, as a function that is broken or hostile may."""
    os.write(sys.stdout._pipe, data)


def sends_half_a_message(x):
    write_past_the_messages(struct.pack("!I", 1_000) + b"m")
    time.sleep(1_000)


def sends_a_message_without_measure(x):
    write_past_the_messages(struct.pack("!I", 1 << 31))
    time.sleep(1_000)


def sends_no_pickle(x):
    write_past_the_messages(struct.pack("!I", 5) + b"mPASS")
    time.sleep(1_000)


@linux
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (sends_half_a_message, "waits for something and did nothing for 1 s"),
        (sends_a_message_without_measure, "stopped the check with a malformed message"),
        (sends_no_pickle, "stopped the check with a malformed message"),
    ],
)
def test_a_check_never_waits_for_the_rest_of_a_message(answer, says):
    assert says in str(check_function(EXERCISE, answer, SHORT))


class Reaching:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@linux
def test_messages_of_bytes_only_are_never_unpickled(tmp_path: Path):
    data, reached, got = pickle.dumps(Reaching(tmp_path / "reached")), tmp_path / "reached", []

    def work(send):
        send(data)
        write_past_the_messages(struct.pack("!I", 1 + len(data)) + b"d" + data)
        time.sleep(1_000)

    death = guard.run_guarded(work, got.append, SHORT, only_bytes=True)
    assert got == [data]
    assert death == guard.ChildExit(raised="a malformed message")
    assert not reached.exists()


@linux
def test_a_crash_names_the_case_the_line_and_the_likely_reason():
    text = str(check_function(EXERCISE, reads_address_zero_on_the_second_case, LONG))
    assert text.splitlines()[0] == "FAIL 1/2  l90.plus_one"
    assert "three zeros" in text
    assert "ctypes.string_at(0)" in text
    assert "an index reaches past the end of an array" in text


@linux
def test_a_failure_found_before_a_crash_is_the_one_that_is_shown():
    def wrong_then_crashes(x):
        return x if len(x) == 2 else ctypes.string_at(0)

    text = str(check_function(EXERCISE, wrong_then_crashes, LONG))
    assert "two ones" in text
    assert "values: 2 of 2 differ" in text


@linux
def test_a_crash_in_compiled_code_is_survived():
    @njit
    def writes_far_away(values, at):
        values[at] = 1.0

    exercise = Exercise(
        name="l90.fill",
        reference=lambda values, at: None,
        cases=[Case("far away", (np.zeros(4), 1 << 40))],
        hints=("a", "b", "c", "d"),
        wrong=(),
    )
    assert "crashed (SIGSEGV)" in str(check_function(exercise, writes_far_away, LONG))


def out_of_bounds_exercise(guarded: bool) -> Exercise:
    """Copy `x` into a result, by a function that gets memory and no lengths it must obey."""

    def drive(function, x):
        fences = Fences()
        source, out = fences.input("x", x), fences.output("out", x.shape, x.dtype)
        function(source.numpy(), out.numpy(), len(x))
        fences.check()
        return out.clone()

    @njit
    def copy(x, out, count):
        for i in range(count):
            out[i] = x[i]

    return Exercise(
        name="l90.copy",
        reference=copy,
        cases=[Case("three numbers", (torch.arange(3.0),)), Case("five numbers", (torch.arange(5.0),))],
        hints=("a", "b", "c", "d"),
        wrong=(),
        run_case=drive,
        guarded=guarded,
    )


@pytest.mark.parametrize("guarded", [True, False])
def test_writing_past_the_end_fails_even_where_nothing_crashes(guarded: bool):
    @njit
    def one_too_many(x, out, count):
        for i in range(count + 1):
            out[i] = x[i]

    text = str(check_function(out_of_bounds_exercise(guarded), one_too_many))
    assert "FAIL 0/2" in text
    assert "your function wrote 1 number outside of out, the first 1 after its last" in text
    assert "is a mask missing, or does a loop run too far?" in text


def test_without_a_child_an_endless_loop_and_an_exit_are_still_survived(monkeypatch):
    monkeypatch.setattr("minillm.teaching.check_function.can_guard", lambda: False)
    assert "did not return within 1 s" in str(check_function(EXERCISE, endless, SHORT))
    assert "ends the program" in str(check_function(EXERCISE, exits, LONG))
    assert check_function(EXERCISE, plus_one, LONG).passed


def test_the_stop_button_works_without_a_child(monkeypatch):
    monkeypatch.setattr("minillm.teaching.check_function.can_guard", lambda: False)
    with pytest.raises(KeyboardInterrupt):
        check_function(EXERCISE, interrupts, LONG)


@linux
def test_what_the_function_prints_is_seen_and_cut_when_it_never_ends(capsys):
    def talks(x):
        print("I was given", len(x))
        return x + 1

    assert check_function(EXERCISE, talks, LONG).passed
    assert capsys.readouterr().out == "I was given 2\nI was given 3\n"

    def talks_without_end(x):
        while True:
            print("and on")

    check_function(EXERCISE, talks_without_end, SHORT)
    out = capsys.readouterr().out
    assert len(out) < guard.MAX_PRINTED + 100
    assert "left out" in out


@linux
def test_where_the_process_has_lower_limits_a_right_answer_passes():
    """As after `ulimit -v` and `ulimit -t`: hard limits below those that a check asks for."""

    def work(send):
        import resource

        size = psutil.Process().memory_info().vms + guard.GIB
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
        send(str(check_function(EXERCISE, plus_one, Limits(seconds=20.0, memory=2 * guard.GIB))))

    got = []
    assert guard.run_guarded(work, got.append, LONG) is None
    assert got == ["PASS 2/2  l90.plus_one"]


@linux
@pytest.mark.parametrize(
    ("answer", "says"),
    [(endless, r"did not return within 2 s \("), (hoards, r"asked for more than 0\.(5|4\d*) GiB of memory")],
)
def test_where_the_process_has_lower_limits_the_check_names_these(answer, says):
    """Not the limits that the check asks for, nor the SIGKILL that ends a process at its hard limit of time."""

    def work(send):
        import resource

        size = psutil.Process().memory_info().vms + guard.GIB // 2
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CPU, (3, 3))
        send(str(check_function(EXERCISE, answer, Limits(seconds=20.0, memory=2 * guard.GIB))))

    got = []
    assert guard.run_guarded(work, got.append, LONG) is None
    assert re.search(says, got[0])


@linux
def test_a_check_leaves_nothing_behind():
    def careless(x):
        torch.set_default_dtype(torch.float64)
        os.environ["LEFT_BEHIND"] = "1"
        return x + 1

    files, children = len(list(Path("/proc/self/fd").iterdir())), children_of_this_process()
    assert check_function(EXERCISE, careless, LONG).passed
    assert torch.get_default_dtype() == torch.float32
    assert "LEFT_BEHIND" not in os.environ
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    assert children_of_this_process() == children


def children_of_this_process() -> set[str]:
    """The ids of all child processes, ended ones that nobody waited for included; other tests may have left some."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended while we looked
            name, parent = process.name, (process / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.add(name)
    return found


@linux
def test_a_check_works_after_the_process_has_used_many_threads():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        big = torch.randn(512, 512)
        assert torch.isfinite(big @ big).all()
        assert check_function(EXERCISE, lambda x: x + 1 + 0 * (big @ big).sum(), Limits(seconds=10)).passed
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("work", ["pass", "answer = sum(range(10**7))"], ids=["in time", "as time is up"])
def test_a_time_limit_leaves_python_as_it_was(work: str) -> None:
    """An exception that was taken back instead of raised let Python 3.11 hang in the next function that is traced."""
    program = f"""
import sys
from minillm.teaching.guard import OutOfTime, limited
for _ in range(20):
    try:
        with limited(0.1):
            {work}
    except OutOfTime:
        pass
def traced(number): return number + 1
sys.settrace(lambda frame, event, argument: None)
assert [traced(i) for i in range(10)] == list(range(1, 11))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
