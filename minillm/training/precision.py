"""The arithmetic of training: bf16 from fp32 weights where the hardware multiplies bf16, else fp32."""

from __future__ import annotations

import torch

from minillm import hardware

CPU_BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Instruction sets with which a CPU multiplies bf16 (x86, x86 with AMX, Arm)."""
ON_CPU = torch.bfloat16 if CPU_BF16 & set(hardware.simd()) else torch.float32
"""The arithmetic on this CPU. On one with AVX2 alone, PyTorch has no fast bf16 products: the draft trained 11 times as
fast in fp32 as in bf16, the target 16 times. A constant, so that `torch.compile` has nothing to look up."""


def forward_dtype(device_type: str) -> torch.dtype:
    """The dtype of matrix products in training. `device_type`: `cpu` or `cuda`."""
    return ON_CPU if device_type == "cpu" else torch.bfloat16


def forward_precision(device_type: str) -> torch.autocast:
    """The context in which a model with fp32 weights multiplies in `forward_dtype`."""
    return torch.autocast(device_type, torch.bfloat16, enabled=forward_dtype(device_type) == torch.bfloat16)
