"""Kernels run on a GPU if there is one, else in Triton's interpreter, without affecting any other test.

Triton reads `TRITON_INTERPRET` when it is imported and again while a kernel runs. So the variable is set while this
file imports Triton and the kernels, and during each of these tests, and at no other time.
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
    """Set the environment in which a kernel runs, and silence NumPy, with which the interpreter computes: it warns of
    infinities."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make small vocabularies take several iterations."""
    for kernel in ("sample", "rejection"):
        monkeypatch.setattr(f"minillm.ops.triton.{kernel}.BLOCK", 16)
