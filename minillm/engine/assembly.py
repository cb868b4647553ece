"""From options to a running engine: device and dtype, target and draft model, size of the block pool, drafter."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minillm import hardware
from minillm.cache.base import KVCache
from minillm.cache.block_pool import BlockPool
from minillm.cache.layouts import find_layout
from minillm.config import DTYPES, CacheConfig, EngineArgs
from minillm.engine.engine import Engine
from minillm.engine.scheduler import Scheduler
from minillm.errors import ConfigError, EngineDeadError, TokenizerMismatchError, UnsupportedError
from minillm.models.calibration import CalibrationTexts
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.models.loading import cast_model, load_config, load_model, resolve
from minillm.models.quantize import quantize_unembedding
from minillm.quantization.base import QuantizedLinear
from minillm.quantization.int8 import Int8
from minillm.runtime.runner import ModelRunner
from minillm.speculative.config import SpeculativeConfig
from minillm.speculative.draft_policy import AdaptiveDrafts, DraftPolicy, FixedDrafts
from minillm.speculative.drafter import DraftContext, Drafter
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


@dataclass(frozen=True)
class Placement:
    """Device and dtype of target and draft model."""

    dtype: torch.dtype
    """Of activations and, unless its layout says otherwise, of the cache. Weights may be stored in fewer bits."""
    device: torch.device
    may_move_weights: bool
    """Whether an executor may move the weights out of the model."""

    def load(self, folder: Path, quantization: str | None) -> Decoder:
        """The model in `folder`. For an executor on a CPU the weights keep the dtype of the file.

        With weights of 8 bits the unembedding is quantised to 8 bits too, because every token reads all of it; its
        inputs are not, and neither is a tied embedding. `benchmarks/quality.json` has the loss.
        """
        as_stored = self.may_move_weights and self.device.type == "cpu"
        model = load_model(folder, self.dtype, self.device, quantization, keep_stored_dtype=as_stored)
        some = model.layers[0].qkv_proj
        if isinstance(some, QuantizedLinear) and isinstance(some.scheme, Int8):
            quantize_unembedding(model, Int8())
        return model


def assemble(args: EngineArgs, cache: CacheConfig, speculative: SpeculativeConfig | None) -> Assembly:
    """Load the models and build the engine. Options are checked before anything is loaded or allocated, unless that
    needs a model or its cache."""
    device = choose_device(args.device)
    for name, base in (("scheduler_cls", Scheduler), ("block_pool_cls", BlockPool)):
        if not issubclass(made := getattr(args, name) or base, base):
            raise ConfigError(f"{name}={made.__name__} must be a subclass of {base.__name__}")
    layout = find_layout(cache)
    _check_speculation(layout, cache, speculative)
    folder = resolve(args.model)
    model_config = load_config(folder)
    _check_windows(model_config, speculative)
    max_model_len = args.check_against_context(model_config.max_position_embeddings)
    args = _settle(args, layout, cache, max_model_len)
    _check_drafters(args, speculative)
    tokenizer = Tokenizer.from_folder(folder)
    placement = Placement(choose_dtype(args.dtype, device, model_config), device, not args.enforce_eager)
    with _started_ranks(args, cache, layout, folder, placement) as ranks:
        target_model = placement.load(folder, args.quantization) if ranks is None else ranks.load()

        plans = RunnerPlans(placement, args.block_size, layout, cache, CalibrationTexts(tokenizer))
        target = plans.new_runner(target_model) if ranks is None else plans.add(ranks.new_runner(target_model))
        drafter = None
        if speculative is not None:
            load_draft = partial(_load_draft, tokenizer, target_model.config, placement, max_model_len)
            context = DraftContext(
                options=speculative.options,
                target=target,
                target_name=args.model,
                tokenizer=tokenizer,
                max_num_batched_tokens=args.max_num_batched_tokens,
                load_model=load_draft,
                new_runner=plans.new_runner,
                share_cache=partial(plans.share_cache, target),
            )
            drafter = _build_drafter(speculative, context)
        num_blocks = _num_blocks(args, plans.bytes_per_block, max_model_len, target.device)
        if ranks is not None:
            with _memory_for(num_blocks, num_blocks * plans.bytes_per_block):
                num_blocks = ranks.connect(num_blocks)
        plans.allocate(num_blocks)
        _check_reading(drafter, target.cache, cache)
        for runner in plans.all_runners:
            _use_ops(runner.cache, args.ops or {}, cache)
            _check_rollback(runner.cache, cache, speculative)
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
            _draft_policy(speculative, target, drafter, num_blocks, max_model_len),
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
) -> DraftPolicy | None:
    """How many drafts each request gets. Measures what they cost if their number adapts."""
    if speculative is None:
        return None
    policy = _policy_of(speculative, target, drafter, num_blocks, max_model_len)
    return policy if isinstance(policy, FixedDrafts) else LossLimit(policy, policy.plain_times)


def _policy_of(
    speculative: SpeculativeConfig, target: ModelRunner, drafter: Drafter, num_blocks: int, max_model_len: int
) -> FixedDrafts | AdaptiveDrafts | FallbackDrafts:
    """The policy of a method and, if it has one, of its fallback."""
    if not speculative.adaptive:
        return FixedDrafts(speculative.max_drafts)
    fallback, first = speculative.fallback, drafter.first if isinstance(drafter, FallbackDrafter) else drafter
    most = min(speculative.max_own_drafts, first.max_drafts or speculative.max_own_drafts)
    costs = measure(target, first, num_blocks, most, max_model_len)
    adaptive = AdaptiveDrafts(most, costs, speculative.drafter_cls.proposes_trees)
    if fallback is None:
        return adaptive
    return FallbackDrafts(drafter, adaptive, _policy_of(fallback, target, drafter.second, num_blocks, max_model_len))


class RunnerPlans:
    """The runners of an engine. Their caches are allocated together, because one block table addresses all of them."""

    def __init__(
        self, placement: Placement, block_size: int, layout: type[KVCache], cache: CacheConfig, texts: CalibrationTexts
    ) -> None:
        self.placement, self.block_size, self.layout, self.options = placement, block_size, layout, cache.options
        self.texts = texts
        """Calibration texts, for caches that need some."""
        self.runners: list[ModelRunner] = []
        """Those with a cache of their own."""
        self._sharing: list[tuple[ModelRunner, ModelRunner]] = []
        """Runners without one, each with the runner whose cache it shares."""
        self._layouts: list[tuple[type[KVCache], Mapping[str, Any]]] = []

    def new_runner(self, model: Decoder, layout: type[KVCache] | None = None, **options: Any) -> ModelRunner:
        """See `DraftContext.new_runner`. Raises `UnsupportedError` for a layout that blocks cannot address."""
        chosen, options = (self.layout, dict(self.options)) if layout is None else (layout, options)
        if chosen.whole_sequences != self.layout.whole_sequences:
            raise UnsupportedError(
                f"cache layouts {chosen.__name__} and {self.layout.__name__} cannot serve one engine: the blocks of "
                "one are whole requests, those of the other are not"
            )
        runner = ModelRunner(model, None, self.block_size)  # type: ignore[arg-type]  (`allocate` sets its cache)
        return self.add(runner, chosen, options)

    def add(
        self, runner: ModelRunner, layout: type[KVCache] | None = None, options: Mapping[str, Any] | None = None
    ) -> ModelRunner:
        """Plan a cache for a runner that has none yet; by default of the engine's layout. Returns the runner."""
        self.runners.append(runner)
        self._layouts.append((layout or self.layout, self.options if options is None else options))
        return runner

    def share_cache(self, owner: ModelRunner, model: Decoder) -> ModelRunner:
        """See `DraftContext.share_cache`."""
        runner = ModelRunner(model, None, self.block_size)  # type: ignore[arg-type]  (`allocate` sets its cache)
        self._sharing.append((runner, owner))
        return runner

    @property
    def all_runners(self) -> list[ModelRunner]:
        """The runners with and without a cache of their own."""
        return [*self.runners, *(runner for runner, _ in self._sharing)]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, summed over all caches."""
        return sum(
            layout.bytes_per_block(runner.model.config, self.block_size, self.placement.dtype, **options)
            for runner, (layout, options) in zip(self.runners, self._layouts, strict=True)
        )

    def allocate(self, num_blocks: int) -> None:
        """Allocate the caches, then the views of them. Raises `ConfigError` if the system does not give the memory."""
        place = self.placement
        needed = num_blocks * self.bytes_per_block
        for runner, (layout, options) in zip(self.runners, self._layouts, strict=True):
            with _memory_for(num_blocks, needed):
                runner.cache = layout(
                    runner.model.config, num_blocks, self.block_size, place.dtype, place.device, **options
                )
            if runner.cache.stored_rows() is None:  # no executor reads this cache, so PyTorch runs the model
                cast_model(runner.model, place.dtype)
            runner.cache.prepare(runner.model, self.texts)
        for runner, owner in self._sharing:
            runner.cache = owner.cache.draft_view()

    def use_executors(self, max_num_seqs: int, max_model_len: int) -> None:
        """Give each model whose caches are all supported an executor. On a CPU the weights of a model move into its
        executor, so one unsupported cache keeps all runners of that model in PyTorch."""
        for model in {runner.model: None for runner in self.all_runners}:
            runners = [runner for runner in self.all_runners if runner.model is model]
            reason = next(filter(None, (runner.unsupported_reason() for runner in runners)), None)
            if reason is None:
                reasons = [runner.use_executor(max_num_seqs, max_model_len) for runner in runners]
                reason = next(filter(None, reasons), None)
            if reason is not None and self.placement.device.type == "cuda":
                warn_of_fallback(reason)


@contextmanager
def _memory_for(num_blocks: int, needed: int) -> Iterator[None]:
    """Allocate caches of `needed` bytes in this process, or as many in each rank of a tensor-parallel engine. Raises
    `ConfigError` if the system does not give them: a limit of a process is not in the free memory."""
    no_memory = ConfigError(
        f"{num_blocks} cache blocks need {needed / 2**20:,.0f} MiB, which the system does not give this process; "
        "lower num_kv_blocks or max_model_len, or raise the limit (ulimit -v)"
    )
    if needed >= 2**63:  # more than PyTorch can count
        raise no_memory
    try:
        yield
    except MemoryError:
        raise no_memory from None
    except (RuntimeError, EngineDeadError) as problem:  # the second has the words of the rank's own error
        if re.search("allocate memory|out of memory|MemoryError", str(problem)):
            raise no_memory from None
        raise


def warn_of_fallback(reason: str) -> None:
    """Warn that a GPU runs plain PyTorch, and why. (On a CPU the doctor says so; some layouts always run there.)"""
    warnings.warn(
        f"the GPU runs plain PyTorch, which is correct but slower: {reason}; run `minillm doctor` for details, or pass "
        "enforce_eager=True to choose it without this warning",
        stacklevel=2,
    )


def _use_ops(made: KVCache, ops: Mapping[str, Callable[..., Any]], cache: CacheConfig) -> None:
    """Replace ops that the cache calls. Raises `UnsupportedError` for an op that it does not call."""
    for name, function in ops.items():
        if name not in made.ops:
            raise UnsupportedError(
                f"ops={{{name!r}: …}} is not called by cache layout {cache.name!r}; it can replace: "
                f"{', '.join(made.ops) or 'nothing'}"
            )
        made.ops = {**made.ops, name: function}


def _build_drafter(speculative: SpeculativeConfig, context: DraftContext) -> Drafter:
    """The drafter of the method, and behind it that of its fallback. Raises `ConfigError` if it cannot propose as many
    drafts per round as it shall."""
    drafter = speculative.drafter_cls.build(replace(context, options=speculative.options))
    wanted, most = speculative.num_speculative_tokens, drafter.max_drafts
    if wanted is not None and most is not None and wanted > most:
        raise ConfigError(
            f"num_speculative_tokens={wanted} is more than this {type(drafter).__name__} can propose per round, {most}"
            "; lower it"
        )
    if (fallback := speculative.fallback) is None:
        return drafter
    second = _build_drafter(fallback, context)
    return FallbackDrafter(drafter, second, speculative.max_own_drafts, fallback.max_drafts, speculative.fallback_below)


def _check_rollback(made: KVCache, cache: CacheConfig, speculative: SpeculativeConfig | None) -> None:
    if speculative is None or made.max_rollback is None:
        return
    if made.max_rollback < speculative.max_drafts:
        raise UnsupportedError(
            f"num_speculative_tokens={speculative.max_drafts} is not supported by cache layout "
            f"{cache.name!r}, which can roll back {made.max_rollback} tokens; lower it or use layout 'paged'"
        )


def _check_speculation(layout: type[KVCache], cache: CacheConfig, speculative: SpeculativeConfig | None) -> None:
    if speculative is None:
        return
    if speculative.needs_blocks and layout.whole_sequences:
        raise UnsupportedError(
            f"speculative method {speculative.method_name!r} reads the blocks of the target's cache, and layout "
            f"{cache.name!r} stores each request in one piece; use layout 'paged'"
        )
    if speculative.proposes_trees and not layout.supports_trees:
        raise UnsupportedError(
            f"speculative method {speculative.method_name!r} drafts trees, which cache layout {cache.name!r} cannot "
            "verify; use layout 'paged'"
        )


def _check_drafters(args: EngineArgs, speculative: SpeculativeConfig | None) -> None:
    while speculative is not None:
        if hasattr(speculative.options, "check_engine"):
            speculative.options.check_engine(args.model, args.block_size)
        speculative = speculative.fallback


def _check_windows(model: ModelConfig, speculative: SpeculativeConfig | None) -> None:
    if speculative is not None and speculative.proposes_trees and model.has_windows:
        raise UnsupportedError(
            f"speculative method {speculative.method_name!r} drafts trees, which are not verified in a model with a "
            f"sliding window (here {model.sliding_window} tokens); use a method that drafts chains, like 'draft_model'"
        )


def _check_reading(drafter: Drafter | None, made: KVCache, cache: CacheConfig) -> None:
    if drafter is not None and drafter.reads_target_cache and made.stored_rows() is None:
        raise UnsupportedError(
            f"{type(drafter).__name__} reads the target's keys, and cache layout {cache.name!r} stores them in a way "
            "of its own; use layout 'paged'"
        )


def _settle(args: EngineArgs, layout: type[KVCache], cache: CacheConfig, max_model_len: int) -> EngineArgs:
    """`args` with the layout's defaults filled in. Raises `UnsupportedError` for options it does not support."""
    if layout.whole_sequences and args.block_size is not None:
        raise UnsupportedError(
            f"block_size={args.block_size} is not supported by cache layout {cache.name!r}, which stores each request "
            "in one piece; leave it out"
        )
    if args.enable_prefix_caching and not layout.supports_prefix_sharing:
        raise UnsupportedError(
            f"enable_prefix_caching=True is not supported by cache layout {cache.name!r}, whose rows belong to one "
            "request; leave it out, or use layout 'paged'"
        )
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


