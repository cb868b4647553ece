"""Rows of the cache: the same bits as `kv_quant` writes, and the same numbers as it reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minillm.cache.paged_int4 import PagedInt4KVCache
from minillm.cache.paged_two_level import PagedTwoLevelKVCache
from minillm.models.config import ModelConfig
from minillm.ops import kv_quant
from minillm.ops.cpu.compiled import entry_point
from minillm.ops.cpu.kv_rows import read_row, write_row

COUNT, SIZE = 200, 64


@entry_point()
def write(rows, x, size):
    for i in range(len(x) // size):
        write_row(rows, i, x, i * size, size)


@entry_point()
def read(rows, out, size):
    for i in range(len(out) // size):
        read_row(rows, i, out, i * size, size)


@pytest.fixture
def numbers() -> torch.Tensor:
    """Rows of numbers of very different sizes. Some rows are constant, zero, tiny, of one sign, or far from zero."""
    torch.manual_seed(0)
    x = torch.randn(COUNT, SIZE) * 10.0 ** torch.randint(-8, 4, (COUNT, 1))
    x[0], x[1], x[2] = 0.0, 3.25, -1e-30
    x[3], x[4], x[5] = x[3].abs(), -x[4].abs(), 1000 + x[5].clamp(-1, 1)
    return x


def test_floats_are_kept_as_they_are(numbers: torch.Tensor) -> None:
    kept, out = np.empty(COUNT * SIZE, np.float32), np.empty(COUNT * SIZE, np.float32)
    write((kept,), numbers.numpy().reshape(-1), SIZE)
    read((kept,), out, SIZE)
    assert np.array_equal(kept, numbers.numpy().reshape(-1)) and np.array_equal(kept, out)


def test_bfloats_are_the_nearest_ones(numbers: torch.Tensor) -> None:
    numbers[6, :2] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])  # halfway between two: to the even one
    kept = np.empty(COUNT * SIZE, np.uint16)
    write((kept,), numbers.numpy().reshape(-1), SIZE)
    assert np.array_equal(kept.reshape(COUNT, SIZE), numbers.bfloat16().view(torch.uint16).numpy())


def test_int8_rows_have_the_same_bits(numbers: torch.Tensor) -> None:
    codes, scales = np.empty(COUNT * SIZE, np.int8), np.empty(COUNT, np.uint16)
    write((codes, scales), numbers.numpy().reshape(-1), SIZE)
    right_codes, right_scales = kv_quant.quantize_symmetric(numbers, kv_quant.INT8_LEVELS)
    assert np.array_equal(scales, right_scales.view(torch.uint16).numpy())
    assert np.array_equal(codes.reshape(COUNT, SIZE), right_codes.numpy())
    out = np.empty(COUNT * SIZE, np.float32)
    read((codes, scales), out, SIZE)
    assert np.array_equal(out.reshape(COUNT, SIZE), kv_quant.dequantize_symmetric(right_codes, right_scales).numpy())


@pytest.mark.parametrize("group", [16, 32, 64])
def test_int4_rows_have_the_same_bits(numbers: torch.Tensor, group: int) -> None:
    config = ModelConfig(8, 64, 64, 1, 1, 1, SIZE, 8)
    cache = PagedInt4KVCache(config, 1, 1, torch.float32, torch.device("cpu"), group_size=group)
    packed, scale, zero = cache.encode(numbers[:, None])
    groups = SIZE // group
    kept = np.empty(COUNT * SIZE // 2, np.uint8), *(np.empty(COUNT * groups, np.int16) for _ in range(2)), groups
    write(kept, numbers.numpy().reshape(-1), SIZE)
    for mine, right in zip(kept[:3], (packed, scale.view(torch.int16), zero.view(torch.int16)), strict=True):
        assert np.array_equal(mine, right.numpy().reshape(-1))
    out = np.empty(COUNT * SIZE, np.float32)
    read(kept, out, SIZE)
    assert np.array_equal(out.reshape(COUNT, SIZE), cache.decode(packed, scale, zero)[:, 0].numpy())


@pytest.mark.parametrize("group", [16, 64])
def test_rows_of_two_levels_have_the_same_bits(numbers: torch.Tensor, group: int) -> None:
    config = ModelConfig(8, 64, 64, 1, 1, 1, SIZE, 8)
    cache = PagedTwoLevelKVCache(config, 1, 1, torch.float32, torch.device("cpu"), group_size=group)
    upper, scale, zero, lower = stored = cache.encode(numbers[:, None])
    groups = SIZE // group
    codes, scales = (
        [np.empty(size, dtype) for _ in range(2)]
        for size, dtype in ((COUNT * SIZE // 2, np.uint8), (COUNT * groups, np.int16))
    )
    kept = codes[0], *scales, codes[1], groups
    write(kept, numbers.numpy().reshape(-1), SIZE)
    right = (upper, scale.view(torch.int16), zero.view(torch.int16), lower)
    assert all(np.array_equal(mine, x.numpy().reshape(-1)) for mine, x in zip(kept[:4], right, strict=True))
    out = np.empty(COUNT * SIZE, np.float32)
    read(kept, out, SIZE)
    assert np.array_equal(out.reshape(COUNT, SIZE), cache.decode(*stored)[:, 0].numpy())


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFE000, 0x7F800001], ids=hex)
def test_nan_stays_visible(bits: int) -> None:
    """PyTorch's NaN, its negative, CUDA's in float32, its negative, CUDA's in float16, and the smallest."""
    x = np.ones(SIZE, np.float32)
    x.view(np.uint32)[7] = bits
    codes, scales, out = np.empty(SIZE, np.int8), np.empty(1, np.uint16), np.empty(SIZE, np.float32)
    write((codes, scales), x, SIZE)
    read((codes, scales), out, SIZE)
    assert np.isnan(out).all()
    kept = np.empty(SIZE, np.uint16)
    write((kept,), x, SIZE)
    bfloats = torch.from_numpy(kept.view(np.int16)).view(torch.bfloat16)
    assert bfloats[7].isnan() and bfloats.isfinite().sum() == SIZE - 1
