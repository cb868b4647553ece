"""Attention over parts, merged, is attention over all."""

from __future__ import annotations

import math

import pytest
import torch

from minillm.ops.lse_merge import merge, partial_attention


@pytest.mark.parametrize("cuts", [[16], [1, 15], [5, 5, 6], [1] * 16, [0, 16], [16, 0]])
def test_any_parts_give_the_whole(cuts: list[int]) -> None:
    torch.manual_seed(0)
    q, keys, values = torch.randn(2, 3, 8).double(), torch.randn(2, 16, 8).double(), torch.randn(2, 16, 8).double()
    whole = torch.softmax(q @ keys.transpose(1, 2) / math.sqrt(8), -1) @ values
    parts = zip(keys.split(cuts, 1), values.split(cuts, 1), strict=True)
    outs, lses = zip(*(partial_attention(q, k, v) for k, v in parts), strict=True)
    out, lse = merge(torch.stack(outs), torch.stack(lses))
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, (q @ keys.transpose(1, 2) / math.sqrt(8)).logsumexp(-1))
    wrong = torch.stack(outs).mean(0)
    assert len([c for c in cuts if c]) == 1 or (wrong - whole).abs().max() > 0.01


def test_a_query_that_sees_nothing_of_a_part_takes_nothing_from_it() -> None:
    torch.manual_seed(0)
    q, keys, values = torch.randn(2, 8).double(), torch.randn(6, 8).double(), torch.randn(6, 8).double()
    hidden = torch.tensor([[False] * 3 + [True] * 3, [True] * 6])
    parts = [partial_attention(q, keys[i : i + 3], values[i : i + 3], hidden[:, i : i + 3]) for i in (0, 3)]
    out, lse = merge(*map(torch.stack, zip(*parts, strict=True)))
    assert torch.equal(out[1], torch.zeros(8).double()) and lse[1] == -math.inf
    torch.testing.assert_close(out[0], partial_attention(q[:1], keys[:3], values[:3])[0][0])
