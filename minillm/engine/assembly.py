"""From options to a running engine: device and dtype, target and draft model, size of the block pool, drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minillm import hardware
from minillm.cache.base import KVCache
from minillm.cache.block_pool import BlockPool
from minillm.cache.layouts import find_layout
from minillm.config import CacheConfig, EngineArgs
from minillm.engine.compatibility import (
    check_drafters,
    check_layout_options,
    check_num_drafts,
    check_reading,
    check_rollback,
    check_speculation,
    check_windows,
    replace_ops,
)
from minillm.engine.engine import Engine
from minillm.engine.placement import Placement, choose_device, choose_dtype
from minillm.engine.runner_plans import RunnerPlans, memory_for
from minillm.engine.scheduler import Scheduler
from minillm.errors import ConfigError
from minillm.models.calibration import CalibrationTexts
from minillm.models.decoder import Decoder
from minillm.models.hub import resolve
from minillm.models.loading import cast_model, load_config
from minillm.runtime.runner import ModelRunner
from minillm.speculative.adaptive_drafts import AdaptiveDrafts
from minillm.speculative.config import SpeculativeConfig
from minillm.speculative.draft_model import draft_folder
from minillm.speculative.draft_policy import DraftPolicy, FixedDrafts
from minillm.speculative.drafter import DraftContext, Drafter, TargetInfo
from minillm.speculative.fallback import FallbackDrafter
from minillm.speculative.fallback_policy import FallbackDrafts
from minillm.speculative.loss_limit import LossLimit
from minillm.speculative.rejection_sampler import EXACT
from minillm.speculative.step_costs import measure
from minillm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minillm.parallel.launch import Ranks

DEFAULT_BLOCK_SIZE = 16
CPU_CACHE_BYTES = 256 * 2**20
"""Default size of the KV cache on a CPU; an eighth of the free memory if that is less."""


@dataclass(frozen=True)
class Assembly:
    """An engine and the settings it was built with."""

    engine: Engine
    args: EngineArgs
    """With every default filled in."""
    max_model_len: int
    bytes_per_block: int
    """Keys and values of one block over all layers, the drafter's pools included."""


def assemble(args: EngineArgs, cache: CacheConfig, speculative: SpeculativeConfig | None) -> Assembly:
    """Load the models and build the engine. Options are checked before anything is loaded or allocated, unless that
    needs a model or its cache."""
    device = choose_device(args.device)
    for name, base in (("scheduler_cls", Scheduler), ("block_pool_cls", BlockPool)):
        if not issubclass(made := getattr(args, name) or base, base):
            raise ConfigError(f"{name}={made.__name__} must be a subclass of {base.__name__}")
    layout = find_layout(cache)
    check_speculation(layout, cache, speculative)
    folder = resolve(args.model)
    model_config = load_config(folder)
    check_windows(model_config, speculative)
    max_model_len = args.check_against_context(model_config.max_position_embeddings)
    check_layout_options(args, layout, cache)
    args = _with_defaults(args, layout, max_model_len)
    dtype = choose_dtype(args.dtype, device, model_config)
    layout.bytes_per_block(model_config, args.block_size, dtype, **cache.options)  # checks the layout's own options
    tokenizer = Tokenizer.from_folder(folder)
    info = TargetInfo(args.model, model_config, tokenizer, args.block_size, max_model_len)
    check_drafters(info, speculative)
    placement = Placement(dtype, device, not args.enforce_eager)
    with _started_ranks(args, cache, layout, folder, placement) as ranks:
        target_model = placement.load(folder, args.quantization) if ranks is None else ranks.load()

        plans = RunnerPlans(placement, args.block_size, layout, cache, CalibrationTexts(tokenizer))
        target = plans.new_runner(target_model) if ranks is None else plans.add(ranks.new_runner(target_model))
        drafter = None
        if speculative is not None:
            context = partial(
                DraftContext,
                target=target,
                target_name=args.model,
                tokenizer=tokenizer,
                max_num_batched_tokens=args.max_num_batched_tokens,
                load_model=partial(_load_draft, info, placement),
                new_runner=plans.new_runner,
                share_cache=partial(plans.share_cache, target),
            )
            drafter = _build_drafter(speculative, context)
        num_blocks = _num_blocks(args, plans.bytes_per_block, max_model_len, target.device)
        if ranks is not None:
            with memory_for(num_blocks, num_blocks * plans.bytes_per_block, target.device):
                num_blocks = ranks.connect(num_blocks)
        plans.allocate(num_blocks)
        check_reading(drafter, target.cache, cache)
        for runner in plans.all_runners:
            replace_ops(runner.cache, args.ops or {}, cache)
            check_rollback(runner.cache, cache, speculative)
        if not args.enforce_eager:
            plans.use_executors(args.max_num_seqs, max_model_len)
        for runner in plans.all_runners:
            if runner.executor is None:
                cast_model(runner.model, placement.dtype)  # PyTorch needs all of a model in one dtype
        engine = Engine(
            target,
            (args.block_pool_cls or BlockPool)(num_blocks, args.block_size),
            args,
            tokenizer,
            drafter,
            _draft_policy(speculative, target, drafter, num_blocks, max_model_len, args.max_num_seqs),
            args.scheduler_cls or Scheduler,
            speculative.accept_rule if speculative else EXACT,
        )
        if speculative is not None:
            engine.scheduler.disable_by_batch_size = speculative.disable_by_batch_size
        return Assembly(engine, args, max_model_len, plans.bytes_per_block)


