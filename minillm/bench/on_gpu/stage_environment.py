"""Stage 1 of the GPU benchmark: the machine's name, versions, bandwidth and peak rates."""

from __future__ import annotations

import shutil
import subprocess
from importlib import metadata
from typing import Any

import torch

from minillm import hardware
from minillm.bench.device_clock import last_cache_bytes
from minillm.bench.on_gpu.findings import Report
from minillm.bench.on_gpu.stage_setup import StageSetup
from minillm.doctor.machine_limits import copy_bandwidth, matmul_rate

FIELDS = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit")


def environment(setup: StageSetup, report: Report) -> None:
    """Report names, versions and clocks; measure the bandwidth of a copy and the rate of a matrix product."""
    for name, value in hardware.describe().items():
        report.note(name, value)
    for library in ("torch", "triton"):
        report.note(library, metadata.version(library))
    report.note("cuda", torch.version.cuda)
    report.note("nvidia-smi", driver_facts())
    report.counted("last-level cache", last_cache_bytes(setup.clock.device), "bytes")
    copy = copy_bandwidth(setup.clock.device, num_bytes=setup.size_for(None, 2**20))
    report.measured("copy bandwidth", [copy.median, copy.low, copy.high], "B/s")
    if not setup.is_rehearsal:
        for dtype in dict.fromkeys((setup.half, torch.float32)):
            rate = matmul_rate("cuda", dtype)
            report.measured(rate.name, [rate.median, rate.low, rate.high], "FLOP/s")


def driver_facts() -> dict[str, Any]:
    """Return what `nvidia-smi` reports of driver and clocks; empty if it is missing or does not answer."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    lines = done.stdout.splitlines()
    return (
        dict(zip(FIELDS, map(str.strip, lines[0].split(",")), strict=False)) if done.returncode == 0 and lines else {}
    )
