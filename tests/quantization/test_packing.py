"""Packed codes come back as they were, and take the bytes that they should."""

from __future__ import annotations

import pytest
import torch

from minillm.quantization.packing import BITS, pack, packed_width, unpack


def test_every_pair_of_nibbles_is_its_own_byte() -> None:
    pairs = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)
    packed = pack(pairs, 4)
    assert packed.shape == (256, 1) and packed.flatten().unique().numel() == 256
    assert torch.equal(unpack(packed, 4, 2), pairs)


def test_the_even_column_is_the_low_half_of_its_byte() -> None:
    assert pack(torch.tensor([[0x3, 0xA]], dtype=torch.uint8), 4).tolist() == [[0xA3]]


def test_a_row_is_a_stream_of_bits_lowest_first() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0]], dtype=torch.uint8)
    stream = sum(code << 3 * i for i, code in enumerate(codes[0].tolist()))
    assert bytes(pack(codes, 3)[0].tolist()) == stream.to_bytes(3, "little")


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [1, 2, 3, 7, 8, 9, 15, 16, 17, 384])
def test_packing_is_undone_at_every_width(bits: int, width: int) -> None:
    codes = torch.randint(2**bits, (5, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(width))
    packed = pack(codes, bits)
    assert packed.shape == (5, packed_width(width, bits)) == (5, -(-width * bits // 8))
    assert torch.equal(unpack(packed, bits, width), codes)


@pytest.mark.parametrize("bits", BITS)
def test_every_code_survives_next_to_every_other(bits: int) -> None:
    codes = torch.cartesian_prod(*[torch.arange(2**bits)] * 3).to(torch.uint8)
    assert torch.equal(unpack(pack(codes, bits), bits, 3), codes)
    assert torch.unique(pack(codes, bits), dim=0).shape[0] == len(codes)
