"""Where a model runs and in which dtype, as the options say or as fits this machine."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from minillm import hardware
from minillm.config import DTYPES
from minillm.errors import ConfigError
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.models.loading import load_model
from minillm.models.quantize import quantize_unembedding
from minillm.quantization.base import QuantizedLinear
from minillm.quantization.int8 import Int8


@dataclass(frozen=True)
class Placement:
    """Device and dtype of target and draft model."""

    dtype: torch.dtype
    """Of activations and, unless its layout says otherwise, of the cache. Weights may be stored in fewer bits."""
    device: torch.device
    may_move_weights: bool
    """Whether an executor may move the weights out of the model."""

    def load(self, folder: Path, quantization: str | None) -> Decoder:
        """The model in `folder`. For an executor on a CPU the weights keep the dtype of the file.

        With weights of 8 bits the unembedding is quantised to 8 bits too, because every token reads all of it; its
        inputs are not, and neither is a tied embedding. `benchmarks/quality.json` has the loss.
        """
        as_stored = self.may_move_weights and self.device.type == "cpu"
        model = load_model(folder, self.dtype, self.device, quantization, keep_stored_dtype=as_stored)
        some = model.layers[0].qkv_proj
        if isinstance(some, QuantizedLinear) and isinstance(some.scheme, Int8):
            quantize_unembedding(model, Int8())
        return model


def choose_device(name: str) -> torch.device:
    """`auto` is a GPU if there is one, and the CPU, with a warning, if it cannot be used.

    Raises `ConfigError` for a device that is named and cannot be used.
    """
    if name != "auto":
        with suppress(RuntimeError, TypeError):  # a text that names no device is refused below
            if torch.device(name).type not in ("cpu", "cuda"):
                raise ConfigError(f"device={name!r} is not supported; use 'cpu' or 'cuda'")
        if (reason := hardware.unusable_reason(name)) is not None:
            raise ConfigError(f"device={name!r} cannot be used here ({reason}); use 'cpu'")
        return torch.device(name)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if (reason := hardware.unusable_reason("cuda")) is None:
        return torch.device("cuda")
    warnings.warn(
        f"the model runs on the CPU, because the GPU cannot be used ({reason}); say device='cpu' to choose it without "
        "this warning",
        stacklevel=2,
    )
    return torch.device("cpu")


def choose_dtype(name: str, device: torch.device, config: ModelConfig) -> torch.dtype:
    """`auto`: float32 on a CPU; on a GPU the checkpoint's own dtype, float16 where the GPU lacks bfloat16."""
    if name not in DTYPES:
        raise ConfigError(f"dtype={name!r} must be one of {', '.join(DTYPES)}")
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cpu":
        return torch.float32
    stored = getattr(torch, config.dtype)
    return hardware.half_dtype(device) if stored == torch.bfloat16 and device.type == "cuda" else stored
