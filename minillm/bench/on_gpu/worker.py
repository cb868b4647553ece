"""Runs one stage of the GPU benchmark: `python -m minillm.bench.on_gpu.worker MODULE:FUNCTION FILE [--rehearse]`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Run the stage and write its results to FILE, line by line."""
    target, path, is_rehearsal = arguments[0], Path(arguments[1]), "--rehearse" in arguments
    import numpy as np

    from minillm.bench.on_gpu.findings import Report
    from minillm.bench.on_gpu.stage_setup import StageSetup

    module, function = target.split(":")
    module = module if "." in module else f"minillm.bench.on_gpu.{module}"
    with np.errstate(all="ignore"):  # the interpreter computes with NumPy, which warns of infinities
        getattr(import_module(module), function)(StageSetup.here(is_rehearsal), Report(path, is_rehearsal))


if __name__ == "__main__":
    main(sys.argv[1:])
