"""Runs the stages of the GPU benchmark, each in its own process with a time limit.

A kernel that reads out of bounds corrupts the CUDA context of its process, and a kernel that hangs can only be killed
from outside. In its own process, a stage that crashes, hangs or runs out of time does not affect the others, and its
results so far are kept. After a CUDA error in a part of a stage, the other parts get a new process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm.bench.on_gpu.findings import Findings
from minillm.bench.on_gpu.worker import DEVICE_FAULT_CODE

DONE, FAILED, TIMED_OUT, SKIPPED = "done", "failed", "out of time", "left out"
TOTAL_S = 470.0
"""Seconds for all stages together: less than the sum of their budgets, which a fast host does not use up."""
LEAST_S = 10.0
"""With less time left, a stage is not started."""
ERROR_CHARACTERS = 3000


@dataclass(frozen=True)
class Stage:
    """One part of the benchmark."""

    name: str
    function: str
    """`module:function`, a module of this folder unless its name has dots; called with a `StageSetup` and a
    `Report`."""
    budget_s: float
    description: str


STAGES = (
    Stage("environment", "stage_environment:environment", 40, "the machine and its peak rates"),
    Stage("check", "stage_check:check", 130, "every kernel against its reference"),
    Stage("engine", "stage_engine:engine", 110, "graphs on = off = plain PyTorch, token for token"),
    Stage("decode", "stage_decode:decode", 120, "an 8B shape: decoding, verification, batches, prefill"),
    Stage("kernels", "stage_kernels:kernels", 75, "attention after 32K tokens, and every op by itself"),
    Stage("speculation", "stage_speculation:speculation", 60, "measured speed-up against the predicted one"),
    Stage("tiles", "stage_tiles:find_tiles", 100, "the fastest tiles of the quantised products"),
    Stage("bundled", "stage_bundled:bundled", 80, "the bundled model against transformers"),
    Stage("training", "stage_training:training", 60, "training steps as CUDA graphs"),
)
"""In order of importance."""


def run_stage(
    stage: Stage,
    is_rehearsal: bool,
    seconds: float,
    lines: Path | None = None,
    processes: StageProcesses | None = None,
) -> dict[str, Any]:
    """Run a stage for at most `seconds`; returns its results and how it ended, as JSON values.

    `lines`: the file to which the stage writes, which stays; None: a temporary one. `processes`: where another thread
    can end it.
    """
    info: dict[str, Any] = {"name": stage.name, "what": stage.description, "budget_s": seconds}
    if seconds < LEAST_S:
        error = f"no time was left; --stages {stage.name} runs it alone"
        nothing = _found(Findings([], {}, []))
        return {**info, "status": SKIPPED, "seconds": 0.0, "restarts": 0, "error": error, **nothing}
    with tempfile.TemporaryDirectory() as folder:
        lines, errors = lines or Path(folder, "lines.jsonl"), Path(folder, "errors.txt")
        lines.unlink(missing_ok=True)
        began = time.monotonic()
        processes = processes or StageProcesses()
        status, code, restarts = _run_with_restarts(stage, is_rehearsal, began + seconds, lines, errors, processes)
        took = round(time.monotonic() - began, 1)
        ending = {"status": status, "seconds": took, "restarts": restarts}
        error = None if status == DONE else _tail(errors, code)
        return {**info, **ending, "error": error, **_found(Findings.read(lines))}


def _run_with_restarts(
    stage: Stage,
    is_rehearsal: bool,
    deadline: float,
    lines: Path,
    errors: Path,
    processes: StageProcesses,
) -> tuple[str, int | None, int]:
    """Run a stage, again after each CUDA error that has left a note. Returns how it ended, and the number of restarts.

    A part that has left a note is not run again, so there are at most as many restarts as parts.
    """
    num_notes, restarts = 0, 0
    while True:
        status, code = _run(stage, is_rehearsal, deadline, lines, errors, processes)
        before, num_notes = num_notes, len(Findings.read(lines).notes)
        has_time = deadline - time.monotonic() >= LEAST_S
        if code != DEVICE_FAULT_CODE or num_notes == before or not has_time:
            return status, code, restarts
        restarts += 1


def _run(
    stage: Stage,
    is_rehearsal: bool,
    deadline: float,
    lines: Path,
    errors: Path,
    processes: StageProcesses,
) -> tuple[str, int | None]:
    with errors.open("a", encoding="utf-8") as stream:
        process = subprocess.Popen(
            command(stage, lines, deadline, is_rehearsal),
            stdout=stream,
            stderr=stream,
            env=environment(is_rehearsal),
            start_new_session=True,
        )
        processes.add(process)
        try:
            code = process.wait(timeout=max(0.0, deadline - time.monotonic()))
            return (DONE if code == 0 else FAILED), code
        except subprocess.TimeoutExpired:
            return TIMED_OUT, None
        finally:
            kill(process)


def command(stage: Stage, lines: Path, deadline: float, is_rehearsal: bool) -> list[str]:
    """Return the command that runs a stage, which writes to `lines`. `deadline`: see `StageSetup`."""
    worker = [sys.executable, "-m", "minillm.bench.on_gpu.worker", stage.function, str(lines), str(deadline)]
    return [*worker, *(["--rehearse"] if is_rehearsal else [])]


class StageProcesses:
    """The processes of stages that run in several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: list[subprocess.Popen[bytes]] = []
        self._ended = False

    def add(self, process: subprocess.Popen[bytes]) -> None:
        """Note a process. After `end`, which may have missed it, it is killed."""
        with self._lock:
            self._started.append(process)
        if self._ended:
            kill(process)

    def end(self) -> None:
        """Kill all of them, those too that another thread is about to start."""
        self._ended = True
        with self._lock:
            for process in self._started:
                kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a stage and the processes that it has started, such as compilers."""
    if process.poll() is None and hasattr(os, "killpg"):
        with suppress(ProcessLookupError):  # another thread was quicker
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def environment(is_rehearsal: bool) -> dict[str, str]:
    """Return the environment of a stage's process: kernels are interpreted in a rehearsal only."""
    variables = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # The stage imports the same minillm package as this process, wherever it is.
    here = str(Path(__file__).parents[3])
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (here, variables.get("PYTHONPATH"))))
    return variables | ({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} if is_rehearsal else {})


def _found(findings: Findings) -> dict[str, Any]:
    return {"metrics": findings.metrics, "notes": findings.notes, "rows": findings.rows}


def _tail(errors: Path, code: int | None) -> str:
    """Return how the process ended and the last part of its output."""
    text = errors.read_text(encoding="utf-8", errors="replace").strip()
    how = "it was killed at its time limit" if code is None else f"it exited with code {code}"
    return f"{how}\n{text[-ERROR_CHARACTERS:]}".strip()
