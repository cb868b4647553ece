"""SqueezeLLM: clustering only ever improves, what is kept sparse is kept exactly, and levels stand where it matters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minillm.errors import CheckpointError
from minillm.quantization.base import LayerStatistics
from minillm.quantization.groups import dequantize_groups, quantize_groups
from minillm.quantization.kmeans import SortedRows, nearest, run_kmeans
from minillm.quantization.schemes import make_scheme
from minillm.quantization.squeezellm import (
    MIN_IMPORTANCE,
    SqueezeLLM,
    _quantile_centroids,
    _uniform_centroids,
    fit_codebooks,
    importance,
)


def weight(rows: int = 24, columns: int = 250) -> Tensor:
    """Stored in fp16, as checkpoints are; a few values lie far out."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator) * 0.02
    x.view(-1)[::151] *= 12
    return x.half().float()


def seen(x: Tensor) -> LayerStatistics:
    squares = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).square() ** 2
    return LayerStatistics(squared_gradients=squares)


# --- clustering ------------------------------------------------------------------------------------------------------


def by_hand(values: Tensor, counts: Tensor, centroids: Tensor) -> Tensor:
    """Σ counts · (value − nearest centroid)² of each row, without sorting or running sums."""
    distances = (values.double()[:, :, None] - centroids.double()[:, None, :]).square().amin(2)
    return (counts.double() * distances).sum(1)


def test_the_objective_never_rises_and_is_what_it_says() -> None:
    x, counts = weight(), seen(weight()).squared_gradients
    start = x[:, :8].sort(dim=1).values
    centroids, objectives = run_kmeans(SortedRows(x, counts), start, rounds=25)
    assert objectives.shape == (26, 24)
    assert torch.allclose(objectives[0], by_hand(x, counts, start), rtol=1e-9)
    assert torch.allclose(objectives[-1], by_hand(x, counts, centroids), rtol=1e-9)
    assert (objectives.diff(dim=0) <= 1e-12 * objectives[0]).all()
    assert (objectives[-1] < 0.7 * objectives[0]).all()


def test_rows_that_have_settled_are_left_out_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(3)
    values, weights = torch.randn(40, 30, generator=draw), torch.rand(40, 30, generator=draw)
    rows, start = SortedRows(values, weights), values[:, :5]
    plain = [start.double().sort(dim=1).values]
    for _ in range(30):
        mass, first, _ = rows.clusters(plain[-1])
        plain.append(torch.where(mass > 0, first / mass, plain[-1]).sort(dim=1).values)
    asked, clusters = [], SortedRows.clusters
    monkeypatch.setattr(SortedRows, "clusters", lambda own, c: asked.append(len(c)) or clusters(own, c))
    centroids, objectives = run_kmeans(rows, start)
    assert torch.equal(centroids, plain[-1])
    for found, then in zip(objectives, plain, strict=True):
        mass, first, second = clusters(rows, then)
        by_hand = (second - 2 * then * first + then.square() * mass).sum(1).clamp_min(0)
        assert torch.equal(found, by_hand)
    assert sum(asked) < 40 * 31 / 2


def test_each_centroid_ends_at_the_weighted_mean_of_its_values() -> None:
    x, counts = weight(3, 60), seen(weight(3, 60)).squared_gradients
    centroids, _ = run_kmeans(SortedRows(x, counts), x[:, :4], rounds=200)
    codes = nearest(x, centroids)
    for row in range(3):
        for k in range(4):
            mine = codes[row] == k
            mean = (x[row, mine] * counts[row, mine]).double().sum() / counts[row, mine].double().sum()
            assert torch.isclose(mean, centroids[row, k], rtol=1e-5)


def test_values_in_as_many_places_as_there_are_centroids_are_all_met() -> None:
    places = torch.tensor([-3.0, -1.0, 0.5, 4.0])
    x = places.repeat(2, 10)
    assert torch.allclose(fit_codebooks(x, torch.ones_like(x), 4), places.double().expand(2, -1))


def test_each_row_takes_the_best_of_the_three_starts() -> None:
    x, counts = weight(), seen(weight()).squared_gradients
    starts = (
        _uniform_centroids(x, counts, 8),
        _quantile_centroids(x, torch.ones_like(x).double(), 8),
        _quantile_centroids(x, counts.double(), 8),
    )
    each = torch.stack([by_hand(x, counts, run_kmeans(SortedRows(x, counts), start)[0]) for start in starts])
    assert each.argmin(0).unique().numel() == 3, "no start is the best for all rows"
    assert torch.allclose(by_hand(x, counts, fit_codebooks(x, counts, 8)), each.amin(0), rtol=1e-9)


def test_nearest_is_nearest() -> None:
    x, centroids = weight(), weight()[:, :16].sort(dim=1).values
    by_search = (x[:, :, None] - centroids[:, None, :]).abs().argmin(2)
    chosen = centroids.gather(1, nearest(x, centroids))
    assert torch.allclose((x - chosen).abs(), (x - centroids.gather(1, by_search)).abs(), atol=1e-9)


def test_rows_of_one_value_and_rows_without_weight_break_nothing() -> None:
    x = torch.zeros(3, 40)
    x[1], x[2, 3] = 0.25, 1.0
    counts = importance(torch.zeros(3, 40))
    assert torch.equal(counts, torch.ones(3, 40))
    codebooks = fit_codebooks(x, counts, 16)
    assert torch.isfinite(codebooks).all()
    assert torch.allclose(codebooks.gather(1, nearest(x, codebooks)).float(), x)


def test_a_weight_counts_by_its_gradient_and_never_nothing() -> None:
    fisher = torch.tensor([[0.0, 1.0, 8.0, 3.0]])
    assert importance(fisher).tolist() == [[3.0 * MIN_IMPORTANCE, 3.0 * MIN_IMPORTANCE, 8.0, 3.0]]


