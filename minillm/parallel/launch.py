"""How the ranks of an engine come to life, chosen by `distributed_executor_backend` as in vLLM.

`mp`: this process is rank 0 and starts the others. `external_launcher`: `torchrun` has started all ranks, and each runs
the same script with its own engine. Schedulers and sampling are deterministic and all ranks get all logits, so the
engines take the same decisions without asking each other, and each rank returns the same outputs.
"""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Protocol

import torch
import torch.distributed as dist

from minillm.cache.base import KVCache
from minillm.cache.paged import PagedKVCache
from minillm.cache.paged_int4 import PagedInt4KVCache
from minillm.cache.paged_int8 import PagedInt8KVCache
from minillm.config import CacheConfig, EngineArgs
from minillm.errors import ConfigError, UnsupportedError
from minillm.models.loading import load_config
from minillm.parallel.decoder import ParallelDecoder
from minillm.parallel.group import Group, gloo_problem, local_store
from minillm.parallel.loading import load_part
from minillm.parallel.messages import Allocate, Connect, Setup
from minillm.parallel.runner import LeadingRunner
from minillm.parallel.split import check_split
from minillm.parallel.workers import Workers
from minillm.runtime.runner import ModelRunner

LAYOUTS: dict[type[KVCache], str] = {PagedKVCache: "auto", PagedInt8KVCache: "int8", PagedInt4KVCache: "int4"}
"""Layouts that treat each KV head by itself, so that a rank can hold some of them."""
_NUMBERS = count()
"""Numbers the engines of this process, so that each finds its own ranks in a shared store."""


class Ranks(Protocol):
    """This process's rank of an engine, before and while it connects to the others."""

    def load(self) -> ParallelDecoder:
        """Load this rank's part of the model."""

    def new_runner(self, model: ParallelDecoder) -> ModelRunner:
        """The runner of the engine, still without a cache."""

    def connect(self, num_blocks: int) -> int:
        """Connect to the other ranks. Returns how many blocks the cache of each rank has."""

    def close(self) -> None:
        """End the other ranks, because the engine is not built."""


def check_options(args: EngineArgs, cache: CacheConfig, layout: type[KVCache], device: torch.device) -> None:
    """Raise `UnsupportedError` for an option that has no tensor-parallel form, or a PyTorch without
    `torch.distributed` or, on a CPU, without gloo; `ConfigError` for too few GPUs."""
    size = args.tensor_parallel_size
    if not dist.is_available():
        raise UnsupportedError(
            f"tensor_parallel_size={size} needs torch.distributed, which this build of PyTorch lacks; leave it out"
        )
    refused = {
        "quantization": (args.quantization, "leave it out"),
        "speculative_config": (args.speculative_config, "leave it out"),
        "ops": (args.ops, "leave it out"),
        "kv_cache_config": (None if layout in LAYOUTS else cache.name, "use layout 'paged'"),
    }
    for name, (value, fix) in refused.items():
        if value:
            raise UnsupportedError(f"{name}={value!r} is not supported with tensor_parallel_size={size}; {fix}")
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device={device.type!r} is not supported with tensor_parallel_size={size}; use 'cpu'")
    if device.index and not has_launched_ranks(args):  # rank r is given GPU r
        raise UnsupportedError(f"device={str(device)!r} is not supported with tensor_parallel_size={size}; use 'cuda'")
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(
            f"tensor_parallel_size={size} needs as many GPUs, and this machine has {torch.cuda.device_count()}; lower "
            "it or use device='cpu'"
        )
    if device.type == "cpu" and (problem := gloo_problem()):
        raise UnsupportedError(
            f"tensor_parallel_size={size} needs gloo, which this build of PyTorch cannot use ({problem}); install "
            "another version of PyTorch, or on Windows use WSL"
        )


def start_ranks(
    args: EngineArgs,
    cache: CacheConfig,
    layout: type[KVCache],
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
) -> Ranks:
    """Start the other ranks, or find out which one this is.

    Raises what `check_options` and `check_split` raise, and `ConfigError` if torchrun has started other ranks than
    `args` asks for, or none.
    """
    check_options(args, cache, layout, device)
    check_split(load_config(folder), args.tensor_parallel_size)
    if has_launched_ranks(args):
        return LaunchedRank(args, folder, dtype, device)
    return LeadingRank(args, CacheConfig(dtype=LAYOUTS[layout], options=cache.options), folder, dtype, device)


