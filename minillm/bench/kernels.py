"""Every op by itself, in the shapes of a model: microseconds, bytes, and how near that is to what the machine can do.

Each op runs at one new token (decode), five (verify four drafts) and 256 (a chunk of prefill); attention after 64, 512
and 2000 cached tokens. All implementations that run on the device take turns in one run, on one thread of a CPU: what
one processor does is the kernel's merit, how several share the work is the executor's. An implementation is called as
the engine calls it: PyTorch from Python, the compiled step's functions from compiled code, kernels from a CUDA graph.

`cold`: weights and caches come from memory, because as many copies of them as are twice the last cache are read in
turn; this is what a step of a large model sees. `warm`: the same copy again and again. Only ops that read weights or
the cache have a cold figure, and only where copies enough fit; activations are always near.

Bytes are modelled (see `kernel_cases`), times and the ceilings are measured: what large copies and a square matrix
product reach here, on the same number of threads. `of copy` is bytes per second over the bandwidth of the copy. It can
exceed 1: warm, because caches are faster than memory; cold, because reading alone can be faster than copying.

The reference is written to be right, not fast: that of `int8_linear` makes float weights anew in every call, that of
`w8a8_linear` multiplies in fp64. Where the engine has a faster way in PyTorch it is a line of its own, `pytorch`.

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

from minillm.bench.contestants import choose
from minillm.bench.device_clock import Clock, Timing, Way, clock_for, in_turn, last_cache_bytes, ratios
from minillm.bench.harness import Row, result
from minillm.bench.kernel_cases import KNOWN, REFERENCE, Case, Implementation, Maker, Setting, small_cases
from minillm.bench.kernel_report import COLD, WARM, chart, table
from minillm.ceilings import Ceiling, copy_bandwidth, matmul_rate
from minillm.errors import ConfigError, UnsupportedError
from minillm.ops.cpu.compiled import showing_progress
from minillm.ops.dispatch import OPS, interpreted

if TYPE_CHECKING:
    from minillm.models.config import ModelConfig

__all__ = ["chart", "run", "table"]

ROUNDS = 5
RUN_S = 1e-3
"""Seconds of one run of a way, about."""
ALL_OPS = ("linear", *OPS)
CLOSE = {torch.float32: 1e-5}
CLOSE_16 = 2e-2


def run(
    shape: str | None = None,
    systems: Sequence[str] | None = None,
    ops: Sequence[str] | None = None,
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """Every op in the shapes of the bundled model and of the 0.4b shape; returns the result as JSON values.

    `shape`: only these shapes (`minicoder`, `0.4b`). `systems`: only these implementations beside the reference.
    `ops`: only these. Raises `ConfigError` for one that is none of them, `UnsupportedError` in Triton's interpreter,
    whose times say nothing of kernels.
    """
    if interpreted():
        raise UnsupportedError("TRITON_INTERPRET is set: an interpreted kernel's time means nothing; unset it")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = {REFERENCE, *choose(KNOWN, systems)}
    wanted = _wanted(ops)
    clock, settings = clock_for(device), [_setting(name, device) for name in _shapes(shape)]
    with showing_progress(), one_thread(), torch.no_grad():
        ceilings = ceilings_of(device)
        rows = measure([m for s in settings for m in makers(s)], clock, ceilings, rounds, names, wanted)
    config = {
        "shapes": [s.shape for s in settings],
        "dtype": str(settings[0].dtype).removeprefix("torch."),
        "device": device,
        "threads": 1 if device == "cpu" else None,
        "rounds": rounds,
        "last_cache_bytes": settings[0].cache_bytes,
        "ceilings": {c.name: {"unit": c.unit, "median": c.median, "low": c.low, "high": c.high} for c in ceilings},
        "counted": "calls of one op; bytes are modelled (the least that the op can move), the rest is measured",
    }
    return result("kernels", config, rows)


def makers(s: Setting) -> list[Maker]:
    """All cases of a setting, not made yet."""
    from minillm.bench.kernel_attention import attention_cases
    from minillm.bench.kernel_products import product_cases

    return [*small_cases(s), *product_cases(s), *attention_cases(s)]


def measure(
    cases: Sequence[Maker],
    clock: Clock,
    ceilings: Sequence[Ceiling],
    rounds: int,
    names: set[str],
    ops: set[str],
) -> list[Row]:
    """The rows of all cases of these ops. Cases are made one by one and dropped again."""
    rows: list[Row] = []
    with tqdm([case for case in cases if case.op in ops], desc="measuring", unit=" cases") as bar:
        for case in bar:
            bar.set_postfix_str(case.op)
            rows += case_rows(case.make(), clock, ceilings, rounds, names)
    return rows


def case_rows(
    case: Case,
    clock: Clock,
    ceilings: Sequence[Ceiling],
    rounds: int,
    names: set[str],
    seconds: float | None = None,
) -> list[Row]:
    """A row for each implementation of one case; what counts is the cold figure, if there is one.

    `seconds`: about so long are runs, in place of `RUN_S`.
    """
    chosen = {name: way for name, way in case.ways.items() if name in names}
    right = chosen[REFERENCE].once()
    errors = {name: relative_error(way.once(), right) for name, way in chosen.items()}
    timings: dict[str, dict[str, Timing]] = {}
    recorded: set[str] = set()
    for kind, copies in ((WARM, 1), (COLD, case.copies)):
        if kind == WARM or copies > 1:
            position = _Position()
            ways = [_way(name, one, copies, position, clock) for name, one in chosen.items()]
            recorded |= {way.name for way in ways if way.is_recorded}
            timings[kind] = in_turn(clock, ways, rounds, seconds or RUN_S)
    clock.free()
    counted = timings.get(COLD, timings[WARM])
    limit = CLOSE.get(case.touched[0].dtype if case.touched[0].is_floating_point() else right.dtype, CLOSE_16)
    rows = []
    for name, way in chosen.items():
        found = [] if name == REFERENCE else ratios(counted, name, REFERENCE)
        middle = counted[name].median
        rows.append(
            Row(
                system=f"{case.name}, {name}",
                baseline=None if name == REFERENCE else f"{case.name}, {REFERENCE}",
                ratio=statistics.median(found) if found else None,
                ratio_min=min(found, default=None),
                ratio_max=max(found, default=None),
                tokens_per_s=1 / middle,
                p50_ms=1000 * middle,
                peak_memory_bytes=None,
                outputs_equal=None if name == REFERENCE else errors[name] <= (way.limit or limit),
                config={
                    **_figures(case, name, way, timings, ceilings, errors[name]),
                    "recorded": name in recorded,
                },
            )
        )
    return rows


def relative_error(found: Tensor, right: Tensor) -> float:
    """‖found - right‖ / ‖right‖; NaN if there is one in either."""
    difference = (found.double() - right.double()).norm().item()
    return difference / max(right.double().norm().item(), 1e-300) if difference else 0.0


def ceilings_of(device: str) -> list[Ceiling]:
    """What copies and products reach on this device, on as many threads as PyTorch has now."""
    return [copy_bandwidth(device), matmul_rate(device, usual_dtype(device))]


def usual_dtype(device: str) -> torch.dtype:
    """What models compute in: float32 on a CPU, bfloat16 on a GPU, float16 on one before Ampere."""
    if device == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch uses one thread inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Position:
    """Which copy is read next. All ways of a case share it: what one has read is near for the next."""

    def __init__(self) -> None:
        self.next = 0

    def take(self, count: int, copies: int) -> int:
        first, self.next = self.next, (self.next + count) % copies
        return first


def _way(name: str, one: Implementation, copies: int, position: _Position, clock: Clock) -> Way:
    """An implementation that is done `count` times, on the copies in turn."""
    if one.loop is not None:
        loop = one.loop
        return Way(name, lambda count: loop(count, position.take(count, copies), copies))
    assert one.call is not None
    call = one.call
    if clock.device != "cpu" and one.records:
        together = max(copies, RECORDED_CALLS)

        def all_copies() -> None:
            for i in range(together):
                call(i % copies)

        try:
            replay = clock.recorded(all_copies)
        except RuntimeError:  # something in it waits for the device: then it is called from Python, as it can be
            pass
        else:
            return Way(name, lambda count: [replay() for _ in range(count // together)], together, True)

    def calls(count: int) -> None:
        first = position.take(count, copies)
        for i in range(first, first + count):
            call(i % copies)

    return Way(name, calls)


RECORDED_CALLS = 20
"""A graph holds at least so many calls: a replay costs the host some 10 µs."""


def _figures(
    case: Case,
    name: str,
    way: Implementation,
    timings: Mapping[str, Mapping[str, Timing]],
    ceilings: Sequence[Ceiling],
    error: float,
) -> dict[str, Any]:
    num_bytes = way.num_bytes or case.num_bytes
    figures: dict[str, Any] = {
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
        figures |= {
            f"{kind}_us": 1e6 * timing.median,
            f"{kind}_us_spread": [1e6 * min(timing.seconds), 1e6 * max(timing.seconds)],
            f"{kind}_gb_per_s": rate / 1e9,
            f"{kind}_of_copy": rate / ceilings[0].median,
            f"{kind}_calls": timing.calls,
        }
        if case.operations:
            figures[f"{kind}_gflop_per_s"] = case.operations / timing.median / 1e9
        if name != REFERENCE:
            figures[f"{kind}_ratio"] = statistics.median(ratios(timings[kind], name, REFERENCE))
    return figures


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
    from minillm.models.loading import load_config, resolve

    return SHAPES[name] if name in SHAPES else load_config(resolve(name))