# --- dense and sparse ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_sparse_values_come_back_exactly(bits: int) -> None:
    x = weight()
    scheme = SqueezeLLM(bits=bits, outliers=0.01, sensitive=0.005)
    fisher = seen(x).squared_gradients
    kept = scheme.choose_sparse(x, fisher)
    found = scheme.dequantize(scheme.quantize(x, seen(x)), 250)
    assert kept.sum() == 60 + 30 == sum(scheme.num_sparse(x.numel()))
    assert torch.equal(found[kept], x[kept])
    assert not torch.equal(found[~kept], x[~kept])


def test_the_largest_and_the_most_sensitive_are_kept() -> None:
    x = weight()
    fisher = seen(x).squared_gradients
    scheme = SqueezeLLM(outliers=0.01, sensitive=0.005)
    kept = scheme.choose_sparse(x, fisher)
    large = x.abs() >= x.abs().flatten().sort(descending=True).values[59]
    assert kept[large].all()
    rest = fisher.masked_fill(large, 0)
    assert kept[rest >= rest.flatten().sort(descending=True).values[29]].all()


def test_values_that_are_both_large_and_sensitive_are_kept_once() -> None:
    """The share kept is a promise about bytes, so the sensitive ones come from what is left."""
    x = weight()
    assert SqueezeLLM(outliers=0.01, sensitive=0.005).choose_sparse(x, x.square()).sum() == 60 + 30


def test_no_level_is_spent_on_values_that_are_kept_sparse() -> None:
    x = weight()
    x[:, 3] = 1.0
    scheme = SqueezeLLM(outliers=0.01, sensitive=0.0)
    kept = scheme.choose_sparse(x, seen(x).squared_gradients)
    assert kept[:, 3].all()
    codebooks = scheme.quantize(x, seen(x))["codebooks"].float()
    assert codebooks.abs().max() <= x[~kept].abs().max() * 1.001


def test_the_dense_part_is_a_codebook_per_row() -> None:
    x = weight()
    tensors = make_scheme("squeezellm").quantize(x, seen(x))
    kept = SqueezeLLM().choose_sparse(x, seen(x).squared_gradients)
    found = make_scheme("squeezellm").dequantize(tensors, 250)
    for row in range(24):
        assert set(found[row, ~kept[row]].tolist()) <= set(tensors["codebooks"][row].float().tolist())


def test_sparse_rows_own_their_entries_in_order() -> None:
    x = weight()
    x[7] = 0  # a row that keeps nothing by size
    scheme = SqueezeLLM(outliers=0.01, sensitive=0.0)
    tensors = scheme.quantize(x, LayerStatistics(squared_gradients=torch.ones_like(x)))
    starts = tensors["sparse_rows"].tolist()
    assert starts[0] == 0 and starts[-1] == 60 and starts[7] == starts[8]
    for row in range(24):
        columns = tensors["sparse_columns"][starts[row] : starts[row + 1]].long()
        assert torch.equal(tensors["sparse_values"][starts[row] : starts[row + 1]].float(), x[row, columns])


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("kind", ["weighted", "plain"])
def test_better_than_rounding_at_as_many_bits(bits: int, kind: str) -> None:
    """One codebook per row against one scale per row, without the sparse values, which would make it too easy."""
    x = weight()
    statistics = seen(x) if kind == "weighted" else LayerStatistics(squared_gradients=torch.ones_like(x))
    scheme = SqueezeLLM(bits=bits, outliers=0.0, sensitive=0.0)
    ours = scheme.dequantize(scheme.quantize(x, statistics), 250) - x
    plain = dequantize_groups(*quantize_groups(x, bits, 256), 256) - x
    counts = importance(statistics.squared_gradients)
    assert ((counts * ours.square()).sum(1) < 0.9 * (counts * plain.square()).sum(1)).all()


def test_gradients_move_the_levels_to_where_they_are_large() -> None:
    x = weight()
    counts = torch.where(x > 0.01, 100.0, 0.01)
    scheme = SqueezeLLM(bits=3, outliers=0.0, sensitive=0.0)
    weighted = scheme.quantize(x, LayerStatistics(squared_gradients=counts))
    plain = scheme.quantize(x, LayerStatistics(squared_gradients=torch.ones_like(x)))

    def error(tensors: dict[str, Tensor]) -> float:
        return (scheme.dequantize(tensors, 250) - x)[x > 0.01].square().sum().item()

    assert error(weighted) < 0.75 * error(plain)


def test_sparse_values_over_fp16_are_refused() -> None:
    x = weight()
    x[0, 0] = 1e6
    with pytest.raises(CheckpointError, match="over 65504"):
        SqueezeLLM().quantize(x, seen(x))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("sparse_columns", lambda t: t.fill_(250), "points outside 250 columns"),
        ("sparse_columns", lambda t: t.fill_(-1), "points outside 250 columns"),
        ("sparse_rows", lambda t: t.add_(1), "not a partition"),
        ("sparse_rows", lambda t: t.copy_(t.flip(0)), "not a partition"),
        ("codebooks", lambda t: t.fill_(float("nan")), "codebooks contains NaN"),
        ("sparse_values", lambda t: t.fill_(float("inf")), "sparse_values contains NaN or infinity"),
    ],
)
def test_tensors_that_contradict_themselves_are_refused(name: str, change: object, words: str) -> None:
    x = weight()
    tensors = SqueezeLLM().quantize(x, seen(x))
    SqueezeLLM().check(tensors, 250)
    change(tensors[name])
    with pytest.raises(CheckpointError, match=words):
        SqueezeLLM().check(tensors, 250)
