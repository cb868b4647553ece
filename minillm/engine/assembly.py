"""From options to a running engine: device and dtype, both models, the size of the pool, the drafter."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minillm import hardware
from minillm.cache.base import KVCache
from minillm.cache.block_pool import BlockPool
from minillm.cache.layouts import find_layout
from minillm.config import DTYPES, CacheConfig, EngineConfig
from minillm.engine.engine import Engine
from minillm.engine.scheduler import Scheduler
from minillm.errors import ConfigError, TokenizerMismatchError, UnsupportedError
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.models.loading import load_config, load_model, resolve, widen
from minillm.models.runner import ModelRunner
from minillm.quantization.base import QuantizedLinear
from minillm.quantization.int8 import Int8
from minillm.quantization.model import quantize_unembedding
from minillm.quantization.schemes import make_scheme
from minillm.speculative.config import SpeculativeConfig
from minillm.speculative.draft_model import DraftModelDrafter
from minillm.speculative.drafter import Drafter
from minillm.speculative.ngram import NgramDrafter
from minillm.speculative.suffix import SuffixDrafter
from minillm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minillm.llm_engine import EngineArgs

DEFAULT_BLOCK_SIZE = 16
CPU_CACHE_BYTES = 256 * 2**20
"""What a CPU engine gives its cache unless told otherwise, or an eighth of the free memory if that is less."""


@dataclass(frozen=True)
class Assembly:
    """A ready engine and what its makers knew."""

    engine: Engine
    config: EngineConfig
    """With everything decided that was left open."""
    max_model_len: int
    bytes_per_block: int
    """Keys and values of one block over all layers, the draft's pool included."""


@dataclass(frozen=True)
class Placement:
    """Where models compute and in what: the same for target and draft."""

    dtype: torch.dtype
    """Of activations and, unless its layout says otherwise, of the cache. Weights may be kept in fewer bits."""
    device: torch.device
    may_be_taken: bool
    """Whether an executor may take the weights over."""

    def load(self, folder: Path, quantization: str | None) -> Decoder:
        """The model in `folder`; what an executor on a CPU may take is in the bits that the file has.

        With weights of 8 bits the unembedding is rounded to as many, for it is read at every token; its inputs are not,
        and a tied embedding stays as it is. `benchmarks/quality.json` says what that costs.
        """
        as_stored = self.may_be_taken and self.device.type == "cpu"
        model = load_model(folder, self.dtype, self.device, quantization, keep_stored=as_stored)
        some = model.layers[0].qkv_proj
        if isinstance(some, QuantizedLinear) and isinstance(some.scheme, Int8):
            quantize_unembedding(model, Int8())
        return model


def assemble(
    args: EngineArgs, config: EngineConfig, cache: CacheConfig, speculative: SpeculativeConfig | None
) -> Assembly:
    """Load what is named and put it together. Nothing heavy happens before the options are checked."""
    device = choose_device(args.device)
    layout = find_layout(cache)
    folder = resolve(args.model)
    model_config = load_config(folder)
    max_model_len = config.check_against_context(model_config.max_position_embeddings)
    config = _settle(config, layout, cache, max_model_len)
    tokenizer = Tokenizer.from_folder(folder)
    placement = Placement(choose_dtype(args.dtype, device, model_config), device, not args.enforce_eager)
    target = placement.load(folder, args.quantization)
    draft = _load_draft(speculative, tokenizer, target, placement, max_model_len) if speculative else None

    models = [m for m in (target, draft) if m is not None]
    bytes_per_block = sum(
        layout.bytes_per_block(m.config, config.block_size, placement.dtype, **cache.options) for m in models
    )
    num_blocks = _num_blocks(config, bytes_per_block, max_model_len, device)
    runners = [_runner(m, placement, layout, cache, num_blocks, config.block_size) for m in models]
    for runner in runners:
        _use_ops(runner.cache, args.ops or {}, cache)
        _check_rollback(runner.cache, cache, speculative)
        reason = None if args.enforce_eager else runner.speed_up(config.max_num_seqs, max_model_len)
        if runner.executor is None:
            widen(runner.model, placement.dtype)  # it stays in PyTorch, where all of it has to be of one dtype
        if reason is not None and device.type == "cuda":
            tell_of_fallback(reason)
    engine = Engine(
        runners[0],
        (args.block_pool_cls or BlockPool)(num_blocks, config.block_size),
        config,
        tokenizer,
        _drafter(speculative, runners[-1], config),
        speculative.max_drafts if speculative else 0,
        args.scheduler_cls or Scheduler,
    )
    if speculative is not None:
        engine.scheduler.disable_by_batch_size = speculative.disable_by_batch_size
    return Assembly(engine, config, max_model_len, bytes_per_block)


