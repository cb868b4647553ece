"""All correctness checks and timings for a single GPU, in one run of under eight minutes.

    minillm bench gpu --json FILE        stages in order of importance; FILE is rewritten after each
    minillm bench gpu --rehearse         the same stages with tiny sizes on a CPU, kernels in Triton's interpreter

A rehearsal shows that every stage runs, and makes all checks that a CPU can make. Its times are meaningless and not
reported.

Each stage has a time budget and a process of its own (`on_gpu/stage_runner.py`), so a failure or a timeout does not
affect the others. If the first ones use up the eight minutes, the last ones are left out; `--stages` runs them alone.
The running stage writes its results to FILE.<stage>.jsonl, which is removed when they are in FILE. An interrupt or
SIGTERM ends the running stages as well, and leaves that file.

A metric with a target is reported as `met` or `NOT MET`; metrics without a target are informative. The targets are for
a model of 8 billion weights in 16 bits. If the GPU has too little memory, a shape of 1 billion replaces it, and the
stage's notes say so.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from minillm.bench.harness import result, save
from minillm.bench.on_gpu.findings import failure_note
from minillm.bench.on_gpu.stage_runner import STAGES, TOTAL_S, Stage, StageProcesses, run_stage
from minillm.errors import ConfigError, UnsupportedError
from minillm.ops.dispatch import has_triton, interpreted

if TYPE_CHECKING:
    from rich.table import Table


def run(stages: Sequence[str] | None = None, rehearse: bool = False, save_to: Path | None = None) -> dict[str, Any]:
    """Run the stages (all, or those named). Returns the result as JSON values.

    `save_to`: file for the partial result after each stage. Raises `ConfigError` for an unknown stage,
    `UnsupportedError` without Triton, and outside a rehearsal without a GPU or with `TRITON_INTERPRET` set.
    """
    chosen = _chosen(stages)
    _check_machine(rehearse)
    began = time.monotonic()
    models = {"model": "minicoder", "draft": "minicoder-draft"}  # of the stage with the bundled pair
    outcome = result("gpu", {"rehearsal": rehearse, "stages": [stage.name for stage in chosen], **models}, [])
    outcome["stages"] = []

    processes = StageProcesses()

    def one(stage: Stage) -> dict[str, Any]:
        left = TOTAL_S - (time.monotonic() - began)
        lines = save_to and _lines_file(save_to, stage)
        return run_stage(stage, rehearse, min(stage.budget_s, left), lines, processes)

    # On a GPU one stage at a time, because stages are timed. In a rehearsal two at once, in threads of their own.
    with _sigterm_as_exit(), ThreadPoolExecutor(2) as pool, tqdm(total=len(chosen), desc="stages") as bar:
        try:
            for stage, found in zip(chosen, pool.map(one, chosen) if rehearse else map(one, chosen), strict=True):
                outcome["stages"].append(found)
                bar.set_postfix_str(f"{found['name']} {found['status']}")
                bar.update()
                if save_to is not None:
                    save(outcome, save_to)
                    _lines_file(save_to, stage).unlink(missing_ok=True)
        except BaseException:  # also an interrupt, which the threads of a rehearsal do not get
            pool.shutdown(wait=False, cancel_futures=True)
            processes.end()
            raise
    outcome["config"]["seconds"] = round(time.monotonic() - began, 1)
    return outcome


def _lines_file(save_to: Path, stage: Stage) -> Path:
    return save_to.with_name(f"{save_to.name}.{stage.name}.jsonl")


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Turn SIGTERM into `SystemExit` inside the block, so that the running stages are ended too.

    Only the main thread can; in another one, SIGTERM is left as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def table(outcome: dict[str, Any]) -> Table:
    """Every metric of every stage, with its target and whether it is met, and what has failed."""
    from rich.table import Table

    rehearsed = outcome["config"]["rehearsal"]
    gpu = (outcome["hardware"]["gpu"] or {}).get("name", "no GPU")
    title = "gpu: a rehearsal; times mean nothing and are left out" if rehearsed else f"gpu: {gpu}"
    table = Table(title=title)
    for heading in ("stage", "metric", "value", "spread", "unit", "target", "", "bound"):
        table.add_column(heading, justify="right" if heading in ("value", "target") else "left")
    for stage in outcome["stages"]:
        table.add_section()
        table.add_row(stage["name"], *_ending(stage))
        for metric in stage["metrics"]:
            table.add_row("", *_cells(metric))
        for name, text in stage["notes"].items():
            if name.endswith(failure_note("")):
                table.add_row("", name, "", "", "", "", "", " ".join(text.split())[-100:])
        for line in stage["notes"].get("lines for tiles.MEASURED", []):
            table.add_row("", line.strip())
    return table


def _ending(stage: dict[str, Any]) -> list[str]:
    error = (stage["error"] or "").splitlines()
    return [stage["what"], f"{stage['seconds']:.0f} s", "", stage["status"], "", "", error[-1][:100] if error else ""]


def _cells(metric: dict[str, Any]) -> list[str]:
    value, low, high = metric["value"], metric["low"], metric["high"]
    met = {True: "met", False: "NOT MET", None: ""}[metric["met"]]
    return [
        metric["name"],
        "" if value is None else f"{value:,.4g}",
        "" if low is None or low == high else f"{low:,.3g} to {high:,.3g}",
        metric["unit"],
        metric["target"] or "",
        met,
        metric["bound"] or "",
    ]


def _chosen(names: Sequence[str] | None) -> list[Stage]:
    known = [stage.name for stage in STAGES]
    for name in names or ():
        if name not in known:
            raise ConfigError(f"there is no stage {name!r}; there are: {', '.join(known)}")
    return [stage for stage in STAGES if not names or stage.name in names]


def _check_machine(rehearse: bool) -> None:
    import torch

    if not has_triton():
        raise UnsupportedError("Triton is not installed, and this benchmark measures Triton kernels")
    if rehearse:
        return
    if not torch.cuda.is_available():
        raise UnsupportedError("there is no GPU that PyTorch sees; --rehearse runs the stages on a CPU")
    if interpreted():
        raise UnsupportedError("TRITON_INTERPRET is set: an interpreted kernel's time means nothing; unset it")
