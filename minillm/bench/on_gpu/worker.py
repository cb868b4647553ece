"""One stage of the GPU benchmark: `python -m minillm.bench.on_gpu.worker MODULE:FUNCTION FILE [--rehearse]`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Run the stage; what it finds goes to FILE, line by line."""
    place, path, is_rehearsal = arguments[0], Path(arguments[1]), "--rehearse" in arguments
    import numpy as np

    from minillm.bench.on_gpu.report import Report
    from minillm.bench.on_gpu.site import Site

    module, function = place.split(":")
    with np.errstate(all="ignore"):  # the interpreter computes with NumPy, which warns of infinities
        getattr(import_module(module), function)(Site.here(is_rehearsal), Report(path, is_rehearsal))


if __name__ == "__main__":
    main(sys.argv[1:])
