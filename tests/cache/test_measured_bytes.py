"""Every layout takes the bytes it says it takes: its claim against what the operating system counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minillm.cache.layouts import LAYOUTS

LINUX = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells a process its own pages"
)


@pytest.fixture(scope="module")
def told() -> dict[str, dict[str, int]]:
    """What the program says of each class."""
    command = [sys.executable, "-m", "tests.cache.measured_bytes"]
    root = Path(__file__).parents[2]
    small_pages = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}  # see the Makefile
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, env=small_pages)
    lines = done.stdout.splitlines()
    return {line.pop("layout"): line for line in map(json.loads, lines)}


@LINUX
@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS)
def test_claimed_bytes_are_measured_within_one_percent(
    told: dict[str, dict[str, int]], layout: str, dtype: str
) -> None:
    found = told[LAYOUTS[layout, dtype].__name__]
    assert found["claimed"] == pytest.approx(found["measured"], rel=0.01)
    assert found["claimed"] <= found["promised"] * 1.001  # a few tables that all requests share may come on top
