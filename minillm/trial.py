"""Whether packages can be imported, found out in another process.

Only importing a package tells whether its install is whole. But what was imported stays: numba and Triton are some
140 MB that a lesson which uses neither would carry to its end, and an install that ends the process would end this one.
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
"""How long the other process may take for all of it; a cold disk needs several."""

MARK = "minillm tried: "
"""Begins the lines that count of what the other process prints; packages print too."""
PROGRAM = """
import json, sys
sys.path[:], questions = json.loads(sys.argv[1])
from minillm.trial import MARK, answer
for question in questions:
    print(chr(10) + MARK + json.dumps([question, *answer(question)]), flush=True)
"""


@dataclass(frozen=True)
class Answer:
    """What became of one import."""

    problem: str
    """Why it cannot be imported; empty if it can."""
    value: Any = None
    """What the function gave, if one was named."""


def problem(name: str) -> str:
    """Why the module `name` cannot be imported here; empty if it can, and then it has been."""
    return answer(name)[0]


def answer(question: str) -> tuple[str, Any]:
    """Import `module`, or call `module:function` without arguments: the problem or an empty string, and the value.

    A broken install fails in many ways, so any error counts.
    """
    module, _, function = question.partition(":")
    try:
        found = importlib.import_module(module)
        return "", getattr(found, function)() if function else None
    except ModuleNotFoundError:
        return "not installed", None
    except Exception as error:
        return f"broken: {error}".splitlines()[0], None


def ask(*questions: str) -> dict[str, Answer]:
    """`answer` to all questions, from one process that is started for them and has this one's `sys.path`.

    Asked again, the same questions get the same answers without a process.
    """
    return _ask(questions, tuple(sys.path))


@lru_cache(maxsize=8)
def _ask(questions: tuple[str, ...], path: tuple[str, ...]) -> dict[str, Answer]:
    command = [sys.executable, "-c", PROGRAM, json.dumps([path, questions])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except OSError:  # where no process can be started, such as in a browser
        return {question: Answer(*answer(question)) for question in questions}
    except subprocess.TimeoutExpired:
        return dict.fromkeys(questions, Answer(f"broken: importing it took more than {SECONDS} seconds"))
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    found = {question: Answer(problem, value) for question, problem, value in map(json.loads, lines)}
    died = Answer(f"broken: importing it ends the process (exit status {done.returncode})")
    return {question: found.get(question, died) for question in questions}
