"""The ops, their implementations, and the choice of an implementation for a device.

    reference   PyTorch, on any device: the others are tested against it
    triton      a kernel: on an NVIDIA GPU, or on a CPU in Triton's interpreter if `TRITON_INTERPRET=1` is set

All implementations of an op take the same arguments; a kernel raises `UnsupportedError` for those that it cannot
compute with. They are listed as `module:function` and imported when they are chosen, so Triton is not imported on a
machine that does not use it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from minillm.errors import UnknownOptionError, UnsupportedError

TURING, AMPERE = (7, 5), (8, 0)
"""Compute capabilities: that of the T4, and the first on which Triton (3.9) multiplies INT8."""


@dataclass(frozen=True)
class Op:
    """The implementations of one op, each as `module:function`."""

    reference: str
    triton: str
    oldest_gpu: tuple[int, int] = TURING
    """The least compute capability that the kernel runs on."""


def _op(module: str, function: str, file: str | None = None, oldest_gpu: tuple[int, int] = TURING) -> Op:
    """An op whose reference is in `ops/<module>.py`, and its kernel, of the same name, in `ops/triton/<file>.py`."""
    kernel = f"minillm.ops.triton.{file or module}:{function}"
    return Op(f"minillm.ops.{module}:{function}", kernel, oldest_gpu)


OPS: dict[str, Op] = {
    "paged_attention": _op("paged_attention", "paged_attention"),
    "tree_attention": _op("tree_attention", "tree_attention", "paged_attention"),
    "store_kv": _op("store_kv", "store_kv"),
    "rms_norm": _op("rms_norm", "rms_norm"),
    "add_rms_norm": _op("rms_norm", "add_rms_norm"),
    "rope": _op("rope", "rope"),
    "silu_gate": _op("silu_gate", "silu_gate"),
    "int8_linear": _op("quantized_linear", "int8_linear", "int8_linear"),
    "w8a8_linear": _op("quantized_linear", "w8a8_linear", "w8a8_linear", AMPERE),
    "int4_linear": _op("quantized_linear", "int4_linear", "int4_linear"),
    "argmax": _op("sample", "argmax"),
    "advance": _op("advance", "advance"),
    "all_finite": _op("sample", "all_finite"),
    "sample": _op("sample", "sample"),
    "rejection": _op("rejection", "rejection"),
}


def op(name: str, device: torch.device | str, implementation: str | None = None) -> Callable[..., Any]:
    """Return the function that computes op `name` on `device`: the best `implementation`, or the one named.

    Call this when a layer or a cache is built, not in every step: it queries the GPU and the environment. Raises
    `UnknownOptionError` for an unknown op, `UnsupportedError` for an implementation that the op does not have or the
    device cannot run.
    """
    chosen = implementation or implementations(name, device)[0]
    if chosen not in implementations(name, device):
        able = ", ".join(implementations(name, device))
        raise UnsupportedError(f"op {name!r} has no implementation {chosen!r} that runs on {device}; it has {able}")
    module, function = getattr(OPS[name], chosen).split(":")
    return getattr(import_module(module), function)


def implementations(name: str, device: torch.device | str) -> list[str]:
    """Return the implementations that run on `device`, best first. Raises `UnknownOptionError` for an unknown op."""
    if name not in OPS:
        raise UnknownOptionError(f"there is no op {name!r}; there are {', '.join(OPS)}")
    runs_kernels = triton_runs(torch.device(device), OPS[name].oldest_gpu)
    return ["triton", "reference"] if runs_kernels else ["reference"]


def triton_runs(device: torch.device, oldest_gpu: tuple[int, int] = TURING) -> bool:
    """Whether kernels run on this device: on an NVIDIA GPU that is new enough, or on a CPU in the interpreter.

    PyTorch for ROCm also calls an AMD GPU `cuda`, and the version of its architecture a compute capability.
    """
    if device.type == "cpu":
        return interpreted() and has_triton()
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and has_triton() and torch.cuda.get_device_capability(device) >= oldest_gpu


def interpreted() -> bool:
    """Whether `TRITON_INTERPRET` is set to any of the values that Triton accepts as true."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton is installed. Does not import it."""
    return find_spec("triton") is not None
