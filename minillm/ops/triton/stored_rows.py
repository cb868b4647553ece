"""What a layer's cache holds, as the attention kernel takes it: floats, or codes with what makes numbers of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from minillm.errors import UnsupportedError
from minillm.ops.store_kv import code_bits


class StoredRows(Protocol):
    """Keys or values of one layer as a quantised cache holds them (`cache.paged_quantized.DequantizedRows`)."""

    pools: Sequence[Tensor]
    """INT8: codes `[slots, KV heads, dim]`, scales `[slots, KV heads]`. INT4: packed codes `[slots, KV heads,
    dim / 2]`, then scales and zero points `[slots, KV heads, groups]`."""
    shape: tuple[int, int, int]
    """`(slots, KV heads, dim)`."""


@dataclass(frozen=True)
class Stored:
    """The pools of keys or values as the kernel takes them."""

    bits: int
    """Of a code: 8, 4, or 0 where floats are stored."""
    pools: tuple[Tensor, Tensor, Tensor]
    """Codes or numbers, scales, zero points; the first stands in for what a format lacks."""
    channels: int
    """Of an INT4 group."""

    @classmethod
    def of(cls, rows: Tensor | StoredRows) -> Stored:
        """Tell the format by the dtypes. Raises `UnsupportedError` for one that no cache has, or pools with gaps."""
        pools = (rows,) if isinstance(rows, Tensor) else tuple(rows.pools)
        bits, first = code_bits(pools), pools[0]
        if not all(pool.is_contiguous() for pool in pools):
            raise UnsupportedError(
                "the pools of a layer must lie whole in memory; give the kernel one layer's, not views"
            )
        channels = rows.shape[2] // pools[1].shape[2] if bits == 4 else 1
        return cls(bits, (*pools, first, first)[:3], channels)
