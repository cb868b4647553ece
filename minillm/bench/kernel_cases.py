"""What `bench kernels` measures: one op, at one size, in every implementation that runs on the device.

Bytes are *modelled*: what an op must read and write at least, by the formula in the header of its file. An
implementation that makes intermediate tensors moves more, and its bandwidth comes out low; that is the point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm.bench import kernels_cpu
from minillm.models.config import ModelConfig
from minillm.ops.dispatch import implementations, interpreted, op
from minillm.ops.tree_attention import tree_masks

REFERENCE, PYTORCH, COMPILED, TRITON = "reference", "pytorch", "compiled", "triton"
KNOWN = (REFERENCE, PYTORCH, COMPILED, TRITON)
"""`reference`: plain PyTorch, what all are tested against. `pytorch`: what the engine calls where no executor runs, if
that is something faster. `compiled`: the function of the compiled CPU step. `triton`: the GPU's kernel."""
DECODE, VERIFY, PREFILL = 1, 5, 256
TOKENS = (DECODE, VERIFY, PREFILL)
WAITS = frozenset({"store_kv"})
"""Ops whose reference looks at numbers on the host: no graph can hold that."""


@dataclass(frozen=True)
class Setting:
    """Whose shapes, and where."""

    shape: str
    """What the shapes are called: `minicoder`, `0.4b`."""
    config: ModelConfig
    device: str
    dtype: torch.dtype
    """Of activations, and of weights and caches that are not quantised."""
    cache_bytes: int
    """Size of the last cache: what is to come from memory must be several times larger."""
    tokens: tuple[int, ...] = TOKENS
    contexts: tuple[int, ...] = (64, 512, 2000)

    @property
    def on_cpu(self) -> bool:
        """Whether the compiled step's functions run here."""
        return self.device == "cpu" and self.dtype == torch.float32 and not interpreted()

    def random(self, *shape: int) -> Tensor:
        """Numbers of ordinary size."""
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def copies(self, num_bytes: int, most: int = 512) -> int:
        """How many copies of so many bytes are twice the last cache, two at least; 1 if that takes more than `most`."""
        wanted = max(2, -(-2 * self.cache_bytes // num_bytes))
        return wanted if wanted <= most else 1


@dataclass(frozen=True)
class Implementation:
    """One way of doing an op. It has a `call` from Python, or a `loop` of compiled code."""

    call: Callable[[int], Any] | None = None
    """`call(copy)` does it once on that copy of the inputs, and returns the result."""
    loop: Callable[[int, int, int], Any] | None = None
    """`loop(count, first, copies)`."""
    result: Callable[[], Any] | None = None
    """What the last run left, if that is not what `call` returns."""
    records: bool = True
    """Whether a CUDA graph can hold its call."""
    num_bytes: int | None = None
    """If this one keeps its inputs in a wider format than the others."""
    limit: float | None = None
    """How far it may be from the reference, relative in norm, if that is not what its dtype says."""

    def once(self) -> Tensor:
        """The result for the first copy."""
        if self.call is not None:
            found = self.call(0)
        else:
            assert self.loop is not None
            found = self.loop(1, 0, 1)
        found = found if self.result is None else self.result()
        return (found[0] if isinstance(found, tuple) else found).clone()


@dataclass(frozen=True)
class Case:
    """One op at one size."""

    op: str
    kind: str
    """Of the weights or the cache; empty where there is neither."""
    shape: str
    tokens: int
    context: int | None
    """Tokens cached before, for attention."""
    num_bytes: int
    """What it must move at least."""
    operations: int | None
    """Multiplications and additions, where they matter."""
    copies: int
    """Of what is read from memory, together larger than the last cache; 1: only measured warm."""
    ways: Mapping[str, Implementation]
    touched: tuple[Tensor, ...] = field(default=(), repr=False)
    """What a call reads and writes, once each: the tensors that `num_bytes` counts."""

    @property
    def name(self) -> str:
        """Such as `paged_attention int8, 5 tokens after 512 (0.4b)`."""
        what = f"{self.op} {self.kind}".strip()
        past = "" if self.context is None else f" after {self.context}"
        return f"{what}, {self.tokens} token{'s' if self.tokens != 1 else ''}{past} ({self.shape})"


@dataclass(frozen=True)
class Maker:
    """A case that is not made yet."""

    op: str
    make: Callable[[], Case]


def from_dispatch(
    name: str, device: str, call: Callable[..., Any], result: Callable[[], Any] | None = None
) -> dict[str, Implementation]:
    """The reference and, on a GPU, the kernel; `call(function, copy)` calls it. See `Implementation.result`.

    On a CPU kernels run in Triton's interpreter if the environment asks for it. That is for checking them, and whoever
    measures must not ask for it.
    """
    able = [way for way in (REFERENCE, TRITON) if way in implementations(name, device)]
    return {
        way: Implementation(
            partial(call, op(name, device, way)), result=result, records=way != REFERENCE or name not in WAITS
        )
        for way in able
    }


def small_cases(s: Setting) -> list[Maker]:
    """What moves activations only: norms, RoPE, gates, choosing tokens. In a step all of it is in the caches."""
    few = [n for n in s.tokens if n < PREFILL]  # logits are wanted for the last token of a prompt only
    several = [n for n in few if n > 1]
    tokens_of = {
        **dict.fromkeys((rms_norm, add_rms_norm, rope, silu_gate), s.tokens),
        **dict.fromkeys((argmax, sample, all_finite, advance), few),
        rejection: several,
    }
    return [Maker(make.__name__, partial(make, s, n)) for make, tokens in tokens_of.items() for n in tokens]


def rms_norm(s: Setting, tokens: int) -> Case:
    """Rows of the hidden size: x in, y out, the weight."""
    x, weight = s.random(tokens, s.config.hidden_size), s.random(s.config.hidden_size)
    ways = from_dispatch("rms_norm", s.device, lambda f, copy: f(x, weight, 1e-5))
    if s.on_cpu:
        out = torch.empty_like(x)
        arrays = (_flat(x), *x.shape, _flat(weight), np.float32(1e-5), _flat(out))
        ways[COMPILED] = _looped(lambda n: kernels_cpu.rms_norm_loop(n, *arrays), out)
    return _small(s, "rms_norm", tokens, 2 * x.nbytes + weight.nbytes, ways, (x, weight, x))


def add_rms_norm(s: Setting, tokens: int) -> Case:
    """With the residual: two in, two out. (The compiled step adds in the product before.)"""
    x, residual = (s.random(tokens, s.config.hidden_size) for _ in range(2))
    weight = s.random(s.config.hidden_size)
    ways = from_dispatch("add_rms_norm", s.device, lambda f, copy: f(x, residual, weight, 1e-5))
    return _small(s, "add_rms_norm", tokens, 4 * x.nbytes + weight.nbytes, ways, (x, x, x, x, weight))


def rope(s: Setting, tokens: int) -> Case:
    """All query and key heads: x in and out, a row of the tables for each token."""
    c = s.config
    x = s.random(tokens, c.num_heads + c.num_kv_heads, c.head_dim)
    angles = torch.rand(tokens, 1, c.head_dim // 2, device=s.device) * 6
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(s.dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(s.dtype)
    ways = from_dispatch("rope", s.device, lambda f, copy: f(x, cos, sin))
    if s.on_cpu:
        own = x.clone()
        arrays = (_flat(own), *x.shape, _flat(cos), _flat(sin))
        ways[COMPILED] = _looped(lambda n: kernels_cpu.rope_loop(n, *arrays), own)
    return _small(s, "rope", tokens, 2 * x.nbytes + cos.nbytes + sin.nbytes, ways, (x, x, cos, sin))


def silu_gate(s: Setting, tokens: int) -> Case:
    """Two numbers in, one out."""
    x, out = s.random(tokens, 2 * s.config.intermediate_size), s.random(tokens, s.config.intermediate_size)
    ways = from_dispatch("silu_gate", s.device, lambda f, copy: f(x))
    if s.on_cpu:
        arrays = (_flat(x), *out.shape, _flat(out))
        ways[COMPILED] = _looped(lambda n: kernels_cpu.silu_gate_loop(n, *arrays), out)
    return _small(s, "silu_gate", tokens, x.nbytes + out.nbytes, ways, (x, out))


def argmax(s: Setting, tokens: int) -> Case:
    """The logits once."""
    logits = s.random(tokens, s.config.vocab_size)
    ways = from_dispatch("argmax", s.device, lambda f, copy: f(logits))
    if s.on_cpu:
        out = torch.empty(tokens, dtype=torch.int64)
        arrays = (_flat(logits), *logits.shape, _flat(out))
        ways[COMPILED] = _looped(lambda n: kernels_cpu.argmax_loop(n, *arrays), out)
    return _small(s, "argmax", tokens, logits.nbytes, ways, (logits,))


def all_finite(s: Setting, tokens: int) -> Case:
    """The logits once."""
    logits = s.random(tokens, s.config.vocab_size)
    ways = from_dispatch("all_finite", s.device, lambda f, copy: f(logits))
    return _small(s, "all_finite", tokens, logits.nbytes, ways, (logits,))


def advance(s: Setting, tokens: int) -> Case:
    """So many requests with one token each: a length in and out, an entry of a block table, a slot."""
    lengths = torch.arange(100, 100 + tokens, device=s.device)
    tables = torch.arange(tokens * 64, device=s.device).view(tokens, 64)
    ways = from_dispatch("advance", s.device, lambda f, copy: f(lengths, tables, 16))
    return _small(s, "advance", tokens, 4 * lengths.nbytes, ways, (lengths, lengths, lengths, tables[:, 0]))


def sample(s: Setting, tokens: int) -> Case:
    """The probabilities once; up to the chosen token they are read again, which depends on the token."""
    probs = torch.rand(tokens, s.config.vocab_size, device=s.device)
    uniforms = torch.rand(tokens, dtype=torch.float64, device=s.device)
    ways = from_dispatch("sample", s.device, lambda f, copy: f(probs, uniforms))
    return _small(s, "sample", tokens, probs.nbytes, ways, (probs,))


def rejection(s: Setting, tokens: int) -> Case:
    """One request whose drafts are all accepted up to the last: one row of p and one of q."""
    drafts, vocab = tokens - 1, s.config.vocab_size
    probs = torch.rand(tokens, vocab, device=s.device).softmax(-1)
    q = probs[:-1].roll(1, -1).contiguous()
    start = torch.tensor([0, drafts], dtype=torch.int32, device=s.device)
    uniforms = torch.full((2, tokens), 0.5, dtype=torch.float64, device=s.device)
    ids = torch.arange(drafts, device=s.device)
    uniforms[0, :drafts] = torch.tensor([0.0] * (drafts - 1) + [1.0], device=s.device)  # the last one is rejected
    arguments = (ids, start, q, probs, uniforms[0, :drafts], uniforms[1])
    ways = from_dispatch("rejection", s.device, lambda f, copy: f(*arguments))
    return _small(s, "rejection", tokens, 2 * probs[0].nbytes, ways, (probs[0], q[0]))


def chain(tokens: int, device: str) -> Tensor:
    """The masks of a draft tree that is a chain; bit 63 is the sign."""
    masks = tree_masks(list(range(-1, tokens - 1)))
    return torch.tensor([mask - (mask >> 63 << 64) for mask in masks], device=device)


def _small(
    s: Setting, name: str, tokens: int, num_bytes: int, ways: dict[str, Implementation], touched: tuple[Tensor, ...]
) -> Case:
    return Case(name, "", s.shape, tokens, None, num_bytes, None, 1, ways, touched)


def _looped(run: Callable[[int], Any], out: Tensor) -> Implementation:
    """A compiled loop over the same inputs."""
    return Implementation(loop=lambda count, first, copies: run(count), result=lambda: out)


def _flat(x: Tensor) -> Any:
    return x.numpy().reshape(-1)
