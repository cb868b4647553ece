"""Squeezed Attention: exact attention over the clusters whose centroids a query scores above the threshold."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from minillm import LLM
from minillm.cache.squeezed import SqueezedKVCache, cluster_scores
from minillm.errors import ConfigError
from minillm.quantization.vector_kmeans import vector_kmeans
from tests.cache.prompt_steps import Definition, outputs_are_the_definitions, random_text, step_of
from tests.cache.steps import CONTEXT, CPU, small_config, tensor_bytes
from tests.conftest import TinyPair


def definition(threshold: float, share: float, window: int) -> Definition:
    """One query, one KV head and one cluster at a time."""

    def made(q: Tensor, k: Tensor, v: Tensor, prompt: int) -> tuple[Tensor, Tensor, Tensor]:
        groups, dim = q.shape[1] // k.shape[1], q.shape[2]
        keys, values = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, v))
        gone = torch.zeros(len(keys), len(q), len(q), dtype=torch.bool)
        old = prompt - window
        for head in range(k.shape[1]) if old > 0 else ():
            count = max(1, round(share * old))
            _, [labels] = vector_kmeans(F.normalize(k[:old, head], dim=-1).unsqueeze(0), count)
            members = [[j for j in range(old) if labels[j] == i] for i in range(count)]
            for p in range(prompt, len(q)):
                mean = [0.0] * count
                for h in range(head * groups, (head + 1) * groups):
                    raw = [
                        math.exp(float(k[own, head].mean(0) @ q[p, h]) / dim**0.5) if own else 0.0 for own in members
                    ]
                    total = sum(len(own) * one for own, one in zip(members, raw, strict=True))
                    mean = [m + one / total / groups for m, one in zip(mean, raw, strict=True)]
                for own, score in zip(members, mean, strict=True):
                    if score < threshold / old:
                        gone[head * groups : (head + 1) * groups, p, own] = True
        return keys, values, gone

    return made


@pytest.mark.parametrize("threshold, share, window", [(1.0, 0.3, 4), (0.7, 1.0, 2), (3.0, 0.1, 9), (0, 0.5, 3)])
def test_outputs_are_those_over_the_kept_clusters(threshold: float, share: float, window: int) -> None:
    config = small_config()
    for seed in range(2):
        options = {"threshold": threshold, "cluster_share": share, "window": window}
        cache = SqueezedKVCache(config, 3, CONTEXT, torch.float64, CPU, **options)
        outputs_are_the_definitions(cache, config, definition(threshold, share, window), seed)
        assert (cache.share_read == 1) == (threshold == 0)


def test_with_one_cluster_per_token_the_score_is_the_attention_weight() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(3, 4, 8, dtype=torch.float64), torch.randn(11, 2, 8, dtype=torch.float64)
    scores = cluster_scores(q, k.transpose(0, 1), torch.ones(2, 11))
    for head in range(2):
        exact = torch.stack([(q[:, h] @ k[:, head].T / 8**0.5).softmax(-1) for h in (2 * head, 2 * head + 1)]).mean(0)
        torch.testing.assert_close(scores[head], exact)


def test_scores_weigh_clusters_by_their_size_and_empty_ones_by_nothing() -> None:
    torch.manual_seed(1)
    q, centroids = torch.randn(5, 2, 8, dtype=torch.float64), torch.randn(1, 4, 8, dtype=torch.float64)
    sizes = torch.tensor([[3, 0, 10, 1]])
    scores = cluster_scores(q, centroids, sizes)
    torch.testing.assert_close((scores * sizes.unsqueeze(1)).sum(-1), torch.ones(1, 5, dtype=torch.float64))
    assert not scores[..., 1].any() and not scores.isnan().any()


def test_a_query_that_looks_like_a_cluster_reads_that_cluster() -> None:
    """Two clusters far apart: a query along one of them reads its 20 keys and none of the other 40."""
    config = small_config(num_layers=1, num_heads=2)
    text = random_text(config, 65, 64)
    text.k[0][:20], text.k[0][20:60] = torch.randn(2, 1, 2, 8, dtype=torch.float64)
    text.k[0][20:60] = -text.k[0][:1]
    text.q[0][64] = 4 * text.k[0][0]
    cache = SqueezedKVCache(config, 1, CONTEXT, torch.float64, CPU, threshold=1, cluster_share=2 / 60, window=4)
    cache.attend(0, text.q[0], text.k[0], text.v[0], step_of([(0, 0, 65, 64)]))
    assert cache.rows_read.tolist() == [2 * 20, 2 * 60] and cache.share_read == pytest.approx(1 / 3)


def test_everything_is_stored_and_the_centroids_as_well() -> None:
    config, options = small_config(), {"cluster_share": 0.1, "window": 10}
    cache = SqueezedKVCache(config, 1, CONTEXT, torch.float16, CPU, **options)
    fixed = tensor_bytes(cache)
    text, step = random_text(config, CONTEXT, CONTEXT - 1, torch.float32), step_of([(0, 0, CONTEXT, CONTEXT - 1)])
    for layer in range(2):
        cache.attend(layer, *(x[layer].half() for x in (text.q, text.k, text.v)), step)
    whole = 2 * 2 * CONTEXT * 16 * 2
    assert cache.num_bytes == tensor_bytes(cache) - fixed == whole + 2 * 2 * (15 * (8 * 2 + 4) + 149 * 4)
    assert cache.num_bytes <= cache.bytes_per_block(config, CONTEXT, torch.float16, **options)


@pytest.mark.parametrize("heads, count", [(1, 1), (3, 5), (2, 40)])
def test_a_round_of_k_means_never_makes_it_worse(heads: int, count: int) -> None:
    torch.manual_seed(0)
    points = torch.randn(heads, 40, 3, dtype=torch.float64)
    errors = []
    for rounds in range(8):
        centroids, labels = vector_kmeans(points, count, rounds)
        nearest = torch.cdist(points, centroids)
        assert torch.equal(labels, nearest.argmin(-1))
        errors.append(nearest.min(-1).values.square().sum(1))
    assert all((after <= before + 1e-12).all() for before, after in pairwise(errors))
    assert count < 40 or errors[-1].max() < 1e-10


@pytest.mark.parametrize(
    "options, words",
    [
        ({"threshold": -0.1}, r"threshold=-0.1 must be a number of at least 0 and at most 2147483647"),
        ({"threshold": float("nan")}, r"threshold=nan"),
        ({"threshold": float("inf")}, r"threshold=inf"),
        ({"threshold": 10**20}, r"threshold=10{20} must be"),
        ({"cluster_share": 0}, r"cluster_share=0 must be a number above 0"),
    ],
)
def test_options_that_make_no_sense(tiny: TinyPair, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(str(tiny.target), kv_cache_config={"layout": "squeezed", **options})
