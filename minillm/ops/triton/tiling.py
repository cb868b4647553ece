"""How the attention of one step is divided among programs, and the attention metadata that the kernel reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.batch import Batch
from minillm.ops.triton import machine
from minillm.ops.triton.machine import MIN_TILE_SIDE, power_of_two

MIN_KEYS_PER_SPLIT = 256
"""A shorter split costs more to merge than it saves."""
MAX_SPLITS = 64
PROGRAMS_PER_SM = 2
"""Programs that the keys of few requests are split for."""
KEYS = 64
"""Keys per iteration on tensor cores; half as many in registers."""
STAGES, FEWEST_STAGES = 5, 2
"""Triton divides stages between the load of block ids and that of the keys which they point to. From five on, a tile of
keys and values is loaded while the previous one is multiplied; with fewer, the next load waits for that."""
EIGHT_WARP_OUTPUTS = 64 * 128
"""From this many outputs per program on, four warps run out of registers. Half as many where products run in registers
and not on tensor cores."""


@dataclass(frozen=True)
class StepSizes:
    """The sizes of a step that a tiling depends on."""

    tokens: int
    requests: int
    longest_query: int
    """New tokens of the request that has most. Too small a number costs a few more tiles; the result stays right."""


@dataclass(frozen=True)
class HeadShape:
    """The properties of a model that a tiling depends on."""

    query_heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    """The dtype of the activations."""


@dataclass(frozen=True)
class Tiling:
    """How the work is divided. It changes the speed, and the results only in the last bits."""

    rows: int
    """Queries times heads per program; a power of two, at least 16 and at least the group."""
    keys: int
    """Keys per iteration; a power of two, at least 16."""
    splits: int
    """Programs that share the keys of a request."""
    warps: int = 4
    stages: int = 2

    @classmethod
    def of(cls, batch: Batch, q: Tensor, num_kv: int) -> Tiling:
        """Choose a tiling by shapes and lengths alone; no tensor is read."""
        sizes = StepSizes(batch.query_start[-1], batch.num_requests, max(batch.query_lens, default=0))
        heads = HeadShape(q.shape[1], num_kv, q.shape[2], q.dtype)
        return cls.for_sizes(sizes, max(batch.seq_lens, default=0), heads)

    @classmethod
    def for_sizes(cls, sizes: StepSizes, context: int, heads: HeadShape) -> Tiling:
        """Choose a tiling for a step whose sizes alone are known. `context`: tokens of the longest request."""
        is_fast, group = machine.uses_tensor_cores(heads.dtype), heads.query_heads // heads.kv_heads
        rows = power_of_two(min(group * sizes.longest_query, 64 if is_fast else 32), MIN_TILE_SIDE)
        rows = power_of_two(group, rows)
        programs = (sizes.tokens // (rows // group) + sizes.requests) * heads.kv_heads
        splits = num_splits(programs, context, machine.num_sms())
        wide = EIGHT_WARP_OUTPUTS if is_fast else EIGHT_WARP_OUTPUTS // 2
        keys = KEYS if is_fast else KEYS // 2
        return cls(rows, keys, splits, 8 if rows * heads.dim >= wide else 4, num_stages(keys, heads))


def num_splits(programs: int, longest: int, num_sms: int) -> int:
    """Return how many splits of the keys give about `PROGRAMS_PER_SM` programs per SM.

    `longest`: tokens of the longest request, whose splits have at least `MIN_KEYS_PER_SPLIT` keys.
    """
    wanted = -(-PROGRAMS_PER_SM * num_sms // max(programs, 1))
    return 1 if wanted <= 2 else min(wanted, max(1, longest // MIN_KEYS_PER_SPLIT), MAX_SPLITS)


def num_stages(keys: int, heads: HeadShape) -> int:
    """Return `STAGES` if two programs with two tiles of 16-bit keys and values each fit an SM's shared memory."""
    num_bytes = 2 * 2 * keys * power_of_two(heads.dim) * heads.dtype.itemsize
    fits = 2 * num_bytes <= machine.shared_memory()
    return STAGES if fits and machine.uses_tensor_cores(heads.dtype) else FEWEST_STAGES


def num_tiles(batch: Batch, queries: int) -> int:
    """Return the number of query tiles of all requests (see the kernel). A few of them are empty and exit at once."""
    return batch.query_start[-1] // queries + batch.num_requests


@dataclass(frozen=True)
class AttentionMetadata:
    """The lengths that the kernel reads on the device, in addition to the block tables."""

    query_start: Tensor
    """`[requests + 1]` int32."""
    seq_lens: Tensor
    """`[requests]` int32."""

    @classmethod
    def of(cls, batch: Batch) -> AttentionMetadata:
        """Copy the lengths to the device once per step; every layer after the first reuses the copy."""

        def copied() -> AttentionMetadata:
            device = batch.block_tables.device
            lengths = [*batch.query_start, *batch.seq_lens]
            both = torch.tensor(lengths, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
            return cls(*both.to(device, non_blocking=True).split((batch.num_requests + 1, batch.num_requests)))

        return batch.once_per_step(AttentionMetadata, copied)
