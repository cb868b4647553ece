"""An offloaded cache comes back over a slow link, and part of it is recomputed meanwhile (KVPR: Jiang et al. 2024).

    link      activations 0 … l-1 │ keys and values l … n-1 ──────────────►
    compute                       │ keys and values 0 … l-1 ────────►

Keys and values of a request lie in memory behind a link (host memory behind PCIe, another machine). The inputs of the
model's layers, the *activations*, lie there, too. From them, keys and values follow by one projection per layer,
without attention and without the MLP: exactly, up to rounding. So the activations of the first l tokens cross first,
and while their keys and values are computed, those of the other n - l tokens cross. With k bytes of keys and values
and a bytes of activations per token, a link of B bytes/s and C seconds of computing per token:

    T(l) = l a / B + max(l C, (n - l) k / B)             least at l = n k / (C B + k), where both sides of max are equal

Wins: multi-head attention, where a = hidden is half of k = 2 · n_kv · d, and a slow link. Loses: grouped-query
attention. If a ≥ k, an activation takes as long to send as what it saves, T grows with l, and the best l is 0: so it is
for the bundled model (hidden 384 against 2 · 2 · 64 = 256) and for Llama 3. And the memory: activations are stored
beside keys and values.

The link here is throttled to a stated bandwidth, in a thread that sleeps; computing and copying do overlap. On a GPU
the same takes pinned memory and a stream for copies, which this file does not have.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from numbers import Integral, Real

import torch
from torch import Tensor, nn

from minillm.batch import Segment
from minillm.config import at_least
from minillm.errors import ConfigError, PromptError, UnsupportedError
from minillm.input_processor import check_token_ids
from minillm.llm import LLM
from minillm.models.decoder import DecoderLayer
from minillm.ops.linear import Linear
from minillm.ops.rms_norm import rms_norm
from minillm.ops.rope import rope
from minillm.reuse.kv_span import KVSpan
from minillm.reuse.scratch import Scratch


@dataclass(frozen=True)
class Interval:
    """Something that took from `start` to `end`, in seconds since the beginning of the transfer."""

    lane: str
    """`link` or `compute`."""
    name: str
    start: float
    end: float
    num_bytes: int = 0
    """Bytes that crossed the link."""


@dataclass(frozen=True)
class OffloadedCache:
    """What lies behind the link of one text: keys and values, and the inputs of the layers, in host memory."""

    span: KVSpan
    hidden: Tensor
    """`[num_layers, num_tokens, hidden]`."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values, over all layers."""
        return self.span.num_bytes // len(self.span.token_ids)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one token's activations, over all layers."""
        return self.hidden.nbytes // self.hidden.shape[1]


@dataclass
class Link:
    """A link of `bandwidth` bytes per second. Raises `ConfigError` if that is not above 0."""

    bandwidth: float
    num_bytes: int = 0
    """Bytes that have crossed it."""

    def __post_init__(self) -> None:
        if not isinstance(self.bandwidth, Real) or not 0 < self.bandwidth < math.inf:
            raise ConfigError(f"a link of {self.bandwidth!r} bytes/s carries nothing; give a finite number above 0")

    @torch.inference_mode()
    def send(self, *tensors: Tensor) -> list[Tensor]:
        """Copies of `tensors`, as late as a link of this bandwidth would have them."""
        began = time.perf_counter()
        copies = [tensor.clone() for tensor in tensors]
        crossed = sum(copy.nbytes for copy in copies)
        self.wait(began + crossed / self.bandwidth - time.perf_counter())
        self.num_bytes += crossed
        return copies

    def wait(self, seconds: float) -> None:
        """Sleep, where `seconds` is above 0."""
        if seconds > 0:
            time.sleep(seconds)


