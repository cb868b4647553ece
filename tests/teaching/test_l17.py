"""Lesson 17: its references are what `minillm.beside` does, its workshop measures what it says, likely mistakes are
named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from minillm.beside.binary_linear import BinaryLinear
from minillm.beside.chunked_training import SavedBytes
from minillm.beside.contrastive import dense_contrastive_loss
from minillm.beside.embedding_codes import EmbeddingCodes, lloyd_step
from minillm.beside.structured_linear import Blast
from minillm.errors import LessonError
from minillm.models.loading import load_model
from minillm.teaching.check_function import check_function
from minillm.teaching.drives import l17 as drive
from minillm.teaching.exercises.l17_beside_inference import (
    EXERCISES,
    backward_in_chunks,
    blast_apply,
    centroid_step,
    one_bit_and_exact,
    tiled_lse,
)
from minillm.teaching.source import edited
from minillm.teaching.workshop import l17_model as measure
from minillm.teaching.workshop import l17_training as training
from tests.conftest import TinyPair


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --------------------------------------------------------------------------------------------------------- references


@pytest.mark.parametrize("tile", [1, 3, 7, 50])
def test_the_log_sum_exps_give_the_contrastive_loss(tile: int) -> None:
    x, y = numbers(7, 4), numbers(7, 4, seed=1)
    loss = (tiled_lse(x, y, 0.3, tile) - (x * y).sum(1) / 0.3).mean()
    torch.testing.assert_close(loss, dense_contrastive_loss(x, y, 0.3))


def test_the_product_is_the_engines() -> None:
    fit = Blast.fit(numbers(12, 8), 4, 2, rounds=2)
    x = numbers(3, 8, seed=1)
    torch.testing.assert_close(blast_apply(x, fit.u, fit.s, fit.v), fit.apply(x))


@pytest.mark.parametrize("density", [0.0, 0.1, 0.5])
def test_scales_and_exact_parts_are_the_engines(density: float) -> None:
    weight = numbers(6, 10)
    scales, exact = one_bit_and_exact(weight, round(density * weight.numel()))
    theirs = BinaryLinear.fit(weight, rank=0, density=density)
    torch.testing.assert_close(scales, theirs.scales)
    torch.testing.assert_close(scales[:, None] * weight.sign() + exact, theirs.dense())
    assert int((exact != 0).sum()) == theirs.sparse.values().numel()


def test_no_other_scale_is_nearer() -> None:
    weight = numbers(1, 40)
    [scale], _ = one_bit_and_exact(weight, 0)
    errors = [float((weight - factor * scale * weight.sign()).norm()) for factor in (0.95, 1.0, 1.05)]
    assert errors[1] < min(errors[0], errors[2])


def test_a_round_is_that_of_the_engine_and_may_replace_it() -> None:
    points, weights, centroids = numbers(40, 3), numbers(40, seed=1).abs() + 0.1, 3 * numbers(6, 3, seed=2)
    torch.testing.assert_close(centroid_step(points, weights, centroids), lloyd_step(points, weights, centroids))
    counts = torch.arange(40)
    mine, theirs = (EmbeddingCodes.fit(numbers(40, 6), counts, 2, 8, rounds=3, step=s) for s in (centroid_step, None))
    assert torch.equal(mine.codes, theirs.codes)
    torch.testing.assert_close(mine.codebooks, theirs.codebooks)


# --------------------------------------------------------------------------------------------------------- the drives


def test_what_is_too_large_is_seen() -> None:
    x, y = numbers(5, 2), numbers(30, 2, seed=1)
    right = drive.lse_of_tiles(tiled_lse, x, y, 1.0, 4)
    whole = drive.lse_of_tiles(lambda x, y, temperature, tile: (x @ y.T).logsumexp(1), x, y, 1.0, 4)
    assert right["one tile at a time"] and not whole["one tile at a time"]
    torch.testing.assert_close(right["returned"], whole["returned"])


@pytest.mark.parametrize(
    "part",
    [
        lambda x, y, temperature, tile, i: (x / temperature) @ y[i : i + tile].T,
        lambda x, y, temperature, tile, i: x @ (y[i : i + tile] / temperature).T,
        lambda x, y, temperature, tile, i: (
            torch.einsum("nd,md->nm", x, y.narrow(0, i, min(tile, len(y) - i))) / temperature
        ),
    ],
)
def test_other_ways_through_tiles_pass(part) -> None:
    def stacked(x: Tensor, y: Tensor, temperature: float, tile: int) -> Tensor:
        sums = [part(x, y, temperature, tile, i).logsumexp(1) for i in range(0, len(y), tile)]
        total = sums[0]
        for one in sums[1:]:
            total = torch.logaddexp(total, one)
        return total

    assert check_function("l17.tiled_lse", stacked).passed


@pytest.mark.parametrize("tile", [1, 2, 7])
def test_the_log_sum_exps_of_all_tiles_may_be_collected(tile: int) -> None:
    def collected(x: Tensor, y: Tensor, temperature: float, tile: int) -> Tensor:
        return torch.stack([(x @ part.T / temperature).logsumexp(1) for part in y.split(tile)]).logsumexp(0)

    x, y = numbers(2, 2), numbers(30, 2, seed=1)
    assert drive.lse_of_tiles(collected, x, y, 1.0, tile)["one tile at a time"]


def test_a_product_of_numpy_is_refused() -> None:
    """The check sees PyTorch's operations only."""

    def lse(x: Tensor, y: Tensor, temperature: float, tile: int) -> Tensor:
        return torch.from_numpy(x.numpy() @ y.numpy().T / np.float32(temperature)).logsumexp(1)

    def product(x: Tensor, u: Tensor, s: Tensor, v: Tensor) -> Tensor:
        arrays = [np.asarray(each) for each in (u, s, v, x)]
        blocks = np.einsum("iar,ijr,jbr->iajb", *arrays[:3])
        return torch.from_numpy(arrays[3] @ blocks.reshape(u.shape[0] * u.shape[1], -1).T)

    for name, answer in (("l17.tiled_lse", lse), ("l17.blast_apply", product)):
        result = check_function(name, answer)
        assert not result.passed and "compute with torch, not with NumPy" in result.counterexample.got


def by_blocks(x: Tensor, u: Tensor, s: Tensor, v: Tensor) -> Tensor:
    """Writes into a tensor of zeros, which is float32: integer inputs would refuse it."""
    latents = torch.zeros(len(v), len(x), v.shape[2])
    for j, block in enumerate(x.chunk(len(v), 1)):
        latents[j] = block @ v[j]
    y = torch.zeros(len(x), len(u), u.shape[1])
    for i in range(len(u)):
        y[:, i] = (s[i][:, None] * latents).sum(0) @ u[i].T
    return y.flatten(1)


def s_times_u_first(x: Tensor, u: Tensor, s: Tensor, v: Tensor) -> Tensor:
    scaled = u[:, None] * s[:, :, None]
    latents = torch.einsum("njq,jqr->njr", x.unflatten(1, (len(v), -1)), v)
    return torch.einsum("ijpr,njr->nip", scaled, latents).flatten(1)


def s_times_v_first(x: Tensor, u: Tensor, s: Tensor, v: Tensor) -> Tensor:
    mixed = torch.einsum("njq,ijqr->nir", x.unflatten(1, (len(v), -1)), s[:, :, None] * v)
    return torch.einsum("ipr,nir->nip", u, mixed).flatten(1)


@pytest.mark.parametrize("product", [by_blocks, s_times_u_first, s_times_v_first])
def test_a_product_without_blocks_of_the_matrix_passes(product: Callable[..., Tensor]) -> None:
    assert check_function("l17.blast_apply", product).passed


@pytest.mark.parametrize(("rows", "columns"), [(8, 2), (2, 8)])
def test_s_may_be_multiplied_by_v_first_whatever_the_shape(rows: int, columns: int) -> None:
    u, s, v = numbers(rows, 1, 2), numbers(rows, columns, 2), numbers(columns, 8, 2)
    assert drive.product(s_times_v_first, numbers(1, 8 * columns), u, s, v)["without the matrix"]


@pytest.mark.parametrize("last", [True, False])
def test_any_of_equal_weights_may_be_exact(last: bool) -> None:
    def sorted_first(weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
        flat = weight.abs().flatten()
        order = (-flat.flip(0)).argsort(stable=True) if last else (-flat).argsort(stable=True)
        chosen = torch.zeros_like(weight, dtype=torch.bool)
        chosen.view(-1)[(len(flat) - 1 - order if last else order)[:count]] = True
        scales = torch.where(chosen, 0.0, weight.abs()).sum(1) / (~chosen).sum(1).clamp_min(1)
        return scales, torch.where(chosen, weight - scales[:, None] * weight.sign(), 0.0)

    assert check_function("l17.one_bit_and_exact", sorted_first).passed


@pytest.mark.parametrize("start", [-1e3, -1e4])
def test_a_log_sum_exp_that_begins_with_a_finite_number_fails(start: float) -> None:
    def finite(x: Tensor, y: Tensor, temperature: float, tile: int) -> Tensor:
        lse = torch.full((len(x),), start)
        for part in y.split(tile):
            lse = torch.logaddexp(lse, (x @ part.T / temperature).logsumexp(1))
        return lse

    assert not check_function("l17.tiled_lse", finite).passed


def test_gradients_of_a_tiny_text_in_chunks_are_those_at_once_and_graphs_are_counted() -> None:
    tokens, weight = numbers(12, 3), numbers(3, 3, seed=1)
    parts = drive.gradients(backward_in_chunks, tokens, weight, [(0, 4), (4, 8), (8, 12)])
    whole = drive.gradients(backward_in_chunks, tokens, weight, [(0, 12)])
    torch.testing.assert_close(parts["gradient of the weight"], whole["gradient of the weight"])
    assert parts["one graph at a time"] and parts["returned"][:8].abs().min() > 0 and not parts["returned"][8:].any()

    def hoarding(run, chunks, kept):
        graphs = [run(start, end, kept[:start].requires_grad_()) for start, end in chunks]
        torch.stack([loss for loss, _ in graphs]).sum().backward()
        return torch.zeros_like(kept)

    assert not drive.gradients(hoarding, tokens, weight, [(0, 4), (4, 8), (8, 12)])["one graph at a time"]


# ------------------------------------------------------------------------------------------------------- the workshop


@pytest.fixture(scope="module")
def model(tiny: TinyPair):
    return load_model(tiny.target, torch.float32, torch.device("cpu")).requires_grad_()


def test_a_backward_pass_of_a_learner_trains_the_model(model) -> None:
    ids = torch.tensor([3 + i * i % 90 for i in range(41)])
    whole, loss, at_once = training.train_at_once(model, ids)
    mine, same_loss, in_chunks = training.train(model, ids, 8, backward_in_chunks)
    cut, _, _ = training.train(model, ids, 8, training.truncated)
    assert loss == pytest.approx(same_loss, rel=1e-5)
    assert training.difference(mine, whole) < 1e-4 < 1e-3 < training.difference(cut, whole)
    assert in_chunks.peak < 0.6 * at_once.peak
    assert all(parameter.grad is None for parameter in model.parameters())


def test_saved_bytes_are_remembered_over_time() -> None:
    weight = torch.ones(10, requires_grad=True)
    with SavedBytes(torch.nn.Module()) as saved:
        (weight.exp() * 2).sum().backward()
    assert saved.history[0] == saved.peak == 40 and saved.history[-1] == saved.now == 0


def test_a_replaced_matrix_changes_the_loss_and_comes_back(model) -> None:
    ids = torch.tensor([3 + i * i % 90 for i in range(60)])
    plain = measure.loss(model, ids, 30)
    downs = {i: layer.mlp.down_proj.weight.detach() for i, layer in enumerate(model.layers)}
    with measure.replaced(model, downs):
        assert measure.loss(model, ids, 30) == pytest.approx(plain)
    with measure.replaced(model, {i: torch.zeros_like(w) for i, w in downs.items()}):
        assert measure.loss(model, ids, 30) != pytest.approx(plain)
    assert measure.loss(model, ids, 30) == plain
    table = model.embed_tokens.weight.detach()
    seen = []
    for output in (False, True):
        with measure.embedded_by(model, table + 0.1 * numbers(*table.shape), output):
            seen.append(measure.loss(model, ids, 30))
    assert len({plain, *seen}) == 3 and measure.loss(model, ids, 30) == plain


def test_a_last_piece_of_one_token_adds_nothing_to_the_loss(model) -> None:
    ids = torch.tensor([3 + i * i % 90 for i in range(61)])
    assert measure.loss(model, ids, 30) == measure.loss(model, ids[:60], 30)


@pytest.mark.parametrize(("num_tokens", "length"), [(0, 30), (1, 30), (60, 1)])
def test_a_text_without_a_token_to_predict_is_refused(model, num_tokens: int, length: int) -> None:
    ids = torch.arange(num_tokens)
    with pytest.raises(LessonError, match=f"a text of {num_tokens} tokens, length={length}.*at least two tokens"):
        measure.loss(model, ids, length)


def test_int4_is_smaller_and_coarser_than_int8() -> None:
    weight = numbers(64, 128)
    (eight, near), (four, far) = (measure.rounded(weight, bits) for bits in (8, 4))
    assert 8 < eight < 9 and 4 < four < 5
    assert 0 < (weight - near).norm() < 0.2 * (weight - far).norm() < 0.1 * weight.norm()


@pytest.mark.parametrize(
    ("name", "answer", "cause"),
    [
        ("tiled_lse", lambda x, y, temperature, tile: x, "one number for each"),
        ("tiled_lse", lambda x, y, temperature, tile: (x @ y.T / temperature).logsumexp(1), "whole matrix"),
        (
            "tiled_lse",
            lambda x, y, temperature, tile: (x[:, None] * y / temperature).sum(2).logsumexp(1),
            "as large as all of y",
        ),
        ("backward_in_chunks", lambda run, chunks, kept: torch.zeros_like(kept), "no gradient has arrived"),
        ("backward_in_chunks", lambda run, chunks, kept: 3, "return what was sent"),
        (
            "backward_in_chunks",
            edited(backward_in_chunks, (".detach().requires_grad_()", "")),
            "past does not require a gradient",
        ),
        ("blast_apply", lambda x, u, s, v: x[:, :1], "a row of all outputs"),
        (
            "blast_apply",
            lambda x, u, s, v: torch.cat(
                [x @ torch.cat([u[i] * s[i, j] @ v[j].T for j in range(len(v))], 1).T for i in range(len(u))], 1
            ),
            "one row of blocks at a time",
        ),
        ("one_bit_and_exact", lambda weight, count: (weight.abs().mean(1), weight), "not 0"),
        ("one_bit_and_exact", lambda weight, count: weight, "return the scales"),
        ("centroid_step", lambda points, weights, centroids: centroids, "has not moved"),
        ("centroid_step", lambda points, weights, centroids: points.repeat(9, 1), "as many centroids"),
        ("centroid_step", lambda points, weights, centroids: centroids + 1, "weights sum to"),
    ],
)
def test_likely_wrong_answers_are_named(name: str, answer, cause: str) -> None:
    exercise = next(exercise for exercise in EXERCISES if exercise.function_name == name)
    result = check_function(exercise, answer)
    assert not result.passed and cause in str(result), str(result)
