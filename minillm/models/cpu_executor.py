"""Runs a decoder's steps through `minillm.ops.cpu`: packs its weights once, then one compiled call per step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import get_num_threads, set_num_threads
from numba.core.config import NUMBA_NUM_THREADS
from torch import Tensor, nn

from minillm.cache.base import KVCache
from minillm.cache.paged import PagedKVCache
from minillm.cache.paged_int4 import PagedInt4KVCache
from minillm.cache.paged_int8 import PagedInt8KVCache
from minillm.errors import UnsupportedError
from minillm.hardware import usable_processors
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.ops.cpu import amx, step
from minillm.ops.cpu.compiled import showing_progress
from minillm.ops.cpu.matrix_fields import (
    BIAS,
    COLUMNS,
    GROUP,
    INPUTS,
    MATRIX_FIELDS,
    NONE,
    OUTPUTS,
    PANEL,
    SCALES,
    SUMS,
)
from minillm.ops.cpu.nibbles import FLOAT_NIBBLES, LONGEST_GROUP, NIBBLES, pack_nibbles, panel_size
from minillm.ops.cpu.panels import pack, pack_floats, pack_pairs, packed_columns
from minillm.ops.cpu.processor import processor
from minillm.ops.cpu.rounding import codes_size
from minillm.ops.cpu.simd import BFLOAT, HALF, LANES, MIDDLE, TWICE_PAIRED, has_byte_products
from minillm.ops.cpu.team import new_sync
from minillm.ops.cpu.threads import ThreadChoice
from minillm.quantization.awq import AWQ
from minillm.quantization.base import QuantizedLinear, Scheme
from minillm.quantization.int4 import Int4
from minillm.quantization.int8 import Int8
from minillm.quantization.packing import unpack
from minillm.quantization.w8a8 import W8A8

if TYPE_CHECKING:
    from minillm.models.runner import Segment

ONE_TEAM = threading.Lock()
"""Held while a step runs on several threads. numba's `workqueue` layer ends the process if two Python threads use it at
once, and with the others two teams would only wait for each other's processors."""
Rows = tuple[np.ndarray | int, ...]
NO_DRAFTS = np.empty((0, 0), np.int64)
CACHE_LINE = 64
PACKED_ROWS = 64 * LANES
"""So many rows of a matrix are packed at a time; a copy of them is all that packing needs beside its result."""


def why_not(model: Decoder, cache: KVCache) -> str | None:
    """Why this model over this cache cannot be run here; None if it can."""
    if reason := processor().unsupported_reason:
        return reason
    config = model.config
    weight = model.norm.weight  # its dtype is the one to compute in; matrices may be kept in fewer bits
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return f"it computes in float32 on a CPU, the model in {str(weight.dtype)[6:]} on {weight.device}"
    if type(cache) not in ROWS:
        return f"it walks paged caches (float32, INT8, INT4), this is {type(cache).__name__}"
    if cache.ops != type(cache).ops:
        return "an operation was replaced by another"
    if type(cache) is PagedInt4KVCache and cache.group % LANES:
        return f"it reads INT4 groups in multiples of {LANES}, this cache has groups of {cache.group}"
    if config.hidden_size % LANES or config.intermediate_size % LANES or config.head_dim % (2 * LANES):
        return (
            f"hidden size {config.hidden_size} and intermediate size {config.intermediate_size} must be multiples of "
            f"{LANES}, head size {config.head_dim} of {2 * LANES}"
        )
    linears = map(model.get_submodule, _linears(model))
    schemes = {m.scheme if isinstance(m, QuantizedLinear) else None for m in linears}
    if len(schemes) > 1:
        return "it takes one kind of weights for all layers"
    head = model.lm_head.scheme if isinstance(model.lm_head, QuantizedLinear) else None
    return next(filter(None, (_why_not_weights(scheme, config) for scheme in (*schemes, head))), None)


