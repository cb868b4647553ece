"""The cases of `bench kernels` that read weights: the largest product of a layer (gate and up) in every weight format.

Minimum bytes: the weights with their scales and zero points, the activations in, the results out. With few rows the
weights dominate, so they must come from memory: copies that are together twice the last-level cache are read in turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.bench import kernels_cpu
from minillm.bench.kernel_cases import (
    COMPILED,
    PREFILL,
    PYTORCH,
    REFERENCE,
    Case,
    Implementation,
    Maker,
    Setting,
    from_dispatch,
)
from minillm.ops.cpu.matrix_fields import CODE_SUMS, GROUP, MATRIX_FIELDS, NONE, SCALES
from minillm.ops.cpu.nibbles import FLOAT_NIBBLES, NIBBLES, pack_nibbles
from minillm.ops.cpu.panels import SUMS_SIZE, pack_floats, pack_int8, pack_pairs
from minillm.ops.cpu.register_tiles import has_byte_products
from minillm.ops.cpu.rounding import codes_size
from minillm.ops.cpu.simd import BFLOAT, BYTE_OFFSET, HALF, LANES, TWO_BYTES, WORDS
from minillm.ops.linear import PACKED_ROWS, Linear
from minillm.quantization.base import Scheme
from minillm.quantization.int4 import Int4
from minillm.quantization.int8 import Int8
from minillm.quantization.packing import unpack
from minillm.quantization.w8a8 import W8A8, integer_product, quantize_rows

FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TWO_BYTE_ERROR = 1e-4
"""Largest relative error of a product whose activations are rounded to two bytes (see `ops.cpu.panels`)."""
SCHEMES: dict[str, Scheme] = {"int8_linear": Int8(), "w8a8_linear": W8A8(), "int4_linear": Int4(bits=4)}


def product_cases(s: Setting) -> list[Maker]:
    """Makers of the cases: every weight format at every number of rows. The weights of a format are built once."""
    narrow = "float16" if s.shape == "minicoder" else "bfloat16"  # how the checkpoints are stored
    kinds = [str(s.dtype).removeprefix("torch."), *([narrow] if s.on_cpu else []), *SCHEMES]
    made: list[Weights] = []  # at most one: the weights that the previous case has used
    return [
        Maker(kind if kind in SCHEMES else "linear", partial(_case, s, kind, tokens, made))
        for kind in kinds
        for tokens in s.tokens
    ]


class Weights:
    """Copies of one random matrix `[2 · intermediate, hidden]` in one weight format."""

    def __init__(self, s: Setting, kind: str) -> None:
        self.kind, self.setting = kind, s
        self.outputs, self.columns = 2 * s.config.intermediate_size, s.config.hidden_size
        dtype = FLOATS.get(kind, torch.float32)
        plain = (torch.randn(self.outputs, self.columns, device=s.device) * self.columns**-0.5).to(dtype)
        if kind in SCHEMES:
            self.scheme: Scheme | None = SCHEMES[kind]
            self.tensors: Mapping[str, Tensor] = {
                name: tensor.to(s.device) for name, tensor in self.scheme.quantize(plain).items()
            }
        else:
            self.scheme, self.tensors = None, {"weight": plain}
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.num_copies = s.copies(self.num_bytes)
        cast = plain.to(s.dtype) if self.scheme is None else None  # PyTorch needs weights in the activations' dtype
        kept = {"weight": cast} if cast is not None else self.tensors
        self.copies = [{name: t.clone() for name, t in kept.items()} for _ in range(self.num_copies)]
        self.modules = [_linear(copy["weight"]) for copy in self.copies] if cast is not None and s.on_cpu else []
        for module in self.modules:  # the first product with PACKED_ROWS rows makes it pack its weight
            module(s.random(PACKED_ROWS, self.columns))
        self.cast_bytes = self.num_bytes if cast is None else cast.nbytes
        self.panels = self._panels() if s.on_cpu else None

    def _panels(self) -> tuple[Any, Any, Any]:
        """The panels of all copies, a line of fields for each, and the vectors, packed as by the CPU executor."""
        outputs = -(-self.outputs // LANES) * LANES
        vectors = [np.zeros(LANES, np.float32)]
        line = np.full(MATRIX_FIELDS, NONE, np.int64)
        if self.kind in FLOATS:
            weight = self.tensors["weight"]
            bits = {2: torch.int16, 4: torch.float32}[weight.itemsize]
            view = weight.view(bits).numpy()
            panels = pack_floats(view.view({"float32": np.float32, "float16": HALF, "bfloat16": BFLOAT}[self.kind]))
        elif isinstance(self.scheme, Int4):
            panels, line[GROUP] = self._pack_groups(self.scheme), self.scheme.group_size
        else:
            codes, scales = self.tensors["qweight"].numpy(), self.tensors["scales"].numpy()
            panels = self._pack_codes(codes)
            sums = (BYTE_OFFSET * codes.sum(1, dtype=np.int32)).view(np.float32)
            line[SCALES], line[CODE_SUMS] = LANES, LANES + outputs
            vectors += [np.pad(v, (0, outputs - self.outputs)) for v in (scales, sums)]
        lines = np.tile(line, (self.num_copies, 1))
        lines[:, :3] = [(copy * len(panels), self.columns, outputs) for copy in range(self.num_copies)]
        return np.tile(panels, self.num_copies), lines, np.concatenate(vectors)

    def _pack_codes(self, codes: Any) -> Any:
        """INT8 codes in the executor's layout, which depends on the bytes that activations are rounded to."""
        if self.kind == "w8a8_linear":
            return pack_pairs(codes)
        return pack_int8(codes)

    def _pack_groups(self, scheme: Int4) -> Any:
        """INT4 codes with the scales and zero points of their groups, in the executor's layout."""
        scales = self.tensors["scales"]
        codes = unpack(self.tensors["qweight"], scheme.bits, self.columns).numpy()
        zeros = unpack(self.tensors["qzeros"], scheme.bits, scales.shape[1]).numpy()
        kind = NIBBLES if has_byte_products() else FLOAT_NIBBLES
        return pack_nibbles(codes, scales.numpy(), zeros, scheme.group_size, kind)


