"""Models of well-known shapes with random weights, made on the device itself, and runners for them.

The speed of decoding does not depend on the values of the weights, so no checkpoint is read: 16 GB of random numbers
take a second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minillm.batch import Segment
from minillm.bench.on_gpu.stage_setup import StageSetup
from minillm.cache.base import KVCache
from minillm.cache.paged import PagedKVCache
from minillm.cache.paged_quantized import PagedQuantizedKVCache
from minillm.errors import UnsupportedError
from minillm.models.config import ModelConfig, RopeConfig
from minillm.models.decoder import Decoder
from minillm.models.empty_weights import UninitialisedParameters
from minillm.models.quantize import model_bytes
from minillm.runtime.runner import ModelRunner

BLOCK_SIZE = 16


def _llama(hidden: int, inner: int, layers: int, heads: int, kv: int, dim: int, vocab: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=dim,
        max_position_embeddings=8192,
        rope=RopeConfig(theta=500_000.0),
        tie_word_embeddings=tied,
    )


CONFIGS = {
    "Llama-3.1-8B shape": _llama(4096, 14336, 32, 32, 8, 128, 128_256, False),
    "Llama-3.2-1B shape": _llama(2048, 8192, 16, 32, 8, 64, 128_256, True),
    "rehearsal": _llama(64, 96, 1, 4, 2, 32, 320, False),
    "rehearsal draft": _llama(32, 64, 1, 2, 1, 32, 320, True),
}
LARGE, SMALL = "Llama-3.1-8B shape", "Llama-3.2-1B shape"
LARGE_NEEDS = 46e9
"""Bytes for two copies of the 8B shape, one of them while it is quantised to INT8, and caches."""


def target_name(setup: StageSetup) -> str:
    """Return the name of the largest shape that fits into the GPU's memory."""
    return setup.size_for(LARGE if setup.free_bytes() > LARGE_NEEDS else SMALL, "rehearsal")


def random_model(setup: StageSetup, name: str, seed: int = 0) -> Decoder:
    """Return a decoder of a known shape on the device in `setup.half`, scaled as in `shapes.random_decoder`."""
    with torch.random.fork_rng(devices=[setup.device] if setup.device.type == "cuda" else []):
        torch.manual_seed(seed)
        with UninitialisedParameters(setup.device, setup.half, setup.half):
            model = Decoder(CONFIGS[name])
        model = model.to(setup.device)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(std=parameter.shape[1] ** -0.5)
                else:
                    parameter.fill_(1.0)
    return model.requires_grad_(False).eval()


def fast_runner(
    setup: StageSetup, model: Decoder, layout: type[KVCache], requests: int, length: int, use_graphs: bool = True
) -> ModelRunner:
    """Return a runner with room for `requests` of `length` tokens, run by kernels; its cache holds random numbers.

    Raises `UnsupportedError` with the reason if kernels cannot run this model over this cache.
    """
    blocks = requests * -(-length // BLOCK_SIZE)
    cache = layout(model.config, blocks, BLOCK_SIZE, setup.half, setup.device)
    fill(cache)
    runner = ModelRunner(model, cache, BLOCK_SIZE)
    use_kernels(setup, runner, requests, length, use_graphs)
    return runner


def use_kernels(setup: StageSetup, runner: ModelRunner, requests: int, length: int, use_graphs: bool = True) -> None:
    """Make a runner use kernels, with or without CUDA graphs; a rehearsal uses no graphs.

    Raises `UnsupportedError` with the reason if kernels cannot run this model over this cache.
    """
    from minillm.runtime.gpu_executor import GpuExecutor, unsupported_reason

    with_graphs = use_graphs and not setup.is_rehearsal
    reason = runner.use_executor(requests, length) if with_graphs else unsupported_reason(runner.model, runner.cache)
    if reason is not None:
        raise UnsupportedError(reason)
    if with_graphs:
        return
    runner.executor = GpuExecutor(runner.model, runner.cache, runner.block_size, requests, length, use_graphs=False)


def fill(cache: KVCache) -> None:
    """Write numbers of ordinary size into every slot, because unwritten memory could be NaN."""
    if isinstance(cache, PagedKVCache):
        for pool in (cache.keys, cache.values):
            pool.normal_()
        return
    assert isinstance(cache, PagedQuantizedKVCache)
    numbers = torch.randn(1024, *cache.shape[1:], device=cache.keys[0].device)
    for pools in (cache.keys, cache.values):
        for pool, part in zip(pools, cache.encode(numbers), strict=True):
            for layer in pool:
                for first in range(0, len(layer), len(part)):
                    rows = layer[first : first + len(part)]
                    rows.copy_(part[: len(rows)])


def segments(requests: int, tokens: int, past: int, length: int, vocab: int) -> list[Segment]:
    """Return requests with `tokens` new tokens each after `past`. Each has blocks of its own, for `length` tokens."""
    blocks = -(-length // BLOCK_SIZE)
    ids = [(7 * i + 3) % vocab for i in range(tokens)]
    return [
        Segment(ids, past, range(r * blocks, (r + 1) * blocks), num_logits=tokens if tokens <= 16 else 1)
        for r in range(requests)
    ]


def read_tokens(logits: Tensor) -> Any:
    """Return the argmax tokens on the host, as a greedy engine does."""
    return logits.argmax(-1).tolist()


def weight_bytes(model: Decoder) -> int:
    """Return the bytes of weights that the forward of one token must read: all but the embedding's unused rows."""
    parts = model_bytes(model)
    is_tied = "unembedding" not in parts
    return sum(parts.values()) - (0 if is_tied else parts["embedding"])


def kv_bytes(runner: ModelRunner, tokens: int) -> int:
    """Return the bytes of the keys and values of this many tokens."""
    block = type(runner.cache).bytes_per_block(runner.model.config, BLOCK_SIZE, runner.model.embed_tokens.weight.dtype)
    return block * tokens // BLOCK_SIZE


def product_weights(model: Decoder) -> int:
    """Return the number of weights that multiply every token, without the unembedding."""
    c = model.config
    layer = c.hidden_size * (c.q_size + 2 * c.kv_size) + c.q_size * c.hidden_size
    return c.num_layers * (layer + 3 * c.hidden_size * c.intermediate_size)
