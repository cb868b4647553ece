"""The training-side ideas, each against its own mathematics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.beside import chunked_training
from minillm.beside.binary_linear import BinaryLinear
from minillm.beside.chunked_training import ChunkAttention, SavedBytes, chunked_backward, whole_backward
from minillm.beside.contrastive import dense_contrastive_loss, tiled_contrastive_loss
from minillm.beside.embedding_codes import EmbeddingCodes, kmeans, nearest
from minillm.beside.sparse_gather import by_bag, by_gather, by_product, incidence
from minillm.beside.structured_linear import Blast, LowRank, Monarch, compare, relative_error
from minillm.errors import ConfigError, TrainingError, UnsupportedError
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder

WHERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# --- contrastive loss ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [1, 3, 7, 64])
def test_the_tiled_loss_and_its_gradients_are_the_dense_ones(tile: int) -> None:
    torch.manual_seed(0)
    given = [torch.nn.functional.normalize(torch.randn(7, 5).double(), dim=-1).requires_grad_() for _ in "xy"]
    dense = dense_contrastive_loss(*given, 0.1)
    right = torch.autograd.grad(3 * dense, given)
    tiled = tiled_contrastive_loss(*given, 0.1, tile)
    torch.testing.assert_close(tiled, dense)
    torch.testing.assert_close(torch.autograd.grad(3 * tiled, given), right)


class Largest(TorchDispatchMode):
    """The most numbers in any tensor that is made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.numbers = max(self.numbers, found.numel())
        return found


def test_the_largest_tensor_of_the_tiled_loss_does_not_grow_with_the_square_of_the_batch() -> None:
    largest = {}
    for loss in (dense_contrastive_loss, tiled_contrastive_loss):
        for n in (256, 512):
            x, y = (torch.randn(n, 4, requires_grad=True) for _ in "xy")
            with Largest() as seen:
                (loss(x, y, 0.1) if loss is dense_contrastive_loss else loss(x, y, 0.1, 32)).backward()
            largest[loss.__name__, n] = seen.numbers
    assert largest["dense_contrastive_loss", 512] == 512**2
    assert largest["tiled_contrastive_loss", 512] == 512 * 4 == 2 * largest["tiled_contrastive_loss", 256]


def test_the_tiled_loss_gives_no_wrong_second_derivatives() -> None:
    x, y = (torch.randn(6, 4, dtype=torch.double, requires_grad=True) for _ in range(2))
    with pytest.raises(UnsupportedError, match="the tiled loss has no second derivative"):
        torch.autograd.grad(tiled_contrastive_loss(x, y, 0.5, 2), x, create_graph=True)


def test_the_contrastive_loss_refuses_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"row i belongs to row i"):
        tiled_contrastive_loss(torch.randn(3, 2), torch.randn(4, 2), 0.1)
    with pytest.raises(ConfigError, match=r"tile=0"):
        tiled_contrastive_loss(torch.randn(3, 2), torch.randn(3, 2), 0.1, 0)


# --- training in chunks ----------------------------------------------------------------------------------------------


def small_model() -> Decoder:
    torch.manual_seed(0)
    model = Decoder(ModelConfig(50, 32, 48, 2, 4, 2, 8, 600, tie_word_embeddings=True)).double()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("chunk", [1, 5, 16, 40, 64])
