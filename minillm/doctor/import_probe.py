"""Find out in another process whether packages can be imported.

Only an import shows whether an install is complete. But an imported module stays in memory: numba and Triton take some
140 MB, also in a lesson that uses neither. And a broken install that kills its process would kill this one.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

SECONDS = 120
"""Time limit of each process; a cold disk needs several seconds."""

MARK = "minillm tried: "
"""Prefix of the lines with answers in a process's output; packages may print lines of their own."""
PROGRAM = """
import json, sys
sys.path[:], questions = json.loads(sys.argv[1])
from minillm.doctor.import_probe import MARK, answer
for question in questions:
    print(chr(10) + MARK + json.dumps([question, *answer(question)]), flush=True)
"""


@dataclass(frozen=True)
class Answer:
    """The result of one import."""

    problem: str
    """Why it cannot be imported; empty if it can."""
    value: Any = None
    """What the function returned, if the question named one."""


def problem(name: str) -> str:
    """Import the module `name` in this process. Returns why that failed; empty if it succeeded."""
    return answer(name)[0]


def answer(question: str) -> tuple[str, Any]:
    """Import `module`, or call `module:function` without arguments. Returns the problem (or "") and the value.

    A broken install can raise any exception, so all are caught.
    """
    module, _, function = question.partition(":")
    try:
        found = importlib.import_module(module)
        return "", getattr(found, function)() if function else None
    except ModuleNotFoundError as error:
        if error.name is None or f"{module}.".startswith(f"{error.name}."):
            return "not installed", None
        return f"broken: it needs {error.name}, which is not installed", None
    except Exception as error:
        return f"broken: {error}".splitlines()[0], None


def ask(*questions: str) -> dict[str, Answer]:
    """Run `answer` for all questions in one new process with this one's `sys.path`. The answers are cached until
    `forget` is called.

    If an import ends the process or takes too long, another process answers the questions behind it.
    """
    return _ask(questions, tuple(entry for entry in sys.path if isinstance(entry, str)))  # Python skips any others


def forget() -> None:
    """Drop the cached answers: packages may have been installed or removed."""
    _ask.cache_clear()


@lru_cache(maxsize=8)
def _ask(questions: tuple[str, ...], path: tuple[str, ...]) -> dict[str, Answer]:
    found: dict[str, Answer] = {}
    while left := [question for question in questions if question not in found]:
        command = [sys.executable, "-c", PROGRAM, json.dumps([path, left])]
        try:
            done = subprocess.run(command, capture_output=True, check=False, timeout=SECONDS)
            output, end = done.stdout, f"ends the process (exit status {done.returncode})"
        except OSError:  # no process can be started, as in a browser
            return found | {question: Answer(*answer(question)) for question in left}
        except subprocess.TimeoutExpired as late:
            output, end = late.stdout or b"", f"took more than {SECONDS} seconds"
        lines = output.decode(errors="replace").splitlines()
        answers = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
        found |= {question: Answer(problem, value) for question, problem, value in answers}
        culprit = next((question for question in left if question not in found), None)
        if culprit is not None:
            found[culprit] = Answer(f"broken: importing it {end}")
    return found
