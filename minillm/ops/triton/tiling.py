"""How the work of one attention step is cut into programs, and where the kernel finds each request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.cache.base import Batch
from minillm.ops.triton import machine
from minillm.ops.triton.machine import SMALLEST_DOT, power_of_two

KEYS_OF_A_SPLIT = 256
"""A split shorter than this costs more in merging than it gains."""
MAX_SPLITS = 64
WIDE_TILE = 64 * 128
"""Outputs of one program from which four warps run out of registers; half as many where these also multiply."""


@dataclass(frozen=True)
class Sizes:
    """What a tiling must know of a step's new tokens."""

    tokens: int
    requests: int
    longest_query: int
    """New tokens of the request that has most; too small a number costs a few more tiles, nothing else."""


@dataclass(frozen=True)
class Heads:
    """What a tiling must know of a model."""

    queries: int
    keys: int
    dim: int
    dtype: torch.dtype
    """Of the activations."""


@dataclass(frozen=True)
class Tiling:
    """How the work is cut. It changes the speed, and the results in the last bits."""

    rows: int
    """Queries times heads of one program; a power of two, at least 16 and at least the group."""
    keys: int
    """Keys at a time; a power of two, at least 16."""
    splits: int
    """Programs that share the keys of a request."""
    warps: int = 4
    stages: int = 2

    @classmethod
    def of(cls, batch: Batch, q: Tensor, num_kv: int) -> Tiling:
        """A choice by shapes and lengths alone: no tensor's numbers are looked at."""
        sizes = Sizes(batch.query_start[-1], batch.num_requests, max(batch.query_lens, default=0))
        heads = Heads(q.shape[1], num_kv, q.shape[2], q.dtype)
        return cls.for_sizes(sizes, max(batch.seq_lens, default=0), heads)

    @classmethod
    def for_sizes(cls, sizes: Sizes, context: int, heads: Heads) -> Tiling:
        """The same choice for a step of which only sizes are known. `context`: tokens of the longest request."""
        is_fast, group = machine.has_fast_dots(heads.dtype), heads.queries // heads.keys
        rows = power_of_two(min(group * sizes.longest_query, 64 if is_fast else 32), SMALLEST_DOT)
        rows = power_of_two(group, rows)
        programs = (sizes.tokens // (rows // group) + sizes.requests) * heads.keys
        splits = num_splits(programs, context, machine.num_processors())
        wide = WIDE_TILE if is_fast else WIDE_TILE // 2
        return cls(rows, 64 if is_fast else 32, splits, 8 if rows * heads.dim >= wide else 4)


def num_splits(programs: int, longest: int, processors: int) -> int:
    """Parts to cut the keys into, so that about two programs per processor have something to do.

    `longest`: tokens of the longest request. No part is shorter than `KEYS_OF_A_SPLIT`, if it is the longest's.
    """
    wanted = -(-2 * processors // max(programs, 1))
    return 1 if wanted <= 2 else min(wanted, max(1, longest // KEYS_OF_A_SPLIT), MAX_SPLITS)


def num_tiles(batch: Batch, queries: int) -> int:
    """Tiles that the requests own (see the kernel); a few of them are empty and end at once."""
    return batch.query_start[-1] // queries + batch.num_requests


@dataclass(frozen=True)
class Places:
    """What the kernel reads of a batch beside its block tables, on the device."""

    query_start: Tensor
    """`[requests + 1]` int32."""
    seq_lens: Tensor
    """`[requests]` int32."""

    @classmethod
    def of(cls, batch: Batch) -> Places:
        """One copy to the device per step; every layer after the first finds it."""
        if Places not in batch.plans:
            device = batch.block_tables.device
            both = torch.tensor(
                [*batch.query_start, *batch.seq_lens], dtype=torch.int32, pin_memory=batch.block_tables.is_cuda
            )
            batch.plans[Places] = cls(
                *both.to(device, non_blocking=True).split((batch.num_requests + 1, batch.num_requests))
            )
        return batch.plans[Places]
