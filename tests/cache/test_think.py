"""ThinK: the channels whose scores matter least go, and their bytes with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minillm import LLM
from minillm.cache.think import ThinkKVCache, channel_scores
from minillm.errors import ConfigError
from tests.cache.prompt_steps import Definition, outputs_are_the_definitions, random_text, step_of
from tests.cache.steps import CONTEXT, CPU, small_config
from tests.conftest import TinyPair


def definition(kept: int, window: int) -> Definition:
    """By the scores themselves: the Frobenius norm of Q_c K_cᵀ over all query heads of a KV head."""

    def made(q: Tensor, k: Tensor, v: Tensor, prompt: int) -> tuple[Tensor, Tensor, Tensor]:
        groups, dim = q.shape[1] // k.shape[1], q.shape[2]
        keys, values = (x.repeat_interleave(groups, dim=1).transpose(0, 1).clone() for x in (k, v))
        for h in range(k.shape[1]):
            own = q[max(0, prompt - window) : prompt, h * groups : (h + 1) * groups].flatten(0, 1)
            norms = [torch.outer(own[:, c], k[:prompt, h, c]).norm().item() for c in range(dim)]
            dropped = sorted(range(dim), key=lambda c: norms[c])[: dim - kept]
            for c in dropped:
                keys[h * groups : (h + 1) * groups, : max(0, prompt - window), c] = 0
        return keys, values, torch.zeros(len(keys), len(q), dtype=torch.bool)

    return made


@pytest.mark.parametrize("share, kept, window", [(0.6, 5, 8), (0.1, 1, 1), (1.0, 8, 5), (0.5, 4, 40)])
def test_outputs_are_those_of_keys_without_the_dropped_channels(share: float, kept: int, window: int) -> None:
    config = small_config()
    for seed in range(2):
        cache = ThinkKVCache(config, 3, CONTEXT, torch.float64, CPU, key_share=share, window=window)
        outputs_are_the_definitions(cache, config, definition(kept, window), seed)


def test_the_score_is_the_squared_norm_of_a_channels_part_of_all_scores() -> None:
    """mean q² · mean k² = ‖Q_c K_cᵀ‖² / (number of scores), so both have the same order."""
    torch.manual_seed(0)
    q, k = torch.randn(5, 4, 8, dtype=torch.float64), torch.randn(9, 2, 8, dtype=torch.float64)
    scores = channel_scores(q, k)
    for h in range(2):
        for c in range(8):
            part = torch.outer(q[:, 2 * h : 2 * h + 2, c].flatten(), k[:, h, c])
            assert float(scores[h, c]) == pytest.approx(float(part.square().mean()))


def test_what_is_stored_is_what_is_left() -> None:
    """Bytes of 100 prompt tokens: 92 keys of 2 channels, the rest whole, and the channels' indices."""
    config = small_config()
    cache = ThinkKVCache(config, 1, CONTEXT, torch.float16, CPU, key_share=0.25, window=8)
    text, step = random_text(config, 100, 100, torch.float32), step_of([(0, 0, 100, 100)])
    for layer in range(2):
        cache.attend(layer, *(x[layer].half() for x in (text.q, text.k, text.v)), step)
    assert cache.num_bytes == 2 * 2 * (2 * (92 * (2 + 8) + 8 * 16) + 2 * 2)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"key_share": 0}, r"key_share=0 must be a number above 0 and at most 1"),
        ({"key_share": 1.2}, r"key_share=1.2"),
        ({"key_share": True}, r"key_share=True"),
        ({"window": 0}, r"window=0 must be an integer of at least 1"),
    ],
)
def test_options_that_make_no_sense(tiny: TinyPair, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(str(tiny.target), kv_cache_config={"layout": "think", **options})
