"""Quantise a checkpoint: load, calibrate, quantise, write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from minillm.errors import UnsupportedError
from minillm.models.calibration import calibrate, calibration_rows
from minillm.models.hub import resolve
from minillm.models.loading import load_model, stored_scheme
from minillm.models.quantize import linear_bytes, num_weights, quantize_model
from minillm.models.quantized_checkpoint import check_new_folder, save_quantized
from minillm.models.shards import DTYPES, Shards
from minillm.quantization.base import Scheme
from minillm.tokenizer import Tokenizer


@dataclass(frozen=True)
class Conversion:
    """The sizes of a checkpoint before and after, in bytes of its tensors."""

    num_weights: int
    """Weights in the linears of the layers."""
    linears_before: int
    linears_after: dict[str, int]
    """By kind of tensor: packed weights, scales and so on."""
    others: int
    """Embedding, norms and biases; they do not change."""

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight of the quantised linears, scales and other extra tensors included."""
        return 8 * sum(self.linears_after.values()) / self.num_weights


def quantize_checkpoint(name: str, scheme: Scheme, out: Path, progress: bool = False) -> Conversion:
    """Write the checkpoint `name` (see `resolve`), quantised by `scheme`, to the new folder `out`.

    If the scheme needs calibration, it uses the held-out calibration prompts. Everything is computed in fp32 on the
    CPU. Raises `ConfigError` if `out` exists and is not empty or its parent does not exist, `UnsupportedError` if the
    checkpoint is quantised already, `CheckpointError` if it cannot be read.
    """
    check_new_folder(out)
    source = resolve(name)
    stored = stored_scheme(source)
    if stored is not None:
        raise UnsupportedError(f"{name} is quantised already ({stored.method}); give the original checkpoint")
    model = load_model(source, torch.float32)
    calibration = None
    if scheme.needs:
        rows = calibration_rows(Tokenizer.from_folder(source))
        calibration = calibrate(model, rows, scheme.needs, progress=progress)
    quantize_model(model, scheme, calibration, progress)
    save_quantized(model, source, out)
    before = stored_bytes(source)
    linears = sum(size for tensor, size in before.items() if tensor.endswith("_proj.weight"))
    return Conversion(num_weights(model), linears, linear_bytes(model), sum(before.values()) - linears)


def stored_bytes(folder: Path) -> dict[str, int]:
    """Bytes of each tensor of a full-precision checkpoint, from the headers of its files."""
    shards = Shards(folder)
    headers = {name: shards.header(name) for name in shards.names}
    return {name: torch.Size(shape).numel() * DTYPES[dtype].itemsize for name, (dtype, shape) in headers.items()}