def _why_not_weights(scheme: Scheme | None, config: ModelConfig) -> str | None:
    """Why there is no product with weights of this kind; None if there is one."""
    if scheme is not None and type(scheme) not in (Int8, W8A8, Int4, AWQ):
        return f"it has products for float, int8, w8a8, int4 and awq weights, not for {scheme.method}"
    if isinstance(scheme, Int4):
        longest = max(config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
        if scheme.group_size % LANES or min(scheme.group_size, longest) > LONGEST_GROUP:
            return (
                f"it reads {scheme.method} weights in groups of a multiple of {LANES}, {LONGEST_GROUP} at most, and "
                f"these are in groups of {scheme.group_size}"
            )
    return None


def _linears(model: Decoder) -> list[str]:
    """The matrices of all layers, in the order of `step.QKV` … `step.DOWN`."""
    names = ("qkv_proj", "o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    return [f"layers.{layer}.{name}" for layer in range(model.config.num_layers) for name in names]


def _bits(x: Tensor) -> np.ndarray:
    """A 16-bit float tensor as the integers that stand for it, sharing memory."""
    return (
        x.view(torch.int16).numpy().reshape(-1)
        if x.dtype == torch.float16
        else x.view(torch.uint16).numpy().reshape(-1)
    )


ROWS: dict[type[KVCache], Callable[..., tuple[Rows, Rows]]] = {
    PagedKVCache: lambda cache: tuple((pool.numpy().reshape(-1),) for pool in (cache.keys, cache.values)),
    PagedInt8KVCache: lambda cache: tuple(
        (pool[0].numpy().reshape(-1), _bits(pool[1])) for pool in (cache.keys, cache.values)
    ),
    PagedInt4KVCache: lambda cache: tuple(
        (pool[0].numpy().reshape(-1), _bits(pool[1]), _bits(pool[2]), pool[1].shape[-1])
        for pool in (cache.keys, cache.values)
    ),
}
"""How the keys and values of a layout are handed over: the very memory of its pools."""


class Moved(nn.Module):
    """What is left of a layer whose weights an executor has taken."""

    def forward(self, *args: Any) -> Tensor:
        """Raises `UnsupportedError`."""
        raise UnsupportedError(
            "the weights of this layer were packed for the compiled step and the model is empty; "
            "use LLM(..., enforce_eager=True) to keep the model whole and run it in PyTorch"
        )


class CpuExecutor:
    """One model over one cache. The weights move in here, so that they are in memory once: the model keeps its
    configuration only. The cache stays what it is, in memory too."""

    def __init__(self, model: Decoder, cache: KVCache, block_size: int) -> None:
        config = model.config
        self.block_size = block_size
        self.vocab_size = config.vocab_size
        vectors = _Vectors()
        vectors.add(torch.full((LANES,), config.rms_norm_eps))
        self.matrices = np.full((4 * config.num_layers + 1, MATRIX_FIELDS), NONE, np.int64)
        self.weights = _pack_all(model, _linears(model), self.matrices[:-1], vectors)
        embedding = model.embed_tokens.weight
        tied = not isinstance(model.lm_head, QuantizedLinear) and model.lm_head.weight is embedding
        self.embedding = np.zeros(0, np.float32) if tied else _narrow([embedding])(embedding).reshape(-1)
        model.embed_tokens = Moved()
        del embedding  # or it would live as long as this function, beside its copy
        self.head = _pack_all(model, ["lm_head"], self.matrices[-1:], vectors)
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
        self.keys, self.values = ROWS[type(cache)](cache)
        slots = cache.keys.shape[1] if isinstance(cache, PagedKVCache) else cache.keys[0].shape[1]
        self.dims = np.array(
            [
                config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size,
                config.num_layers, block_size, slots, vectors.add(model.norm.weight), tied,
                config.vocab_size,
            ],
            np.int64,
        )  # fmt: skip
        self.vectors = vectors.flat()
        self.cos, self.signed_sin = (table.numpy().reshape(-1) for table in (model.rope.cos, model.rope.signed_sin))
        self.sync = new_sync()
        self.thread_choice = ThreadChoice()
        self.usable_processors = usable_processors()
        self.scratch, self.codes = np.zeros(0, np.float32), np.zeros(0, np.uint8)
        self.widest = max(codes_size(amx.ROWS, int(c), int(g)) for c, g in self.matrices[:, [COLUMNS, GROUP]])
        """Bytes that sixteen rows of inputs become at most."""
        self._compile()

    def _compile(self) -> None:
        """Have the step compiled for these kinds of weights and cache, or fetch it from disk, by running one."""
        from minillm.models.runner import Segment

        with showing_progress():
            self.run([Segment([0], 0, [0])])
        self.thread_choice = ThreadChoice()  # that one took long: it says nothing of the number of threads

    def run(self, segments: Sequence[Segment]) -> Tensor:
        """See `ModelRunner.run`."""
        return self._run(segments, NO_DRAFTS)[:, : self.vocab_size]

    def draft(self, segments: Sequence[Segment], count: int) -> list[list[int]]:
        """See `ModelRunner.draft`. All of it is one call."""
        drafted = np.empty((len(segments), count), np.int64)
        self._run(segments, drafted)
        return drafted.tolist()

    def _run(self, segments: Sequence[Segment], drafted: np.ndarray) -> Tensor:
        token_ids, tables, requests, wanted = [], [], [], []
        for s in segments:
            count, first = len(s.token_ids), len(token_ids)
            requests.append((first, count, s.start + count, len(tables)))
            token_ids += s.token_ids
            tables += s.block_table
            wanted += range(first + count - s.num_logits, first + count)
        kind = len(token_ids).bit_length(), drafted.shape[1]
        limit = min(torch.get_num_threads(), NUMBA_NUM_THREADS, self.usable_processors)
        threads = self.thread_choice.threads(kind, limit)
        own = self._make_room(len(token_ids), threads)
        logits = torch.empty((len(wanted), int(self.matrices[-1, OUTPUTS])))
        self.sync[:] = 0
        arguments = (
            self.sync, threads, drafted, self.dims, self.layers, self.matrices, self.vectors, self.weights, self.head,
            self.embedding, self.cos, self.signed_sin, self.keys, self.values, np.array(token_ids, np.int64),
            np.array(requests, np.int64), np.array(tables, np.int64), np.array(wanted, np.int64), self.scratch, own,
            self.codes, logits.numpy().reshape(-1),
        )  # fmt: skip
        self.thread_choice.took(kind, threads, _time_step(arguments, threads))
        return logits

    def _make_room(self, tokens: int, threads: int) -> int:
        """Let the scratch memory be large enough for a step; returns the part that each thread has for itself."""
        own = step.own_size(self.dims)
        needed = int(step.areas.py_func(self.dims, tokens)[-1] + threads * own)
        if len(self.scratch) < needed:
            self.scratch = _whole_lines(needed, np.dtype(np.float32))
        bytes_needed = -(-tokens // amx.ROWS) * self.widest
        if len(self.codes) < bytes_needed:
            self.codes = _whole_lines(bytes_needed, np.dtype(np.uint8))
        return int(own)


def _time_step(arguments: tuple[Any, ...], threads: int) -> float:
    """Run a step; returns the seconds that it took, without the time that others had the threads before it."""
    if threads == 1:
        began = time.perf_counter()
        step.run(*arguments)
        return time.perf_counter() - began
    with ONE_TEAM:
        began = time.perf_counter()
        if get_num_threads() != threads:
            set_num_threads(threads)
        step.run_together(*arguments)
        return time.perf_counter() - began


class _Vectors:
    """Everything that is a list of floats, one behind the other."""

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
        """All of them."""
        return np.concatenate(self.parts).astype(np.float32, copy=False)


def _pack_all(model: Decoder, names: Sequence[str], matrices: np.ndarray, vectors: _Vectors) -> np.ndarray:
    """The panels of the matrices with these names in one array; fills in their rows of `matrices`.

    Each leaves the model as soon as it is packed, so that at no time there are two of everything.
    """
    linears = [model.get_submodule(name) for name in names]
    narrow = None if isinstance(linears[0], QuantizedLinear) else _narrow([m.weight for m in linears])
    kind = None if narrow is None else narrow(linears[0].weight[:1]).dtype
    total = sum(_packed_size(m, kind) for m in linears)
    flat, at = None, 0
    for name, matrix in zip(names, matrices, strict=True):
        linear = linears.pop(0)
        matrix[[PANEL, COLUMNS, OUTPUTS]] = at, linear.in_features, -(-linear.out_features // LANES) * LANES
        pack_rows = _packing(linear, matrix, vectors) if narrow is None else _packing_of_floats(narrow(linear.weight))
        if linear.bias is not None:
            matrix[BIAS] = vectors.add(linear.bias)
        for first in range(0, linear.out_features, PACKED_ROWS):
            panels = pack_rows(slice(first, first + PACKED_ROWS))
            if flat is None:
                flat = _whole_lines(total, panels.dtype)
            flat[at : at + len(panels)] = panels
            at += len(panels)
        model.set_submodule(name, Moved())
    assert flat is not None
    return flat


def _whole_lines(size: int, dtype: np.dtype[Any]) -> np.ndarray:
    """`size` numbers, uninitialised, that begin where a cache line does, so that no load of a panel needs two."""
    memory = np.empty(size + CACHE_LINE // dtype.itemsize, dtype)
    first = -memory.ctypes.data % CACHE_LINE // dtype.itemsize
    return memory[first : first + size]


def _packed_size(linear: nn.Linear | QuantizedLinear, floats: np.dtype[Any] | None) -> int:
    """Numbers that the panels of a layer consist of; `floats`: what those of a layer that is not quantised are."""
    panels, columns = -(-linear.out_features // LANES), linear.in_features
    if isinstance(linear, QuantizedLinear) and isinstance(linear.scheme, Int4):
        return panels * panel_size.py_func(columns, linear.scheme.group_size)
    return panels * (columns if floats is None else packed_columns(columns, floats)) * LANES


def _packing(linear: QuantizedLinear, matrix: np.ndarray, vectors: _Vectors) -> Callable[[slice], np.ndarray]:
    """What packs some rows of a quantised layer; the rest of what its products need goes to `matrix` and `vectors`.

    Codes are laid out by what activations are rounded to: for W8A8 one byte, otherwise two, or none where the processor
    cannot multiply bytes.
    """
    if isinstance(linear.scheme, Int4):
        return _packing_of_groups(linear, matrix, vectors)
    codes = linear.get_buffer("qweight").numpy()
    matrix[SCALES] = vectors.add(linear.get_buffer("scales"))
    matrix[SUMS] = vectors.add((MIDDLE * codes.sum(1, dtype=np.int32)).view(np.float32))
    if isinstance(linear.scheme, W8A8):
        return lambda rows: pack_pairs(codes[rows])
    if has_byte_products():
        return lambda rows: pack_pairs(codes[rows], TWICE_PAIRED)
    return lambda rows: pack(codes[rows])


def _packing_of_floats(weight: np.ndarray) -> Callable[[slice], np.ndarray]:
    return lambda rows: pack_floats(weight[rows])


def _packing_of_groups(linear: QuantizedLinear, matrix: np.ndarray, vectors: _Vectors) -> Callable[[slice], np.ndarray]:
    """`_packing` of INT4 and AWQ. AWQ's codes of 3 bits become nibbles too: the same numbers in more bytes."""
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


def _narrow(weights: Sequence[Tensor]) -> Callable[[Tensor], np.ndarray]:
    """How to keep these weights in as few bytes as hold each of them exactly: 16-bit floats if they came from such."""
    kinds = {torch.float16: HALF, torch.bfloat16: BFLOAT}
    for dtype in sorted(kinds, key=lambda kind: kind != weights[0].dtype):  # the one they are in, if it is one, first
        if all(w.dtype == dtype or torch.equal(w.detach().to(dtype).float(), w.detach().float()) for w in weights):
            return lambda w, dtype=dtype: _bits(w.detach().to(dtype)).view(kinds[dtype]).reshape(w.shape)
    return lambda w: w.detach().float().numpy()
