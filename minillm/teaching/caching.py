"""Lesson 2's experiments with a KV cache: which keys stay the same, and what growing a buffer costs one layer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.bench.timing import Spread, ratio, time_in_turn
from minillm.models.decoder import Decoder

HEADS, GROUP, WIDTH = 8, 4, 128
"""One attention layer of Llama-3-8B: KV heads, query heads per KV head, head_dim."""

Append = Callable[[Tensor, Tensor, int, Tensor, Tensor], tuple[Tensor, Tensor]]
NextCapacity = Callable[[int, int, int, int], tuple[int, int]]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q·k/√d)·v over the keys where `mask` (`[num_queries, num_keys]`) is True.

    q, k, v and the result are `[tokens, heads, width]`.
    """
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1)


class KeyRecorder:
    """Attention within one forward that records the keys of each layer."""

    def __init__(self, causal: bool) -> None:
        self.causal = causal
        self.keys: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: object = None) -> Tensor:
        """Causal attention; with `causal=False` every token attends to every token."""
        self.keys.append(k)
        full_mask = torch.ones(len(q), len(q), dtype=torch.bool)
        return attention(q, k, v, full_mask.tril() if self.causal else full_mask)


def changed_keys(model: Decoder, ids: Sequence[int], num_old: int, causal: bool) -> list[int]:
    """For each layer, how many keys of the first `num_old` tokens change when the other `ids` follow them."""
    recorders = []
    for length in (num_old, len(ids)):
        recorders.append(KeyRecorder(causal))
        model(torch.tensor(ids[:length]), torch.arange(length), recorders[-1])
    pairs = zip(recorders[0].keys, recorders[1].keys, strict=True)
    return [int(((short - long[:num_old]).abs().amax((1, 2)) > 1e-3).sum()) for short, long in pairs]


def decode_layer(next_capacity: NextCapacity, append: Append, every: int, num_steps: int, view: bool) -> None:
    """`num_steps` decode steps of one attention layer, whose buffers grow by `next_capacity` with r = `every`.

    With `view` attention runs over the valid rows, otherwise over the whole buffer with its empty rows masked.
    """
    query, new_row = torch.ones(HEADS, GROUP, WIDTH), torch.ones(1, HEADS, WIDTH)
    keys = values = torch.zeros(0, HEADS, WIDTH)
    for past in range(num_steps):
        capacity, copied = next_capacity(len(keys), past, 1, every)
        if capacity > len(keys):
            keys, values = _grown(keys, capacity, copied), _grown(values, capacity, copied)
        valid_keys, valid_values = append(keys, values, past, new_row, new_row)
        k, v = (valid_keys, valid_values) if view else (keys, values)
        scores = query @ k.permute(1, 2, 0)  # [heads, group, rows]
        scores[..., past + 1 :] = -torch.inf  # empty rows; a view has none
        scores.softmax(-1) @ v.transpose(0, 1)


def _grown(old: Tensor, capacity: int, rows: int) -> Tensor:
    """A larger zeroed buffer (`[capacity, heads, width]`) with the first `rows` rows copied over."""
    new = torch.zeros(capacity, HEADS, WIDTH)
    new[:rows] = old[:rows]
    return new


@dataclass(frozen=True)
class GrowthCosts:
    """Measured times of `decode_layer` as ratios, and the three costs of the cost model in seconds."""

    num_steps: int
    relative_times: Mapping[tuple[str, int], Spread]
    """("whole" or "view", r) → time relative to one preallocated buffer with a view."""
    preallocated: float
    """Seconds with one preallocated buffer and a view."""
    copy: float
    pad: float
    allocation: float

    def best(self, kernel: str) -> int:
        """The r with the lowest measured time."""
        return min(
            (r for k, r in self.relative_times if k == kernel), key=lambda r: self.relative_times[kernel, r].median
        )

    def near_best(self, kernel: str) -> list[int]:
        """Every r within 10% of the fastest: on a busy machine, smaller differences mean nothing."""
        limit = 1.1 * self.relative_times[kernel, self.best(kernel)].median
        return [r for k, r in self.relative_times if k == kernel and self.relative_times[k, r].median <= limit]


def time_growth_policies(
    next_capacity: NextCapacity, append: Append, num_steps: int, grid: Sequence[int]
) -> GrowthCosts:
    """Time every r of `grid`, which begins with 1 and ends with `num_steps`, with both kernels, in turn.

    The two ends calibrate the cost model: r = 1 only copies, r = `num_steps` only pads.
    """
    runs = {
        (kernel, r): lambda r=r, kernel=kernel: decode_layer(next_capacity, append, r, num_steps, kernel == "view")
        for r in grid
        for kernel in ("whole", "view")
    }
    took = time_in_turn(runs, rounds=3)
    row = torch.ones(1, HEADS, WIDTH)
    once = statistics.median(time_in_turn({"new": lambda: (_grown(row, 1, 0), _grown(row, 1, 0))}, rounds=200)["new"])
    slower = {key: ratio(seconds, took["view", num_steps]) for key, seconds in took.items()}
    base, moved = statistics.median(took["view", num_steps]), num_steps**2 / 2
    return GrowthCosts(
        num_steps=num_steps,
        relative_times=slower,
        preallocated=base,
        copy=max(0.0, (slower["whole", 1].median - 1) * base - num_steps * once) / moved,
        pad=max(0.0, slower["whole", num_steps].median - 1) * base / moved,
        allocation=once,
    )
