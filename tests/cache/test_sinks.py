"""Attention sinks: scores as if every key and query had been rotated anew to its position within the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minillm.cache import sequence_rows as rows_module
from minillm.cache import window as window_module
from minillm.cache.sinks import SinksKVCache
from minillm.errors import ConfigError, MinillmError
from minillm.models.config import ModelConfig, RopeConfig
from minillm.models.loading import load_model
from minillm.tokenizer import Tokenizer
from tests.cache.runs import PROMPTS, draft_of, generated, greedy_tokens, paged
from tests.cache.steps import CONTEXT, CPU, Play, Reference, full, rotated, small_config, tensor_bytes, textbook
from tests.conftest import TinyPair

TOKEN_BYTES = 2 * 2 * 2 * 8 * 8
"""One token of `small_config` in fp64: keys and values · layers · KV heads · head size · bytes."""
YARN = RopeConfig(theta=100.0, kind="yarn", parameters={"factor": 4.0, "original_max_position_embeddings": 40})
LINEAR = RopeConfig(theta=100.0, kind="linear", parameters={"factor": 3.0})


def make(sinks: int, window: int, spare: int, **config: Any) -> tuple[Any, SinksKVCache]:
    shape = small_config(**config)
    cache = SinksKVCache(shape, 4, CONTEXT, torch.float64, CPU, sinks=sinks, window=window, spare=spare)
    return shape, cache


def streaming(sinks: int, window: int) -> Reference:
    """As the paper does it: drop what is neither sink nor recent, then rotate all that is left to 0, 1, 2, …"""

    def attention(config: ModelConfig, layer: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        tokens = [p for p in range(len(keys)) if p < sinks or p >= len(keys) - window]
        return textbook(config, layer, q, keys[tokens], values[tokens], torch.arange(len(tokens)))

    return attention


@pytest.mark.parametrize("product", ["alone", "padded together"])
@pytest.mark.parametrize("sinks, window, spare", [(1, 1, 0), (4, 5, 0), (4, 9, 2), (2, 16, 16), (20, 10, 4)])
def test_random_steps_equal_positions_given_anew(
    sinks: int, window: int, spare: int, product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks from 1 to 40, roll-backs of up to `spare`, places that change hands with and without being freed."""
    monkeypatch.setattr(rows_module, "PADDED_DEVICES", ("cpu",) if product == "padded together" else ())
    monkeypatch.setattr(window_module, "SLICE", 16)
    for seed in range(2):
        config, cache = make(sinks, window, spare)
        play = Play(config, cache, streaming(sinks, window), seed, max_back=spare).steps(25, places=3)
        assert (play.num_rolled_back > 3) == (spare > 0)


@pytest.mark.parametrize(
    "changes",
    [{"rope": YARN}, {"rope": LINEAR}, {"rope_layers": (True, False)}, {"sliding_window": 14}],
    ids=["yarn", "linear", "a layer without rotation", "a window of the model's own"],
)
def test_other_rotations(changes: dict[str, Any]) -> None:
    config, cache = make(4, 10, 3, **changes)
    Play(config, cache, streaming(4, 10), 0, max_back=3).steps(25, places=2)


def test_a_context_shorter_than_the_sinks() -> None:
    config, cache = make(CONTEXT + 5, 10, 3)
    Play(config, cache, full, 0, max_back=CONTEXT).steps(20, places=2)
    assert cache.num_rows == CONTEXT


def test_without_eviction_it_is_a_full_cache() -> None:
    config, cache = make(4, CONTEXT - 4, 3)
    Play(config, cache, full, 0, max_back=3).steps(25, places=2)


def test_going_back_beyond_spare_is_refused() -> None:
    config, cache = make(4, 10, 3)
    play = Play(config, cache, streaming(4, 10), 0, max_back=3)
    play.step([(0, 0, 60)])
    play.step([(0, 57, 4)])
    with pytest.raises(MinillmError, match=r"from 61 tokens to 56, by 5 tokens.*spare=3"):
        play.step([(0, 56, 1)])


def test_bytes_are_as_claimed_and_nothing_stays() -> None:
    config, cache = make(4, 12, 4)
    limit = SinksKVCache.bytes_per_block(config, CONTEXT, torch.float64, sinks=4, window=12, spare=4)
    assert limit == 20 * TOKEN_BYTES
    idle = cache.num_bytes
    assert idle == tensor_bytes(cache) == config.head_dim // 2 * 4
    play = Play(config, cache, streaming(4, 12), 0, max_back=0)
    for past in range(0, 100, 20):
        play.step([(2, past, 20), (3, past, 20)])
        assert cache.num_bytes == tensor_bytes(cache) == idle + 2 * limit
    cache.free([0, 1, 2, 3])
    assert cache.num_bytes == tensor_bytes(cache) == idle


def test_sinks_and_window_must_fit_into_a_window_of_the_models_own() -> None:
    assert make(4, 8, 3, sliding_window=12)
    with pytest.raises(ConfigError, match=r"sinks=4 and window=9 give a query 13 tokens.*layer 1.*window of 12"):
        make(4, 9, 3, sliding_window=12, sliding_layers=(False, True))


class NaiveSinks:
    """One sequence: every key kept as it came, turned back by its position, and rotated anew for every query."""

    def __init__(self, config: ModelConfig, sinks: int, window: int) -> None:
        self.config = config
        self.reference = streaming(sinks, window)
        nothing = torch.empty(0, config.num_kv_heads, config.head_dim)
        self.keys = [nothing] * config.num_layers
        self.values = [nothing] * config.num_layers

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Any) -> Tensor:
        past = len(self.keys[layer])
        back = -torch.arange(past, past + len(q))
        q, k = (rotated(self.config, layer, x, back) for x in (q, k))
        self.keys[layer] = keys = torch.cat((self.keys[layer], k))
        self.values[layer] = values = torch.cat((self.values[layer], v))
        ends = range(past + 1, past + len(q) + 1)
        rows = [self.reference(self.config, layer, x, keys[:end], values[:end]) for x, end in zip(q, ends, strict=True)]
        return torch.stack(rows)


def test_the_tokens_are_those_of_a_model_that_rotates_all_keys_anew(tiny: TinyPair) -> None:
    model = load_model(tiny.target, torch.float32, CPU)
    tokenizer = Tokenizer.from_folder(tiny.target)
    expected = [greedy_tokens(model, NaiveSinks(model.config, 3, 12), tokenizer.encode(prompt)) for prompt in PROMPTS]
    assert generated(str(tiny.target), {"layout": "sinks", "sinks": 3, "window": 12}) == expected


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_a_text_within_sinks_and_window_is_that_of_the_paged_layout(tiny: TinyPair, drafted: bool) -> None:
    speculative = draft_of(tiny) if drafted else None
    layout = {"layout": "sinks", "window": 82}
    assert generated(str(tiny.target), layout, speculative_config=speculative) == paged(str(tiny.target))


def test_minicoder_drafts_without_loss() -> None:
    draft = {"method": "draft_model", "model": "minicoder-draft", "num_speculative_tokens": 4}
    layout = {"layout": "sinks", "window": 16, "spare": 4}
    assert generated("minicoder", layout, speculative_config=draft) == generated("minicoder", layout)
