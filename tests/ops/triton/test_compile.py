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
CACHE = Path(__file__).parent / "__pycache__" / "kernels"
FROM_AMPERE_ON = {"_quantize_tokens", "_w8a8_linear"}
GPUS = [
    ("80", "bfloat16"),  # what the interpreter cannot run
    *(
        pytest.param(*gpu, marks=pytest.mark.long)
        for gpu in (
            *(("75", dtype) for dtype in ("float32", "float16", "bfloat16")),
            *(("80", "float16"), ("89", "float16"), ("90", "bfloat16")),
        )
    ),
]


@pytest.mark.skipif(find_spec("triton.backends.nvidia") is None, reason="this Triton has no compiler for NVIDIA GPUs")
@pytest.mark.skipif(
    tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 6),
    reason="older versions of Triton describe arguments in another way",
)
@pytest.mark.parametrize(("gpu", "dtype"), GPUS)
def test_every_kernel_compiles_and_fits_into_shared_memory(gpu: str, dtype: str) -> None:
    """To machine code, for activations of `dtype` on `sm_<gpu>`. `compile_only.py` takes others by hand. Triton
    compiles again what has changed, or all if its own version has."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.triton.compile_only", gpu, dtype],
        env=clean | {"TRITON_CACHE_DIR": str(CACHE), "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = [name for name in KERNELS if gpu != "75" or name not in FROM_AMPERE_ON]
    assert sorted({line.split()[1] for line in done.stdout.splitlines() if line.startswith(f"sm_{gpu}")}) == expected
