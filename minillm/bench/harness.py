"""How minillm measures: systems in turn within one process, median ratios of runs of the same round, with their spread.

A ratio compares runs of the same round, so a temporary slowdown of the machine affects both: a run of a system, and the
runs of its baseline nearest to it, one before and one after if there are both. The compared systems should give the
same tokens; if they do not, the result says so.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minillm import hardware
from minillm.bench import provenance
from minillm.whole_file import write_whole_file

SCHEMA = 1
LIBRARIES = ("torch", "transformers", "llama-cpp-python", "numba", "triton", "numpy")


@dataclass(frozen=True)
class Counted:
    """The part of a run that is measured."""

    seconds: float
    num_tokens: int


@dataclass(frozen=True)
class System:
    """One system of a benchmark. `run()` generates and returns the token ids of every prompt."""

    name: str
    run: Callable[[], list[list[int]]]
    baseline: str | tuple[str, ...] | None = None
    """The system or systems that it is compared with, one row each. None: it is compared with none."""
    extra: Callable[[], dict[str, Any]] = dict
    """Returns further values to report for the last run, such as τ."""
    counted: Callable[[], Counted] | None = None
    """Returns the measured part of the last run; None: all of its time and tokens."""

    @property
    def baselines(self) -> tuple[str | None, ...]:
        """The baseline of each of its rows."""
        return self.baseline if isinstance(self.baseline, tuple) else (self.baseline,)


@dataclass(frozen=True)
class Row:
    """One line of a benchmark's table. `ratio` is the speed of `system` divided by that of `baseline`."""

    system: str
    baseline: str | None
    ratio: float | None
    ratio_min: float | None
    ratio_max: float | None
    tokens_per_s: float
    p50_ms: float
    """Median time per generated token."""
    peak_memory_bytes: int | None
    outputs_equal: bool | None
    """Whether the tokens are those of the baseline; None for the baseline itself."""
    config: dict[str, Any] = field(default_factory=dict)
    same_start: float | None = None
    """Share of the baseline's tokens before the first difference, over all prompts; None for the baseline itself."""
    interval: tuple[float, float] | None = None
    """Where the true median of the ratio lies with a probability of 95% or more (`median_interval`)."""


@dataclass(frozen=True)
class Run:
    """One run of a system in a round."""

    system: str
    per_token: float
    """Seconds."""


def compare(
    systems: Sequence[System],
    rounds: int,
    peak_memory: Callable[[str], int | None] = lambda name: None,
    seconds: int = 0,
    first_every: int = 0,
) -> list[Row]:
    """Warm up every system once, then run them in turn `rounds` times (A B C A B C …), or more often, so that a system
    as fast as the first runs for about `seconds`. Returns their rows: none where no system can run.

    `first_every`: the first system runs again behind every so many others and at the end of a round (2: A B C A D E A),
    so that a ratio compares runs close to each other, on a machine whose speed changes. 0: once in a round.
    """
    if not systems:
        return []
    order = _order(systems, first_every)
    tokens: dict[str, list[list[int]]] = {}
    measured: list[list[Run]] = []
    with tqdm(total=len(systems) + rounds * len(order), desc="measuring", unit=" runs") as bar:
        for turn in itertools.count():
            if turn == 2 and seconds:  # after the first round that counts
                of_a_run = measured[0][0].per_token * sum(map(len, tokens[order[0].name]))
                rounds = max(rounds, math.ceil(seconds / of_a_run))
                bar.total = len(systems) + rounds * len(order)
            if turn > rounds:
                break
            runs = []
            for system in order if turn else systems:
                bar.set_postfix_str(system.name)
                began = time.perf_counter()
                tokens[system.name] = system.run()
                took = Counted(time.perf_counter() - began, sum(map(len, tokens[system.name])))
                counted = system.counted() if turn and system.counted else took
                runs.append(Run(system.name, counted.seconds / counted.num_tokens))
                bar.update()
            if turn:
                measured.append(runs)
    rows = []
    for system in systems:
        peak, extra = peak_memory(system.name), system.extra()
        rows += [_row(system.name, baseline, tokens, measured, peak, extra) for baseline in system.baselines]
    return rows


def _order(systems: Sequence[System], first_every: int) -> list[System]:
    """The systems of a round; see `compare`."""
    if not first_every or len(systems) < 2:
        return list(systems)
    first, order = systems[0], []
    for place, system in enumerate(systems[1:]):
        order += [system] if place % first_every else [first, system]
    return [*order, first]


