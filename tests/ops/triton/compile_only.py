"""Compile the kernels without a GPU: `python -m tests.ops.triton.compile_only 75 80 90`.

A test runs this in a process of its own, because Triton must not be in interpreter mode. The launchers run unchanged,
on CPU tensors. Where they launch a kernel, it is compiled to machine code instead, for the arguments of the launch.
Prints one line per kernel and GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minillm.batch import Segment
from minillm.bench.on_gpu.ragged_steps import coded
from minillm.cache.base import KVCache
from minillm.cache.paged import PagedKVCache
from minillm.cache.paged_int4 import PagedInt4KVCache
from minillm.cache.paged_int8 import PagedInt8KVCache
from minillm.models.config import ModelConfig, RopeConfig
from minillm.models.decoder import Decoder
from minillm.ops import dispatch
from minillm.ops.dispatch import OPS
from minillm.ops.triton import machine
from minillm.ops.triton.advance import advance
from minillm.ops.triton.int4_linear import int4_linear
from minillm.ops.triton.int8_linear import int8_linear
from minillm.ops.triton.paged_attention import paged_attention
from minillm.ops.triton.rejection import rejection
from minillm.ops.triton.rms_norm import add_rms_norm
from minillm.ops.triton.rope import rope
from minillm.ops.triton.sample import all_finite, argmax, sample
from minillm.ops.triton.silu_gate import silu_gate
from minillm.ops.triton.store_kv import store_kv
from minillm.ops.triton.tiles import MEASURED, STAND_INS
from minillm.ops.triton.tiling import Tiling
from minillm.ops.triton.w8a8_linear import w8a8_linear
from minillm.runtime.gpu_executor import GpuExecutor
from tests.ops.triton.steps import node_masks, step

CACHES: tuple[type[KVCache], ...] = (PagedKVCache, PagedInt8KVCache, PagedInt4KVCache)
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


def kind(value: Any) -> str:
    """Return Triton's name for the type of an argument."""
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_instead(target: GPUTarget, seen: set[str]) -> Callable[..., None]:
    """Return the function that replaces `JITFunction.run`: it compiles a kernel instead of launching it."""

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = [p.name for p in kernel.params]
        given = dict(zip(names, args)) | {k: v for k, v in kwargs.items() if k in names}  # noqa: B905
        options = {k: v for k, v in kwargs.items() if k not in names}
        # An integer that is 1 becomes a constant, as in a launch.
        constants = {
            p.name: given[p.name]
            for p in kernel.params
            if p.is_constexpr or (type(given[p.name]) is int and given[p.name] == 1 and not p.do_not_specialize)
        }
        signature = {name: "constexpr" if name in constants else kind(given[name]) for name in names}
        key = f"{kernel.__name__} {sorted(signature.items())} {sorted(constants.items(), key=str)}"
        if key in seen:
            return
        seen.add(key)
        # Pointers and multiples of 16 are marked as divisible by 16, as in a launch.
        whole = {
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if signature[n].startswith("*")
            or (signature[n] == "i32" and given[n] % 16 == 0 and not kernel.params[i].do_not_specialize)
        }
        made = triton.compile(ASTSource(kernel, signature, constants, whole), target=target, options=options)
        shared = made.metadata.shared
        assert made.asm["cubin"], kernel.__name__
        limit = machine.shared_memory_of(*divmod(target.arch, 10))  # compiling succeeds, but the GPU would not load it
        assert shared <= limit, f"{kernel.__name__}: {shared} bytes of shared memory, sm_{target.arch} has {limit}"
        print(f"sm_{target.arch} {kernel.__name__} {options} shared={shared}", flush=True)

    return run


