"""Benchmark of every op by itself, in a model's shapes: microseconds, bytes, and the share of the machine's limits.

Each op runs at one new token (decode), five (verification of four drafts) and 256 (a chunk of prefill); attention runs
after 64, 512 and 2000 cached tokens. All implementations for the device take turns in one process, on one CPU thread:
the kernel determines the speed of one thread, the executor how threads share the work. An implementation is called as
the engine calls it: PyTorch from Python, the compiled step's functions from compiled code, kernels from a CUDA graph.

`cold`: weights and KV cache come from memory, as in a step of a large model. To ensure that, the runs cycle through
copies of them that are together twice as large as the last-level cache. `warm`: the same copy every time. Only ops that
read weights or the KV cache have a cold time, and only if enough copies fit; activations are always in the caches.

Bytes are modelled (see `kernel_cases`). Times are measured, and so are the machine's limits: the speed of
large copies and of a square matrix product with the same number of threads. `of copy` is bytes per second divided by
the copy bandwidth. It can exceed 1: warm, because caches are faster than memory; cold, because reading alone can be
faster than copying.

The reference is written for correctness, not speed: that of `int8_linear` dequantises its weights in every call, that
of `w8a8_linear` multiplies in fp64. If the engine has a faster PyTorch implementation, that is a separate line,
`pytorch`.

Two outputs count as equal if they differ by less than 1e-5 of their norm: 2e-2 in 16 bits, 1e-4 where the compiled
step rounds activations to two bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from minillm.bench.device_clock import (
    Clock,
    Timing,
    clock_for,
    last_cache_bytes,
    ratios,
    time_calls_in_turn,
)
from minillm.bench.harness import Row, result
from minillm.bench.kernel_cases import KNOWN, REFERENCE, Case, Implementation, Maker, Setting, small_cases
from minillm.bench.kernel_report import COLD, WARM, table
from minillm.bench.kernel_timing import Position, timed_function
from minillm.bench.systems import choose
from minillm.doctor.machine_limits import MachineLimit, copy_bandwidth, matmul_rate
from minillm.errors import ConfigError, UnsupportedError
from minillm.hardware import half_dtype
from minillm.ops.cpu.compiled import showing_progress
from minillm.ops.dispatch import OPS, interpreted

if TYPE_CHECKING:
    from minillm.models.config import ModelConfig

__all__ = ["run", "table"]

ROUNDS = 5
RUN_S = 1e-3
"""Approximate seconds of one run of an implementation."""
ALL_OPS = ("linear", *OPS)
CLOSE = {torch.float32: 1e-5}
CLOSE_16 = 2e-2


def run(
    shape: str | None = None,
    systems: Sequence[str] | None = None,
    ops: Sequence[str] | None = None,
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """Measure every op in the shapes of the bundled model and of the 0.4b shape. Returns the result as JSON values.

    `shape`: only this one (`minicoder`, `0.4b`). `systems`: only these implementations, and the reference. `ops`: only
    these. Raises `ConfigError` for an unknown name, `UnsupportedError` in Triton's interpreter, whose times say nothing
    about kernels.
    """
    if interpreted():
        raise UnsupportedError("TRITON_INTERPRET is set: an interpreted kernel's time means nothing; unset it")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = {REFERENCE, *choose(KNOWN, systems)}
    wanted = _wanted(ops)
    clock, settings = clock_for(device), [_setting(name, device) for name in _shapes(shape)]
    with showing_progress(), one_thread(), torch.no_grad():
        limits = machine_limits_of(device)
        rows = measure([m for s in settings for m in makers(s)], clock, limits, rounds, names, wanted)
    config = {
        "shapes": [s.shape for s in settings],
        "dtype": str(settings[0].dtype).removeprefix("torch."),
        "device": device,
        "threads": 1 if device == "cpu" else None,
        "rounds": rounds,
        "last_cache_bytes": settings[0].cache_bytes,
        "limits": {c.name: {"unit": c.unit, "median": c.median, "low": c.low, "high": c.high} for c in limits},
        "counted": "calls of one op; bytes are modelled (the least that the op can move), the rest is measured",
    }
    return result("kernels", config, rows)


def makers(s: Setting) -> list[Maker]:
    """The makers of all cases of a setting."""
    from minillm.bench.kernel_attention import attention_cases
    from minillm.bench.kernel_products import product_cases

    return [*small_cases(s), *product_cases(s), *attention_cases(s)]


def measure(
    cases: Sequence[Maker],
    clock: Clock,
    limits: Sequence[MachineLimit],
    rounds: int,
    names: set[str],
    ops: set[str],
) -> list[Row]:
    """The rows of all cases of these ops. Cases are built and freed one by one."""
    rows: list[Row] = []
    with tqdm([case for case in cases if case.op in ops], desc="measuring", unit=" cases") as bar:
        for case in bar:
            bar.set_postfix_str(case.op)
            rows += case_rows(case.make(), clock, limits, rounds, names)
    return rows


def case_rows(
    case: Case,
    clock: Clock,
    limits: Sequence[MachineLimit],
    rounds: int,
    names: set[str],
    seconds: float | None = None,
) -> list[Row]:
    """A row for each implementation of one case, with the cold time if there is one, else the warm one.

    `seconds`: approximate length of a run, in place of `RUN_S`.
    """
    chosen = {name: implementation for name, implementation in case.implementations.items() if name in names}
    expected = chosen[REFERENCE].once()
    errors = {name: relative_error(implementation.once(), expected) for name, implementation in chosen.items()}
    timings: dict[str, dict[str, Timing]] = {}
    recorded: set[str] = set()
    for kind, copies in ((WARM, 1), (COLD, case.copies)):
        if kind == WARM or copies > 1:
            position = Position()
            functions = [timed_function(name, one, copies, position, clock) for name, one in chosen.items()]
            recorded |= {function.name for function in functions if function.is_recorded}
            timings[kind] = time_calls_in_turn(clock, functions, rounds, seconds or RUN_S)
    clock.free()
    counted = timings.get(COLD, timings[WARM])
    limit = CLOSE.get(case.touched[0].dtype if case.touched[0].is_floating_point() else expected.dtype, CLOSE_16)
    rows = []
    for name, implementation in chosen.items():
        found = [] if name == REFERENCE else ratios(counted, name, REFERENCE)
        median = counted[name].median
        rows.append(
            Row(
                system=f"{case.name}, {name}",
                baseline=None if name == REFERENCE else f"{case.name}, {REFERENCE}",
                ratio=statistics.median(found) if found else None,
                ratio_min=min(found, default=None),
                ratio_max=max(found, default=None),
                tokens_per_s=1 / median,
                p50_ms=1000 * median,
                peak_memory_bytes=None,
                outputs_equal=None if name == REFERENCE else errors[name] <= (implementation.limit or limit),
                config={
                    **_metrics(case, name, implementation, timings, limits, errors[name]),
                    "recorded": name in recorded,
                },
            )
        )
    return rows


def relative_error(found: Tensor, right: Tensor) -> float:
    """‖found - right‖ / ‖right‖; NaN if either contains one."""
    difference = (found.double() - right.double()).norm().item()
    return difference / max(right.double().norm().item(), 1e-300) if difference else 0.0


def machine_limits_of(device: str) -> list[MachineLimit]:
    """The measured copy bandwidth and matrix-product rate of this device, with PyTorch's current number of threads."""
    return [copy_bandwidth(device), matmul_rate(device, usual_dtype(device))]


