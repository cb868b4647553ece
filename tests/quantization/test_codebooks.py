"""Codebooks: centres that commute with RoPE, signs in rotations, and every stage leaves less than the one before."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from minillm.quantization.codebooks import (
    BinaryCodebook,
    Codebook,
    CommutingCodebook,
    binary_rotation,
    pair_groups,
    ungrouped,
)

KINDS: list[type[Codebook]] = [CommutingCodebook, BinaryCodebook]


def points(heads: int = 2, count: int = 300, dim: int = 16) -> Tensor:
    """Correlated channels of different size, and a mean."""
    torch.manual_seed(0)
    return torch.randn(heads, count, dim) @ torch.randn(heads, dim, dim) + 3 * torch.randn(heads, 1, dim)


def test_a_centre_as_a_matrix_commutes_with_a_rotation_and_a_free_matrix_does_not() -> None:
    """[[x, -y], [y, x]] R = R [[x, -y], [y, x]] for every angle, and (x, y) is its first column."""
    torch.manual_seed(0)
    for x, y, angle in torch.randn(20, 3, dtype=torch.float64).tolist():
        turn = torch.tensor(angle, dtype=torch.float64)
        r = torch.stack((torch.stack((turn.cos(), -turn.sin())), torch.stack((turn.sin(), turn.cos()))))
        m = torch.tensor([[x, -y], [y, x]], dtype=torch.float64)
        torch.testing.assert_close(r @ m, m @ r)
        free = m + torch.tensor([[1.0, 0], [0, 0]], dtype=torch.float64)
        assert not torch.allclose(r @ free, free @ r)


def test_both_channels_of_a_pair_share_a_group() -> None:
    x = torch.arange(2 * 3 * 16.0).view(2, 3, 16)
    groups = pair_groups(x)
    assert groups.shape == (4, 3, 8)
    assert groups[0, 0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]  # channel c with channel c + 8
    assert groups[3, 1].tolist() == [68, 69, 70, 71, 76, 77, 78, 79]
    assert torch.equal(ungrouped(groups, 2), x)


@pytest.mark.parametrize("kind", KINDS)
def test_every_stage_leaves_less(kind: type[Codebook]) -> None:
    """On what it was trained on: one bit per number each; the same seed gives the same codes."""
    x = points()
    errors = [float((x - x.mean(1, keepdim=True)).square().mean())]
    for stages in (1, 2, 3):
        book = kind.trained(x, stages, seed=1)
        codes = book.encode(x)
        assert codes.dtype == torch.uint8 and codes.shape == (2, 300, 2 * stages)
        errors.append(float((book.decode(codes) - x).square().mean()))
        assert torch.equal(codes, kind.trained(x, stages, seed=1).encode(x))
    assert all(after < 0.6 * before for before, after in pairwise(errors))
    assert not torch.equal(codes, kind.trained(x, 3, seed=2).encode(x))


def test_a_point_gets_the_nearest_centre_and_comes_back_as_centre_and_mean() -> None:
    x = points(heads=1)
    book = CommutingCodebook.trained(x, 1, seed=0)
    [centres] = book.stages
    for group in range(2):
        channels = [*range(4 * group, 4 * group + 4), *range(8 + 4 * group, 12 + 4 * group)]
        own = (x - book.mean)[0][:, channels]
        nearest = torch.cdist(own, centres[group].float()).argmin(1)
        assert torch.equal(book.encode(x)[0, :, group].long(), nearest)
        expected = centres[group].float()[nearest] + book.mean[0][:, channels]
        torch.testing.assert_close(book.decode(book.encode(x))[0][:, channels], expected)


def test_binary_codes_are_signs_in_the_rotation() -> None:
    x = points(heads=1)
    book = BinaryCodebook.trained(x, 1, seed=0)
    [[rotation]], [[scale]] = (part[0].float().unsqueeze(0) for part in book.parts)
    signs = torch.where((x - book.mean)[0] @ rotation >= 0, 1.0, -1.0)
    torch.testing.assert_close(book.decode(book.encode(x))[0], book.mean[0] + (signs * scale) @ rotation.T)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(16), atol=5e-3, rtol=0)


def test_a_turn_of_fitting_a_rotation_never_raises_the_error() -> None:
    x = points() - points().mean(1, keepdim=True)
    errors = []
    for rounds in range(9):
        turned = x @ (rotation := binary_rotation(x, rounds, seed=0))
        coded = turned.sign() * turned.abs().mean(1, keepdim=True)
        errors.append((x - coded @ rotation.transpose(1, 2)).square().sum((1, 2)))
    assert all((after <= before * (1 + 1e-5)).all() for before, after in pairwise(errors))
    assert (errors[-1] < 0.95 * errors[0]).all()
