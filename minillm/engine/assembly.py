"""From options to a running engine: device and dtype, both models, the size of the pool, the drafter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minillm import hardware
from minillm.cache.block_pool import BlockPool
from minillm.cache.paged import PagedKVCache
from minillm.config import DTYPES, EngineConfig, SpeculativeConfig
from minillm.engine.engine import Engine
from minillm.errors import ConfigError, TokenizerMismatchError
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.models.loading import load_config, load_model, resolve
from minillm.models.runner import ModelRunner
from minillm.speculative.draft_model import DraftModelDrafter
from minillm.speculative.drafter import Drafter
from minillm.tokenizer import Tokenizer

CPU_CACHE_BYTES = 256 * 2**20
"""What a CPU engine gives its cache unless told otherwise, or an eighth of the free memory if that is less."""


@dataclass(frozen=True)
class Assembly:
    """A ready engine and what its makers knew."""

    engine: Engine
    max_model_len: int
    bytes_per_block: int
    """Keys and values of one block over all layers, the draft's pool included."""


def assemble(
    model: str, dtype: str, device: str, config: EngineConfig, speculative: SpeculativeConfig | None
) -> Assembly:
    """Load what is named and put it together. Nothing heavy happens before the options are checked."""
    where = choose_device(device)
    folder = resolve(model)
    tokenizer = Tokenizer.from_folder(folder)
    target = load_model(folder, choose_dtype(dtype, where, load_config(folder)), where)
    max_model_len = config.check_against_context(target.config.max_position_embeddings)
    draft = _load_draft(speculative, tokenizer, target, max_model_len) if speculative else None

    bytes_per_block = sum(_bytes_per_block(m, config.block_size) for m in (target, draft) if m is not None)
    num_blocks = _num_blocks(config, bytes_per_block, max_model_len, where)
    engine = Engine(
        _runner(target, num_blocks, config.block_size),
        BlockPool(num_blocks, config.block_size),
        config,
        tokenizer,
        _drafter(speculative, draft, num_blocks, config),
        speculative.num_speculative_tokens if speculative else 0,
    )
    return Assembly(engine, max_model_len, bytes_per_block)


def choose_device(name: str) -> torch.device:
    """`auto` is a GPU if there is one. Raises `ConfigError` for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:
        reason = str(problem).splitlines()[0]
        raise ConfigError(f"device={name!r} cannot be used here ({reason}); use 'auto' or 'cpu'") from None
    return device


def choose_dtype(name: str, device: torch.device, config: ModelConfig) -> torch.dtype:
    """`auto`: float32 on a CPU; on a GPU the checkpoint's own dtype, float16 where the GPU lacks bfloat16."""
    if name not in DTYPES:
        raise ConfigError(f"dtype={name!r} must be one of {', '.join(DTYPES)}")
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cpu":
        return torch.float32
    stored = getattr(torch, config.dtype)
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    return torch.float16 if stored == torch.bfloat16 and old else stored


def _load_draft(
    speculative: SpeculativeConfig, tokenizer: Tokenizer, target: Decoder, max_model_len: int
) -> Decoder | None:
    if speculative.model is None:
        return None
    folder = resolve(speculative.model)
    if not tokenizer.same_vocabulary(Tokenizer.from_folder(folder)):
        raise TokenizerMismatchError(
            f"the draft {speculative.model!r} has another tokenizer than the target, so its guesses would mean other "
            "text; use a draft trained with the target's tokenizer"
        )
    weight = target.embed_tokens.weight
    draft = load_model(folder, weight.dtype, weight.device)
    if draft.config.vocab_size != target.config.vocab_size:
        raise TokenizerMismatchError(
            f"the draft {speculative.model!r} has {draft.config.vocab_size} logits, the target "
            f"{target.config.vocab_size}; use a draft with the target's vocabulary"
        )
    if draft.config.max_position_embeddings < max_model_len:
        raise ConfigError(
            f"the draft {speculative.model!r} can see {draft.config.max_position_embeddings} tokens, the engine is to "
            f"run {max_model_len}; lower max_model_len"
        )
    return draft


def _bytes_per_block(model: Decoder, block_size: int) -> int:
    return PagedKVCache.bytes_per_block(model.config, block_size, model.embed_tokens.weight.dtype)


def _runner(model: Decoder, num_blocks: int, block_size: int) -> ModelRunner:
    weight = model.embed_tokens.weight
    return ModelRunner(
        model, PagedKVCache(model.config, num_blocks, block_size, weight.dtype, weight.device), block_size
    )


def _drafter(
    speculative: SpeculativeConfig | None, draft: Decoder | None, num_blocks: int, config: EngineConfig
) -> Drafter | None:
    if speculative is None:
        return None
    if isinstance(speculative.method, type):
        return speculative.method()
    greedy = speculative.draft_sample_method == "greedy"
    return DraftModelDrafter(_runner(draft, num_blocks, config.block_size), config.max_num_batched_tokens, greedy)


def _num_blocks(config: EngineConfig, bytes_per_block: int, max_model_len: int, device: torch.device) -> int:
    """What was asked for; else what the memory allows, and never more than all requests at full length could fill."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    budget = config.kv_cache_memory_bytes
    if budget is None and device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(free - (1 - config.gpu_memory_utilization) * total)
    elif budget is None:
        budget = min(CPU_CACHE_BYTES, hardware.memory().free // 8)
    most = config.max_num_seqs * -(-max_model_len // config.block_size)
    num_blocks = min(most, budget // bytes_per_block)
    if num_blocks < 1:
        raise ConfigError(
            f"a cache of {max(budget, 0)} bytes holds no block of {bytes_per_block} bytes; raise kv_cache_memory_bytes "
            "or lower block_size"
        )
    return num_blocks
