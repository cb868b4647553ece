"""The runners of an engine and the memory of their caches."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from minillm import hardware
from minillm.cache.base import KVCache
from minillm.config import CacheConfig
from minillm.engine.placement import Placement
from minillm.errors import ConfigError, EngineDeadError, UnsupportedError
from minillm.models.calibration import CalibrationTexts
from minillm.models.decoder import Decoder
from minillm.models.loading import cast_model
from minillm.ops.dispatch import triton_runs
from minillm.runtime.runner import ModelRunner


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
        dtype = self.placement.dtype
        with memory_for(num_blocks, num_blocks * self.bytes_per_block, self.runners[0].device):
            for runner, (layout, options) in zip(self.runners, self._layouts, strict=True):
                # A tensor-parallel rank has a GPU of its own, whatever `Placement.device` says.
                config, device = runner.model.config, runner.device
                runner.cache = layout(config, num_blocks, self.block_size, dtype, device, **options)
        for runner in self.runners:
            if runner.cache.stored_rows() is None:  # no executor reads this cache, so PyTorch runs the model
                cast_model(runner.model, dtype)
            runner.cache.prepare(runner.model, self.texts)
        for runner, owner in self._sharing:
            runner.cache = owner.cache.draft_view()

    def use_executors(self, max_num_seqs: int, max_model_len: int) -> None:
        """Give each model whose caches are all supported an executor. On a CPU the weights of a model move into its
        executor, so one unsupported cache keeps all runners of that model in PyTorch.

        Warns where PyTorch stays, unless the user chose a layout, a model class or an op that only PyTorch runs; on a
        CPU also not for quantised weights that only PyTorch runs, nor for what `minillm doctor` finds missing."""
        for model in {runner.model: None for runner in self.all_runners}:
            runners = [runner for runner in self.all_runners if runner.model is model]
            reason = next(filter(None, (runner.unsupported_reason() for runner in runners)), None)
            # Where kernels run, what they do not support is the model or the cache.
            is_chosen = reason is not None and triton_runs(self.placement.device)
            if reason is None:
                reasons = [runner.use_executor(max_num_seqs, max_model_len) for runner in runners]
                reason = next(filter(None, reasons), None)
            if reason is None:
                continue
            if self.placement.device.type == "cuda" and not is_chosen:
                warn_of_fallback("GPU", reason, "run `minillm doctor` for details")
            elif reason == runners[0].unsupported_sizes():
                warn_of_fallback("CPU", reason, "choose another dtype or model")


@contextmanager
def memory_for(num_blocks: int, needed: int, device: torch.device) -> Iterator[None]:
    """Allocate caches of `needed` bytes on `device`, or as many in each rank of a tensor-parallel engine. Raises
    `ConfigError` if the system does not give them: a limit of a process is not in the free memory."""
    need = f"{num_blocks} cache blocks need {needed / 2**20:,.0f} MiB"
    fix = "lower num_kv_blocks, kv_cache_memory_bytes or max_model_len"
    if device.type == "cuda":
        free, _ = hardware.gpu_memory(device)
        no_memory = ConfigError(f"{need}, and {device} has {free / 2**20:,.0f} MiB free; {fix}")
    else:
        or_raise = ", or raise the limit (ulimit -v)" if os.name == "posix" else ""
        no_memory = ConfigError(f"{need}, which the system does not give this process; {fix}{or_raise}")
    if needed >= 2**63:  # more than PyTorch can count
        raise no_memory
    try:
        yield
    except MemoryError:
        raise no_memory from None
    except (RuntimeError, EngineDeadError) as problem:  # the second has the words of the rank's own error
        if re.search("DefaultCPUAllocator|allocate memory|out of memory|MemoryError", str(problem)):
            raise no_memory from None
        raise


def warn_of_fallback(processor: str, reason: str, fix: str) -> None:
    """Warn that plain PyTorch runs a model, and why."""
    warnings.warn(
        f"the {processor} runs plain PyTorch, which is correct but slower: {reason}; {fix}, or pass enforce_eager=True "
        "to choose it without this warning",
        stacklevel=2,
    )