def usual_dtype(device: str) -> torch.dtype:
    """The default compute dtype: float32 on a CPU, bfloat16 on a GPU, float16 on a GPU before Ampere."""
    return torch.float32 if device == "cpu" else half_dtype()


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit PyTorch to one thread inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _metrics(
    case: Case,
    name: str,
    implementation: Implementation,
    timings: Mapping[str, Mapping[str, Timing]],
    limits: Sequence[MachineLimit],
    error: float,
) -> dict[str, Any]:
    num_bytes = implementation.num_bytes or case.num_bytes
    metrics: dict[str, Any] = {
        "op": case.op,
        "kind": case.kind,
        "shape": case.shape,
        "implementation": name,
        "tokens": case.tokens,
        "context": case.context,
        "modelled_bytes": num_bytes,
        "copies": case.copies,
        "error": error,
    }
    for kind in (COLD, WARM):
        if kind not in timings:
            continue
        timing = timings[kind][name]
        rate = num_bytes / timing.median
        metrics |= {
            f"{kind}_us": 1e6 * timing.median,
            f"{kind}_us_spread": [1e6 * min(timing.seconds), 1e6 * max(timing.seconds)],
            f"{kind}_gb_per_s": rate / 1e9,
            f"{kind}_of_copy": rate / limits[0].median,
            f"{kind}_calls": timing.calls,
        }
        if case.operations:
            metrics[f"{kind}_gflop_per_s"] = case.operations / timing.median / 1e9
        if name != REFERENCE:
            metrics[f"{kind}_ratio"] = statistics.median(ratios(timings[kind], name, REFERENCE))
    return metrics


def _wanted(ops: Sequence[str] | None) -> set[str]:
    for name in ops or ():
        if name not in ALL_OPS:
            raise ConfigError(f"there is no op {name!r}; there are: {', '.join(ALL_OPS)}")
    return set(ops or ALL_OPS)


def _shapes(shape: str | None) -> list[str]:
    known = ["minicoder", "0.4b"]
    if shape is not None and shape not in known:
        raise ConfigError(f"shape {shape!r} is not available; there are: {', '.join(known)}")
    return [shape] if shape else known


def _setting(name: str, device: str) -> Setting:
    return Setting(name, _config(name), device, usual_dtype(device), last_cache_bytes(device))


def _config(name: str) -> ModelConfig:
    from minillm.bench.shapes import SHAPES
    from minillm.models.hub import resolve
    from minillm.models.loading import load_config

    return SHAPES[name] if name in SHAPES else load_config(resolve(name))
