"""Small whole numbers side by side in bytes: two of 4 bits fill one byte, eight of 3 bits fill three.

A row is a stream of bits, lowest first: the number at column i owns the bits [i·b, (i+1)·b) of its row. With 4 bits the
even column is therefore the low half of its byte and the odd column the high half. What is left over in the last byte
of a row is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

BITS = (2, 3, 4)
"""The widths that can be packed."""


def packed_width(count: int, bits: int) -> int:
    """Bytes that `count` numbers of `bits` bits need."""
    return -(-count * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """`codes`: `[..., count]` uint8, each below 2^`bits` → `[..., packed_width(count, bits)]` uint8."""
    count = codes.shape[-1]
    if bits == 4:
        codes = F.pad(codes, (0, count % 2))
        return codes[..., ::2] | codes[..., 1::2] << 4
    # Eight numbers of b bits are exactly b bytes, and together fit one integer of 64 bits.
    eights = F.pad(codes, (0, -count % 8)).unflatten(-1, (-1, 8)).long()
    words = (eights << _steps(8, bits, codes.device)).sum(-1, keepdim=True)
    found = (words >> _steps(bits, 8, codes.device) & 255).to(torch.uint8)
    return found.flatten(-2)[..., : packed_width(count, bits)].contiguous()


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The `count` numbers in each row of `packed` (see `pack`): `[..., count]` uint8."""
    if bits == 4:
        return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :count]
    groups = F.pad(packed, (0, -packed.shape[-1] % bits)).unflatten(-1, (-1, bits)).long()
    words = (groups << _steps(bits, 8, packed.device)).sum(-1, keepdim=True)
    codes = (words >> _steps(8, bits, packed.device) & (1 << bits) - 1).to(torch.uint8)
    return codes.flatten(-2)[..., :count]


def _steps(count: int, size: int, device: torch.device) -> Tensor:
    return torch.arange(0, count * size, size, device=device)