def launches(dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """Yield a launch of every kernel, as the engine makes it on activations of `dtype`."""
    x = torch.randn(4, 384, dtype=dtype)
    yield lambda: add_rms_norm(x, x, x[0], 1e-5)
    yield lambda: rope(torch.randn(4, 6, 64, dtype=dtype), *torch.randn(2, 4, 1, 64, dtype=dtype))
    yield lambda: silu_gate(x)
    yield lambda: argmax(x)
    yield lambda: all_finite(x)
    yield from attention(dtype)
    for rows, outputs in ((3, 64), (200, 64)):  # few rows, whose columns are split, and many rows
        wide = torch.randn(rows, 1024, dtype=dtype)
        codes, scales = torch.zeros(outputs, 1024, dtype=torch.int8), torch.ones(outputs)
        bytes_, zeros, halves = codes[:, :512].byte(), codes[:, :4].byte(), torch.ones(outputs, 8).half()
        yield lambda x=wide, w=codes, s=scales: int8_linear(x, w, s, s.to(dtype))
        yield lambda x=wide[:1], w=codes, s=scales: int8_linear(x, w, s, s.to(dtype))
        if machine.capability() >= OPS["w8a8_linear"].oldest_gpu:
            yield lambda x=wide, w=codes, s=scales: w8a8_linear(x, w, s)
        yield lambda x=wide, w=bytes_, s=halves, z=zeros: int4_linear(x, w, s, z, 128)
    x, group = torch.randn(4, 96, dtype=dtype), torch.ones(64, 4).half()
    yield lambda: int4_linear(x, torch.zeros(64, 48).byte(), group, torch.zeros(64, 2).byte(), 24)
    if dtype != torch.float32:
        yield from measured_tiles(dtype)


def measured_tiles(dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """Yield a product with each of the tiles that were measured on a GPU of this compute capability."""
    codes, scales = torch.zeros(256, 4096, dtype=torch.int8), torch.ones(256)
    bytes_, zeros, halves = codes[:, :2048].byte(), codes[:, :16].byte(), torch.ones(256, 32).half()
    for (gpu, product, size), tiles in MEASURED.items():
        if gpu != STAND_INS.get(machine.capability()):
            continue
        x = torch.randn({"one": 1, "few": 3, "some": 40, "many": 200}[size.split(",")[0]], 4096, dtype=dtype)
        if product == "int8":
            yield lambda x=x, tiles=tiles: int8_linear(x, codes, scales, tiles=tiles)
        elif product == "w8a8":
            yield lambda x=x, tiles=tiles: w8a8_linear(x, codes, scales, tiles=tiles)
        else:
            yield lambda x=x, tiles=tiles: int4_linear(x, bytes_, halves, zeros, 128, tiles=tiles)


def attention(dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """Yield a decode, a prefill, a tree and a window over every kind of pool, and writes to it."""
    decode = step(0, [1, 5, 2], 16, (6, 2), 64, dtype)
    prefill = step(0, [100], 16, (8, 2), 128, dtype)
    tree = torch.tensor([m for n in decode.batch.query_lens for m in node_masks(list(range(-1, n - 1)))])
    slots = torch.arange(8)
    yield lambda: paged_attention(*decode, tree=tree, tiling=Tiling(16, 64, splits=4))
    yield lambda: paged_attention(*decode, window=128)
    one = step(0, [1], 16, (2, 2), 32, dtype)
    yield lambda: paged_attention(*one)
    for bits in (0, 8, 4):
        for s in (prefill, decode):
            k, v = (coded(t, bits) if bits else t for t in (s.keys, s.values))
            yield lambda s=s, k=k, v=v: paged_attention(s.q, k, v, s.batch)
        pools = (k.pools, v.pools) if bits else ([k], [v])
        yield lambda pools=pools: store_kv(decode.q[:, :2], decode.q[:, 2:4], *pools, slots)


def whole_steps(dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """Yield decoding steps as the executor runs them, with int32 inputs in one tensor, over every cache."""
    config = ModelConfig(96, 64, 96, 1, 4, 2, 32, 512, rope=RopeConfig(), qk_norm=True)
    model = Decoder(config).requires_grad_(False).to(dtype)
    for layout in CACHES:
        cache = layout(config, 8, 16, dtype, torch.device("cpu"))
        executor = GpuExecutor(model, cache, 16, 4, 512, use_graphs=False)
        yield lambda run=executor.run: run([Segment([1, 2], 0, [3]), Segment([4], 0, [5])])
        yield lambda run=executor.run: run([Segment([7], 300, list(range(8)) * 3)])
    inputs = torch.zeros(4, 8, dtype=torch.int32)
    yield lambda: advance(inputs[0], inputs[:, :7], 16)


def choices() -> Iterator[Callable[[], Any]]:
    """Yield the kernels on probabilities, which are always fp32."""
    p, uniforms = torch.rand(5, 3000), torch.rand(5).double()
    yield lambda: sample(p, uniforms)
    drafts, start = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 3, 3], dtype=torch.int32)
    for q in (p[:3], None):
        yield lambda q=q: rejection(drafts, start, q, p, uniforms[:3], uniforms)


def main(architectures: list[int], dtypes: list[torch.dtype]) -> None:
    """Compile everything for every GPU named."""
    for architecture in architectures:
        machine.capability = lambda: (architecture // 10, architecture % 10)  # noqa: B023
        machine.num_sms, machine.gpu_name = lambda: 100, lambda: "none"
        dispatch.triton_runs = lambda kind, oldest_gpu: True
        triton.JITFunction.run = compile_instead(GPUTarget("cuda", architecture, 32), set())
        for launch in [
            *choices(),
            *(one for dtype in dtypes for one in launches(dtype)),
            *(one for dtype in dtypes for one in whole_steps(dtype)),
        ]:
            launch()


if __name__ == "__main__":
    chosen = [getattr(torch, name) for name in sys.argv[1:] if not name.isdigit()]
    main([int(name) for name in sys.argv[1:] if name.isdigit()], chosen or [torch.float16])
