"""The whole decoder for one ragged step, in GPU kernels.

It follows `minillm.models.decoder` line by line, with three differences. The residual addition is fused into the norm
after it. A kernel writes keys and values into the pools of the cache, and attention reads them there. Each operation
comes from `ops.dispatch`, so the same step runs on GPU kernels, in Triton's interpreter, or on the PyTorch references.
That is how it is tested where there is no GPU.

What it costs: per layer 10 launches, 4 of them matrix products (one more where the keys or a product's columns are
split, one fewer where a layer has no RoPE, three more for normalised heads). Products of floats are PyTorch's (cuBLAS),
those of INT8, W8A8, INT4 and AWQ weights are kernels that read the codes. Any other scheme multiplies in its own
module, in PyTorch.

Wins: few tokens, where launching a kernel takes longer than running it, above all in a CUDA graph (`gpu_executor`); and
quantised weights and caches, which are never dequantised in memory. Loses: a long prefill in one piece, where the
kernels of PyTorch (cuBLAS, FlashAttention) are as good. `docs/gpu.md` has what an H100 measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minillm.batch import Batch
from minillm.cache.base import DequantizedRows, KVCache
from minillm.models.decoder import Decoder, DecoderLayer
from minillm.ops.dispatch import implementations, op
from minillm.quantization.awq import AWQ
from minillm.quantization.base import QuantizedLinear, Scheme
from minillm.quantization.int4 import Int4
from minillm.quantization.int8 import Int8
from minillm.quantization.w8a8 import W8A8

FORMATS = ("float", "int8", "int4")
"""Formats of `StoredRows` that the kernels read and write."""
PRODUCTS: dict[type[Scheme], str] = {
    Int8: "int8_linear",
    W8A8: "w8a8_linear",
    Int4: "int4_linear",
    AWQ: "int4_linear",
}
"""The op that multiplies with the weights of a scheme as they are stored."""

Product = Callable[[Tensor], Tensor]
"""`[rows, in]` → `[rows, out]`."""


@dataclass(frozen=True)
class Ops:
    """The operations of a step other than its matrix products, chosen once."""

    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    rope: Callable[..., Tensor]
    silu_gate: Callable[..., Tensor]
    store_kv: Callable[..., None]
    paged_attention: Callable[..., Tensor]
    argmax: Callable[..., tuple[Tensor, Tensor]]
    advance: Callable[..., tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, device: torch.device | str, implementation: str | None = None) -> Ops:
        """Choose the best implementations on `device`, or the `implementation` named (see `ops.dispatch.op`)."""
        return cls(*(op(field.name, device, implementation) for field in fields(cls)))


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer and its part of the cache, without modules."""

    input_norm: Tensor
    qkv: Product
    head_norms: Tensor | None
    """`[query and KV heads, head_dim]`: the weights of the norms of q and k, head by head (Qwen3)."""
    rotates: bool
    window: int | None
    key_pools: Sequence[Tensor]
    value_pools: Sequence[Tensor]
    """What `store_kv` writes: one tensor of floats, or codes with their scales and zero points."""
    keys: Tensor | DequantizedRows
    values: Tensor | DequantizedRows
    """The same, as attention reads it."""
    out: Product
    post_norm: Tensor
    gate_up: Product
    down: Product


@dataclass(frozen=True)
class Weights:
    """The weights of a decoder and its cache: the model's own tensors, except for copies of the RoPE tables."""

    embedding: Tensor
    cos: Tensor
    signed_sin: Tensor
    """`[positions, 1, head_dim]`, in the model's dtype."""
    ones: Tensor
    """`[head_dim]`: the weight of a norm without weights."""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Product
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float

    @classmethod
    def of(cls, model: Decoder, cache: KVCache, implementation: str | None = None) -> Weights:
        """Prepare a model and the cache that it writes to, once. The cache stores its rows in one of `FORMATS`."""
        config, weight = model.config, model.embed_tokens.weight
        multiply = partial(linear_op, device=weight.device, implementation=implementation)
        return cls(
            embedding=weight,
            cos=model.rope.cos.to(weight.dtype).unsqueeze(1),
            signed_sin=model.rope.signed_sin.to(weight.dtype).unsqueeze(1),
            ones=torch.ones(config.head_dim, dtype=weight.dtype, device=weight.device),
            layers=tuple(_layer(layer, config.window(i), cache, multiply) for i, layer in enumerate(model.layers)),
            final_norm=model.norm.weight,
            head=multiply(model.lm_head),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
        )


