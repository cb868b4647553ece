"""The arithmetic of training: bf16 from fp32 weights where the hardware multiplies bf16, else fp32."""

from __future__ import annotations

from collections.abc import Collection

import torch

from minillm import hardware

CPU_BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Instruction sets with which a CPU multiplies bf16 (x86, x86 with AMX, Arm)."""


def cpu_dtype(simd: Collection[str]) -> torch.dtype:
    """The faster dtype of products on a CPU with these instruction sets (`hardware.SIMD`).

    With AVX2 alone, PyTorch has no fast bf16 products: on one thread of a Zen 3, in rows of 512, the draft trained 11
    times as fast in fp32 as in bf16, the target 16 times.
    """
    return torch.float32 if CPU_BF16.isdisjoint(simd) else torch.bfloat16


ON_CPU = cpu_dtype(hardware.simd())
"""The dtype on this CPU: a constant, so that `torch.compile` has nothing to look up."""


def forward_dtype(device_type: str) -> torch.dtype:
    """The dtype of matrix products in training. `device_type`: `cpu` or `cuda`, the current GPU.

    On a GPU before sm_80, PyTorch only emulates bf16 and does not compile it. fp16 would need its gradients scaled.
    """
    if device_type == "cpu":
        return ON_CPU
    return torch.bfloat16 if hardware.half_dtype() == torch.bfloat16 else torch.float32


def forward_precision(device_type: str) -> torch.autocast:
    """The context in which a model with fp32 weights multiplies in `forward_dtype`."""
    return torch.autocast(device_type, torch.bfloat16, enabled=forward_dtype(device_type) == torch.bfloat16)
