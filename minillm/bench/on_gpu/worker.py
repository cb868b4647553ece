"""Runs one stage of the GPU benchmark.

    python -m minillm.bench.on_gpu.worker MODULE:FUNCTION FILE DEADLINE [--rehearse]

DEADLINE: see `StageSetup.deadline`.
"""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module
from pathlib import Path

DEVICE_FAULT_CODE = 75
"""The exit code after a CUDA error: a new process can do the parts of the stage that are not done."""


def main(arguments: list[str]) -> None:
    """Run the stage and write its results to FILE, line by line."""
    target, path, deadline = arguments[0], Path(arguments[1]), float(arguments[2])
    is_rehearsal = "--rehearse" in arguments
    import numpy as np

    from minillm.bench.on_gpu.failures import DeviceFault
    from minillm.bench.on_gpu.findings import Report
    from minillm.bench.on_gpu.stage_setup import StageSetup

    module, function = target.split(":")
    module = module if "." in module else f"minillm.bench.on_gpu.{module}"
    setup, report = StageSetup.here(is_rehearsal, deadline), Report(path, is_rehearsal)
    try:
        with np.errstate(all="ignore"):  # the interpreter computes with NumPy, which warns of infinities
            getattr(import_module(module), function)(setup, report)
    except DeviceFault:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(DEVICE_FAULT_CODE)  # without freeing anything on the GPU, which would fail or hang


if __name__ == "__main__":
    main(sys.argv[1:])