def has_launched_ranks(args: EngineArgs) -> bool:
    """Whether torchrun starts the ranks of this engine: as `args` say, or because it has started this process."""
    if args.tensor_parallel_size == 1 or not dist.is_available():
        return False
    backend = args.distributed_executor_backend
    return backend == "external_launcher" or (backend is None and dist.is_torchelastic_launched())


def device_of(device: torch.device, rank: int) -> torch.device:
    """Each rank has a GPU of its own; on a CPU they share it."""
    return torch.device("cuda", rank) if device.type == "cuda" else device


class LeadingRank:
    """Rank 0, which has started the others (`mp`)."""

    def __init__(
        self, args: EngineArgs, cache: CacheConfig, folder: Path, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.folder, self.dtype, self.block_size = folder, dtype, args.block_size
        size = args.tensor_parallel_size
        self.group = Group(0, size, device_of(device, 0))
        self.num_threads = max(1, torch.get_num_threads() // size)
        """Of each rank, because they share the processors."""
        self.workers = Workers(
            [
                Setup(
                    folder=str(folder.resolve()),
                    rank=rank,
                    size=size,
                    device=str(device_of(device, rank)),
                    dtype=str(dtype).removeprefix("torch."),
                    kv_cache_dtype=cache.dtype,
                    kv_cache_options=dict(cache.options),
                    block_size=args.block_size,
                    num_threads=self.num_threads,
                )
                for rank in range(1, size)
            ]
        )

    def load(self) -> ParallelDecoder:
        """See `Ranks.load`. The workers load at the same time."""
        model = load_part(self.folder, self.group, self.dtype)
        self.workers.wait_until_ready()
        return model

    def new_runner(self, model: ParallelDecoder) -> LeadingRunner:
        """See `Ranks.new_runner`."""
        return LeadingRunner(model, self.block_size, self.workers, self.num_threads)

    def connect(self, num_blocks: int) -> int:
        """See `Ranks.connect`. Ranks of one machine find each other through a store of rank 0.

        Raises `EngineDeadError` with a worker's own error if it cannot allocate its cache, or has ended."""
        self.workers.send(Allocate(num_blocks))
        self.workers.wait_until_ready()
        store = local_store(self.group.size)
        self.workers.send(Connect(store.port))
        problems: list[Exception] = []

        def connect() -> None:
            try:
                self.group.connect(store)
            except Exception as problem:
                problems.append(problem)

        # In a thread of its own, because until ranks are connected it waits for one that has ended, for minutes.
        connecting = Thread(target=connect, daemon=True)
        connecting.start()
        while connecting.is_alive() and not self.workers.has_lost_one:
            connecting.join(0.02)
        if connecting.is_alive() or problems:
            raise self.workers.failure(lost=next(iter(problems), None)) from None
        return num_blocks

    def close(self) -> None:
        """See `Ranks.close`."""
        self.workers.close()


class LaunchedRank:
    """One of the ranks that torchrun has started (`external_launcher`)."""

    def __init__(self, args: EngineArgs, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.folder, self.dtype, self.block_size = folder, dtype, args.block_size
        size, started = args.tensor_parallel_size, os.environ.get("WORLD_SIZE")
        if started is None or "RANK" not in os.environ:
            raise ConfigError(
                "distributed_executor_backend='external_launcher' needs a launcher, and RANK and WORLD_SIZE are not "
                f"set; start the script with `torchrun --nproc-per-node {size}`, or use 'mp'"
            )
        if started != str(size):
            raise ConfigError(
                f"tensor_parallel_size={size}, but the launcher started {started} processes; use the same number"
            )
        local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        self.group = Group(int(os.environ["RANK"]), size, device_of(device, local))

    def load(self) -> ParallelDecoder:
        """See `Ranks.load`."""
        return load_part(self.folder, self.group, self.dtype)

    def new_runner(self, model: ParallelDecoder) -> ModelRunner:
        """See `Ranks.new_runner`."""
        return ModelRunner(model, None, self.block_size)  # type: ignore[arg-type]  (`RunnerPlans` sets its cache)

    def connect(self, num_blocks: int) -> int:
        """See `Ranks.connect`: the number that all ranks have memory for, because their engines must schedule alike."""
        store, _, _ = next(dist.rendezvous("env://", self.group.rank, self.group.size))
        self.group.connect(dist.PrefixStore(f"minillm/{next(_NUMBERS)}", store))
        return self.group.lowest(num_blocks)

    def close(self) -> None:
        """See `Ranks.close`. Nothing to do: torchrun ends the others when this process fails."""