def _row(
    system: str,
    baseline: str | None,
    tokens: dict[str, list[list[int]]],
    measured: Sequence[Sequence[Run]],
    peak: int | None,
    extra: dict[str, Any],
) -> Row:
    ratios = [] if baseline is None else [_ratio(runs, system, baseline) for runs in measured]
    median = statistics.median(run.per_token for runs in measured for run in runs if run.system == system)
    return Row(
        system=system,
        baseline=baseline,
        ratio=statistics.median(ratios) if ratios else None,
        ratio_min=min(ratios, default=None),
        ratio_max=max(ratios, default=None),
        tokens_per_s=1 / median,
        p50_ms=1000 * median,
        peak_memory_bytes=peak,
        outputs_equal=None if baseline is None else tokens[system] == tokens[baseline],
        config=extra,
        same_start=None if baseline is None else common_prefix_share(tokens[system], tokens[baseline]),
        interval=median_interval(ratios),
    )


def _ratio(runs: Sequence[Run], system: str, baseline: str) -> float:
    """The speed of `system` in a round, over the mean of the nearest runs of `baseline` before and after it."""
    names = [run.system for run in runs]
    place = names.index(system)
    places = [i for i, name in enumerate(names) if name == baseline]
    before, after = [i for i in places if i < place][-1:], [i for i in places if i > place][:1]
    return statistics.mean(runs[i].per_token for i in before + after) / runs[place].per_token


CONFIDENCE = 0.95


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """An interval that the true median lies in with a probability of `CONFIDENCE` or more, whatever the distribution of
    the values, if they are independent: from the k-th smallest to the k-th largest, with the largest k for which the
    binomial distribution allows it. None if there are too few, fewer than six."""
    n, found = len(values), None
    ordered, outside = sorted(values), 0.0
    for k in range(n // 2):
        outside += 2 * math.comb(n, k) / 2**n  # the true median is below the k-th smallest or above the k-th largest
        if outside > 1 - CONFIDENCE:
            break
        found = ordered[k], ordered[n - 1 - k]
    return found


def common_prefix_share(tokens: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """Share of the tokens of `others` that precede the first difference from `tokens`, over all prompts."""
    same = 0
    for own, other in zip(tokens, others, strict=True):
        pairs = zip(own, other, strict=False)  # up to the shorter length
        same += next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(own), len(other)))
    return same / max(1, sum(map(len, others)))


def result(name: str, config: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """The JSON of a benchmark: its rows and its configuration, and what `describe_run` says."""
    return {**describe_run(name, config), "config": config, "rows": [asdict(row) for row in rows]}


def describe_run(name: str, config: Mapping[str, Any], libraries: Sequence[str] = LIBRARIES) -> dict[str, Any]:
    """Where and with what a benchmark runs, as JSON values: the hardware, the versions, the git revision and whether
    the package's files differ from it, and the weights of the bundled models that `config` names."""
    return {
        "schema": SCHEMA,
        "name": name,
        **provenance.of_this_process(),
        "weights": provenance.weights_of_config(config),
        "hardware": hardware.describe(),
        "versions": {
            "python": sys.version.split()[0],
            **{library: provenance.version(library) for library in libraries},
        },
    }


def save(outcome: dict[str, Any], path: Path) -> None:
    """Write a result as readable JSON, with a line for each row. An earlier file at this path stays whole until the new
    one is complete, unless the path is a link or a device, or its folder is not writable. Raises `OSError`."""
    parts = [f"  {json.dumps(key)}: {_as_json(key, value)}" for key, value in outcome.items()]
    text = "{\n" + ",\n".join(parts) + "\n}\n"
    in_place = path.is_symlink() or (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK)
    write_whole_file(path, text, path if in_place else None)


def _as_json(key: str, value: Any) -> str:
    """A value of the outermost object. Rows are many: with a line for each of their values they would fill the file."""
    if key == "rows" and value:
        return "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in value) + "\n  ]"
    return json.dumps(value, indent=2).replace("\n", "\n  ")  # no string has a line break in it


REPORT_PEAK = "\nfrom minillm.bench.processes import own_peak_memory\nprint(own_peak_memory())"


def peak_memory_of(code: str) -> int | None:
    """Peak resident bytes of a new Python process that runs `code`; None if the process fails."""
    command = [sys.executable, "-c", code + REPORT_PEAK]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(done.stdout.split()[-1]) if done.returncode == 0 else None
