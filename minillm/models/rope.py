"""Rotary position embeddings (RoPE): one table of cosines and sines per model, indexed by position in each step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from minillm.errors import UnsupportedError
from minillm.models.config import ModelConfig, RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return the angle per position of each channel pair (`[head_dim / 2]`, fp32), and the factor on cos and sin.

    Raises `UnsupportedError` for an unsupported kind of scaling.
    """
    if rope.kind not in SCALINGS:
        raise UnsupportedError(f"RoPE of kind {rope.kind!r} is not supported; minillm has {', '.join(SCALINGS)}")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return SCALINGS[rope.kind](1.0 / rope.theta**exponents, rope)


def _unscaled(frequencies: Tensor, rope: RopeConfig) -> tuple[Tensor, float]:
    return frequencies, 1.0


def _linear(frequencies: Tensor, rope: RopeConfig) -> tuple[Tensor, float]:
    """Position interpolation (Chen et al. 2023): every angle is divided by `factor`, as if positions were closer."""
    return frequencies / rope.parameter("factor"), 1.0


def _llama3(frequencies: Tensor, rope: RopeConfig) -> tuple[Tensor, float]:
    """Llama 3.1: low frequencies are divided by `factor`, high ones are kept, those in between are blended."""
    factor, low, high = (rope.parameter(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = rope.parameter("original_max_position_embeddings") * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / factor + kept * frequencies, 1.0


def _yarn(frequencies: Tensor, rope: RopeConfig) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): as llama3, but blended by channel index, and cos and sin are scaled."""
    factor, original = rope.parameter("factor"), rope.parameter("original_max_position_embeddings")
    last = 2 * len(frequencies) - 1

    def channel(turns: float) -> float:
        """Return the (fractional) index of the channel pair that makes this many turns over the original context."""
        return len(frequencies) * math.log(original / (turns * 2 * math.pi)) / math.log(rope.theta)

    low, high = channel(rope.parameters.get("beta_fast") or 32), channel(rope.parameters.get("beta_slow") or 1)
    if rope.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, last)
    high += 0.001 if low == high else 0.0
    scaled = ((torch.arange(len(frequencies), dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    return frequencies / factor * scaled + frequencies * (1 - scaled), _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """Return the factor on cos and sin; q·k grows by its square. It is given, or follows from the scaling factor."""
    given, factor = rope.parameters.get("attention_factor"), rope.parameter("factor")
    if given is not None:
        return given

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    scale, scale_all = rope.parameters.get("mscale"), rope.parameters.get("mscale_all_dim")
    return mscale(scale) / mscale(scale_all) if scale and scale_all else mscale(1.0)


SCALINGS: dict[str, Callable[[Tensor, RopeConfig], tuple[Tensor, float]]] = {
    "default": _unscaled,
    "linear": _linear,
    # Dynamic NTK scaling applies only beyond `max_position_embeddings`, where it would change the angles of keys that
    # are already cached. The table ends there, so its frequencies are unscaled.
    "dynamic": _unscaled,
    "llama3": _llama3,
    "yarn": _yarn,
}


class RotaryEmbedding(nn.Module):
    """Rotate pairs (i, i + head_dim/2) of q and k by position × frequency (Su et al. 2021).

    The tables (`[max_position_embeddings, head_dim]`) follow the model from device to device but always stay fp32:
    in bf16, neighbouring positions would have equal entries.
    """

    cos: Tensor
    signed_sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        frequencies, scale = inverse_frequencies(config.rope, config.head_dim)
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, frequencies)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        self.register_buffer("cos", torch.cat((cos, cos), dim=-1), persistent=False)
        self.register_buffer("signed_sin", torch.cat((-sin, sin), dim=-1), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        """Implement `.to()`, `.half()` and `.cuda()`: change the device, ignore the dtype."""
        device = fn(torch.empty(0, device=self.cos.device)).device
        if device.type != "meta":
            self.cos, self.signed_sin = self.cos.to(device), self.signed_sin.to(device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines for `positions` (`[num_tokens]`): each `[num_tokens, 1, head_dim]`, fp32."""
        return self.cos[positions].unsqueeze(1), self.signed_sin[positions].unsqueeze(1)
