"""`minillm.doctor()`: report what runs on this machine, what does not, and the fix.

The checks import packages only when they run, so importing this file is fast, and the first cell of a lesson can call
the function.
"""

from __future__ import annotations

from minillm.doctor.checks import machine, run_checks
from minillm.doctor.import_probe import forget
from minillm.doctor.report import Report
from minillm.errors import UnsupportedError


def doctor(measure: bool = False, full: bool = False) -> Report:
    """Check this machine.

    The report shows one line and the rows that need a fix; with `full`, every row. `measure` also times copies and
    matrix products, which takes a few seconds, and shows every row.

    Raises `UnsupportedError` for `measure` without PyTorch.
    """
    forget()  # a fix may have been made since the last call
    rows = tuple(run_checks())
    if not measure:
        return Report(rows, machine=machine(), full=full)
    try:
        from minillm.doctor.machine_limits import measure as measure_limits
    except ImportError as problem:
        raise UnsupportedError(f"measuring needs PyTorch ({problem}); without measuring, the doctor works") from None
    return Report(rows, tuple(measure_limits()), machine())
