"""A decoder's weights as the compiled CPU step reads them: matrices in panels, norms, scales and biases in one array.

The weights move: each matrix leaves the model as soon as it is packed, so that the model is never in memory twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numba
import numpy as np
import torch
from torch import Tensor, nn

from minillm.errors import UnsupportedError
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.ops.cpu import amx
from minillm.ops.cpu.matrix_fields import (
    BIAS,
    CODE_SUMS,
    COLUMNS,
    GROUP,
    INPUTS,
    MATRIX_FIELDS,
    NONE,
    OUTPUTS,
    PANEL,
    SCALES,
)
from minillm.ops.cpu.nibbles import FLOAT_NIBBLES, MAX_GROUP_SIZE, NIBBLES, pack_nibbles, panel_size
from minillm.ops.cpu.panels import (
    float_panel_size,
    int8_kind,
    pack_bfloat_pairs,
    pack_floats,
    pack_int8,
    pack_pairs,
)
from minillm.ops.cpu.processor import processor
from minillm.ops.cpu.register_tiles import has_byte_products
from minillm.ops.cpu.rounding import codes_size
from minillm.ops.cpu.simd import BFLOAT, BFLOAT_PAIRS, BYTE_OFFSET, HALF, LANES, ONE_BYTE
from minillm.quantization.awq import AWQ
from minillm.quantization.base import QuantizedLinear, Scheme
from minillm.quantization.int4 import Int4
from minillm.quantization.int8 import Int8
from minillm.quantization.packing import unpack
from minillm.quantization.w8a8 import W8A8

KINDS = {torch.float16: HALF, torch.bfloat16: BFLOAT}
CACHE_LINE = 64
PACKED_ROWS = 64 * LANES
"""Rows of a matrix that are packed at a time. Beside the result, packing needs memory only for copies of these rows."""


def unsupported_model(model: Decoder) -> str | None:
    """Why the compiled step cannot run this model; None if it can."""
    if numba.config.DISABLE_JIT:
        return "numba compiles nothing while NUMBA_DISABLE_JIT is set"
    if reason := processor().unsupported_reason:
        return reason
    if model in _PACKED:
        return None
    if type(model) is not Decoder:
        return f"the compiled step computes what Decoder does, and {type(model).__name__} does so in its own way"
    if reason := unsupported_shape(model):
        return reason
    linears = map(model.get_submodule, _linears(model))
    schemes = {m.scheme if isinstance(m, QuantizedLinear) else None for m in linears}
    if len(schemes) > 1:
        return "the compiled step needs one kind of weights for all layers"
    head = model.lm_head.scheme if isinstance(model.lm_head, QuantizedLinear) else None
    return next(filter(None, (_unsupported_weights(scheme, model.config) for scheme in (*schemes, head))), None)


def unsupported_shape(model: Decoder) -> str | None:
    """Why the compiled step cannot run a model of this dtype and these sizes; None if it can."""
    config = model.config
    weight = model.norm.weight  # has the compute dtype; matrices may be stored in fewer bits
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return (
            "the compiled step runs models in float32 or bfloat16 on a CPU, and this one is in "
            f"{str(weight.dtype)[6:]} on {weight.device}"
        )
    if config.hidden_size % LANES or config.intermediate_size % LANES or config.head_dim % (2 * LANES):
        return (
            f"hidden size {config.hidden_size} and intermediate size {config.intermediate_size} must be multiples of "
            f"{LANES}, head size {config.head_dim} of {2 * LANES}"
        )
    return None


def _unsupported_weights(scheme: Scheme | None, config: ModelConfig) -> str | None:
    """Why the step cannot multiply by weights of this scheme; None if it can."""
    if scheme is not None and type(scheme) not in (Int8, W8A8, Int4, AWQ):
        return f"the compiled step supports float, int8, w8a8, int4 and awq weights, not {scheme.method}"
    if isinstance(scheme, Int4):
        longest = max(config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
        if scheme.group_size % LANES or min(scheme.group_size, longest) > MAX_GROUP_SIZE:
            return (
                f"the compiled step reads {scheme.method} weights in groups of a multiple of {LANES}, "
                f"{MAX_GROUP_SIZE} at most, and these are in groups of {scheme.group_size}"
            )
    return None


def _linears(model: Decoder) -> list[str]:
    """Names of the matrices of all layers, each layer's in the order of `step.QKV` … `step.DOWN`."""
    names = ("qkv_proj", "o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    return [f"layers.{layer}.{name}" for layer in range(model.config.num_layers) for name in names]


def packed(model: Decoder) -> PackedDecoder:
    """The weights of a model in panels. The first call moves them out of the model; later calls, for other caches,
    return the same object."""
    if model not in _PACKED:
        _PACKED[model] = PackedDecoder(model)
    return _PACKED[model]


class PackedDecoder:
    """Everything that the step reads of a model, as arrays."""

    def __init__(self, model: Decoder) -> None:
        config = model.config
        vectors = Vectors()
        vectors.add(torch.full((LANES,), config.rms_norm_eps, dtype=torch.float32, device="cpu"))
        self.matrices = np.full((4 * config.num_layers + 1, MATRIX_FIELDS), NONE, np.int64)
        self.weights = _pack_matrices(model, _linears(model), self.matrices[:-1], vectors)
        embedding = model.embed_tokens.weight
        self.tied = not isinstance(model.lm_head, QuantizedLinear) and model.lm_head.weight is embedding
        # Empty if tied, but of the same kind: the step that is compiled for one serves the other.
        self.embedding = smallest_cast([embedding])(embedding[:0] if self.tied else embedding).reshape(-1)
        model.embed_tokens = MovedLayer()
        del embedding  # otherwise it would stay in memory until this function returns
        self.head = _pack_matrices(model, ["lm_head"], self.matrices[-1:], vectors)
        self.layers = np.array(
            [
                [
                    vectors.add(layer.input_norm.weight),
                    vectors.add(layer.post_attention_norm.weight),
                    NONE if layer.q_norm is None else vectors.add(layer.q_norm.weight),
                    NONE if layer.k_norm is None else vectors.add(layer.k_norm.weight),
                    config.rotates(i),
                    config.window(i) or 0,
                ]
                for i, layer in enumerate(model.layers)
            ],
            np.int64,
        )
        self.final_norm = vectors.add(model.norm.weight)
        self.vectors = vectors.flat()
        self.cos, self.signed_sin = (table.numpy().reshape(-1) for table in (model.rope.cos, model.rope.signed_sin))
        self.widest_codes = max(codes_size(amx.ROWS, int(c), int(g)) for c, g in self.matrices[:, [COLUMNS, GROUP]])
        """Most bytes that sixteen rows of inputs take once they are rounded (`rounding.prepare_row`)."""


_PACKED: WeakKeyDictionary[Decoder, PackedDecoder] = WeakKeyDictionary()


class MovedLayer(nn.Module):
    """Stands in the model for a layer whose weights an executor has taken."""

    def forward(self, *args: Any) -> Tensor:
        """Raises `UnsupportedError`."""
        raise UnsupportedError(
            "the weights of this layer were moved into the compiled step; "
            "use LLM(..., enforce_eager=True) to keep them in the model and run it in PyTorch"
        )


class Vectors:
    """Collects norms, scales and biases, which become one flat float32 array."""

    def __init__(self) -> None:
        self.parts: list[np.ndarray] = []
        self.size = 0

    def add(self, x: Tensor | np.ndarray) -> int:
        """Append a copy of `x`, padded to a multiple of sixteen; returns where it begins."""
        part = np.asarray(x.detach().float() if isinstance(x, Tensor) else x)
        at, self.size = self.size, self.size + -(-len(part) // LANES) * LANES
        self.parts.append(np.pad(part, (0, self.size - at - len(part))))
        return at

    def flat(self) -> np.ndarray:
        """All vectors, one after the other."""
        return np.concatenate(self.parts).astype(np.float32, copy=False)


def _pack_matrices(model: Decoder, names: Sequence[str], matrices: np.ndarray, vectors: Vectors) -> np.ndarray:
    """The panels of the matrices with these names in one array; fills in their rows of `matrices`.

    Each matrix leaves the model as soon as it is packed, so that the model is never in memory twice.
    """
    linears = [model.get_submodule(name) for name in names]
    floats = (
        None
        if isinstance(linears[0], QuantizedLinear)
        else FloatPacking([m.weight for m in linears], model.norm.weight.dtype)
    )
    total = sum(_packed_size(m, floats) for m in linears)
    flat, at = None, 0
    for name, matrix in zip(names, matrices, strict=True):
        linear = linears.pop(0)
        matrix[[PANEL, COLUMNS, OUTPUTS]] = at, linear.in_features, -(-linear.out_features // LANES) * LANES
        pack_rows = floats.row_packer(linear.weight) if floats else _row_packer(linear, matrix, vectors)
        if linear.bias is not None:
            matrix[BIAS] = vectors.add(linear.bias)
        for first in range(0, linear.out_features, PACKED_ROWS):
            panels = pack_rows(slice(first, first + PACKED_ROWS))
            if flat is None:
                flat = empty_aligned(total, panels.dtype)
            flat[at : at + len(panels)] = panels
            at += len(panels)
        model.set_submodule(name, MovedLayer())
    assert flat is not None
    return flat


def empty_aligned(size: int, dtype: np.dtype[Any]) -> np.ndarray:
    """`size` numbers, uninitialised, aligned to a cache line, so that no load of a panel touches two cache lines."""
    memory = np.empty(size + CACHE_LINE // dtype.itemsize, dtype)
    first = -memory.ctypes.data % CACHE_LINE // dtype.itemsize
    return memory[first : first + size]


class FloatPacking:
    """How matrices that are not quantised are packed: for the activations of a float32 model in the fewest bits that
    hold them exactly, for those of a bfloat16 model as bfloat16s."""

    def __init__(self, weights: Sequence[Tensor], dtype: torch.dtype) -> None:
        """`dtype`: that of the model."""
        if dtype == torch.bfloat16:
            self._cast, self._pack, self._kind = _cast_to(dtype), pack_bfloat_pairs, np.dtype(BFLOAT_PAIRS)
        else:
            self._cast, self._pack = smallest_cast(weights), pack_floats
            self._kind = self._cast(weights[0][:1]).dtype

    def row_packer(self, weight: Tensor) -> Callable[[slice], np.ndarray]:
        """A function that packs some rows of `weight`."""
        return lambda rows: self._pack(self._cast(weight[rows]))

    def panel_size(self, columns: int) -> int:
        """Numbers in a panel."""
        return float_panel_size(columns, self._kind)


def _packed_size(linear: nn.Linear | QuantizedLinear, floats: FloatPacking | None) -> int:
    """Numbers in the panels of a layer. `floats`: None for a quantised layer."""
    panels, columns = -(-linear.out_features // LANES), linear.in_features
    if isinstance(linear, QuantizedLinear) and isinstance(linear.scheme, Int4):
        return panels * panel_size.py_func(columns, linear.scheme.group_size)
    if floats is not None:
        return panels * floats.panel_size(columns)
    kind = ONE_BYTE if isinstance(linear.scheme, W8A8) else int8_kind()
    return panels * columns * LANES // np.dtype(kind).itemsize


def _row_packer(linear: QuantizedLinear, matrix: np.ndarray, vectors: Vectors) -> Callable[[slice], np.ndarray]:
    """A function that packs some rows of a quantised layer. Scales and sums of codes go to `matrix` and `vectors`.

    The layout of the codes depends on the activations. For W8A8 they are rounded to one byte each, otherwise to 16 bits
    or not at all (`pack_int8`).
    """
    if isinstance(linear.scheme, Int4):
        return _group_row_packer(linear, matrix, vectors)
    codes = linear.get_buffer("qweight").numpy()
    matrix[SCALES] = vectors.add(linear.get_buffer("scales"))
    matrix[CODE_SUMS] = vectors.add((BYTE_OFFSET * codes.sum(1, dtype=np.int32)).view(np.float32))
    if isinstance(linear.scheme, W8A8):
        return lambda rows: pack_pairs(codes[rows])
    return lambda rows: pack_int8(codes[rows])


def _group_row_packer(linear: QuantizedLinear, matrix: np.ndarray, vectors: Vectors) -> Callable[[slice], np.ndarray]:
    """`_row_packer` of INT4 and AWQ. AWQ's codes of 3 bits become nibbles too: the same codes in more bytes."""
    scheme, tensors, columns = linear.scheme, linear.tensors, linear.in_features
    assert isinstance(scheme, Int4)
    matrix[GROUP] = scheme.group_size
    if "input_scales" in tensors:
        matrix[INPUTS] = vectors.add(tensors["input_scales"])
    kind = NIBBLES if has_byte_products() else FLOAT_NIBBLES

    def pack_rows(rows: slice) -> np.ndarray:
        codes = unpack(tensors["qweight"][rows], scheme.bits, columns)
        scales = tensors["scales"][rows]
        zeros = unpack(tensors["qzeros"][rows], scheme.bits, scales.shape[1])
        return pack_nibbles(codes.numpy(), scales.numpy(), zeros.numpy(), scheme.group_size, kind)

    return pack_rows


def smallest_cast(weights: Sequence[Tensor]) -> Callable[[Tensor], np.ndarray]:
    """A function that casts each of these weights to the smallest float type that holds all of them exactly: a 16-bit
    one if the checkpoint was in 16 bits."""
    for dtype in sorted(KINDS, key=lambda kind: kind != weights[0].dtype):  # their own dtype first
        if all(_is_exact(w.detach(), dtype) for w in weights):
            return _cast_to(dtype)
    return lambda w: w.detach().float().numpy()


def _is_exact(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether `dtype` holds all numbers of `weight` exactly."""
    return weight.dtype == dtype or all(
        torch.equal(rows.to(dtype).float(), rows.float()) for rows in weight.split(PACKED_ROWS)
    )


def _cast_to(dtype: torch.dtype) -> Callable[[Tensor], np.ndarray]:
    return lambda w: bits_of(w.detach().to(dtype)).view(KINDS[dtype]).reshape(w.shape)


def bits_of(x: Tensor) -> np.ndarray:
    """The bits of a 16-bit float tensor as integers, flat, sharing memory."""
    return x.view(torch.int16 if x.dtype == torch.float16 else torch.uint16).numpy().reshape(-1)