def transfer_seconds(
    split: float, num_tokens: int, kv_bytes: float, hidden_bytes: float, bandwidth: float, seconds_per_token: float
) -> float:
    """T(l) for `split` = l: seconds until keys and values of all `num_tokens` are there (KVPR, section 3).

    `kv_bytes`, `hidden_bytes`: of one token; `bandwidth`: bytes per second; `seconds_per_token`: of recomputing.
    """
    rest = (num_tokens - split) * kv_bytes / bandwidth
    return split * hidden_bytes / bandwidth + max(split * seconds_per_token, rest)


def best_split(
    num_tokens: int, kv_bytes: float, hidden_bytes: float, bandwidth: float, seconds_per_token: float
) -> int:
    """How many tokens to recompute so that `transfer_seconds` is least; the fewest of equals.

    Left of the balance T changes by (a - k) / B per token, right of it by a / B + C, which is above 0. So the balance
    is best if a < k, and 0 otherwise. Of the two whole numbers around it, the better one.
    """
    if hidden_bytes >= kv_bytes:
        return 0
    balance = num_tokens * kv_bytes / (seconds_per_token * bandwidth + kv_bytes)
    low, high = (
        transfer_seconds(split, num_tokens, kv_bytes, hidden_bytes, bandwidth, seconds_per_token)
        for split in (math.floor(balance), math.ceil(balance))
    )
    return math.floor(balance) if low <= high else math.ceil(balance)


@dataclass(frozen=True)
class Restored:
    """Keys and values that came back, and when what happened."""

    span: KVSpan
    timeline: list[Interval]

    @property
    def seconds(self) -> float:
        """Until all of them were there."""
        return max(interval.end for interval in self.timeline)


