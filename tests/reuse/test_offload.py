"""Keys and values that came back over a link, partly recomputed: those of a prefill, and as many bytes as said."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm import LLM, SamplingParams
from minillm.errors import ConfigError, PromptError, UnsupportedError
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.reuse.offload import (
    Link,
    Offloader,
    _KeyValueProjection,
    best_split,
    transfer_seconds,
)
from minillm.reuse.scratch import Scratch
from tests.conftest import TinyPair

IDS = [3 + i * i % 200 for i in range(37)]
FAST = 1e12


@pytest.fixture(scope="module")
def llm(tiny: TinyPair) -> LLM:
    return LLM(str(tiny.target), block_size=4, enforce_eager=True)


@pytest.fixture
def offloader(llm: LLM) -> Offloader:
    llm.reset_prefix_cache()
    return Offloader(llm)


@pytest.mark.parametrize("split", [0, 1, 17, 36, 37])
def test_what_comes_back_is_what_a_prefill_computes(llm: LLM, offloader: Offloader, split: int) -> None:
    with Scratch(llm, len(IDS)) as scratch:
        scratch.forward(IDS, 0)
        right = scratch.read(0, len(IDS), IDS)
    cache = offloader.offload(IDS)
    found = offloader.restore(cache, Link(FAST), split).span
    torch.testing.assert_close(found.keys, right.keys, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.values, right.values, rtol=1e-4, atol=1e-5)
    assert torch.equal(found.keys[:, split:], right.keys[:, split:]), "what was sent is the same to the last bit"
    assert found.start == 0 and found.token_ids == IDS


def test_a_restored_prompt_gives_the_plain_tokens(llm: LLM, offloader: Offloader) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    span = offloader.restore(offloader.offload(IDS), Link(FAST), 20).span
    with Scratch(llm, len(IDS)) as scratch:
        scratch.write(span)
        scratch.publish(IDS, "restored")
    [output] = llm.generate({"prompt_token_ids": IDS, "cache_salt": "restored"}, greedy, use_tqdm=False)
    [plain] = llm.generate({"prompt_token_ids": IDS}, greedy, use_tqdm=False)
    assert output.num_cached_tokens == 36 and output.outputs[0].token_ids == plain.outputs[0].token_ids


@pytest.mark.parametrize("split", [0, 12, 37])
def test_as_many_bytes_cross_as_the_model_of_the_time_says(offloader: Offloader, split: int) -> None:
    cache, link = offloader.offload(IDS), Link(FAST)
    timeline = offloader.restore(cache, link, split).timeline
    first, rest = split * cache.hidden_bytes, (len(IDS) - split) * cache.kv_bytes
    assert link.num_bytes == first + rest
    recomputed = [("compute", "recompute", 0), ("link", "activations", first)] if split else []
    sent = [("link", "keys and values", rest)] if rest else []
    assert sorted((part.lane, part.name, part.num_bytes) for part in timeline) == recomputed + sent
    config = offloader.llm.engine.runner.model.config
    assert cache.kv_bytes == 2 * config.num_layers * config.kv_size * 4
    assert cache.hidden_bytes == config.num_layers * config.hidden_size * 4


def test_the_link_waits_as_long_as_its_bandwidth_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    link = Link(1000.0)
    monkeypatch.setattr(link, "wait", asked.append)
    link.send(torch.zeros(100), torch.zeros(25))
    assert link.num_bytes == 500 and len(asked) == 1
    assert asked[0] <= 0.5, "0.5 s, less what copying took"
    link.send(torch.zeros(10**9 // 4, device="meta"))
    assert asked[1] > 0.9 * 1e6


def test_the_rest_crosses_while_the_beginning_is_recomputed(
    offloader: Offloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recomputing waits until the rest is on its way, and the rest ends only when recomputing has."""
    cache, link, on_its_way, done = offloader.offload(IDS), Link(FAST), threading.Event(), threading.Event()
    real, crossings = offloader.recompute, []

    def wait(seconds: float) -> None:
        crossings.append(seconds)
        if len(crossings) == 2:
            on_its_way.set()
            assert done.wait(20), "recomputing did not run meanwhile"

    def recompute(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert len(crossings) == 1 or on_its_way.is_set(), "the activations are there"
        assert on_its_way.wait(20), "the rest is not sent meanwhile"
        found = real(hidden)
        done.set()
        return found

    monkeypatch.setattr(link, "wait", wait)
    monkeypatch.setattr(offloader, "recompute", recompute)
    offloader.restore(cache, link, 20)
    assert done.is_set() and len(crossings) == 2


positive = st.floats(0.01, 100)


@given(n=st.integers(1, 60), kv=positive, hidden=positive, bandwidth=positive, seconds=positive)
def test_the_closed_form_is_the_least_of_all_splits(
    n: int, kv: float, hidden: float, bandwidth: float, seconds: float
) -> None:
    times = [transfer_seconds(split, n, kv, hidden, bandwidth, seconds) for split in range(n + 1)]
    found = best_split(n, kv, hidden, bandwidth, seconds)
    assert times[found] == pytest.approx(min(times))
    assert hidden < kv or found == 0


def test_the_bundled_model_has_nothing_to_recompute_and_its_multi_head_form_would() -> None:
    """hidden 384 against 2 · 2 · 64 = 256 numbers per layer; with six KV heads 768."""
    assert best_split(100, 256, 384, 1.0, 1e-3) == 0
    assert best_split(100, 768, 384, 768.0, 1.0) == 50


def test_refusals(llm: LLM, offloader: Offloader, tiny: TinyPair) -> None:
    cache = offloader.offload(IDS)
    for split in (-1, 38, 1.5, float("nan")):
        with pytest.raises(ConfigError, match=rf"split={split} of 37 tokens"):
            offloader.restore(cache, Link(1.0), split)
    with pytest.raises(ConfigError, match="rounds=0 must be"):
        offloader.seconds_per_token(cache, rounds=0)
    for bandwidth in (0.0, -1.0, float("nan"), float("inf"), "5"):
        with pytest.raises(ConfigError, match="carries nothing"):
            Link(bandwidth)
    with pytest.raises(PromptError, match="0 tokens"):
        offloader.offload([])
    with pytest.raises(UnsupportedError, match="from a full-precision checkpoint with enforce_eager=True"):
        Offloader(LLM(str(tiny.target), quantization="int8", enforce_eager=True))
    assert llm.engine.pool.num_used == 0


@pytest.mark.parametrize(
    "switches",
    [{}, {"qkv_bias": True}, {"qk_norm": True}, {"qkv_bias": True, "qk_norm": True}, {"rope_layers": (False, True)}],
    ids=str,
)
@torch.inference_mode()
def test_the_projection_is_that_of_the_layer_for_every_family(switches: dict) -> None:
    shape = ModelConfig(20, 32, 64, 2, 4, 2, 16, 64, **switches)
    torch.manual_seed(3)
    model = Decoder(shape)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    x, positions = torch.randn(7, 32), torch.arange(5, 12)
    cos, signed_sin = model.rope(positions)
    for layer in model.layers:
        _, keys, values = layer.heads(x, cos, signed_sin)
        found = _KeyValueProjection(layer)(x, cos, signed_sin)
        torch.testing.assert_close(found, (keys, values), rtol=1e-4, atol=1e-4)


def test_ids_may_be_an_array(offloader: Offloader) -> None:
    found, right = offloader.offload(np.array(IDS)), offloader.offload(IDS)
    assert torch.equal(found.span.keys, right.span.keys) and torch.equal(found.hidden, right.hidden)


def test_no_hook_stays_behind(llm: LLM, offloader: Offloader) -> None:
    offloader.offload(IDS)
    assert all(not layer._forward_pre_hooks for layer in llm.engine.runner.model.layers)


@pytest.mark.parametrize("token", [-1, 10**9])
def test_a_token_outside_the_vocabulary_is_refused(offloader: Offloader, token: int) -> None:
    with pytest.raises(PromptError, match=rf"prompt token \d+ is {token}; ids must be integers"):
        offloader.offload([5, token])
