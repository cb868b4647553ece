"""Quantises the linears of a decoder, and counts its bytes.

The linears inside the layers are quantised: qkv, o, gate and up, down. The embedding and the unembedding are not: a
look-up needs no product, small models tie both to one matrix, and errors in the logits cost most quality. Norms and
biases are not either, as they are small. An engine with 8-bit weights also quantises its unembedding
(`quantize_unembedding`): at 8 bits this costs little quality, and every token reads that matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from tqdm import tqdm

from minillm.errors import ConfigError, MinillmError, UnsupportedError
from minillm.models.decoder import Decoder
from minillm.quantization.base import WEIGHTS, LayerStatistics, QuantizedLinear, Scheme

NO_STATISTICS = LayerStatistics()
UNEMBEDDING_ROWS = 256
"""The number of rows of the unembedding that are quantised at a time."""


@dataclass(frozen=True)
class Calibration:
    """The statistics that calibration collected, by name of the linear (`layers.0.qkv_proj`)."""

    needs: str
    """`inputs` or `gradients`: what was collected."""
    num_tokens: int
    layers: Mapping[str, LayerStatistics]


def decoder_linears(model: Decoder) -> Iterator[tuple[str, nn.Linear | QuantizedLinear]]:
    """Yield the linears inside the layers by name, in order of computation; the unembedding is not among them."""
    for name, module in model.layers.named_modules(prefix="layers"):
        if isinstance(module, nn.Linear | QuantizedLinear):
            yield name, module


def quantize_model(
    model: Decoder, scheme: Scheme, calibration: Calibration | None = None, progress: bool = False
) -> Decoder:
    """Replace every linear of the layers by a quantised one, in place, and return `model`.

    Raises `ConfigError` if the scheme needs a calibration that is missing, `UnsupportedError` if the model is already
    quantised, `CheckpointError` for NaN or infinite weights. After an error the model may be partly quantised.
    """
    if scheme.needs and (calibration is None or calibration.needs != scheme.needs):
        raise ConfigError(f"scheme {scheme.method!r} needs calibration that collects {scheme.needs}; see `calibrate`")
    linears = list(decoder_linears(model))
    for name, linear in tqdm(linears, desc="quantising", unit=" layers", disable=not progress):
        if isinstance(linear, QuantizedLinear):
            raise UnsupportedError(f"{name} is quantised already ({linear.scheme.method}); load the original model")
        statistics = calibration.layers[name] if calibration and scheme.needs else NO_STATISTICS
        quantized = empty_like(linear, scheme)
        try:
            quantized.fill(scheme.quantize(linear.weight, statistics))
        except MinillmError as problem:
            raise type(problem)(f"{name}: {problem}") from None
        model.set_submodule(name, quantized)
    return model


def quantize_unembedding(model: Decoder, scheme: Scheme) -> Decoder:
    """Replace the unembedding by a quantised one, in place; a tied embedding stays as it is.

    Raises what `Scheme.quantize` raises.
    """
    quantized = empty_like(model.lm_head, scheme)
    for first, rows in enumerate(
        model.lm_head.weight.split(UNEMBEDDING_ROWS)
    ):  # fp32 copies of all rows would be large
        quantized.fill(scheme.quantize(rows), first * UNEMBEDDING_ROWS)
    model.lm_head = quantized
    return model


def empty_like(linear: nn.Linear, scheme: Scheme) -> QuantizedLinear:
    """Return a quantised layer with the shape, bias and device of `linear`, and uninitialised weights."""
    return QuantizedLinear(
        scheme, linear.in_features, linear.out_features, linear.bias, device=linear.weight.device
    ).eval()


def linear_bytes(model: Decoder) -> dict[str, int]:
    """Return the bytes that store the weights of the layers' linears, by purpose (see `base.PARTS`)."""
    count: dict[str, int] = {}
    for _, linear in decoder_linears(model):
        quantized = isinstance(linear, QuantizedLinear)
        parts = linear.bytes_by_part() if quantized else {WEIGHTS: linear.weight.nbytes}
        for part, num_bytes in parts.items():
            count[part] = count.get(part, 0) + num_bytes
    return count


def model_bytes(model: Decoder) -> dict[str, int]:
    """Return the bytes of all parameters of the model, by purpose: `linear_bytes`, then all others.

    A tied embedding counts once. Tables that follow from the configuration (RoPE) do not count.
    """
    count = linear_bytes(model) | {"embedding": model.embed_tokens.weight.nbytes}
    if isinstance(model.lm_head, QuantizedLinear):
        count["unembedding"] = model.lm_head.num_bytes
    elif model.lm_head.weight is not model.embed_tokens.weight:
        count["unembedding"] = model.lm_head.weight.nbytes
    in_linears = {id(linear.weight) for _, linear in decoder_linears(model) if isinstance(linear, nn.Linear)}
    tables = {id(model.embed_tokens.weight), id(getattr(model.lm_head, "weight", None))}
    for name, parameter in model.named_parameters():
        if id(parameter) not in in_linears | tables:
            part = "biases" if name.endswith("bias") else "norms"
            count[part] = count.get(part, 0) + parameter.nbytes
    return count


def num_weights(model: Decoder) -> int:
    """Return the number of weights in the linears of the layers, quantised or not."""
    return sum(linear.in_features * linear.out_features for _, linear in decoder_linears(model))
