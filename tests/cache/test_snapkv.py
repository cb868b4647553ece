"""SnapKV: each KV head keeps the prompt tokens that the last queries attend to, and nothing else of the prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from minillm import LLM
from minillm.cache.snapkv import SnapKVCache, observed_mass, pooled
from minillm.errors import ConfigError
from tests.cache.prompt_steps import Definition, Text, outputs_are_the_definitions, random_text, step_of
from tests.cache.steps import CONTEXT, CPU, small_config
from tests.conftest import TinyPair


def mass_of(q: Tensor, k: Tensor, prompt: int, window: int, head: int) -> list[float]:
    """The attention each token of the prompt gets from its last queries, over the query heads of one KV head."""
    groups, mass = q.shape[1] // k.shape[1], [0.0] * prompt
    for p in range(max(0, prompt - window), prompt):
        for h in range(head * groups, (head + 1) * groups):
            weights = (k[: p + 1, head] @ q[p, h] / q.shape[2] ** 0.5).softmax(0).tolist()
            for j, weight in enumerate(weights):
                mass[j] += weight
    return mass


def definition(budget: int, window: int, kernel: int) -> Definition:
    def made(q: Tensor, k: Tensor, v: Tensor, prompt: int) -> tuple[Tensor, Tensor, Tensor]:
        groups = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, v))
        gone = torch.zeros(len(keys), len(q), dtype=torch.bool)
        old = max(0, prompt - window)
        for head in range(k.shape[1]) if prompt > budget else ():
            mass = mass_of(q, k, prompt, window, head)[:old]
            reach = kernel // 2
            pools = [max(mass[max(0, j - reach) : j + reach + 1]) for j in range(old)]
            order = sorted(range(old), key=lambda j: -pools[j])  # stable: of equals the earlier token
            gone[head * groups : (head + 1) * groups, order[budget - window :]] = True
        return keys, values, gone

    return made


@pytest.mark.parametrize("budget, window, kernel", [(12, 4, 3), (9, 8, 1), (20, 5, 7), (60, 3, 5), (2, 1, 9)])
def test_outputs_are_those_over_the_tokens_attended_to_most(budget: int, window: int, kernel: int) -> None:
    config = small_config()
    for seed in range(2):
        cache = SnapKVCache(config, 3, CONTEXT, torch.float64, CPU, budget=budget, window=window, kernel=kernel)
        outputs_are_the_definitions(cache, config, definition(budget, window, kernel), seed)


def test_the_mass_of_each_token_is_its_softmax_weight() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(20, 4, 8, dtype=torch.float64), torch.randn(20, 2, 8, dtype=torch.float64)
    mass = observed_mass(q[-6:], k)
    for head in range(2):
        assert mass[head].tolist() == pytest.approx(mass_of(q, k, 20, 6, head))
    assert mass.sum().item() == pytest.approx(6 * 4)  # every query of every head gives 1


def textbook_mass(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Query by query and head by head."""
    mass, group = torch.zeros(len(keys)), queries.shape[1] // keys.shape[1]
    for i, of_heads in enumerate(queries):
        end = len(keys) - len(queries) + i + 1
        first = max(0, end - window) if window else 0
        for head, query in enumerate(of_heads):
            scores = keys[first:end, head // group] @ query / keys.shape[2] ** 0.5
            mass[first:end] += scores.softmax(0)
    return mass


@pytest.mark.parametrize("window", [None, 6])
def test_the_mass_is_that_of_a_textbook_in_a_layer_with_a_window_too(window: int | None) -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(3, 4, 8), torch.randn(20, 2, 8)
    mass = observed_mass(queries, keys, window).sum(0)
    assert torch.allclose(mass, textbook_mass(queries, keys, window), atol=1e-5)
    assert mass.sum().item() == pytest.approx(12)
    assert not torch.allclose(mass, textbook_mass(queries.flip(0), keys, window), atol=1e-3)


def test_pooling_takes_the_largest_of_the_neighbours() -> None:
    mass = torch.tensor([[1.0, 5.0, 2.0, 0.0, 0.0, 3.0]])
    assert pooled(mass, 3).tolist() == [[5.0, 5.0, 5.0, 2.0, 3.0, 3.0]]
    assert pooled(mass, 1).tolist() == mass.tolist()


def test_a_kernel_wider_than_the_prompt_costs_no_more_than_one_as_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, kernels, mass = F.max_pool1d, [], torch.arange(60.0).view(2, 30)
    monkeypatch.setattr(
        F, "max_pool1d", lambda x, kernel, **options: kernels.append(kernel) or pool(x, kernel, **options)
    )
    assert pooled(mass, 2**31 - 1).tolist() == mass.amax(1, keepdim=True).expand(-1, 30).tolist()
    assert pooled(mass, 59).tolist() == mass.amax(1, keepdim=True).expand(-1, 30).tolist()
    assert pooled(mass, 57)[0, 0] == 28  # the first token does not see the last
    assert kernels == [59, 59, 57]
    assert pooled(mass[:, :1], 2**31 - 1).tolist() == mass[:, :1].tolist()


def test_a_token_that_the_question_asks_for_is_kept_and_only_the_budget_is_stored() -> None:
    """One key of 90 looks like the last queries. Both KV heads keep it, three others, and the window."""
    config = small_config(num_layers=1)
    text: Text = random_text(config, 91, 90)
    needle = torch.full((config.head_dim,), 3.0, dtype=torch.float64)
    text.k[0][17], text.q[0][82:] = needle, needle
    cache = SnapKVCache(config, 1, CONTEXT, torch.float64, CPU, budget=12, window=8, kernel=3)
    out = cache.attend(0, text.q[0], text.k[0], text.v[0], step_of([(0, 0, 91, 90)]))
    weights = text.v[0][17].repeat_interleave(2, dim=0)
    torch.testing.assert_close(out[90], weights, rtol=0.05, atol=0.05)
    assert cache.num_bytes == 2 * (12 + 1) * config.kv_size * 8
    [kept_keys, _] = cache.requests[0].layers[0].parts
    assert all(any(torch.equal(row, needle) for row in kept_keys[:, head]) for head in range(2))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"budget": 32}, r"budget=32 must be above window=32.*raise budget or lower window"),
        ({"kernel": 4}, r"kernel=4 must be odd"),
        ({"kernel": 0}, r"kernel=0 must be an integer of at least 1"),
        ({"window": 1.5}, r"window=1.5 must be an integer"),
    ],
)
def test_options_that_make_no_sense(tiny: TinyPair, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(str(tiny.target), kv_cache_config={"layout": "snapkv", **options})