@dataclass
class Offloader:
    """Offloads and restores keys and values of `llm`.

    Raises `UnsupportedError` for an engine with compiled steps or quantised weights, whose layers cannot be run one by
    one, and what `Scratch` raises.
    """

    llm: LLM
    _layers: list[_KeyValueProjection] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        runner = self.llm.engine.runner
        model = runner.model
        if runner.executor is not None or not all(isinstance(layer.qkv_proj, nn.Linear) for layer in model.layers):
            raise UnsupportedError(
                "keys and values are recomputed layer by layer from unquantised weights in plain PyTorch; "
                "make the LLM from a full-precision checkpoint with enforce_eager=True and quantization=None"
            )
        Scratch(self.llm, 1)  # can its cache be read?
        self._layers = [_KeyValueProjection(layer) for layer in model.layers]

    @torch.inference_mode()
    def offload(self, token_ids: Sequence[int]) -> OffloadedCache:
        """Compute what is stored of a text. Raises `PromptError` if it has no token, `RequestTooLargeError` if it
        has too many."""
        if not len(token_ids):  # NumPy's arrays have no truth value
            raise PromptError("a text of 0 tokens has nothing to offload; give at least one")
        runner, inputs = self.llm.engine.runner, _LayerInputs()
        with Scratch(self.llm, len(token_ids)) as scratch:
            check_token_ids(token_ids, runner.model.config.vocab_size)
            hooks = [layer.register_forward_pre_hook(inputs) for layer in runner.model.layers]
            try:
                batch = runner.batch([Segment(list(token_ids), 0, scratch.blocks)])
                runner.model(batch.token_ids, batch.positions, runner.cache, batch)
            finally:
                for hook in hooks:
                    hook.remove()
            span = scratch.read(0, len(token_ids), token_ids)
        there = KVSpan(span.token_ids, 0, span.keys.cpu(), span.values.cpu())
        return OffloadedCache(there, torch.stack(inputs.seen).cpu())

    @torch.inference_mode()
    def recompute(self, hidden: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens at positions from `start` on: `[num_layers, num_tokens, hidden]` → twice
        `[num_layers, num_tokens, num_kv_heads, head_dim]`."""
        hidden = hidden.to(self.llm.engine.runner.device)
        positions = torch.arange(start, start + hidden.shape[1], device=hidden.device)
        cos, signed_sin = (table.to(hidden.dtype) for table in self.llm.engine.runner.model.rope(positions))
        pairs = [layer(x, cos, signed_sin) for layer, x in zip(self._layers, hidden, strict=True)]
        return torch.stack([keys for keys, _ in pairs]), torch.stack([values for _, values in pairs])

    def seconds_per_token(self, cache: OffloadedCache, rounds: int = 5) -> float:
        """The median time of `rounds` to recompute one of a text's tokens, measured over all of them. Raises
        `ConfigError` for less than one round."""
        at_least("rounds", rounds, 1)
        taken = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            keys, _ = self.recompute(cache.hidden)
            keys[0, 0, 0, 0].item()  # waits for a GPU
            taken.append((time.perf_counter() - began) / cache.hidden.shape[1])
        return statistics.median(taken[1:])

    def restore(self, cache: OffloadedCache, link: Link, split: int) -> Restored:
        """Bring keys and values back over `link`; those of the first `split` tokens are recomputed.

        Raises `ConfigError` for a split that is no integer from 0 to the number of tokens.
        """
        count, device = len(cache.span.token_ids), self.llm.engine.runner.device
        if not isinstance(split, Integral) or not 0 <= split <= count:
            raise ConfigError(f"split={split!r} of {count} tokens; give 0 (recompute none) to {count} (recompute all)")
        began, timeline = time.perf_counter(), []

        def send(name: str, *tensors: Tensor) -> list[Tensor]:
            start = time.perf_counter() - began
            copies = [copy.to(device) for copy in link.send(*tensors)]
            num_bytes = sum(copy.nbytes for copy in copies)
            timeline.append(Interval("link", name, start, time.perf_counter() - began, num_bytes))
            return copies

        keys, values = cache.span.keys, cache.span.values
        with ThreadPoolExecutor(1) as copier:
            parts: list[tuple[Tensor, Tensor]] = []
            hidden = send("activations", cache.hidden[:, :split])[0] if split else None
            rest = copier.submit(send, "keys and values", keys[:, split:], values[:, split:]) if split < count else None
            if hidden is not None:
                start = time.perf_counter() - began
                parts.append(self.recompute(hidden))
                timeline.append(Interval("compute", "recompute", start, time.perf_counter() - began))
            if rest is not None:
                sent = rest.result()
                parts.append((sent[0], sent[1]))
        joined = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        return Restored(KVSpan(cache.span.token_ids, 0, *joined), sorted(timeline, key=lambda part: part.start))


class _LayerInputs:
    """A hook that collects what goes into each layer."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self.seen.append(arguments[0])


class _KeyValueProjection:
    """The part of a decoder layer that leads from its input to keys and values: not the queries, which are a third or
    more of the product."""

    def __init__(self, layer: DecoderLayer) -> None:
        self.layer = layer
        q_size = layer.num_heads * layer.head_dim
        full = layer.qkv_proj
        self.projection = Linear(
            full.in_features, full.out_features - q_size, bias=full.bias is not None, device="meta"
        )
        self.projection.weight = nn.Parameter(full.weight[q_size:], requires_grad=False)
        if full.bias is not None:
            self.projection.bias = nn.Parameter(full.bias[q_size:], requires_grad=False)

    def __call__(self, x: Tensor, cos: Tensor, signed_sin: Tensor) -> tuple[Tensor, Tensor]:
        """`[num_tokens, hidden]` → keys and values, `[num_tokens, num_kv_heads, head_dim]` each."""
        layer = self.layer
        heads = self.projection(layer.input_norm(x)).view(len(x), 2, layer.num_kv_heads, layer.head_dim)
        keys, values = heads.unbind(1)
        if layer.k_norm is not None:
            keys = rms_norm(keys, layer.k_norm.weight, layer.k_norm.eps)
        return (rope(keys, cos, signed_sin) if layer.rotates else keys), values
