"""The messages for a learner whose function ended the process of its check, or never returned."""

from __future__ import annotations

import signal
import traceback

from minillm.teaching.exercise import Function
from minillm.teaching.guard import GIB, ChildExit, Limits
from minillm.teaching.source import plain_function

PAST_THE_END = "an index reaches past the end of an array: is a mask missing, or does a loop run too far?"
CRASHES = {"SIGSEGV": "read or wrote memory outside its arrays", "SIGBUS": "read or wrote beyond its memory"}


def problem(death: ChildExit, limits: Limits) -> str:
    """What happened, in one sentence."""
    if death.out_of_time:
        return out_of_time(limits)
    if death.idle_timeout:
        return (
            f"your function waits for something and did nothing for {limits.seconds:g} s (a lock, a sleep, an input?)"
        )
    if death.raised:
        return f"your function stopped the check with {death.raised}"
    if not death.signal_number:
        return f"your function ended the whole process (os._exit, exit code {death.exit_code})"
    name = signal_name(death.signal_number)
    if name == "SIGKILL":
        return "the system ended your function (SIGKILL), perhaps because the machine has no memory left"
    return f"your function crashed ({name}): it {CRASHES.get(name, death.library_message or 'was ended by the system')}"


def cause(death: ChildExit) -> str:
    """The likely cause; "" if none is known, or if the function was stopped because it took too long."""
    if death.idle_timeout or death.out_of_time:
        return ""
    heap_corrupted = any(
        word in death.library_message for word in ("free()", "malloc", "corrupt")
    )  # words of the C library
    name = signal_name(death.signal_number)
    return PAST_THE_END if name in CRASHES or (name == "SIGABRT" and heap_corrupted) else ""


def got(death: ChildExit) -> str:
    """The text in place of an answer: "nothing", with the signal that ended the function if there was one."""
    ended_here = death.idle_timeout or death.out_of_time or not death.signal_number
    return "nothing" if ended_here else f"nothing: {signal_name(death.signal_number)}"


def where(death: ChildExit, own: set[str]) -> str:
    """The innermost known line of the learner's own code, which is in the files `own`; "" if there is none."""
    for file, line, name in death.lines:
        if file in own:
            return line_in_words(file, line, name)
    return ""


def line_in_words(file: str, number: int, name: str) -> str:
    """`line 3, in f: while True:`."""
    return f"line {number}, in {name}: {traceback.FrameSummary(file, number, name).line}"


def out_of_time(limits: Limits) -> str:
    """The message for a function that never returns."""
    return f"your function did not return within {limits.seconds:g} s (an endless loop?)"


def out_of_memory(limits: Limits) -> str:
    """The message for a function that asks for too much memory."""
    return f"your function asked for more than {limits.memory / GIB:.3g} GiB of memory"


def signal_name(number: int) -> str:
    """`SIGSEGV` for 11."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def files_of(function: Function) -> set[str]:
    """The files that define `function` and the functions in its globals; in a notebook every cell is a file."""
    plain = plain_function(function)
    others = list(getattr(plain, "__globals__", {}).values())
    codes = [getattr(each, "__code__", None) for each in (plain, *others)]
    return {code.co_filename for code in codes if code is not None}
