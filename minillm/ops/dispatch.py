"""An op is a name with implementations; here is which there are, and which one a device gets.

    reference   PyTorch, on any device: what the others are tested against
    cpu         the same on a processor, where something beats PyTorch there
    triton      a kernel: on a GPU, or on a CPU in Triton's interpreter if `TRITON_INTERPRET=1` is set

All implementations of an op take the same arguments. They are named by module and function and imported when they are
chosen, so neither this file nor any other that asks for an op imports Triton on a machine that does not use it.
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
"""Compute capabilities: the T4's, and the first with which Triton (3.9) multiplies INT8."""


@dataclass(frozen=True)
class Op:
    """Where the implementations of one op are, as `module:function`."""

    reference: str
    triton: str | None = None
    cpu: str | None = None
    oldest_gpu: tuple[int, int] = TURING
    """Compute capability that the kernel needs."""


def _op(module: str, function: str, file: str | None = None, oldest_gpu: tuple[int, int] = TURING) -> Op:
    """The usual places: `ops/<module>.py` and `ops/triton/<file or module>.py`, one name in both."""
    kernel = f"minillm.ops.triton.{file or module}:{function}"
    return Op(f"minillm.ops.{module}:{function}", kernel, oldest_gpu=oldest_gpu)


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
    """The function that does `name` on `device`: the best one there is, or the `implementation` asked for.

    To be asked when a layer or a cache is built, not in every step: it looks at the GPU and at the environment.
    Raises `UnknownOptionError` for an op that does not exist, `UnsupportedError` for an implementation that the op does
    not have or the device cannot run.
    """
    chosen = implementation or implementations(name, device)[0]
    if chosen not in implementations(name, device):
        able = ", ".join(implementations(name, device))
        raise UnsupportedError(f"op {name!r} has no implementation {chosen!r} that runs on {device}; it has {able}")
    module, function = getattr(OPS[name], chosen).split(":")
    return getattr(import_module(module), function)


def implementations(name: str, device: torch.device | str) -> list[str]:
    """What runs on `device`, best first. Raises `UnknownOptionError` for an op that does not exist."""
    if name not in OPS:
        raise UnknownOptionError(f"there is no op {name!r}; there are {', '.join(OPS)}")
    kind, places = torch.device(device).type, OPS[name]
    runs = {"triton": triton_runs(kind, places.oldest_gpu), "cpu": kind == "cpu", "reference": True}
    return [way for way, can_run in runs.items() if can_run and getattr(places, way) is not None]


def triton_runs(kind: str, oldest_gpu: tuple[int, int] = TURING) -> bool:
    """Whether kernels run on devices of this kind: on a GPU that is new enough, on a CPU in the interpreter."""
    if kind == "cpu":
        return interpreted() and has_triton()
    return kind == "cuda" and has_triton() and torch.cuda.get_device_capability() >= oldest_gpu


def interpreted() -> bool:
    """Whether the environment asks for Triton's interpreter, in any of the words that Triton takes for yes."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton is installed. It is looked for, not imported."""
    return find_spec("triton") is not None
