from __future__ import annotations

import pytest
import torch

from minillm.training.muon import Muon, orthogonalise


@pytest.mark.parametrize("shape", [(32, 32), (16, 64), (64, 16)])
def test_update_is_nearly_orthogonal(shape):
    """The quintic iteration brings singular values from [0.01, 1] to about [0.7, 1.2]; bf16 adds a little."""
    u, _, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    ill_conditioned = u @ torch.diag(torch.logspace(0, -1.5, min(shape))) @ v
    values = torch.linalg.svdvals(orthogonalise(ill_conditioned).float())
    assert values.min() > 0.6 and values.max() < 1.3


def test_directions_are_kept():
    u, s, v = torch.linalg.svd(torch.randn(24, 24))
    out = orthogonalise(u @ torch.diag(s) @ v).float()
    aligned = torch.diagonal(u.T @ out @ v.T)
    assert aligned.min() > 0.5


def test_a_tall_matrix_moves_further():
    """The step of a 4:1 matrix is twice the rate, so that its output changes as much as a square one's."""
    p = torch.nn.Parameter(torch.zeros(64, 16))
    p.grad = torch.randn(64, 16)
    Muon([p], lr=0.1).step()
    values = torch.linalg.svdvals(p.detach())
    assert values.min() > 0.1 and values.max() < 0.28


def test_rate_zero_changes_nothing_but_the_momentum():
    p = torch.nn.Parameter(torch.ones(4, 4))
    p.grad = torch.eye(4)
    optimizer = Muon([p], lr=0.0, momentum=0.9)
    optimizer.step()
    assert torch.equal(p.detach(), torch.ones(4, 4))
    torch.testing.assert_close(optimizer.state[p]["momentum"], 0.1 * torch.eye(4))


def test_a_rate_may_be_a_tensor_and_matrices_of_one_shape_are_updated_each_by_itself():
    torch.manual_seed(0)
    shapes = [(8, 8), (16, 8), (8, 8), (8, 16)]
    start, grads = [torch.randn(shape) for shape in shapes], [torch.randn(shape) for shape in shapes]

    def updated(chosen, rate):
        params = [torch.nn.Parameter(start[i].clone()) for i in chosen]
        for p, i in zip(params, chosen, strict=True):
            p.grad = grads[i].clone()
        optimizer = Muon(params, lr=rate, weight_decay=0.1)
        for _ in range(3):
            optimizer.step()
        return [p.detach() for p in params]

    together = updated(range(4), torch.tensor(0.1))
    alone = [updated([i], 0.1)[0] for i in range(4)]
    for ours, theirs in zip(together, alone, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