def choose_device(name: str) -> torch.device:
    """`auto` is a GPU if there is one. Raises `ConfigError` for a device that cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # fails on a device without memory, such as `meta`
    except Exception as problem:  # each kind of device raises its own errors
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
    tokenizer: Tokenizer,
    target: ModelConfig,
    placement: Placement,
    max_model_len: int,
    name: str,
    quantization: str | None,
) -> Decoder:
    """See `DraftContext.load_model`."""
    folder = resolve(name)
    if not tokenizer.same_vocabulary(Tokenizer.from_folder(folder)):
        raise TokenizerMismatchError(
            f"the draft model {name!r} has another tokenizer than the target, so its token ids mean other text; use a "
            "draft model with the target's tokenizer"
        )
    draft = placement.load(folder, quantization)
    if draft.config.vocab_size != target.vocab_size:
        raise TokenizerMismatchError(
            f"the draft model {name!r} has {draft.config.vocab_size} logits, the target {target.vocab_size}; use a "
            "draft model with the target's vocabulary"
        )
    if draft.config.max_position_embeddings < max_model_len:
        raise ConfigError(
            f"the draft model {name!r} has a context of {draft.config.max_position_embeddings} tokens, less than "
            f"max_model_len={max_model_len}; lower max_model_len"
        )
    return draft


def _num_blocks(args: EngineArgs, bytes_per_block: int, max_model_len: int, device: torch.device) -> int:
    """`num_kv_blocks` if given; else what the memory budget allows, at most what all requests at full length need."""
    if args.num_kv_blocks is not None:
        return args.num_kv_blocks
    budget = args.kv_cache_memory_bytes
    if budget is None and device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(free - (1 - args.gpu_memory_utilization) * total)
    elif budget is None:
        budget = min(CPU_CACHE_BYTES, hardware.memory().free // 8)
    most = args.max_num_seqs * -(-max_model_len // args.block_size)
    num_blocks = min(most, budget // bytes_per_block)
    if num_blocks < 1:
        smaller = "max_model_len" if args.block_size == max_model_len else "block_size"
        raise ConfigError(
            f"a cache of {max(budget, 0)} bytes holds no block of {bytes_per_block} bytes; raise kv_cache_memory_bytes "
            f"or lower {smaller}"
        )
    return num_blocks
