"""Models, caches and steps for tests of the GPU's step and executor. They cover every option of the architecture, and
are small enough for Triton's interpreter, which runs each program in Python."""

from __future__ import annotations

from dataclasses import replace

import torch

from minillm.batch import Segment
from minillm.cache.base import KVCache
from minillm.cache.paged import PagedKVCache
from minillm.models.config import ModelConfig, RopeConfig
from minillm.models.decoder import Decoder
from minillm.runtime.runner import ModelRunner

WHERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAIN = ModelConfig(97, 48, 64, 2, 4, 2, 16, 64, rope=RopeConfig())
SMALL = replace(PLAIN, num_layers=1, num_heads=2, num_kv_heads=1, hidden_size=32, intermediate_size=32)
SHAPES = {
    "plain": PLAIN,
    "tied": replace(PLAIN, tie_word_embeddings=True),
    "biases": replace(PLAIN, qkv_bias=True, o_bias=True, mlp_bias=True),
    "normalised heads": replace(PLAIN, qk_norm=True),
    "window in one layer": replace(PLAIN, sliding_window=5, sliding_layers=(True, False)),
    "no rope in one layer": replace(PLAIN, rope_layers=(True, False)),
    "other sizes": replace(PLAIN, vocab_size=130, hidden_size=40, intermediate_size=24, num_heads=3, num_kv_heads=1),
}
BLOCK_SIZE, BLOCKS = 4, 40
PROMPT, OTHER = list(range(3, 9)), [9, 4, 1, 7, 7, 2]
TABLE, OTHERS_TABLE = [7, 3, 11, 0, 30, 2], [5, 6, 12, 39]


def random_model(config: ModelConfig, seed: int = 0) -> Decoder:
    """Return a model with every parameter random, so that a forgotten bias or norm shows, and logits far apart."""
    torch.manual_seed(seed)
    model = Decoder(config).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.copy_(torch.randn_like(parameter) * 0.1 + ("norm" in name))
        else:
            parameter.copy_(torch.randn_like(parameter) * 1.4 / parameter.shape[1] ** 0.5)
    model.tie()
    return model.eval().to(WHERE)


def empty_cache(model: Decoder, layout: type[KVCache] = PagedKVCache, **options: int) -> KVCache:
    """Return a cache filled with NaN, also in the scales of codes: slots must not be read before they are written."""
    cache = layout(model.config, BLOCKS, BLOCK_SIZE, torch.float32, WHERE, **options)
    for pool in (*cache.keys, *cache.values):
        if pool.is_floating_point():
            pool.fill_(torch.nan)
    return cache


def runner_of(model: Decoder, layout: type[KVCache] = PagedKVCache, **options: int) -> ModelRunner:
    """Return a runner in plain PyTorch, over a cache of its own."""
    return ModelRunner(model, empty_cache(model, layout, **options), BLOCK_SIZE)


def steps() -> list[list[Segment]]:
    """Return a prefill with a chunk of another, the rest of that with a decode, and a verification with a decode."""
    return [
        [Segment(PROMPT, 0, TABLE, 2), Segment(OTHER[:4], 0, OTHERS_TABLE, 0)],
        [Segment([50], 6, TABLE), Segment(OTHER[4:], 4, OTHERS_TABLE, 2)],
        [Segment([51, 52, 53], 7, TABLE, 3), Segment([80], 6, OTHERS_TABLE)],
    ]


def relative(got: torch.Tensor, right: torch.Tensor) -> float:
    """Return ‖got - right‖ / ‖right‖. It is NaN, which fails every `<=`, if either tensor holds NaN."""
    assert got.shape == right.shape
    return float((got.double() - right.double()).norm() / right.double().norm())
