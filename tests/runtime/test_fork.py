"""A process that was forked from one that has run steps on several threads goes on with one thread."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from minillm.ops.cpu import launch

FORKS = """
import os, signal, sys
import torch
from tests.runtime.test_cpu_executor import PLAIN, outputs, random_model, runner_of
torch.set_num_threads(2)
import minillm.ops.cpu.launch as launch
launch.usable_processors = lambda: 2
runner = runner_of(random_model(PLAIN))
right = outputs(runner)
assert launch.Launcher.threaded_process == os.getpid()
if not (child := os.fork()):
    signal.alarm(60)
    os._exit(0 if torch.equal(right, outputs(runner)) and runner.executor.launcher.threads("any") == 1 else 3)
print("child ended with", os.waitpid(child, 0)[1])
assert torch.equal(right, outputs(runner))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.skipif(launch.NUMBA_NUM_THREADS < 2, reason="numba has one thread here")
def test_a_forked_process_runs_on_one_thread() -> None:
    environment = {**os.environ, "NUMBA_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", FORKS], check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "child ended with 0\n", done.stdout + done.stderr[-2000:]
