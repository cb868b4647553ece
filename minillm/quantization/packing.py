"""Packs small integers into bytes: two 4-bit codes fill one byte, eight 3-bit codes fill three.

A row is a stream of bits, lowest first: the code in column i occupies the bits [i·b, (i+1)·b) of its row. So with 4
bits the even column is the low half of its byte and the odd column the high half. Unused bits in the last byte of a row
are zero.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.ops.kv_quant import pack_int4, unpack_int4

BITS = (2, 3, 4)
"""The supported numbers of bits."""


def packed_width(count: int, bits: int) -> int:
    """Return the number of bytes for `count` codes of `bits` bits."""
    return -(-count * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """`codes`: `[..., count]` uint8, each below 2^`bits` → `[..., packed_width(count, bits)]` uint8."""
    count = codes.shape[-1]
    if bits == 4:
        return pack_int4(F.pad(codes, (0, count % 2)))
    # Eight codes of b bits are exactly b bytes, and fit into one 64-bit integer.
    eights = F.pad(codes, (0, -count % 8)).unflatten(-1, (-1, 8)).long()
    words = (eights << _offsets(8, bits, codes.device)).sum(-1, keepdim=True)
    packed = (words >> _offsets(bits, 8, codes.device) & 255).to(torch.uint8)
    return packed.flatten(-2)[..., : packed_width(count, bits)].contiguous()


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the `count` codes in each row of `packed` (see `pack`): `[..., count]` uint8."""
    if bits == 4:
        return unpack_int4(packed)[..., :count]
    groups = F.pad(packed, (0, -packed.shape[-1] % bits)).unflatten(-1, (-1, bits)).long()
    words = (groups << _offsets(bits, 8, packed.device)).sum(-1, keepdim=True)
    codes = (words >> _offsets(8, bits, packed.device) & (1 << bits) - 1).to(torch.uint8)
    return codes.flatten(-2)[..., :count]


def _offsets(count: int, size: int, device: torch.device) -> Tensor:
    """Return the bit offsets 0, size, … (count - 1) · size."""
    return torch.arange(0, count * size, size, device=device)
