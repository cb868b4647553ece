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
        is_fast, dim = machine.has_fast_dots(q.dtype), q.shape[2]
        group, longest = q.shape[1] // num_kv, max(batch.query_lens, default=0)
        rows = power_of_two(min(group * longest, 64 if is_fast else 32), SMALLEST_DOT)
        rows = power_of_two(group, rows)
        programs = num_tiles(batch, rows // group) * num_kv
        splits = num_splits(programs, max(batch.seq_lens, default=0), machine.num_processors())
        wide = WIDE_TILE if is_fast else WIDE_TILE // 2
        return cls(rows, 64 if is_fast else 32, splits, 8 if rows * dim >= wide else 4)


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