def _case(s: Setting, kind: str, tokens: int, made: list[Weights]) -> Case:
    if not made or made[0].kind != kind:
        made.clear()  # free the previous weights first
        made.append(Weights(s, kind))
    w = made[0]
    x = s.random(tokens, w.columns)
    activations = tokens * (w.columns + w.outputs) * s.dtype.itemsize
    implementations = (
        _plain_implementations(w, x, w.cast_bytes + activations)
        if w.scheme is None
        else _quantised_implementations(w, x)
    )
    if w.panels is not None:
        implementations[COMPILED] = _compiled(w, x)
    name = "linear" if w.scheme is None else kind
    return Case(
        op=name,
        kind=kind if w.scheme is None else "",
        shape=s.shape,
        tokens=tokens,
        context=None,
        num_bytes=w.num_bytes + activations,
        operations=2 * tokens * w.columns * w.outputs,
        copies=w.num_copies if tokens < PREFILL else 1,
        implementations=implementations,
        touched=(*w.tensors.values(), x, s.random(tokens, w.outputs)),
    )


def _plain_implementations(w: Weights, x: Tensor, num_bytes: int) -> dict[str, Implementation]:
    implementations = {
        REFERENCE: Implementation(lambda copy: F.linear(x, w.copies[copy]["weight"]), num_bytes=num_bytes)
    }
    if w.modules:
        implementations[PYTORCH] = Implementation(lambda copy: w.modules[copy](x), num_bytes=num_bytes)
    return implementations


def _quantised_implementations(w: Weights, x: Tensor) -> dict[str, Implementation]:
    group = (w.scheme.group_size,) if isinstance(w.scheme, Int4) else ()
    names = ("qweight", "scales", "qzeros")[: len(w.tensors)]

    def call(function: Any, copy: int) -> Tensor:
        return function(x, *(w.copies[copy][name] for name in names), *group)

    implementations = from_dispatch(w.kind, w.setting.device, call)
    if w.kind == "w8a8_linear":

        def integers(copy: int) -> Tensor:
            codes, scales = quantize_rows(x.float())
            kept = w.copies[copy]
            return (integer_product(codes, kept["qweight"]) * scales[:, None] * kept["scales"]).to(x.dtype)

        implementations[PYTORCH] = Implementation(integers)
    return implementations


def _compiled(w: Weights, x: Tensor) -> Implementation:
    assert w.panels is not None
    panels, lines, vectors = w.panels
    rows, outputs = len(x), int(lines[0, 2])
    scales_and_sums = np.zeros(rows + SUMS_SIZE + LANES, np.float32)
    scratch = np.concatenate([x.numpy().reshape(-1), scales_and_sums])
    columns, group = w.columns, int(lines[0, GROUP])
    codes, out = np.zeros(codes_size(rows, columns, group), np.uint8), np.empty((rows, outputs), np.float32)

    def loop(count: int, first: int, copies: int) -> None:
        kernels_cpu.multiply_loop(count, first, copies, panels, lines, vectors, scratch, codes, rows, out.reshape(-1))

    limit = TWO_BYTE_ERROR if panels.dtype in (TWO_BYTES, WORDS, NIBBLES) else None
    return Implementation(loop=loop, result=lambda: torch.from_numpy(out[:, : w.outputs]), limit=limit)


def _linear(weight: Tensor) -> Linear:
    """The engine's linear layer with this tensor as its weight."""
    layer = Linear(1, 1, bias=False)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer
