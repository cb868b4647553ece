"""Lesson 13: its functions are the engine's mathematics, and its layouts do what the engine's do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minillm.bench.zoo_cache import build, continuation, read_prompt
from minillm.cache.squeezed import cluster_scores
from minillm.cache.think import channel_scores
from minillm.models.calibration import CalibrationTexts
from minillm.models.decoder import Decoder
from minillm.models.rope import inverse_frequencies
from minillm.ops.rerotation import rerotate
from minillm.teaching.check_function import check_function
from minillm.teaching.exercises.l13_compressing_the_cache import (
    absorb_centres,
    commutation_error,
    kept_channels,
    kept_clusters,
    low_rank,
)
from minillm.teaching.grading.hidden_cases import hidden_cases
from minillm.teaching.workshop import l13_layouts as layouts
from minillm.teaching.workshop import l13_measure as measure
from minillm.teaching.workshop import l13_rope as rope
from tests.cache.steps import small_config
from tests.teaching.answers import key_of

ROW = [*((7 * i * i + 3 * i) % 300 for i in range(71)), 0]  # begins and ends with the same token
PROMPT = 60


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(small_config()).requires_grad_(False)


class SomeTexts(CalibrationTexts):
    def __init__(self) -> None:
        pass

    def rows(self) -> list[list[int]]:
        return [[(i * k + k) % 300 for i in range(90)] for k in (3, 7, 11, 13)]


def predicted(model: Decoder, options: dict[str, Any]) -> tuple[Tensor, Any]:
    """Log-probabilities behind the prompt of `ROW`, and the cache."""
    runner = build(options, model, len(ROW), texts=SomeTexts())
    read_prompt(runner, ROW, PROMPT)
    return continuation(runner, ROW, PROMPT, one_by_one=3).logprobs, runner.cache


# ---------------------------------------------------------------------------------------------------- the mathematics


@settings(max_examples=30)
@given(seed=st.integers(0, 999), count=st.integers(1, 8))
def test_channels_are_those_of_the_engine(seed: int, count: int) -> None:
    queries, keys = random(5, 4, 8, seed=seed), random(9, 2, 8, seed=seed + 1)
    best = channel_scores(queries, keys).argsort(dim=1, descending=True, stable=True)[:, :count]
    assert torch.equal(kept_channels(queries, keys, count), best.sort(dim=1).values)


def _by_float64(queries: Tensor, keys: Tensor, count: int) -> Tensor:
    return kept_channels(queries.double(), keys.double(), count)


def _by_products(queries: Tensor, keys: Tensor, count: int) -> Tensor:
    """The mean of (q k)² over all pairs of a query and a key."""
    grouped = queries.unflatten(1, (keys.shape[1], -1)).transpose(1, 2).flatten(0, 1)
    scores = (grouped[:, None] * keys[None]).square().mean((0, 1))
    return scores.argsort(dim=1, descending=True, stable=True)[:, :count].sort(dim=1).values


def _by_norms(queries: Tensor, keys: Tensor, count: int) -> Tensor:
    scores = queries.unflatten(1, (keys.shape[1], -1)).pow(2).sum((0, 2)).sqrt() * keys.norm(dim=0)
    return scores.argsort(dim=1, descending=True, stable=True)[:, :count].sort(dim=1).values


@pytest.mark.parametrize("other", [_by_float64, _by_products, _by_norms])
def test_no_case_of_kept_channels_depends_on_rounding(other) -> None:
    result = check_function("l13.kept_channels", other)
    assert result.passed, str(result)


def test_the_score_is_the_size_of_the_channels_part_of_all_scores() -> None:
    queries, keys = random(5, 1, 6), random(9, 1, 6, seed=1)
    parts = torch.stack([torch.outer(queries[:, 0, c], keys[:, 0, c]).square().sum() for c in range(6)])
    assert set(kept_channels(queries, keys, 3)[0].tolist()) == set(parts.topk(3).indices.tolist())


@settings(max_examples=20)
@given(seed=st.integers(0, 999), rank=st.integers(1, 8))
def test_absorbing_changes_no_output_and_no_basis_of_this_rank_loses_less(seed: int, rank: int) -> None:
    weight, out = random(8, 12, seed=seed), random(4, 12, 4, seed=seed + 1)
    basis, absorbed = low_rank(weight, out, rank)
    coordinates = basis.T @ weight @ random(12, seed=seed + 2)
    values = (basis @ coordinates).view(2, 4).repeat_interleave(2, 0)
    restored = torch.einsum("hd,hid->i", values, out)
    torch.testing.assert_close(torch.einsum("r,hir->i", coordinates, absorbed), restored, rtol=1e-3, atol=1e-4)
    lost = (weight - basis @ basis.T @ weight).square().sum()
    torch.testing.assert_close(lost, torch.linalg.svdvals(weight)[rank:].square().sum(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("student", [32, 244, 321])
def test_no_hidden_case_of_low_rank_depends_on_rounding(student: int) -> None:
    """Students whose first draws had singular values that nearly agree."""
    key = key_of("l13.low_rank")
    for case in hidden_cases(key, b"a secret of sixteen and more bytes", f"student{student}"):
        weight, out, rank = case.args
        exact = tuple(part.float() for part in low_rank(weight.double(), out.double(), rank))
        assert key.exercise.compare(low_rank(weight, out, rank), exact) is None


def test_the_rotation_is_that_of_the_engine() -> None:
    """RoPE of the rows of the identity gives R transposed."""
    frequencies, matrix = torch.tensor([1.0, 0.3, 0.1, 0.02]), random(8, 8)
    for position in (1, 5, 40):
        rotation = rerotate(torch.eye(8).unsqueeze(1), frequencies, position)[:, 0].T
        wanted = (rotation @ matrix - matrix @ rotation).norm() / matrix.norm()
        assert commutation_error(matrix, frequencies, [position]) == pytest.approx(float(wanted), rel=1e-4)


@settings(max_examples=30)
@given(seed=st.integers(0, 999), position=st.integers(-500, 500))
def test_scores_by_look_up_are_those_of_rotated_centres(seed: int, position: int) -> None:
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.02])
    query, centres = random(8, seed=seed), random(5, 8, seed=seed + 1)
    angles = position * frequencies.double()
    turns = torch.stack((angles.cos(), angles.sin())).float()
    scores = (absorb_centres(query, centres) * turns.unsqueeze(1)).sum((0, 2))
    rotated = rerotate(centres.unsqueeze(1), frequencies, position)[:, 0]
    torch.testing.assert_close(scores, rotated @ query, rtol=1e-3, atol=1e-4)


@settings(max_examples=30)
@given(seed=st.integers(0, 999), threshold=st.sampled_from((0.0, 0.3, 0.8, 1.2, 2.0)))
def test_clusters_are_those_of_the_engine(seed: int, threshold: float) -> None:
    q, centroids = random(3, 4, 8, seed=seed), random(2, 6, 8, seed=seed + 1)
    sizes = torch.arange(1, 13).view(2, 6)
    scores = cluster_scores(q, centroids, sizes) * sizes.sum(1).view(2, 1, 1)
    assert torch.equal(layouts.kept(kept_clusters, q, centroids, sizes, threshold), scores >= threshold)


def test_a_cluster_without_keys_is_hidden_from_the_choice_and_never_kept() -> None:
    q, centroids, sizes = random(1, 2, 8), random(1, 3, 8, seed=1), torch.tensor([[4, 0, 2]])
    seen = []

    def choice(queries: Tensor, centroids: Tensor, sizes: Tensor, threshold: float) -> Tensor:
        seen.append(sizes.tolist())
        return torch.ones(len(sizes), dtype=torch.bool)

    assert layouts.kept(choice, q, centroids, sizes, 0.0).tolist() == [[[True, False, True]]]
    assert seen == [[4, 2]]


# -------------------------------------------------------------------------------------------------------- the layouts


@pytest.mark.parametrize(
    ("layout", "mine", "options"),
    [
        ("think", layouts.think_with(kept_channels), {"key_share": 0.5, "window": 8}),
        ("squeezed", layouts.squeezed_with(kept_clusters), {"threshold": 0.8, "cluster_share": 0.2, "window": 8}),
    ],
)
def test_a_layout_with_the_reference_inside_is_the_engines(model: Decoder, layout: str, mine, options) -> None:
    theirs, cache = predicted(model, layouts.options(layout, **options))
    ours, other = predicted(model, layouts.options(mine, **options))
    assert torch.equal(ours, theirs)
    assert other.num_bytes == cache.num_bytes
    if layout == "squeezed":
        assert torch.equal(other.rows_read, cache.rows_read) and 0 < cache.share_read < 1
    plain, _ = predicted(model, {})
    assert not torch.allclose(ours, plain, atol=1e-4)


def test_lorc_with_the_reference_inside_is_the_engines(model: Decoder) -> None:
    half = {"key_share": 0.5, "value_share": 0.5}
    theirs, _ = predicted(model, layouts.options("lorc", **half))
    ours, _ = predicted(model, layouts.options(layouts.lorc_with(low_rank), **half))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_another_choice_gives_other_predictions(model: Decoder) -> None:
    options = {"key_share": 0.5, "window": 8}
    right, _ = predicted(model, layouts.options(layouts.think_with(kept_channels), **options))
    least, _ = predicted(model, layouts.options(layouts.think_with(layouts.least_used), **options))
    assert not torch.allclose(right, least, atol=1e-4)
    queries, keys = random(5, 4, 8), random(9, 2, 8, seed=1)
    kept = torch.cat((kept_channels(queries, keys, 5), layouts.least_used(queries, keys, 3)), 1)
    assert torch.equal(kept.sort(1).values, torch.arange(8).expand(2, -1))


def test_zeros_predict_like_dropped_channels_and_take_all_bytes(model: Decoder) -> None:
    options = {"key_share": 0.5, "window": 8}
    dropped, small = predicted(model, layouts.options("think", **options))
    zeroed, large = predicted(model, layouts.options(layouts.ZeroedChannels, **options))
    _, plain = predicted(model, layouts.options("think", key_share=1.0, window=8))
    assert torch.equal(dropped, zeroed)
    assert large.num_bytes == plain.num_bytes > small.num_bytes


def test_latents_after_rope_are_those_of_rotated_keys(model: Decoder) -> None:
    """With all ranks nothing is lost on either side of RoPE; with fewer, the results differ."""
    whole, _ = predicted(model, layouts.options(layouts.LatentsAfterRope, key_share=1.0, value_share=1.0))
    plain, _ = predicted(model, {})
    torch.testing.assert_close(whole, plain, rtol=1e-3, atol=1e-3)
    after, _ = predicted(model, layouts.options(layouts.LatentsAfterRope))
    before, _ = predicted(model, layouts.options("lorc"))
    assert not torch.allclose(after, before, atol=1e-4)


def test_the_output_projection_by_query_heads_is_the_layers(model: Decoder) -> None:
    out, heads = layouts.out_projection(model, 1), random(4, 8)
    torch.testing.assert_close(torch.einsum("hd,hid->i", heads, out), model.layers[1].o_proj(heads.flatten()))


# ----------------------------------------------------------------------------------------------------------- codebooks


def test_codebooks_of_fewer_bits_are_the_first_stages(model: Decoder) -> None:
    trained = rope.trained_once(model, SomeTexts(), bits=2)
    for bits in (1, 2):
        theirs, cache = predicted(model, layouts.options("commvq", bits=bits))
        ours, other = predicted(model, layouts.options(trained, bits=bits))
        assert torch.equal(ours, theirs)
        assert (other.num_bytes, other.model_bytes) == (cache.num_bytes, cache.model_bytes)


def test_scores_by_look_up_are_those_of_the_keys_that_commvq_restores(model: Decoder) -> None:
    _, cache = predicted(model, layouts.options("commvq", bits=2))
    query = random(8)
    for layer in range(2):
        keys = cache.restore(layer, True, cache.keys[layer][:PROMPT]).unflatten(1, (2, -1))
        wanted = cache.rotate(layer, keys, cache.positions[:PROMPT])[:, 0] @ query
        found = rope.looked_up_scores(absorb_centres, cache, layer, query, PROMPT)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_pairs_are_the_channels_that_rope_turns_together() -> None:
    keys = random(5, 2, 8)
    pairs = rope.pairs_of(keys)
    assert pairs.shape == (8, 5, 2)
    assert torch.equal(pairs[4 + 1], torch.stack((keys[:, 1, 1], keys[:, 1, 5]), 1)), "pair 1 of head 1"
    lengths = rope.pairs_of(rerotate(keys, torch.tensor([1.0, 0.3, 0.1, 0.02]), 9)).norm(dim=2)
    torch.testing.assert_close(lengths, pairs.norm(dim=2))


def test_more_centres_lose_less_and_enough_lose_nothing() -> None:
    points = random(3, 20, 2)
    lost = [rope.clustered(points, centres)[1].mean() for centres in (1, 4, 20)]
    assert lost[0] > lost[1] > lost[2]
    assert lost[2] == pytest.approx(0, abs=1e-6)


def test_an_absorbed_basis_is_exact_at_distance_0_only() -> None:
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.02])
    queries, keys, basis = random(40, 4, 8), random(40, 2, 8, seed=1), torch.linalg.qr(random(16, 12, seed=2)).Q
    errors = rope.error_by_distance(queries, keys, basis, frequencies, [0, 1, 15])
    assert errors[0] == pytest.approx(0, abs=1e-4) and min(errors[1:]) > 0.1
    still = rope.error_by_distance(queries, keys, basis, 0 * frequencies, [0, 1, 15])
    assert max(still) < 1e-4, "without rotation nothing is lost"


# --------------------------------------------------------------------------------------------------------- the measure


def test_the_bench_measures_as_the_zoo_does() -> None:
    bench = measure.Bench("minicoder", 128, rows=1, tasks=1, distance=10)
    assert bench.quality(bench.logprobs({})).mean_kl == 0
    assert bench.share_stored({}) == 1
    assert bench.calibration_texts.rows() == bench.material.fitted.rows()[::2]
    outcome = bench.zoo({0.5: ["window", "int4"], 0.25: ["int8"]}, {})
    assert [row["system"] for row in outcome["rows"]] == ["plain", "int4 50%", "window 50%"], "int8 is never that small"
    assert outcome["rows"][2]["share"] == pytest.approx(0.5, abs=0.02)
    window = bench.quality(bench.logprobs(outcome_options(0.5, bench))).mean_kl
    assert outcome["rows"][2]["quality"]["mean_kl"] == pytest.approx(window, rel=1e-3)
    own = bench.zoo({0.5: ["window"]}, {"window": "paged"})  # type: ignore[dict-item]
    assert own["rows"][1]["error"], "the given layout is used, and this one has no window"


def outcome_options(share: float, bench: measure.Bench) -> dict[str, Any]:
    return layouts.options("window", window=int(share * bench.prompt_len), spare=0)


def test_recorded_attention_sums_to_one_and_is_that_of_the_plain_model(model: Decoder) -> None:
    recorder = measure.record(model, ROW)
    assert [part.shape for part in (recorder.queries[1], recorder.keys[1], recorder.values[1])] == [
        (72, 4, 8),
        (72, 2, 8),
        (72, 2, 8),
    ]
    weights = measure.attention_weights(recorder.queries[1][-1], recorder.keys[1])
    assert weights.sum(1).tolist() == pytest.approx([1.0] * 4)
    frequencies, _ = inverse_frequencies(model.config.rope, model.config.head_dim)
    undone = rope.before_rope(recorder.keys[0], frequencies)
    torch.testing.assert_close(rerotate(undone, frequencies, torch.arange(72)), recorder.keys[0])
    torch.testing.assert_close(undone[0], undone[-1])


@pytest.mark.parametrize(
    ("name", "answer", "cause"),
    [
        ("kept_channels", lambda q, k, n: kept_channels(torch.ones_like(q), k, n), "scores by the keys alone"),
        ("kept_channels", lambda q, k, n: kept_channels(q, k, n) * 0, "keeps a channel twice"),
        ("low_rank", lambda w, o, r: (low_rank(w, o, r)[0], 2 * low_rank(w, o, r)[1]), "2"),
        ("low_rank", lambda w, o, r: (2 * low_rank(w, o, r)[0], low_rank(w, o, r)[1]), "length 1"),
        ("low_rank", lambda w, o, r: tuple(-part for part in low_rank(w, o, r)), ""),
        ("commutation_error", lambda *a: -commutation_error(*a), "never negative"),
        (
            "absorb_centres",
            lambda q, c: absorb_centres(q, c) * torch.tensor([1.0, 3.0]).view(2, 1, 1),
            "turned by a quarter",
        ),
        ("absorb_centres", lambda q, c: absorb_centres(q, c).flip(2), "in reverse order along the last dimension"),
        (
            "absorb_centres",
            lambda q, c: torch.stack((absorb_centres(q, c)[0].flip(1), absorb_centres(q, c)[1])),
            "the table holds the right numbers in other places",
        ),
        (
            "absorb_centres",
            lambda q, c: torch.stack((2 * absorb_centres(q, c)[0], absorb_centres(q, c)[1])),
            "table[0] summed over pairs is query · centre, 6 for the first centre; yours gives 12",
        ),
        ("kept_clusters", lambda *a: ~kept_clusters(*a), "left out"),
        ("kept_clusters", lambda q, c, n, t: kept_clusters(q, c, n, 3 * t), "the threshold is"),
    ],
)
def test_likely_wrong_answers_are_named(name: str, answer, cause: str) -> None:
    """The third answer to `low_rank` is right: singular vectors may point either way."""
    result = check_function(f"l13.{name}", answer)
    assert result.passed == (cause == "") and cause in str(result), str(result)
