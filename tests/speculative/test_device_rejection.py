"""Rejection sampling without waiting leaves the target's distribution unchanged too: the tests of
`test_rejection_sampler.py`, exact enumeration and χ², on the op, and the op against the sampler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from minillm.ops.rejection import rejection
from minillm.ops.transfer import copy_to_device, copy_to_host
from minillm.sampling import Draw, uniform
from minillm.speculative import device_rejection
from minillm.speculative.device_rejection import flat_draft_probs, rejection_inputs
from minillm.speculative.rejection_sampler import Verdict, rejection_sample
from tests.no_waiting import NoWaiting, Waits
from tests.speculative import test_rejection_sampler as on_host
from tests.speculative.test_rejection_sampler import (
    GAMMA,
    TARGET,
    VOCAB,
    draft_argmax,
    draft_two,
    enumerate_joint,
    exact_target_joint,
    p_value,
    ragged_batch,
    speculate,
)

CPU = torch.device("cpu")


def on_device(
    draft_token_ids: Sequence[Sequence[int]],
    draft_probs: Sequence[Tensor | None],
    target_probs: Tensor,
    seeds: Sequence[int],
    first_index: Sequence[int],
) -> list[Verdict]:
    """As `rejection_sample`: one copy there, one read back, nothing else."""
    with NoWaiting() as crossed:
        sent = copy_to_device(rejection_inputs(draft_token_ids, seeds, first_index), CPU)
        q = flat_draft_probs(draft_token_ids, draft_probs, sent["drafts"], target_probs)
        found = rejection(sent["drafts"], sent["start"], q, target_probs, sent["accept"], sent["own"])
        accepted, own, is_valid = copy_to_host(*found)
    assert crossed == {"send": 1, "read": 1}
    assert all(is_valid)
    return [Verdict([*ids[:n], x], n) for ids, n, x in zip(draft_token_ids, accepted, own, strict=True)]


def patch_uniforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the enumeration injects its own numbers into the sampler, they reach the columns as well."""
    monkeypatch.setattr(
        device_rejection,
        "uniforms",
        lambda *asked: np.array([on_host.rejection_sampler.uniform(*one) for one in zip(*asked, strict=True)]),
    )


def test_the_joint_of_three_tokens_is_exactly_the_targets(monkeypatch):
    """No statistics: equality of fractions, all randomness enumerated."""
    patch_uniforms(monkeypatch)
    assert enumerate_joint(on_device, monkeypatch) == exact_target_joint()


@pytest.mark.parametrize("drafting", [draft_two, draft_argmax])
def test_speculation_samples_from_the_target(drafting):
    """End to end at a fixed seed. Over random seeds a correct sampler fails once in 10^6 runs."""
    tokens, accepted = speculate(on_device, drafting)
    assert p_value(tokens) > 1e-6
    assert 0 < accepted < len(tokens)


def spoil(monkeypatch: pytest.MonkeyPatch, **changes) -> None:
    """Hand the op columns that are wrong in one way."""
    real = rejection_inputs

    def wrong(*args):
        columns = real(*args)
        return columns | {name: change(columns) for name, change in changes.items()}

    monkeypatch.setitem(globals(), "rejection_inputs", wrong)


WRONG = {
    "one uniform to accept and to recover": {
        "own": lambda c: np.pad(c["accept"].reshape(-1, GAMMA), ((0, 0), (0, 1)), "edge").ravel()
    },
    "one uniform for all requests": {"own": lambda c: c["own"][:1].repeat(len(c["own"]))},
    "accepts everything": {"accept": lambda c: c["accept"] * 0},
    "accepts too much": {"accept": lambda c: c["accept"] / 2},
}


@pytest.mark.parametrize("name", WRONG)
def test_chi_square_sees_wrong_columns(name, monkeypatch):
    spoil(monkeypatch, **WRONG[name])
    assert p_value(speculate(on_device)[0]) < 1e-6


@pytest.mark.parametrize("vocab", [2, 300])
def test_verdicts_are_the_samplers_in_ragged_batches(vocab):
    """Some requests without drafts, some with deterministic ones, some with sampled ones, in one launch."""
    drafts, draft_probs, target_rows = ragged_batch(64, vocab)
    seeds, first = list(range(64)), list(range(100, 164))
    args = drafts, draft_probs, torch.cat(target_rows), seeds, first
    assert on_device(*args) == rejection_sample(*args)


@pytest.mark.parametrize(("u", "accepted"), [(0.0, 1), (0.4999, 1), (0.5, 0), (1 - 2.0**-24, 0)])
def test_a_draft_stays_if_its_uniform_is_below_the_ratio(u, accepted, monkeypatch):
    p, q = torch.tensor([[0.25, 0.75, 0.0]]), torch.tensor([[0.5, 0.25, 0.25]])
    monkeypatch.setattr(device_rejection, "uniforms", lambda *asked: np.full(len(asked[0]), u))
    verdicts = on_device([[0], [1], [2]], [q, q, q], p.expand(6, -1), [0] * 3, [0] * 3)
    assert [verdict.num_accepted for verdict in verdicts] == [accepted, 1, 0]


def test_nobody_drafts_and_nobody_is_there():
    probs = TARGET[:3]
    args = [[], [], []], [None, torch.empty(0, VOCAB), None], probs, [1, 2, 3], [4, 5, 6]
    assert on_device(*args) == rejection_sample(*args)
    assert on_device([], [], TARGET[:0], [], []) == []


def test_the_uniforms_are_the_ones_the_sampler_would_use():
    columns = rejection_inputs([[7, 8], [], [9]], [11, 22, 33], [40, 50, 60])
    assert columns["drafts"].tolist() == [7, 8, 9]
    assert columns["start"].tolist() == [0, 2, 2, 3]
    accept = [(11, 40), (11, 41), (33, 60)]
    own = [(11, 40, "RECOVER"), (11, 41, "RECOVER"), (11, 42, "SAMPLE"), (22, 50, "SAMPLE")]
    own += [(33, 60, "RECOVER"), (33, 61, "SAMPLE")]
    assert columns["accept"].tolist() == [uniform(seed, index, Draw.ACCEPT) for seed, index in accept]
    assert columns["own"].tolist() == [uniform(seed, index, Draw[purpose]) for seed, index, purpose in own]


def test_proposals_lie_flat_and_deterministic_ones_are_written_out_beside_sampled_ones():
    q = torch.softmax(torch.randn(2, VOCAB), -1)
    like, drafts = TARGET[:1], torch.tensor([3, 1, 2])
    one_hot = torch.eye(VOCAB)[3:4]
    assert flat_draft_probs([[3], [], [1, 2]], [None, None, None], drafts, like) is None
    assert flat_draft_probs([[], [1, 2]], [None, q], drafts[1:], like) is q
    assert torch.equal(flat_draft_probs([[3], [], [1, 2]], [None, None, q], drafts, like), torch.cat([one_hot, q]))
    assert torch.equal(flat_draft_probs([[], [1, 2]], [None, q.double()], drafts[1:], like), q)


def test_a_planted_wait_is_seen():
    def waits(*args):
        found = rejection(*args)
        return found._replace(num_accepted=found.num_accepted + int(found.is_valid.sum()) * 0)

    columns = copy_to_device(rejection_inputs([[1]], [0], [0]), CPU)
    args = columns["drafts"], columns["start"], None, TARGET[:2], columns["accept"], columns["own"]
    with NoWaiting():
        rejection(*args)
    with pytest.raises(Waits), NoWaiting():
        waits(*args)
