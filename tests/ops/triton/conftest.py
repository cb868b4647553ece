"""Kernels run on a GPU if there is one, else in Triton's interpreter, without any other test noticing.

Triton decides when it is imported, and asks again while a kernel runs. So the environment says "interpret" while this
file imports Triton and the kernels, and again during each of these tests, and at no other time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import import_module

import numpy as np
import pytest
import torch

KERNELS = (
    *("rms_norm", "rope", "silu_gate", "paged_attention", "store_kv"),
    *("int8_linear", "w8a8_linear", "int4_linear", "sample", "rejection", "advance"),
)

if not torch.cuda.is_available():
    before = os.environ.get("TRITON_INTERPRET")
    if "triton" in sys.modules and before != "1":
        raise RuntimeError("Triton was imported before TRITON_INTERPRET=1 was set; run tests/ops/triton by itself")
    os.environ["TRITON_INTERPRET"] = "1"
    for name in KERNELS:
        import_module(f"minillm.ops.triton.{name}")
    if before is None:
        del os.environ["TRITON_INTERPRET"]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment of a kernel's run. The interpreter computes with NumPy, which warns of infinities; a GPU does
    not."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    with np.errstate(all="ignore"):
        yield
