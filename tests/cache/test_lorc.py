"""Low-rank keys and values: nothing is lost at full rank, and less than full rank loses what the mathematics says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.batch import Batch, Segment
from minillm.cache.lorc import LorcKVCache, projection
from minillm.cache.paged import PagedKVCache
from minillm.errors import ConfigError, UnsupportedError
from minillm.models.causal import CausalAttention
from minillm.models.config import ModelConfig, RopeConfig
from minillm.models.decoder import Decoder
from minillm.models.rope import RotaryEmbedding
from minillm.ops.rope import rope
from minillm.trace import BlocksShared, RequestPreempted
from tests.cache.steps import CPU, tensor_bytes
from tests.conftest import TEXTS, TinyPair

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [text[:60] for text in TEXTS[:3]] + ["def add(a, b):", "for line in"]
ROPES = {
    "plain": RopeConfig(),
    "yarn": RopeConfig(kind="yarn", parameters={"factor": 4.0, "original_max_position_embeddings": 64}),
}


def config(**changes: Any) -> ModelConfig:
    return replace(ModelConfig(96, 64, 96, 3, 4, 2, 16, 256), **changes)


def model(**changes: Any) -> Decoder:
    torch.manual_seed(0)
    made = Decoder(config(**changes)).requires_grad_(False)
    for layer in made.layers:
        torch.nn.init.normal_(layer.qkv_proj.weight, std=0.3)
        if layer.qkv_proj.bias is not None:
            torch.nn.init.normal_(layer.qkv_proj.bias)
    return made


def engine(tiny: TinyPair, share: Any = 1.0, **options: Any) -> LLM:
    layout = {"layout": "lorc", "key_share": share, "value_share": share}
    return LLM(str(tiny.target), kv_cache_config=layout, block_size=4, **options)


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_all_ranks_give_the_plain_tokens_whatever_happens(tiny: TinyPair) -> None:
    """Chunks, a mixed batch, preemption, shared prefixes, draft chains and trees."""
    plain = tokens(LLM(str(tiny.target), enforce_eager=True))
    tree = {"method": "draft_tree", "model": str(tiny.draft), "tree_branching": [2, 2]}
    for options in (
        {},
        {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}},
        {"speculative_config": tree},
    ):
        llm = engine(tiny, num_kv_blocks=40, max_num_batched_tokens=48, max_num_seqs=4, **options)
        with llm.trace() as trace:
            assert tokens(llm) == plain
            assert tokens(llm) == plain  # from the prefix cache
        assert trace.of(BlocksShared)
    assert trace.of(RequestPreempted)


def test_copies_of_a_block_keep_their_contents(tiny: TinyPair) -> None:
    """n > 1 forks the last block, which each copy then continues."""
    params = SamplingParams(n=3, temperature=1.0, max_tokens=9, seed=5)
    outputs = [
        [c.token_ids for c in llm.generate("def add(a, b", params, use_tqdm=False)[0].outputs]
        for llm in (engine(tiny), LLM(str(tiny.target), block_size=4, enforce_eager=True))
    ]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("bias", [False, True])
def test_what_is_read_is_the_projection_onto_the_first_singular_vectors(kind: str, bias: bool) -> None:
    """Against U Uᵀ of the key before RoPE, in float64, then RoPE."""
    decoder = model(rope=ROPES[kind], qkv_bias=bias)
    cache = LorcKVCache(decoder.config, 4, 16, torch.float32, CPU, key_share=0.25, value_share=0.5)
    cache.prepare(decoder)
    torch.manual_seed(1)
    hidden, positions = torch.randn(20, 64), torch.arange(20)
    batch = Batch.from_segments([Segment([1] * 20, 0, [2, 0])], 16, CPU)
    for layer in range(3):
        weight, offset = projection(decoder, layer, is_key=True)
        before = hidden @ weight.T + offset
        table = RotaryEmbedding(decoder.config)
        cos, sin = (part / table.cos[0, 0] for part in table(positions))  # `projection` has YaRN's factor
        keys = rope(before.view(20, 2, 16), cos, sin)
        value_weight, value_offset = projection(decoder, layer, is_key=False)
        values = (hidden @ value_weight.T + value_offset).view(20, 2, 16)
        cache.attend(layer, torch.randn(20, 4, 16), keys, values, batch)
        slots = batch.key_slots[0, :20]
        u = torch.linalg.svd(weight.double()).U[:, :8]
        expected = ((before - offset).double() @ u @ u.T).float() + offset
        found = read(cache, layer, True, slots)
        torch.testing.assert_close(found, rope(expected.view(20, 2, 16), cos, sin), rtol=1e-4, atol=1e-4)
        u = torch.linalg.svd(value_weight.double()).U[:, :16]
        expected = ((values.flatten(1) - value_offset).double() @ u @ u.T).float() + value_offset
        torch.testing.assert_close(read(cache, layer, False, slots).flatten(1), expected, rtol=1e-4, atol=1e-4)


def read(cache: LorcKVCache, layer: int, is_key: bool, slots: Tensor) -> Tensor:
    from minillm.cache.paged_latent import RestoredRows

    return RestoredRows(cache, layer, is_key)[slots]


def test_the_error_is_that_of_the_left_out_singular_values() -> None:
    """Eckart and Young: over inputs of unit covariance, the mean squared error is the sum of their squares."""
    decoder = model()
    cache = LorcKVCache(decoder.config, 1, 1, torch.float32, CPU, key_share=0.5)
    cache.prepare(decoder)
    torch.manual_seed(0)
    weight, _ = projection(decoder, 1, is_key=True)
    keys = torch.randn(20_000, 64) @ weight.T
    error = (cache.restore(1, True, cache.compress(1, True, keys)) - keys).square().sum(-1).mean()
    left_out = torch.linalg.svdvals(weight)[16:].square().sum()
    assert float(error) == pytest.approx(float(left_out), rel=0.05)


def test_keys_are_compressed_before_rope_because_rotated_keys_do_not_fit_the_basis() -> None:
    """On the bundled model: projecting rotated keys with the same ranks loses more."""
    llm = LLM("minicoder", enforce_eager=True)
    decoder = llm.engine.runner.model
    ids = torch.tensor(llm.engine.tokenizer.encode(TEXTS[0] + TEXTS[1] + TEXTS[2]))
    seen: list[Tensor] = []

    class Recorder(CausalAttention):
        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Any) -> Tensor:
            seen.append(k)
            return super().attend(layer, q, k, v, batch)

    with torch.inference_mode():
        decoder(ids, torch.arange(len(ids)), Recorder(len(ids)))
    cache = LorcKVCache(decoder.config, 1, 1, torch.float32, CPU, key_share=0.5)
    cache.prepare(decoder)
    lost = {"before": 0.0, "after": 0.0}
    for layer, k in enumerate(seen):
        plain = cache.rotate(layer, k, -torch.arange(len(ids)))
        for when, keys in (("before", plain), ("after", k)):
            rows = keys.flatten(1)
            error = cache.restore(layer, True, cache.compress(layer, True, rows)) - rows
            lost[when] += float(error.square().sum() / rows.square().sum())
    assert lost["before"] < 0.7 * lost["after"]


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1, [0.75, 0.5, 0.25]])
def test_bytes_are_counted_and_real(share: Any) -> None:
    options = {"key_share": share, "value_share": 0.5}
    cache = LorcKVCache(config(), 6, 4, torch.float16, CPU, **options)
    shares = share if isinstance(share, list) else [share] * 3
    numbers = sum(max(1, round(32 * s)) for s in shares) + 3 * 16
    assert cache.num_bytes == 24 * (2 * numbers + 4) == 6 * cache.bytes_per_block(config(), 4, torch.float16, **options)
    assert cache.num_bytes == tensor_bytes(cache) - cache.frequencies.nbytes
    plain = PagedKVCache.bytes_per_block(config(), 4, torch.float16)
    assert (cache.num_bytes / 6 < plain) == (sum(shares) / 3 + 0.5 < 2 - 4 / 192)


def test_bad_options_are_refused_before_anything_is_allocated(tiny: TinyPair) -> None:
    for share, text in (
        (0, "above 0"),
        (1.2, "at most 1"),
        (True, "must be a number"),
        ([0.5], "1 numbers for 2 layers"),
    ):
        with pytest.raises(ConfigError, match=text):
            engine(tiny, share)
    with pytest.raises(UnsupportedError, match="qk_norm"):
        LorcKVCache(config(), 1, 1, torch.float32, CPU).prepare(model(qk_norm=True))
