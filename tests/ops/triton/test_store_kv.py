"""The kernel that writes keys and values: codes and scales bit for bit, and no write outside its slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm.errors import UnsupportedError
from minillm.ops import store_kv as reference
from minillm.ops.kv_quant import head_group
from minillm.ops.triton.store_kv import store_kv
from tests.ops.triton.close import examples
from tests.ops.triton.steps import WHERE

SLOTS = 9


def pools(bits: int, heads: int, dim: int, group: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return the pools of one layer, with every byte set to 0x7b."""
    if bits == 8:
        made = [((SLOTS, heads, dim), torch.int8), ((SLOTS, heads), torch.bfloat16)]
    elif bits == 4:
        per_group = ((SLOTS, heads, dim // group), torch.float16)
        made = [((SLOTS, heads, dim // 2), torch.uint8), per_group, per_group]
    else:
        made = [((SLOTS, heads, dim), dtype)]
    out = []
    for shape, kind in made:
        pool = torch.empty(shape, dtype=kind)
        pool.view(torch.uint8).fill_(0x7B)
        out.append(pool.to(WHERE))
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


def check(k: torch.Tensor, v: torch.Tensor, slots: list[int], bits: int, group: int, dtype: torch.dtype) -> None:
    """Write with kernel and reference into equal pools; the reference on a CPU, where division is exactly rounded."""
    shape = (bits, k.shape[1], k.shape[2], group, dtype)
    found, expected = ([pools(*shape) for _ in "kv"] for _ in range(2))
    expected = [[pool.cpu() for pool in side] for side in expected]
    index = torch.tensor(slots, dtype=torch.int64)
    store_kv(k.to(WHERE), v.to(WHERE), *found, index.to(WHERE))
    reference.store_kv(k.cpu(), v.cpu(), *expected, index)
    for f, e in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        assert same_bits(f, e)


@examples(20)
@given(
    bits=st.sampled_from((0, 8, 4)),
    tokens=st.integers(0, 3),
    heads=st.integers(1, 3),
    dim=st.sampled_from((32, 48, 64, 96, 128)),
    group_size=st.sampled_from((2, 16, 32, 24, 128)),
    spread=st.sampled_from((1.0, 1e-30, 1e-6, 1e4)),
    seed=st.integers(0, 999),
)
def test_codes_and_scales_are_the_references_bit_for_bit(
    bits: int, tokens: int, heads: int, dim: int, group_size: int, spread: float, seed: int
) -> None:
    torch.manual_seed(seed)
    group = min(group_size, dim)
    group = head_group(dim, group if dim % group == 0 else 16)
    k, v = (torch.randn(tokens, heads + 1, dim)[:, :heads] * spread for _ in "kv")
    if tokens:
        k[0, 0] = 0  # a row of zeros has a scale too
        v[0, 0] = 3.25
    slots = torch.randperm(SLOTS)[:tokens].tolist()
    check(k, v, slots, bits, group, torch.float32)


def test_ties_between_codes_go_to_the_even_one() -> None:
    x = torch.zeros(1, 1, 32)
    x[0, 0, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])  # scale 1
    check(x, x * 2, [4], 8, 0, torch.float32)
    affine = torch.zeros(1, 1, 32)
    affine[0, 0, :4] = torch.tensor([15.0, 0.5, 1.5, 2.5])
    check(affine, affine, [4], 4, 32, torch.float32)


def test_ties_between_scales_go_to_the_even_one() -> None:
    """127 · (1 + 2^-8) is midway between two bfloat16 scales and is rounded down, 127 · (1 + 3 · 2^-8) up."""
    k, v = (torch.full((1, 1, 32), 127 * (1 + odd * 2.0**-8)) for odd in (1, 3))
    check(k, v, [4], 8, 0, torch.float32)
    scales = pools(8, 1, 32, 0), pools(8, 1, 32, 0)
    store_kv(k.to(WHERE), v.to(WHERE), *scales, torch.tensor([4]).to(WHERE))
    assert [side[1][4].item() for side in scales] == [1.0, 1 + 2.0**-6]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_activations_of_16_bits(bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 3, 2, 64).to(dtype)
    check(k, v, [8, 0, 3], bits, 32, dtype)


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_a_token_without_a_slot_is_written_nowhere(bits: int) -> None:
    torch.manual_seed(1)
    k, v = torch.randn(2, 3, 2, 32)
    check(k, v, [-1, 5, -1], bits, 32, torch.float32)


def test_odd_groups_go_the_reference_way() -> None:
    torch.manual_seed(2)
    k, v = torch.randn(2, 2, 1, 48)
    check(k, v, [1, 2], 4, 3, torch.float32)


@pytest.mark.parametrize("bits", [8, 4])
def test_nan_makes_its_own_scale_nan_and_no_other(bits: int) -> None:
    torch.manual_seed(3)
    k = torch.randn(2, 1, 64)
    k[1, 0, 40] = torch.nan
    found, other = pools(bits, 1, 64, 32), pools(bits, 1, 64, 32)
    store_kv(k.to(WHERE), k.to(WHERE), found, other, torch.tensor([2, 6]).to(WHERE))
    scales = found[1].float().reshape(SLOTS, -1)
    assert scales[6].isnan()[-1]
    assert not scales[2].isnan().any()
    assert bits == 8 or not scales[6].isnan()[0]


def test_pools_that_no_cache_has_are_refused() -> None:
    k = torch.zeros(1, 1, 32, device=WHERE)
    with pytest.raises(UnsupportedError, match="no cache has pools"):
        store_kv(k, k, [k.int()], [k.int()], torch.tensor([0], device=WHERE))


def test_keys_and_values_of_two_formats_are_refused() -> None:
    """The values would be written in the format of the keys."""
    k, slots = torch.zeros(1, 2, 32, device=WHERE), torch.tensor([0], device=WHERE)
    floats, int8, groups_of_32, groups_of_16 = (pools(b, 2, 32, g) for b, g in ((0, 0), (8, 0), (4, 32), (4, 16)))
    for keys, values, words in (
        (floats, int8, r"keys have \(0, \(2, 32\)\) and values \(8, \(2, 32\), \(2,\)\)"),
        (int8, groups_of_32, r"keys have \(8, .* and values \(4, \(2, 16\), \(2, 1\), \(2, 1\)\)"),
        (groups_of_32, groups_of_16, r"keys have \(4, .*\(2, 1\)\) and values \(4, .*\(2, 2\)\)"),
        (groups_of_16, groups_of_32, r"keys have \(4, .*\(2, 2\)\) and values \(4, .*\(2, 1\)\)"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            store_kv(k, k, keys, values, slots)


def test_a_strided_view_of_a_pool_is_refused() -> None:
    k, slots = torch.zeros(1, 2, 32, device=WHERE), torch.tensor([0], device=WHERE)
    [base] = pools(0, 4, 32, 0)
    with pytest.raises(UnsupportedError, match="must be contiguous; pass whole pools"):
        store_kv(k, k, [base[:, :2]], [base[:, 2:]], slots)
