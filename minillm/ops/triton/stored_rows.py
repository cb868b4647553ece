"""The cached keys or values of a layer, as the attention kernel takes them: floats, or codes with scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minillm.errors import UnsupportedError
from minillm.ops.store_kv import code_bits


class QuantizedRows(Protocol):
    """Keys or values of one layer in a quantised cache (`cache.base.DequantizedRows`)."""

    pools: Sequence[Tensor]
    """INT8: codes `[slots, KV heads, dim]`, scales `[slots, KV heads]`. INT4: packed codes `[slots, KV heads,
    dim / 2]`, then scales and zero points `[slots, KV heads, groups]`."""
    shape: tuple[int, int, int]
    """`(slots, KV heads, dim)`."""


def check_contiguous(pools: Sequence[Tensor]) -> None:
    """Raise `UnsupportedError` for strided pools: kernels compute addresses from the shape."""
    if not all(pool.is_contiguous() for pool in pools):
        raise UnsupportedError(
            "the pools of a layer must be contiguous; pass whole pools of one layer, not strided views"
        )


@dataclass(frozen=True)
class KernelPools:
    """The pools of keys or values as the kernel takes them."""

    bits: int
    """Bits of a code: 8 or 4; 0 where floats are stored."""
    pools: tuple[Tensor, Tensor, Tensor]
    """Codes or floats, scales, zero points. Where a format has no scales or zero points, the first pool is repeated.
    Codes are viewed as words of several codes each, the first channel in the lowest bits."""
    channels: int
    """Channels per INT4 group; 1 in other formats."""
    planes: int
    """Codes per word: 16 bits hold 2 INT8 or 4 INT4 codes. Half as many if these do not divide the head size."""

    @classmethod
    def of(cls, rows: Tensor | QuantizedRows) -> KernelPools:
        """Detect the format by the dtypes. Raises `UnsupportedError` for an unknown format or non-contiguous pools."""
        pools = (rows,) if isinstance(rows, Tensor) else tuple(getattr(rows, "pools", ()))
        if not pools:
            raise UnsupportedError(
                f"the kernel reads pools of floats, INT8 or INT4 codes, and {type(rows).__name__} has none; use the "
                "reference of paged_attention with this cache layout"
            )
        bits, first = code_bits(pools), pools[0]
        check_contiguous(pools)
        channels = rows.shape[2] // pools[1].shape[2] if bits == 4 else 1
        planes = 1
        if bits:
            planes = 16 // bits if rows.shape[2] % (16 // bits) == 0 else 8 // bits
            pools = (first.view(torch.int16) if planes * bits == 16 else first, *pools[1:])
        return cls(bits, (*pools, first, first)[:3], channels, planes)