def _draft_policy(
    speculative: SpeculativeConfig | None,
    target: ModelRunner,
    drafter: Drafter | None,
    num_blocks: int,
    max_model_len: int,
    max_num_seqs: int,
) -> DraftPolicy | None:
    """How many drafts each request gets. Measures what they cost if their number adapts."""
    if speculative is None:
        return None
    policy = _policy_of(speculative, target, drafter, num_blocks, max_model_len, max_num_seqs)
    return policy if isinstance(policy, FixedDrafts) else LossLimit(policy, policy.plain_times)


def _policy_of(
    speculative: SpeculativeConfig,
    target: ModelRunner,
    drafter: Drafter,
    num_blocks: int,
    max_model_len: int,
    max_num_seqs: int,
) -> FixedDrafts | AdaptiveDrafts | FallbackDrafts:
    """The policy of a method and, if it has one, of its fallback."""
    if not speculative.adaptive:
        return FixedDrafts(speculative.max_drafts)
    fallback, first = speculative.fallback, drafter.first if isinstance(drafter, FallbackDrafter) else drafter
    most = min(speculative.max_own_drafts, first.max_drafts or speculative.max_own_drafts)
    costs = measure(target, first, num_blocks, most, max_model_len, max_num_seqs)
    adaptive = AdaptiveDrafts(most, costs, speculative.drafter_cls.proposes_trees)
    if fallback is None:
        return adaptive
    second = _policy_of(fallback, target, drafter.second, num_blocks, max_model_len, max_num_seqs)
    return FallbackDrafts(drafter, adaptive, second)


def _build_drafter(speculative: SpeculativeConfig, context: Callable[..., DraftContext]) -> Drafter:
    """The drafter of the method, and behind it that of its fallback. `context`: makes the context of each, from its
    `options`. Raises `ConfigError` if it cannot propose as many drafts per round as it shall."""
    drafter = speculative.drafter_cls.build(context(options=speculative.options))
    check_num_drafts(speculative, drafter.max_drafts)
    if (fallback := speculative.fallback) is None:
        return drafter
    second = _build_drafter(fallback, context)
    return FallbackDrafter(drafter, second, speculative.max_own_drafts, fallback.max_drafts, speculative.fallback_below)


def _with_defaults(args: EngineArgs, layout: type[KVCache], max_model_len: int) -> EngineArgs:
    """`args` with the layout's defaults filled in."""
    block_size = max_model_len if layout.whole_sequences else args.block_size or DEFAULT_BLOCK_SIZE
    sharing = layout.supports_prefix_sharing if args.enable_prefix_caching is None else args.enable_prefix_caching
    return replace(args, block_size=block_size, enable_prefix_caching=sharing)


@contextmanager
def _started_ranks(
    args: EngineArgs, cache: CacheConfig, layout: type[KVCache], folder: Path, placement: Placement
) -> Iterator[Ranks | None]:
    """The ranks of a tensor-parallel engine; None for an engine of one process.

    Their processes end if the engine is not built. A notebook keeps the traceback, which would keep them alive.
    """
    if args.tensor_parallel_size == 1:
        yield None
        return
    from minillm.parallel.launch import start_ranks  # here, because other engines do not need it

    ranks = start_ranks(args, cache, layout, folder, placement.dtype, placement.device)
    try:
        yield ranks
    except BaseException:
        ranks.close()
        raise


def _load_draft(target: TargetInfo, placement: Placement, name: str, quantization: str | None) -> Decoder:
    """See `DraftContext.load_model`."""
    return placement.load(draft_folder(name, target), quantization)


def _num_blocks(args: EngineArgs, bytes_per_block: int, max_model_len: int, device: torch.device) -> int:
    """`num_kv_blocks` if given; else what the memory budget allows, at most what all requests at full length need."""
    if args.num_kv_blocks is not None:
        return args.num_kv_blocks
    budget, option = args.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    if budget is None and device.type == "cuda":
        free, total = hardware.gpu_memory(device)
        budget, option = int(free - (1 - args.gpu_memory_utilization) * total), "gpu_memory_utilization"
    elif budget is None:
        budget = min(CPU_CACHE_BYTES, hardware.memory().free // 8)
    most = args.max_num_seqs * -(-max_model_len // args.block_size)
    num_blocks = min(most, budget // bytes_per_block)
    if num_blocks < 1:
        smaller = "max_model_len" if args.block_size == max_model_len else "block_size"
        raise ConfigError(
            f"a cache of {max(budget, 0)} bytes holds no block of {bytes_per_block} bytes; raise {option} or lower "
            f"{smaller}"
        )
    return num_blocks
