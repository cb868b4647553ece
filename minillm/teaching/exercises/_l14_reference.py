"""Lesson 14, the references: load or compute, the split of a transfer, moving keys, and what of a store may be used."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.teaching.workshop.l14_store import Key


def break_even_tokens(kv_bytes: float, bandwidth: float, latency: float, seconds_per_token: float) -> float:
    """Return the number of tokens, not rounded, from which on loading keys and values is faster than computing them;
    `math.inf` if it never is.

    Loading takes `latency` seconds and, for each token, `kv_bytes` over a link of `bandwidth` bytes per second.
    Computing takes `seconds_per_token`.
    """
    saved = seconds_per_token - kv_bytes / bandwidth
    return latency / saved if saved > 0 else math.inf


def best_split(
    num_tokens: int, kv_bytes: float, hidden_bytes: float, bandwidth: float, seconds_per_token: float
) -> int:
    """Return how many tokens l to recompute, the fewest of equals, so that the transfer takes the least time:

    T(l) = l · hidden_bytes / bandwidth + max(l · seconds_per_token, (num_tokens - l) · kv_bytes / bandwidth)

    (KVPR, Jiang et al. 2024.)
    """
    if hidden_bytes >= kv_bytes:
        return 0
    balance = num_tokens * kv_bytes / (seconds_per_token * bandwidth + kv_bytes)

    def seconds(split: int) -> float:
        rest = (num_tokens - split) * kv_bytes / bandwidth
        return split * hidden_bytes / bandwidth + max(split * seconds_per_token, rest)

    return min(math.floor(balance), math.ceil(balance), key=seconds)


def rerotate(keys: Tensor, frequencies: Tensor, delta: int) -> Tensor:
    """Return the keys, which were rotated for their positions, as they are `delta` positions further on.

    `keys`: `[..., head_dim]`; channel i is rotated with channel i + head_dim / 2. `frequencies`: `[head_dim / 2]`, the
    angle per position.
    """
    angles = delta * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = keys.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def find_entry(entries: Sequence[Key], wanted: Key) -> tuple[int, int, bool] | None:
    """Return (index of the entry to use, positions by which its keys move, whether it is exact), or None to compute.

    Text, model, dtype and format must be those that are wanted. An entry is exact if the same tokens were before it.
    The first exact entry, otherwise the first usable one.
    """
    same = (wanted.text, wanted.model, wanted.dtype, wanted.format)
    usable = [i for i, e in enumerate(entries) if (e.text, e.model, e.dtype, e.format) == same]
    for i in usable:
        if entries[i].before == wanted.before:
            return i, 0, True
    return (usable[0], wanted.start - entries[usable[0]].start, False) if usable else None
