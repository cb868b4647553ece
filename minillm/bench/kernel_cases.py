"""The cases of `bench kernels`: one op, at one size, in every implementation that runs on the device.

Bytes are *modelled*: the minimum that an op must read and write, by the formula in the header of its file. An
implementation with intermediate tensors moves more, so its reported bandwidth is intentionally low.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm.batch import Segment, tree_masks
from minillm.bench import kernels_cpu
from minillm.models.config import ModelConfig
from minillm.ops import dispatch
from minillm.ops.dispatch import interpreted, op

REFERENCE, PYTORCH, COMPILED, TRITON = "reference", "pytorch", "compiled", "triton"
KNOWN = (REFERENCE, PYTORCH, COMPILED, TRITON)
"""`reference`: plain PyTorch, which all others are tested against. `pytorch`: a faster PyTorch implementation that the
engine calls without an executor. `compiled`: the function of the compiled CPU step. `triton`: the GPU kernel."""
DECODE, VERIFY, PREFILL = 1, 5, 256
TOKENS = (DECODE, VERIFY, PREFILL)
HOST_SYNC_OPS = frozenset({"store_kv"})
"""Ops whose reference reads values on the host, which a CUDA graph cannot record."""


@dataclass(frozen=True)
class Setting:
    """The model whose shapes are measured, the device and the sizes."""

    shape: str
    """Name of the model: `minicoder`, `0.4b`."""
    config: ModelConfig
    device: str
    dtype: torch.dtype
    """Dtype of activations, and of weights and KV caches that are not quantised."""
    cache_bytes: int
    """Size of the last-level cache. Data that must come from memory must be several times larger."""
    tokens: tuple[int, ...] = TOKENS
    contexts: tuple[int, ...] = (64, 512, 2000)

    @property
    def on_cpu(self) -> bool:
        """Whether the compiled step's functions can run in this setting."""
        return self.device == "cpu" and self.dtype == torch.float32 and not interpreted()

    def random(self, *shape: int) -> Tensor:
        """Normally distributed random numbers."""
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def copies(self, num_bytes: int) -> int:
        """How many copies of `num_bytes` are twice the last-level cache, at least 2; 1 if that is more than 512."""
        wanted = max(2, -(-2 * self.cache_bytes // num_bytes))
        return wanted if wanted <= 512 else 1


@dataclass(frozen=True)
class Implementation:
    """One implementation of an op. It has either a Python function `call` or a compiled `loop`."""

    call: Callable[[int], Any] | None = None
    """`call(copy)` runs the op once on that copy of the inputs, and returns the result."""
    loop: Callable[[int, int, int], Any] | None = None
    """`loop(count, first, copies)`: see `kernels_cpu`."""
    result: Callable[[], Any] | None = None
    """Returns the result of the last run, if `call` does not return it."""
    can_be_captured: bool = True
    """Whether a CUDA graph can record its call."""
    num_bytes: int | None = None
    """Modelled bytes, if this implementation stores its inputs in a wider format than the others."""
    limit: float | None = None
    """Largest allowed relative error in norm, if it differs from the limit of its dtype."""

    def once(self) -> Tensor:
        """Run the op once on the first copy. Returns the result."""
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
    """Storage format of the weights or the KV cache; empty if the op reads neither."""
    shape: str
    tokens: int
    context: int | None
    """Number of cached tokens, for attention."""
    num_bytes: int
    """Modelled bytes: the minimum that the op must move."""
    operations: int | None
    """Multiplications and additions; None if the op is never bound by them."""
    copies: int
    """Number of copies of the data read from memory, together larger than the last-level cache; 1: only warm times."""
    implementations: Mapping[str, Implementation]
    touched: tuple[Tensor, ...] = field(default=(), repr=False)
    """The tensors that a call reads or writes, which `num_bytes` counts once each."""

    @property
    def name(self) -> str:
        """For example `paged_attention int8, 5 tokens after 512 (0.4b)`."""
        what = f"{self.op} {self.kind}".strip()
        past = "" if self.context is None else f" after {self.context}"
        return f"{what}, {self.tokens} token{'s' if self.tokens != 1 else ''}{past} ({self.shape})"


@dataclass(frozen=True)
class Maker:
    """A function that builds a case."""

    op: str
    make: Callable[[], Case]


def from_dispatch(
    name: str, device: str, call: Callable[..., Any], result: Callable[[], Any] | None = None
) -> dict[str, Implementation]:
    """The reference and, on a GPU, the kernel. `call(function, copy)` calls either. `result`: see `Implementation`.

    On a CPU with `TRITON_INTERPRET` set, the kernel runs in Triton's interpreter. That is for checks, not for timing.
    """
    known = dispatch.implementations(name, device)
    return {
        which: Implementation(
            partial(call, op(name, device, which)),
            result=result,
            can_be_captured=which != REFERENCE or name not in HOST_SYNC_OPS,
        )
        for which in (REFERENCE, TRITON)
        if which in known
    }


def small_cases(s: Setting) -> list[Maker]:
    """The cases that read only activations: norms, RoPE, gates, sampling. In a step their data is in the caches."""
    few = [n for n in s.tokens if n < PREFILL]  # of a prompt, only the last token needs logits
    several = [n for n in few if n > 1]
    tokens_of = {
        **dict.fromkeys((rms_norm, add_rms_norm, rope, silu_gate), s.tokens),
        **dict.fromkeys((argmax, sample, all_finite, advance), few),
        rejection: several,
    }
    return [Maker(make.__name__, partial(make, s, n)) for make, tokens in tokens_of.items() for n in tokens]


def rms_norm(s: Setting, tokens: int) -> Case:
    """Moves rows of the hidden size: reads x and the weight, writes y."""
    x, weight = s.random(tokens, s.config.hidden_size), s.random(s.config.hidden_size)
    implementations = from_dispatch("rms_norm", s.device, lambda f, copy: f(x, weight, 1e-5))
    if s.on_cpu:
        out = torch.empty_like(x)
        arrays = (_flat(x), *x.shape, _flat(weight), np.float32(1e-5), _flat(out))
        implementations[COMPILED] = _looped(lambda n: kernels_cpu.rms_norm_loop(n, *arrays), out)
    return _small(s, "rms_norm", tokens, 2 * x.nbytes + weight.nbytes, implementations, (x, weight, x))


def add_rms_norm(s: Setting, tokens: int) -> Case:
    """Reads x, the residual and the weight, writes two tensors. (The compiled step fuses the add into the product.)"""
    x, residual = (s.random(tokens, s.config.hidden_size) for _ in range(2))
    weight = s.random(s.config.hidden_size)
    implementations = from_dispatch("add_rms_norm", s.device, lambda f, copy: f(x, residual, weight, 1e-5))
    return _small(s, "add_rms_norm", tokens, 4 * x.nbytes + weight.nbytes, implementations, (x, x, x, x, weight))


def rope(s: Setting, tokens: int) -> Case:
    """All query and key heads: reads x and a row of each table per token, writes x."""
    c = s.config
    x = s.random(tokens, c.num_heads + c.num_kv_heads, c.head_dim)
    angles = torch.rand(tokens, 1, c.head_dim // 2, device=s.device) * 6
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(s.dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(s.dtype)
    implementations = from_dispatch("rope", s.device, lambda f, copy: f(x, cos, sin))
    if s.on_cpu:
        rotated = x.clone()  # the loop rotates in place
        arrays = (_flat(rotated), *x.shape, _flat(cos), _flat(sin))
        implementations[COMPILED] = _looped(lambda n: kernels_cpu.rope_loop(n, *arrays), rotated)
    return _small(s, "rope", tokens, 2 * x.nbytes + cos.nbytes + sin.nbytes, implementations, (x, x, cos, sin))


def silu_gate(s: Setting, tokens: int) -> Case:
    """Reads two values for each value that it writes."""
    x, out = s.random(tokens, 2 * s.config.intermediate_size), s.random(tokens, s.config.intermediate_size)
    implementations = from_dispatch("silu_gate", s.device, lambda f, copy: f(x))
    if s.on_cpu:
        arrays = (_flat(x), *out.shape, _flat(out))
        implementations[COMPILED] = _looped(lambda n: kernels_cpu.silu_gate_loop(n, *arrays), out)
    return _small(s, "silu_gate", tokens, x.nbytes + out.nbytes, implementations, (x, out))


def argmax(s: Setting, tokens: int) -> Case:
    """Reads the logits once."""
    logits = s.random(tokens, s.config.vocab_size)
    implementations = from_dispatch("argmax", s.device, lambda f, copy: f(logits))
    if s.on_cpu:
        out = torch.empty(tokens, dtype=torch.int64)
        arrays = (_flat(logits), *logits.shape, _flat(out))
        implementations[COMPILED] = _looped(lambda n: kernels_cpu.argmax_loop(n, *arrays), out)
    return _small(s, "argmax", tokens, logits.nbytes, implementations, (logits,))


def all_finite(s: Setting, tokens: int) -> Case:
    """Reads the logits once."""
    logits = s.random(tokens, s.config.vocab_size)
    implementations = from_dispatch("all_finite", s.device, lambda f, copy: f(logits))
    return _small(s, "all_finite", tokens, logits.nbytes, implementations, (logits,))


def advance(s: Setting, tokens: int) -> Case:
    """`tokens` requests with one token each: reads a length and a block-table entry, writes the length and a slot."""
    lengths = torch.arange(100, 100 + tokens, device=s.device)
    tables = torch.arange(tokens * 64, device=s.device).view(tokens, 64)
    implementations = from_dispatch("advance", s.device, lambda f, copy: f(lengths, tables, 16))
    return _small(s, "advance", tokens, 4 * lengths.nbytes, implementations, (lengths, lengths, lengths, tables[:, 0]))


def sample(s: Setting, tokens: int) -> Case:
    """Reads the probabilities once. The kernel reads them again up to the chosen token, which is not counted."""
    probs = torch.rand(tokens, s.config.vocab_size, device=s.device)
    uniforms = torch.rand(tokens, dtype=torch.float64, device=s.device)
    implementations = from_dispatch("sample", s.device, lambda f, copy: f(probs, uniforms))
    return _small(s, "sample", tokens, probs.nbytes, implementations, (probs,))


def rejection(s: Setting, tokens: int) -> Case:
    """One request whose last draft is rejected and all others accepted: reads one row of p and one of q."""
    drafts, vocab = tokens - 1, s.config.vocab_size
    probs = torch.rand(tokens, vocab, device=s.device).softmax(-1)
    q = probs[:-1].roll(1, -1).contiguous()
    start = torch.tensor([0, drafts], dtype=torch.int32, device=s.device)
    uniforms = torch.full((2, tokens), 0.5, dtype=torch.float64, device=s.device)
    ids = torch.arange(drafts, device=s.device)
    uniforms[0, :drafts] = torch.tensor([0.0] * (drafts - 1) + [1.0], device=s.device)  # the last one is rejected
    arguments = (ids, start, q, probs, uniforms[0, :drafts], uniforms[1])
    implementations = from_dispatch("rejection", s.device, lambda f, copy: f(*arguments))
    return _small(s, "rejection", tokens, 2 * probs[0].nbytes, implementations, (probs[0], q[0]))


def chain(tokens: int, device: str) -> Tensor:
    """The masks of a draft tree that is a chain."""
    segment = Segment([0] * tokens, 0, [0], parents=range(-1, tokens - 2))
    return torch.tensor(tree_masks([segment]), device=device)


def _small(
    s: Setting,
    name: str,
    tokens: int,
    num_bytes: int,
    implementations: dict[str, Implementation],
    touched: tuple[Tensor, ...],
) -> Case:
    return Case(name, "", s.shape, tokens, None, num_bytes, None, 1, implementations, touched)


def _looped(run: Callable[[int], Any], out: Tensor) -> Implementation:
    """A compiled loop with only one copy of its inputs."""
    return Implementation(loop=lambda count, first, copies: run(count), result=lambda: out)


def _flat(x: Tensor) -> Any:
    return x.numpy().reshape(-1)