def forward(w: Weights, ops: Ops, batch: Batch, on_queries: Callable[[Tensor], None] | None = None) -> Tensor:
    """One forward over `batch`: hidden states `[num_tokens, hidden]` after the final norm, as `Decoder.forward`.
    `on_queries` is called with the rotated queries of each layer, `[num_tokens, num_heads, head_dim]`.

    A token with a negative slot is not stored, and a token that belongs to no request attends to nothing: its row is
    meaningless, and no other row depends on it.
    """
    num_qk = w.num_heads + w.num_kv_heads
    cos, signed_sin = w.cos.index_select(0, batch.positions), w.signed_sin.index_select(0, batch.positions)
    x = F.embedding(batch.token_ids, w.embedding)
    normed = ops.rms_norm(x, w.layers[0].input_norm, w.eps)
    next_norms = [*(layer.input_norm for layer in w.layers[1:]), w.final_norm]
    for layer, next_norm in zip(w.layers, next_norms, strict=True):
        heads = layer.qkv(normed).unflatten(1, (-1, w.head_dim))
        qk, v = heads.split((num_qk, w.num_kv_heads), dim=1)
        if layer.head_norms is not None:
            qk = ops.rms_norm(qk, w.ones, w.eps) * layer.head_norms
        if layer.rotates:
            qk = ops.rope(qk, cos, signed_sin)
        q, k = qk.split((w.num_heads, w.num_kv_heads), dim=1)
        if on_queries is not None:
            on_queries(q)
        ops.store_kv(k, v, layer.key_pools, layer.value_pools, batch.slot_mapping)
        attended = ops.paged_attention(q, layer.keys, layer.values, batch, layer.window)
        normed, x = ops.add_rms_norm(layer.out(attended.flatten(1)), x, layer.post_norm, w.eps)
        mlp = layer.down(ops.silu_gate(layer.gate_up(normed)))
        normed, x = ops.add_rms_norm(mlp, x, next_norm, w.eps)
    return normed


def linear_op(module: nn.Module, device: torch.device | str, implementation: str | None = None) -> Product:
    """Return the function that multiplies with a linear layer's weights: PyTorch's for floats, a kernel for codes that
    have one, else the module itself. `implementation`: as in `ops.dispatch.op`."""
    if isinstance(module, nn.Linear):
        return partial(F.linear, weight=module.weight, bias=module.bias)
    assert isinstance(module, QuantizedLinear)
    name = _kernel(module.scheme)
    if name is None or (implementation is None and implementations(name, device)[0] == "reference"):
        return module  # where no kernel runs, the scheme itself is faster than the reference
    tensors: dict[str, Any] = module.tensors
    input_scales = tensors.pop("input_scales", None)
    if isinstance(module.scheme, Int4):
        tensors["group_size"] = module.scheme.group_size
    multiply = partial(op(name, device, implementation), **tensors, bias=module.bias)
    if input_scales is None:
        return multiply
    return lambda x: multiply((x * input_scales).to(x.dtype))


def _kernel(scheme: Scheme) -> str | None:
    """Return the op for weights of this scheme, or None."""
    return PRODUCTS.get(type(scheme)) if scheme.bits in (4, 8) else None


def is_capturable(model: Decoder) -> bool:
    """Whether a step may be recorded: no product in it waits for the device. PyTorch's on floats and the ops of
    `PRODUCTS` do not, nor does the module of `W8A8`, which multiplies where its op has no kernel (before sm_80). Other
    schemes might."""
    quantized = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    return all(_kernel(module.scheme) is not None for module in quantized)


def _layer(
    layer: DecoderLayer, window: int | None, cache: KVCache, multiply: Callable[[nn.Module], Product]
) -> LayerWeights:
    rows, number = cache.stored_rows(), layer.layer
    assert rows is not None
    norms = None
    if layer.q_norm is not None and layer.k_norm is not None:
        q_weight, k_weight = layer.q_norm.weight, layer.k_norm.weight
        norms = torch.cat((q_weight.expand(layer.num_heads, -1), k_weight.expand(layer.num_kv_heads, -1))).detach()
    key_pools, value_pools = ([pool[number] for pool in pools] for pools in (rows.keys, rows.values))
    keys, values = rows.layer(number, layer.head_dim)
    return LayerWeights(
        input_norm=layer.input_norm.weight,
        qkv=multiply(layer.qkv_proj),
        head_norms=norms,
        rotates=layer.rotates,
        window=window,
        key_pools=key_pools,
        value_pools=value_pools,
        keys=keys,
        values=values,
        out=multiply(layer.o_proj),
        post_norm=layer.post_attention_norm.weight,
        gate_up=multiply(layer.mlp.gate_up_proj),
        down=multiply(layer.mlp.down_proj),
    )
