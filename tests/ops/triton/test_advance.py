"""The slot of the next draft token: the kernel against the reference, and both against the host's arithmetic."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm.ops import advance as reference_file
from minillm.ops.triton import advance as kernel_file
from tests.ops.triton.close import examples
from tests.ops.triton.steps import WHERE


@examples(20)
@given(requests=st.integers(0, 7), block_size=st.sampled_from((1, 4, 16)), seed=st.integers(0, 999))
def test_slots_and_lengths_are_what_the_host_would_say(requests: int, block_size: int, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice((0, rng.randrange(1, 3 * block_size))) for _ in range(requests)]
    tables = [rng.sample(range(50), 3) for _ in range(requests)]
    slots = [
        table[n // block_size] * block_size + n % block_size if n else -1
        for n, table in zip(lengths, tables, strict=True)
    ]
    for dtype in (torch.int32, torch.int64):
        x = torch.tensor(lengths, dtype=dtype, device=WHERE)
        table = torch.tensor(tables, dtype=dtype, device=WHERE).view(requests, 3)
        wide = torch.cat((table, table), dim=1)[:, :3]  # a view whose row stride is larger than its row
        for advance in (reference_file.advance, kernel_file.advance):
            for given_table in (table, wide):
                got_slots, got_lengths = advance(x, given_table, block_size)
                assert got_slots.dtype == got_lengths.dtype == dtype
                assert got_slots.tolist() == slots
                assert got_lengths.tolist() == [n + 1 if n else 0 for n in lengths]
        assert x.tolist() == lengths


def test_many_requests_take_several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_file, "REQUESTS", 4)
    lengths = torch.arange(10, device=WHERE)
    tables = torch.arange(50, device=WHERE).view(10, 5)
    got, right = (f.advance(lengths, tables, 2) for f in (kernel_file, reference_file))
    assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True))