def tell_of_fallback(reason: str) -> None:
    """Warn that a GPU runs in plain PyTorch, and why. (On a CPU the doctor says so: some layouts are meant to.)"""
    warnings.warn(
        f"the GPU runs in plain PyTorch, right and slower: {reason}; `minillm doctor` says more, and "
        "enforce_eager=True asks for it",
        stacklevel=2,
    )


def _use_ops(made: KVCache, ops: Mapping[str, Callable[..., Any]], cache: CacheConfig) -> None:
    """Have the cache call these functions instead of minillm's own. Raises `UnsupportedError` if it calls no such."""
    for name, function in ops.items():
        if name not in made.ops:
            raise UnsupportedError(
                f"ops has no use for {name!r} with cache layout {cache.name!r}; it could replace: "
                f"{', '.join(made.ops) or 'nothing'}"
            )
        made.ops = {**made.ops, name: function}


def _check_rollback(made: KVCache, cache: CacheConfig, speculative: SpeculativeConfig | None) -> None:
    if speculative is None or made.max_rollback is None:
        return
    if made.max_rollback < speculative.max_drafts:
        raise UnsupportedError(
            f"num_speculative_tokens={speculative.max_drafts} cannot be had with cache layout "
            f"{cache.name!r}, which can take back {made.max_rollback} tokens; lower it or use layout 'paged'"
        )


def _settle(config: EngineConfig, layout: type[KVCache], cache: CacheConfig, max_model_len: int) -> EngineConfig:
    """`config` with everything decided that it left to the layout. Raises `UnsupportedError` for what cannot be."""
    if layout.whole_sequences and config.block_size is not None:
        raise UnsupportedError(
            f"block_size={config.block_size} means nothing to cache layout {cache.name!r}, which keeps each request "
            "in one piece; leave it out"
        )
    if config.enable_prefix_caching and not layout.supports_prefix_sharing:
        raise UnsupportedError(
            f"enable_prefix_caching=True cannot be had with cache layout {cache.name!r}, whose rows belong to one "
            "request; leave it out, or use layout 'paged'"
        )
    block_size = max_model_len if layout.whole_sequences else config.block_size or DEFAULT_BLOCK_SIZE
    sharing = layout.supports_prefix_sharing if config.enable_prefix_caching is None else config.enable_prefix_caching
    max_num_seqs = min(config.max_num_seqs, layout.max_batch or config.max_num_seqs)
    return replace(config, block_size=block_size, enable_prefix_caching=sharing, max_num_seqs=max_num_seqs)


def choose_device(name: str) -> torch.device:
    """`auto` is a GPU if there is one. Raises `ConfigError` for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # a device that keeps nothing, such as `meta`, fails here
    except Exception as problem:  # each kind of device has errors of its own
        [reason, *_] = [*str(problem).splitlines(), type(problem).__name__]
        reason = reason if len(reason) < 200 else f"{reason[:200]}…"
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
    speculative: SpeculativeConfig, tokenizer: Tokenizer, target: Decoder, placement: Placement, max_model_len: int
) -> Decoder | None:
    if speculative.model is None:
        return None
    folder = resolve(speculative.model)
    if speculative.quantization is not None:
        make_scheme(speculative.quantization)  # a name that is none is told before anything is read
    if not tokenizer.same_vocabulary(Tokenizer.from_folder(folder)):
        raise TokenizerMismatchError(
            f"the draft {speculative.model!r} has another tokenizer than the target, so its guesses would mean other "
            "text; use a draft trained with the target's tokenizer"
        )
    draft = placement.load(folder, speculative.quantization)
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


def _runner(
    model: Decoder, placement: Placement, layout: type[KVCache], cache: CacheConfig, num_blocks: int, block_size: int
) -> ModelRunner:
    kept = layout(model.config, num_blocks, block_size, placement.dtype, placement.device, **cache.options)
    return ModelRunner(model, kept, block_size)


def _drafter(speculative: SpeculativeConfig | None, draft: ModelRunner, config: EngineConfig) -> Drafter | None:
    if speculative is None:
        return None
    if isinstance(speculative.method, type):
        return speculative.method()
    if speculative.method == "ngram":
        return NgramDrafter(*speculative.lookup)
    if speculative.method == "suffix":
        return SuffixDrafter(**speculative.suffix_options)
    greedy = speculative.draft_sample_method == "greedy"
    return DraftModelDrafter(draft, config.max_num_batched_tokens, greedy, bool(config.enable_prefix_caching))


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