def test_gradients_in_chunks_are_those_of_the_whole_text(chunk: int) -> None:
    ids = torch.randint(0, 50, (41,), generator=torch.Generator().manual_seed(1))
    grads, losses = [], []
    for way in (whole_backward, lambda m, t: chunked_backward(m, t, chunk)):
        model = small_model()
        losses.append(way(model, ids))
        grads.append([p.grad for p in model.parameters()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    for whole, parts in zip(*grads, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-7)  # norms round to fp32


def test_without_the_gradients_that_later_chunks_send_they_would_be_wrong() -> None:
    """The planted mistake: truncated backpropagation."""
    ids = torch.randint(0, 50, (41,), generator=torch.Generator().manual_seed(1))
    model, cut = small_model(), small_model()
    chunked_backward(model, ids, 10)
    with pytest.MonkeyPatch.context() as patch:
        real = chunked_training._backward_of_chunk
        patch.setattr(
            chunked_training,
            "_backward_of_chunk",
            lambda *a: real(*a[:-1], [[torch.zeros(p.shape).double() for p in pair] for pair in a[-1]]),
        )
        chunked_backward(cut, ids, 10)
    assert any((a.grad - b.grad).abs().max() > 1e-3 for a, b in zip(model.parameters(), cut.parameters(), strict=True))


def test_activations_stay_those_of_a_chunk_as_the_text_grows() -> None:
    peaks = {}
    for length in (129, 257, 513):
        ids = torch.randint(0, 50, (length,), generator=torch.Generator().manual_seed(1))
        for name, chunk in (("whole", length), ("chunks", 32)):
            model = small_model()
            with SavedBytes(model) as saved:
                chunked_backward(model, ids, chunk)
            peaks[name, length] = saved.peak
            assert saved.now == 0
    assert peaks["whole", 513] > 3.5 * peaks["whole", 129]
    keys_and_values = {length: 2 * 2 * 2 * 8 * 8 * (length - 1) for length in (129, 257, 513)}
    activations = {peaks["chunks", length] - count for length, count in keys_and_values.items()}
    assert len(activations) == 1 and activations.pop() < 0.1 * peaks["whole", 513]


def test_gradients_of_keys_and_values_have_one_place_for_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the gradients that a chunk sends would grow with the text too: six numbers per token in place of four."""
    read = []

    class Noted(ChunkAttention):
        def __init__(self, past: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
            super().__init__(past)
            read.extend(part for pair in past for part in pair)

    monkeypatch.setattr(chunked_training, "ChunkAttention", Noted)
    model = small_model()
    chunked_backward(model, torch.arange(41), 10)
    grads = [part.grad for part in read if part.grad is not None]
    assert len(grads) == 4 * 2 * len(model.layers)  # of four chunks
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 2 * len(model.layers)


def test_a_text_without_a_next_token_is_refused() -> None:
    with pytest.raises(TrainingError, match="at least 2 tokens"):
        chunked_backward(small_model(), torch.tensor([3]), 4)


# --- structured matrices ---------------------------------------------------------------------------------------------


def weight(rows: int = 24, columns: int = 16) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(rows, columns).double()


@pytest.mark.parametrize(
    "fit", [lambda w: LowRank.fit(w, 3), lambda w: Blast.fit(w, 4, 3), lambda w: Monarch.fit(w, 4)]
)
def test_applying_is_multiplying_by_the_dense_matrix(fit: Any) -> None:
    w, x = weight().to(WHERE), torch.randn(5, 16).double().to(WHERE)
    fitted = fit(w)
    assert (fitted.dense().shape, fitted.dense().device) == (w.shape, w.device)
    torch.testing.assert_close(fitted.apply(x), x @ fitted.dense().T)


def test_a_matrix_of_a_structure_is_found_again() -> None:
    torch.manual_seed(0)
    low = LowRank(torch.randn(24, 3).double(), torch.randn(3, 16).double())
    assert relative_error(low.dense(), LowRank.fit(low.dense(), 3)) < 1e-12
    monarch = Monarch(torch.randn(4, 6, 4).double(), torch.randn(4, 4, 4).double())
    assert relative_error(monarch.dense(), Monarch.fit(monarch.dense(), 4)) < 1e-12
    assert relative_error(monarch.dense(), LowRank.fit(monarch.dense(), 4)) > 0.3
    blast = Blast(torch.randn(2, 12, 3).double(), torch.randn(2, 2, 3).double(), torch.randn(2, 8, 3).double())
    found = relative_error(blast.dense(), Blast.fit(blast.dense(), 2, 3, rounds=300))
    assert found < 0.05 < relative_error(blast.dense(), LowRank.fit(blast.dense(), 3))


def test_blast_is_never_worse_than_the_svd_it_starts_from_and_improves_with_every_round() -> None:
    w = weight()
    errors = [relative_error(w, Blast.fit(w, 4, 3, rounds)) for rounds in (0, 1, 5, 20)]
    assert errors[0] == pytest.approx(relative_error(w, LowRank.fit(w, 3)))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.98 * errors[0]


def test_the_svd_error_is_that_of_the_left_out_singular_values() -> None:
    w = weight()
    left_out = torch.linalg.svdvals(w)[5:].square().sum().sqrt()
    assert relative_error(w, LowRank.fit(w, 5)) == pytest.approx(float(left_out / torch.linalg.norm(w)))


def test_parameters_are_counted_and_comparable() -> None:
    assert LowRank.fit(weight(), 3).num_parameters == 3 * 40
    assert Blast.fit(weight(), 4, 3).num_parameters == 3 * 40 + 3 * 16
    assert Monarch.fit(weight(), 4).num_parameters == 4 * 40
    table = compare(weight(), 4)
    most = table["Monarch"][0]
    assert list(table) == ["SVD", "BLAST", "Monarch"] and all(
        0.5 * most <= count <= most for count, _ in table.values()
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_matrix_in_half_precision_is_fitted_in_float32(dtype: torch.dtype) -> None:
    half = weight().to(dtype)
    assert compare(half, 4) == compare(half.float(), 4)
    assert Monarch.fit(weight(), 4).left.dtype == weight().dtype == torch.float64


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="rank=17 must be from 1 to 16"):
        LowRank.fit(weight(), 17)
    with pytest.raises(ConfigError, match="blocks=5 must divide"):
        Monarch.fit(weight(), 5)


# --- one bit, few exact weights, low rank ----------------------------------------------------------------------------


def outlier_weight() -> torch.Tensor:
    torch.manual_seed(0)
    w = torch.randn(64, 48) + 2 * torch.randn(64, 2) @ torch.randn(2, 48)
    w[torch.randint(0, 64, (15,)), torch.randint(0, 48, (15,))] = 25.0
    return w


@pytest.mark.parametrize(("rank", "density"), [(0, 0.0), (2, 0.0), (0, 0.01), (2, 0.01)])
def test_one_bit_and_its_parts(rank: int, density: float) -> None:
    w, x = outlier_weight(), torch.randn(7, 48)
    fitted = BinaryLinear.fit(w, rank, density)
    torch.testing.assert_close(fitted.apply(x), x @ fitted.dense().T, rtol=1e-4, atol=1e-4)
    count = round(density * w.numel())
    assert fitted.num_bits == 64 * 48 + 16 * 64 + 16 * rank * 112 + 48 * count
    exact = fitted.sparse.to_dense() != 0
    assert int(exact.sum()) == count
    if not rank:
        torch.testing.assert_close(fitted.dense()[exact], w[exact])


def test_each_part_takes_away_error() -> None:
    w = outlier_weight()

    def error(rank: int, density: float) -> float:
        return float(torch.linalg.norm(BinaryLinear.fit(w, rank, density).dense() - w))

    assert error(2, 0.01) < min(error(2, 0.0), error(0, 0.01)) and max(error(2, 0.0), error(0, 0.01)) < error(0, 0.0)


def test_the_scale_is_the_best_one() -> None:
    w = outlier_weight()
    fitted = BinaryLinear.fit(w, 0, 0.0)
    for factor in (0.97, 1.03):
        other = fitted.dense() * factor
        assert torch.linalg.norm(other - w) > torch.linalg.norm(fitted.dense() - w)


# --- codes of an embedding table -------------------------------------------------------------------------------------


def test_with_a_code_for_every_row_nothing_is_lost() -> None:
    table = torch.randn(12, 8)
    codes = EmbeddingCodes.fit(table, torch.ones(12), parts=2, num_codes=12)
    torch.testing.assert_close(codes.rows(torch.arange(12)), table)
    assert codes.num_bytes == 12 * 2 + 2 * 12 * 4 * 4


def test_rounds_of_k_means_never_raise_the_weighted_error() -> None:
    torch.manual_seed(0)
    points, weights = torch.randn(200, 3), torch.rand(200) + 0.1

    def error(rounds: int) -> float:
        centroids, assigned = kmeans(points, weights, 8, rounds)
        assert torch.equal(assigned, nearest(points, centroids))
        return float((weights * (points - centroids[assigned]).square().sum(-1)).sum())

    errors = [error(rounds) for rounds in range(6)]
    assert errors == sorted(errors, reverse=True)


def test_weighting_by_frequency_serves_the_tokens_that_are_read() -> None:
    torch.manual_seed(0)
    table, counts = torch.randn(600, 8), 1e5 / torch.arange(1, 601)
    errors = {}
    for power in (0.0, 0.5):
        restored = EmbeddingCodes.fit(table, counts, parts=2, num_codes=16, power=power).rows(torch.arange(600))
        lost = (restored - table).square().sum(-1)
        errors[power] = float((counts * lost).sum() / counts.sum()), float(lost.mean())
    assert errors[0.5][0] < 0.9 * errors[0.0][0]  # what a text reads
    assert errors[0.5][1] > errors[0.0][1]  # at the price of rare rows


def test_codes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="parts=3 must divide"):
        EmbeddingCodes.fit(torch.randn(9, 8), torch.ones(9), parts=3)
    with pytest.raises(ConfigError, match="num_codes=256 must be from 1 to 9"):
        EmbeddingCodes.fit(torch.randn(9, 8), torch.ones(9), parts=2)
    with pytest.raises(ConfigError, match=r"counts \(5,\) must have one number for each of the 9 rows"):
        EmbeddingCodes.fit(torch.randn(9, 8), torch.ones(5), parts=2, num_codes=4)


# --- gathering as a product ------------------------------------------------------------------------------------------


def test_three_ways_to_sum_gathered_rows_agree_and_send_the_same_gradients() -> None:
    torch.manual_seed(0)
    signs = torch.tensor([1.0, 1.0, -1.0])
    rows = torch.stack([torch.randperm(20)[:3] for _ in range(11)])
    ways = {
        "gather": lambda table: by_gather(table, rows, signs),
        "bag": lambda table: by_bag(table, rows, signs),
        "product": lambda table: by_product(table, incidence(rows, signs, 20)),
    }
    grads = []
    for way in ways.values():
        table = torch.randn(20, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
        found = way(table)
        found.square().sum().backward()
        grads.append((found.detach(), table.grad))
    torch.testing.assert_close(grads[0], grads[1])
    torch.testing.assert_close(grads[0], grads[2])


def test_a_sparse_product_is_on_the_device_of_its_rows() -> None:
    matrix = incidence(torch.zeros(3, 2, dtype=torch.long, device="meta"), torch.ones(2, device="meta"), 5)
    assert matrix.crow_indices().device == matrix.col_indices().device == matrix.device == torch.device("meta")


def test_a_model_with_a_window_is_refused() -> None:
    """Chunks attend to all tokens before them, so the gradients would be those of another model."""
    model = small_model()
    model.config = replace(model.config, sliding_window=5)
    with pytest.raises(TrainingError, match="sliding window"):
        chunked_backward(model, torch.arange(20), 10)
