"""The results of a stage of the GPU benchmark, written at once: one line of JSON per metric, that is per number.

If a stage crashes or runs out of time, the lines written so far remain. A metric has a kind (`measured`, `counted`,
`modelled`) and, if something was promised, the target and whether it is met.

A rehearsal writes no measured values: such a metric has no value and is marked as rehearsed.

A part of a stage that fails leaves a note. After a CUDA error the stage's process ends, and a new one starts the stage
again (`stage_runner`) without the parts that failed. What is then written again replaces what was written before.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from minillm.bench.on_gpu.failures import DeviceFault, error_text, is_device_error

T = TypeVar("T")

MEASURED, COUNTED, MODELLED = "measured", "counted", "modelled"
BY_TIMES = ", by the two times"
"""Ends the name of a gain that is the quotient of two reported times (`Report.gain`)."""


@dataclass(frozen=True)
class Target:
    """A limit that a metric should keep: at least or at most some value."""

    at_least: float | None = None
    at_most: float | None = None

    def is_met(self, value: float) -> bool:
        """Whether `value` keeps the limit; NaN does not."""
        low = -math.inf if self.at_least is None else self.at_least
        high = math.inf if self.at_most is None else self.at_most
        return low <= value <= high

    def __str__(self) -> str:
        return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"


@dataclass(frozen=True)
class Metric:
    """One number of the report and what is needed to interpret it."""

    name: str
    value: float | None
    """The median of several values. None in a rehearsal if the value is a measured one."""
    unit: str
    kind: str
    low: float | None = None
    high: float | None = None
    target: str | None = None
    met: bool | None = None
    bound: str | None = None
    """The bound that the value cannot exceed here, or what it was divided by."""
    rehearsed: bool = False
    config: dict[str, Any] = field(default_factory=dict)


class Report:
    """The file to which a stage writes its results."""

    def __init__(self, path: Path, is_rehearsal: bool) -> None:
        self.path, self.is_rehearsal = path, is_rehearsal

    def measured(
        self,
        name: str,
        values: float | Sequence[float],
        unit: str,
        target: Target | None = None,
        bound: str | None = None,
        **config: Any,
    ) -> None:
        """Write a metric computed from times: the median of `values`, and their spread.

        Raises `ValueError` if there are no values or one is not finite and positive, also in a rehearsal.
        """
        found = [values] if isinstance(values, float | int) else list(values)
        if not found or not all(math.isfinite(value) and value > 0 for value in found):
            raise ValueError(f"{name}: measured values must be positive and finite, not {found}")
        if self.is_rehearsal:
            wanted = str(target) if target else None
            self._write(Metric(name, None, unit, MEASURED, target=wanted, rehearsed=True, config=config))
            return
        middle = statistics.median(found)
        self._metric(Metric(name, middle, unit, MEASURED, min(found), max(found), bound=bound, config=config), target)

    def gain(
        self, name: str, in_turn: Sequence[float], times: tuple[str, str], target: Target | None = None, bound: str = ""
    ) -> None:
        """Write a speed over a baseline twice: `in_turn`, from rounds in which both were timed in turn, and by the two
        times that were reported as the metrics `times`, first the baseline's. The target counts for the weaker.
        """
        reported = {metric["name"]: metric["value"] for metric in self.so_far().metrics}
        baseline, own = (reported[each] for each in times)
        by_times = 1.0 if self.is_rehearsal else baseline / own
        is_weaker = not self.is_rehearsal and by_times < statistics.median(in_turn)
        self.measured(name, in_turn, "times", None if is_weaker else target, bound or None)
        self.measured(f"{name}{BY_TIMES}", by_times, "times", target if is_weaker else None)

    def counted(self, name: str, value: float, unit: str, target: Target | None = None, **config: Any) -> None:
        """Write a metric that does not depend on time."""
        self._metric(Metric(name, value, unit, COUNTED, config=config), target)

    def modelled(
        self, name: str, value: float, unit: str, spread: Sequence[float] | None = None, **config: Any
    ) -> None:
        """Write a metric that follows from others by a formula. `spread`: its values by round."""
        if self.is_rehearsal:
            self._write(Metric(name, None, unit, MODELLED, rehearsed=True, config=config))
        else:
            low, high = (min(spread), max(spread)) if spread else (None, None)
            self._metric(Metric(name, value, unit, MODELLED, low, high, config=config), None)

    def note(self, name: str, value: Any) -> None:
        """Write a fact that is not a metric: a name, a version, a line to paste."""
        self._line({"note": name, "value": value})

    def so_far(self) -> Findings:
        """Return what the stage has written, also before it was started again."""
        return Findings.read(self.path)

    def part(self, name: str, run: Callable[..., T], *arguments: Any) -> T | None:
        """Run a part of the stage and return its result. If it fails, or has failed before, return None.

        An error becomes a note, and the other parts still run. Raises `DeviceFault` after a CUDA error.
        """
        if failure_note(name) in self.so_far().notes:
            return None
        try:
            return run(*arguments)
        except DeviceFault:
            raise
        except Exception as problem:  # the other parts still run
            self.failed(name, problem)
            return None

    def failed(self, name: str, problem: Exception) -> None:
        """Write that a part of the stage has failed, and why. Raises `DeviceFault` if it was a CUDA error."""
        self.note(failure_note(name), error_text(problem))
        if is_device_error(problem):
            raise DeviceFault(f"{name} ended with a CUDA error") from problem

    def rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write rows of another benchmark's table. A rehearsal writes only their number."""
        self._line({"rows": [] if self.is_rehearsal else list(rows), "num_rows": len(rows)})

    def _metric(self, metric: Metric, target: Target | None) -> None:
        content = asdict(metric)
        if target is not None and metric.value is not None:
            content |= {"target": str(target), "met": target.is_met(metric.value)}
        self._line(content)

    def _write(self, metric: Metric) -> None:
        self._line(asdict(metric))

    def _line(self, content: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")


def failure_note(name: str) -> str:
    """Return the name of the note about a part that has failed."""
    return f"{name} failed"


@dataclass(frozen=True)
class Findings:
    """The results that a stage has written. Of metrics, notes and rows with one name, the last."""

    metrics: list[dict[str, Any]]
    notes: dict[str, Any]
    rows: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Findings:
        """Read the lines of a report so far. An incomplete last line is skipped."""
        metrics: dict[str, dict[str, Any]] = {}
        notes: dict[str, Any] = {}
        rows: dict[str, dict[str, Any]] = {}
        for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if "note" in line:
                notes[line["note"]] = line["value"]
            elif "rows" in line:
                rows |= {row["system"]: row for row in line["rows"]}
            else:
                metrics[line["name"]] = line
        return cls(list(metrics.values()), notes, list(rows.values()))
