"""Stage 5 of the GPU benchmark: attention over a long context, then every op by itself.

Decoding after 32 thousand tokens with the heads of the 8B shape reads 134 MB of keys and values in 16 bits. No L2 cache
holds them, so the time is that of reading memory. Two requests are read in turn. Then follow the cases of `bench
kernels` in that shape, as many as there is time for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch

from minillm.bench.device_clock import TimedFunction, last_cache_bytes, ratios
from minillm.bench.harness import Row
from minillm.bench.kernel_attention import LAYOUTS, attention_cases
from minillm.bench.kernel_cases import PREFILL, REFERENCE, TRITON, Case, Maker, Setting
from minillm.bench.kernel_timing import timed_implementation
from minillm.bench.kernels import case_rows, makers
from minillm.bench.on_gpu.findings import Report, Target
from minillm.bench.on_gpu.random_models import CONFIGS, LARGE
from minillm.bench.on_gpu.stage_setup import StageSetup
from minillm.doctor.machine_limits import MachineLimit
from minillm.ops.dispatch import OPS, implementations

HALF = "half"
BANDWIDTH, INT8_GAIN = Target(at_least=0.85), Target(at_least=1.7)
LAST_CASE_S = 4.0
"""With less time left to the stage, no case of `bench kernels` is begun."""


def kernels(setup: StageSetup, report: Report) -> None:
    """Measure the long context first, then every op."""
    limits = [MachineLimit("copy bandwidth", setup.clock.device, "B/s", setup.bandwidth(), 0, 0, 7)]
    setting = Setting(
        shape="8b",
        config=CONFIGS[setup.size_for(LARGE, "rehearsal")],
        device=setup.clock.device,
        dtype=setup.half,
        cache_bytes=last_cache_bytes(setup.clock.device) if not setup.is_rehearsal else 2**12,
        tokens=(1,),
        contexts=(setup.size_for(32_768, 100),),
    )
    with torch.no_grad():
        _long_context(setup, report, setting, limits)
        every = replace(setting, tokens=setup.size_for((1, 5, PREFILL), (1, 5)), contexts=(setup.size_for(2000, 20),))
        _every_op(setup, report, makers(every), limits)


def _long_context(setup: StageSetup, report: Report, setting: Setting, limits: list[MachineLimit]) -> None:
    """Measure every format of the cache, then compare those that could be measured."""
    [context] = setting.contexts
    found = [maker for maker in attention_cases(setting) if maker.op == "paged_attention"]
    functions: list[TimedFunction] = []
    for kind, maker in zip(LAYOUTS, found, strict=True):
        name = _metric_name(context, kind or HALF)
        function = report.part(name, _one_format, setup, report, name, maker, limits)
        functions += [] if function is None else [function]
    report.part("gains of quantised caches", _gains, setup, report, functions, context)


def _one_format(
    setup: StageSetup, report: Report, name: str, maker: Maker, limits: list[MachineLimit]
) -> TimedFunction:
    """Measure attention over one format of the cache. Returns the kernel, to be timed beside those of the others."""
    case = maker.make()
    row = next(row for row in _rows(setup, case, limits) if row.config["implementation"] == TRITON)
    spread = row.config.get("cold_us_spread", row.config["warm_us_spread"])
    times = [min(spread), 1000 * row.p50_ms, max(spread)]  # µs
    report.measured(name, times, "µs", bound=f"{1e6 * case.num_bytes / limits[0].median:.3g} µs at a copy's rate")
    shares = [case.num_bytes / (us * 1e-6 * limits[0].median) for us in times]
    target = None if case.kind else BANDWIDTH
    report.measured(f"{name}, bandwidth", shares, "of a copy's", target, modelled_bytes=case.num_bytes)
    if not row.outputs_equal:
        report.note(f"{name} is wrong", row.config["error"])
    return timed_implementation(case, TRITON, case.kind or HALF, setup.clock)


def _metric_name(context: int, kind: str) -> str:
    return f"decode after {context}, {kind} KV"


def _gains(setup: StageSetup, report: Report, functions: Sequence[TimedFunction], context: int) -> None:
    """The speed of the quantised caches over half precision, all of them timed in turn."""
    timings = setup.time(*functions)
    for kind, target in (("int8", INT8_GAIN), ("int4", None)):
        if kind in timings and HALF in timings:
            times = _metric_name(context, HALF), _metric_name(context, kind)
            report.gain(f"{kind} KV over {HALF}", ratios(timings, kind, HALF), times, target)


def _every_op(setup: StageSetup, report: Report, cases: list[Maker], limits: list[MachineLimit]) -> None:
    """Measure every op that has a kernel on this device, few tokens first, as long as the stage has time."""
    began, left_out, without = time.monotonic(), [], []
    for number, maker in enumerate(cases):
        if maker.op in OPS and TRITON not in implementations(maker.op, setup.device):
            without.append(maker.op)
            continue
        took = time.monotonic() - began
        if setup.seconds_left() < LAST_CASE_S or took > setup.size_for(math.inf, 3.0):
            left_out.append(maker.op)
            continue
        report.part(f"{maker.op} (case {number})", _one_case, setup, report, maker, limits)
    if without:
        report.note("without a kernel on this device", list(dict.fromkeys(without)))
    report.note("left out for lack of time", left_out)


def _one_case(setup: StageSetup, report: Report, maker: Maker, limits: list[MachineLimit]) -> None:
    report.rows([asdict(row) for row in _rows(setup, maker.make(), limits)])


def _rows(setup: StageSetup, case: Case, limits: list[MachineLimit]) -> list[Row]:
    seconds = setup.size_for(None, 1e-9)
    return case_rows(case, setup.clock, limits, setup.size_for(5, 1), {REFERENCE, TRITON}, seconds)
