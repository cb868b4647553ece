"""Running the stages of the GPU benchmark, each in a process of its own with a limit on its time.

A kernel that reads where it must not takes the whole CUDA context of its process with it, and one that never ends can
only be ended from outside. So a stage that crashes, hangs or runs out of time costs the others nothing, and what it had
found by then is kept.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm.bench.on_gpu.report import Findings

DONE, FAILED, LATE, LEFT_OUT = "done", "failed", "out of time", "left out"
TOTAL_S = 470.0
"""Seconds for all stages together."""
LEAST_S = 10.0
"""With less time left than this a stage is not begun."""
ERROR_CHARACTERS = 3000


@dataclass(frozen=True)
class Stage:
    """One part of the benchmark."""

    name: str
    function: str
    """`module:function`, called with a `Site` and a `Report`."""
    budget_s: float
    what: str


STAGES = (
    Stage("environment", "minillm.bench.on_gpu.environment:environment", 40, "the machine, and what it can do at most"),
    Stage("check", "minillm.bench.on_gpu.check:check", 130, "every kernel against its reference"),
    Stage("engine", "minillm.bench.on_gpu.engine:engine", 110, "graphs on = off = plain PyTorch, token for token"),
    Stage("decode", "minillm.bench.on_gpu.decode:decode", 120, "an 8B shape: decoding, verification, batches, prefill"),
    Stage("kernels", "minillm.bench.on_gpu.kernels:kernels", 75, "attention after 32K tokens, and every op by itself"),
    Stage("speculation", "minillm.bench.on_gpu.speculation:speculation", 60, "how much of its promise arrives"),
    Stage("tiles", "minillm.bench.on_gpu.tiles:find_tiles", 100, "which tiles the quantised products want here"),
    Stage("bundled", "minillm.bench.on_gpu.bundled:bundled", 80, "the bundled model beside transformers"),
)
"""In order of importance."""


def run_stage(stage: Stage, is_rehearsal: bool, seconds: float) -> dict[str, Any]:
    """Run a stage for at most so many seconds; returns what it found and how it ended, as JSON values."""
    told: dict[str, Any] = {"name": stage.name, "what": stage.what, "budget_s": seconds}
    if seconds < LEAST_S:
        return {**told, "status": LEFT_OUT, "seconds": 0.0, "error": "no time was left", **_found(Findings([], {}, []))}
    with tempfile.TemporaryDirectory() as folder:
        lines, errors = Path(folder, "lines.jsonl"), Path(folder, "errors.txt")
        began = time.monotonic()
        status, code = _run(stage, is_rehearsal, seconds, lines, errors)
        took = time.monotonic() - began
        error = None if status == DONE else _tail(errors, code)
        return {**told, "status": status, "seconds": round(took, 1), "error": error, **_found(Findings.read(lines))}


def _run(stage: Stage, is_rehearsal: bool, seconds: float, lines: Path, errors: Path) -> tuple[str, int | None]:
    with errors.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            command(stage, lines, is_rehearsal),
            stdout=stream,
            stderr=stream,
            env=environment(is_rehearsal),
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=seconds)
            return (DONE if code == 0 else FAILED), code
        except subprocess.TimeoutExpired:
            return LATE, None
        finally:
            _end(process)


def command(stage: Stage, lines: Path, is_rehearsal: bool) -> list[str]:
    """What starts a stage, which writes to `lines`."""
    worker = [sys.executable, "-m", "minillm.bench.on_gpu.worker", stage.function, str(lines)]
    return [*worker, *(["--rehearse"] if is_rehearsal else [])]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a stage and what it has started, such as compilers."""
    if process.poll() is None and hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def environment(is_rehearsal: bool) -> dict[str, str]:
    """The variables of a stage's process: a rehearsal interprets kernels, all else must not."""
    variables = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # The children import the package that runs here, wherever it lies.
    here = str(Path(__file__).parents[2])
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (here, variables.get("PYTHONPATH"))))
    return variables | ({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} if is_rehearsal else {})


def _found(findings: Findings) -> dict[str, Any]:
    return {"figures": findings.figures, "notes": findings.notes, "rows": findings.rows}


def _tail(errors: Path, code: int | None) -> str:
    """The end of what the process said, and how it ended if it said nothing."""
    text = errors.read_text(encoding="utf-8", errors="replace").strip()
    how = "it was ended when its time was over" if code is None else f"it ended with code {code}"
    return f"{how}\n{text[-ERROR_CHARACTERS:]}".strip()
