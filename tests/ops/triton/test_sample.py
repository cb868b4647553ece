"""Tokens chosen on the device against the engine's own sampler and rejection sampler."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minillm.ops import rejection as rejection_reference
from minillm.ops import sample as sample_reference
from minillm.ops.triton.rejection import rejection
from minillm.ops.triton.sample import all_finite, argmax, sample
from minillm.sampling import Draw, uniform
from minillm.sampling import sample as engine_sample
from minillm.speculative.rejection_sampler import rejection_sample
from tests.ops.triton.close import examples
from tests.ops.triton.steps import WHERE

pytestmark = pytest.mark.usefixtures("small_blocks")
FEW = examples(12)


def distributions(rows: int, vocab: int, zeros: float) -> Tensor:
    """Return random rows with a share of exact zeros, but never only zeros."""
    probs = torch.rand(rows, vocab) ** 3 * (torch.rand(rows, vocab) >= zeros)
    probs[:, vocab // 2] += 1e-3
    return probs / probs.sum(-1, keepdim=True)


@given(rows=st.integers(0, 4), vocab=st.sampled_from((1, 16, 17, 50)), seed=st.integers(0, 999))
@FEW
def test_argmax_takes_the_first_of_the_largest(rows: int, vocab: int, seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randint(-3, 3, (rows, vocab + 2))[:, 1:-1].float()  # many ties
    tokens, is_valid = argmax(logits.to(WHERE))
    assert tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert is_valid.all()


def test_argmax_flags_rows_that_hold_no_choice() -> None:
    logits = torch.randn(6, 40)
    logits[0, 35] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    logits[3, 1:] = -torch.inf
    logits[5] = torch.nan
    tokens, is_valid = argmax(logits.to(WHERE))
    expected, flags = sample_reference.argmax(logits)
    assert is_valid.tolist() == flags.tolist() == [False, False, False, True, True, False]
    assert tokens[3:5].tolist() == expected[3:5].tolist()
    assert ((tokens >= 0) & (tokens < 40)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1, 16, 40])
def test_rows_with_any_broken_logit_are_found(dtype: torch.dtype, vocab: int) -> None:
    logits = torch.randn(7, vocab + 2)[:, 1:-1].to(dtype)
    logits[1, vocab // 2], logits[3, 0], logits[4, -1] = torch.nan, torch.inf, -torch.inf
    logits[5, 0] = torch.finfo(dtype).max
    expected = [True, False, True, False, False, True, True]
    assert all_finite(logits.to(WHERE)).tolist() == expected
    assert sample_reference.all_finite(logits).tolist() == expected
    assert all_finite(logits[:0].to(WHERE)).tolist() == sample_reference.all_finite(logits[:0]).tolist() == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_argmax_of_16_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 50).to(WHERE, dtype)
    assert argmax(logits)[0].tolist() == logits.float().argmax(-1).tolist()


@given(rows=st.integers(0, 4), vocab=st.sampled_from((1, 16, 33, 70)), zeros=st.sampled_from((0.0, 0.9)))
@FEW
def test_sample_draws_what_the_engine_draws(rows: int, vocab: int, zeros: float) -> None:
    """The two differ only if a uniform is within 10^-15 of a border: with these fixed seeds never."""
    torch.manual_seed(vocab)
    probs = distributions(rows, vocab, zeros)
    uniforms = torch.rand(rows, dtype=torch.float64)
    tokens, is_valid = sample(probs.to(WHERE), uniforms.to(WHERE))
    assert (
        tokens.tolist()
        == engine_sample(probs, uniforms).tolist()
        == sample_reference.sample(probs, uniforms)[0].tolist()
    )
    assert is_valid.all()


def test_the_ends_of_the_uniforms_never_draw_a_token_of_probability_0() -> None:
    probs = torch.zeros(3, 50)
    probs[:, [20, 41]] = torch.tensor([0.25, 0.75])
    uniforms = torch.tensor([0.0, 0.25, 1 - 2.0**-53], dtype=torch.float64)
    assert sample(probs.to(WHERE), uniforms.to(WHERE))[0].tolist() == [20, 41, 41]
    assert sample(probs.to(WHERE), torch.ones(3).double().to(WHERE))[0].tolist() == [41, 41, 41]


def test_rounding_between_blocks_never_draws_a_token_of_probability_0() -> None:
    """Uniforms are within a few ulp of the sum at the end of the first block; the second block begins with zeros."""
    torch.manual_seed(2)
    probs = torch.zeros(60, 32)
    probs[:, :16] = 10.0 ** (-12 * torch.rand(60, 16))
    probs[:, 31] = 0.5
    border = probs[:, :16].double().sum(-1) / probs.double().sum(-1)
    uniforms = border + (torch.arange(60) % 5 - 2) * 2.0**-54
    tokens, is_valid = sample(probs.to(WHERE), uniforms.to(WHERE))
    assert is_valid.all()
    assert (probs.gather(1, tokens.cpu()[:, None]) > 0).all()


def test_sample_flags_rows_that_hold_no_distribution() -> None:
    probs = torch.rand(4, 20)
    probs[0], probs[1, 7], probs[2, 19] = 0.0, torch.nan, torch.inf
    uniforms = torch.full((4,), 0.5, dtype=torch.float64)
    tokens, is_valid = sample(probs.to(WHERE), uniforms.to(WHERE))
    assert is_valid.tolist() == [False, False, False, True]
    assert tokens[3] == engine_sample(probs[3:], uniforms[3:])
    assert ((tokens >= 0) & (tokens < 20)).all()


def test_uniforms_may_be_a_column() -> None:
    probs = torch.full((3, 20), 0.05)
    pairs = torch.tensor([[0.03, 0.97], [0.52, 0.97], [0.97, 0.03]], dtype=torch.float64)
    tokens, is_valid = sample(probs.to(WHERE), pairs.to(WHERE)[:, 0])
    assert tokens.tolist() == [0, 10, 19] and is_valid.all()


def flat_uniforms(counts: list[int], seeds: list[int], first: list[int]) -> tuple[Tensor, Tensor]:
    """Return the uniforms of the rejection sampler, in the layout of the op."""
    accept = [uniform(s, i + j, Draw.ACCEPT) for k, s, i in zip(counts, seeds, first, strict=True) for j in range(k)]
    own = [
        uniform(s, i + n, Draw.RECOVER if n < k else Draw.SAMPLE)
        for k, s, i in zip(counts, seeds, first, strict=True)
        for n in range(k + 1)
    ]
    return torch.tensor(accept, dtype=torch.float64), torch.tensor(own, dtype=torch.float64)


@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    vocab=st.sampled_from((2, 16, 35)),
    one_hot=st.booleans(),
    near=st.sampled_from((0.0, 0.5, 1.0)),
    seed=st.integers(0, 999),
)
@examples(12)
def test_verdicts_are_the_rejection_samplers(
    counts: list[int], vocab: int, one_hot: bool, near: float, seed: int
) -> None:
    """`near`: weight of the draft's distribution in the target's. The tokens differ only if a uniform is within some
    10^-7 of a border: in about 30 draws one time in 10^5, with these fixed seeds never."""
    torch.manual_seed(seed)
    total = sum(counts)
    q = distributions(total, vocab, 0.3)
    x = torch.multinomial(q, 1).squeeze(1) if total else torch.empty(0, dtype=torch.int64)
    p = distributions(total + len(counts), vocab, 0.3)
    start = [0]
    for k in counts:
        start.append(start[-1] + k)
    own_rows = [row + r for r, k in enumerate(counts) for row in range(start[r], start[r] + k)]
    p[own_rows] = near * q + (1 - near) * p[own_rows]
    seeds, first = [seed + r for r in range(len(counts))], [5 * r for r in range(len(counts))]
    accept, own = flat_uniforms(counts, seeds, first)
    args = (x, torch.tensor(start, dtype=torch.int32), None if one_hot else q, p, accept, own)
    found = rejection(*(a if a is None else a.to(WHERE) for a in args))
    verdicts = rejection_sample(
        [x[a:b].tolist() for a, b in pairwise(start)],
        [None if one_hot else q[a:b] for a, b in pairwise(start)],
        *(p, seeds, first),
    )
    assert found.num_accepted.tolist() == [v.num_accepted for v in verdicts]
    assert found.token_ids.tolist() == [v.token_ids[-1] for v in verdicts]
    assert found.is_valid.all()
    plain = rejection_reference.rejection(*args)
    assert [t.tolist() for t in plain] == [t.tolist() for t in found]


def test_drafts_that_contradict_themselves_are_flagged_and_no_other() -> None:
    torch.manual_seed(0)
    vocab, start = 20, torch.arange(0, 13, 2, dtype=torch.int32)
    p, q = distributions(18, vocab, 0.0), distributions(12, vocab, 0.0)
    x = torch.full((12,), 3)
    q[2, 3] = 0.0  # request 1: never drawn from q
    x[5] = 20  # request 2: outside the vocabulary
    x[6] = -1  # request 3
    p[12, 3] = torch.nan  # request 4
    accept, own = torch.full((12,), 0.999, dtype=torch.float64), torch.rand(18, dtype=torch.float64)
    for probs in (q, None):
        args = (x, start, probs, p, accept, own)
        found = rejection(*(a if a is None else a.to(WHERE) for a in args))
        assert found.is_valid.tolist() == rejection_reference.rejection(*args).is_valid.tolist()
        assert found.is_valid.tolist() == [True, probs is None, False, False, False, True]


@pytest.mark.parametrize(("u", "accepted"), [(0.0, 1), (0.4999, 1), (0.5, 0), (1 - 2.0**-24, 0)])
def test_a_draft_stays_if_its_uniform_is_below_the_ratio(u: float, accepted: int) -> None:
    p, q = torch.tensor([[0.25, 0.75, 0.0]]), torch.tensor([[0.5, 0.25, 0.25]])
    uniforms = torch.full((6,), u, dtype=torch.float64)
    args = torch.arange(3), torch.arange(4), q.expand(3, -1), p.expand(6, -1), uniforms[:3], uniforms
    for verdicts in (rejection(*(a.to(WHERE) for a in args)), rejection_reference.rejection(*args)):
        assert verdicts.num_accepted.tolist() == [accepted, 1, 0]


@pytest.mark.parametrize("column", range(4))
def test_each_list_of_numbers_may_be_a_column(column: int) -> None:
    """Two drafts are accepted, and the bonus token is 3. With the numbers of the other column it would not be so."""
    p = torch.tensor([[0.1, 0.8, 0.05, 0.05], [0.1, 0.2, 0.6, 0.1], [0.25, 0.25, 0.25, 0.25]])
    lists = [
        *(torch.tensor([1, 2]), torch.tensor([0, 2])),
        *(torch.tensor([0.5, 0.5]).double(), torch.tensor([0.1, 0.1, 0.9]).double()),
    ]
    other = torch.full_like(lists[column], 0.99 if lists[column].is_floating_point() else 0)
    lists = [x.to(WHERE) for x in lists]
    lists[column] = torch.stack((lists[column], other.to(WHERE)), 1)[:, 0]
    drafts, start, accept, own = lists
    found = rejection(drafts, start, None, p.to(WHERE), accept, own)
    assert [x.tolist() for x in found] == [[2], [3], [True]]


def test_equal_distributions_are_accepted_and_an_empty_residual_falls_back_to_the_target() -> None:
    p = distributions(2, 20, 0.0)
    start = torch.tensor([0, 1], dtype=torch.int32)
    x, own = torch.tensor([4]), torch.tensor([0.3, 0.6], dtype=torch.float64)
    surely, never = torch.tensor([0.999], dtype=torch.float64), torch.tensor([1.5], dtype=torch.float64)
    for accept, row in ((surely, 1), (never, 0)):
        args = [a.to(WHERE) for a in (x, start, p[:1].clone(), p, accept, own)]
        found = rejection(*args)
        assert found.num_accepted.tolist() == [row]
        assert found.token_ids.tolist() == engine_sample(p[row : row + 1], own[row : row + 1]).tolist()
