"""The interpreter accepts code that the compiler rejects, so every kernel is also compiled, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import triton

KERNELS = [
    *("_advance", "_all_finite", "_argmax", "_attend", "_int4_linear", "_int8_linear", "_int8_linear_row", "_merge"),
    *("_quantize_tokens", "_rejection", "_rms_norm", "_rope", "_sample", "_silu_gate", "_split_sum", "_store_kv"),
    "_w8a8_linear",
]


@pytest.mark.skipif(find_spec("triton.backends.nvidia") is None, reason="this Triton has no compiler for NVIDIA GPUs")
@pytest.mark.skipif(
    tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 6),
    reason="older versions of Triton describe arguments in another way",
)
def test_every_kernel_compiles_for_ampere(tmp_path: Path) -> None:
    """To machine code, in fp16. `compile_only.py` takes other GPUs and dtypes by hand."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.triton.compile_only", "80", "float16"],
        env=clean | {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted({line.split()[1] for line in done.stdout.splitlines() if line.startswith("sm_80")}) == KERNELS
