"""Every layout takes the bytes it says it takes: its claim against what the operating system counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from minillm.cache.layouts import LAYOUTS


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells a process its own pages")
@pytest.mark.parametrize("layout, dtype", LAYOUTS, ids=" ".join)
def test_claimed_bytes_are_measured_within_one_percent(layout: str, dtype: str) -> None:
    command = [sys.executable, "-m", "tests.cache.measured_bytes", layout, dtype]
    root = Path(__file__).parents[2]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout)
    assert told["claimed"] == pytest.approx(told["measured"], rel=0.01)
    assert told["claimed"] <= told["promised"] * 1.001  # a few tables that all requests share may come on top
