"""How a case of lesson 09 launches the learner's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.teaching.drives.l09_launch import remembering, run_fenced
from minillm.teaching.exercise import Function


def _sizes(q: Tensor, num_kv: int, block_size: int) -> dict[str, int]:
    group = q.shape[1] // num_kv
    pad_group = 1 << (group - 1).bit_length()
    return {"NUM_KV": num_kv, "GROUP": group, "PAD_GROUP": pad_group, "DIM": q.shape[2], "BLOCK_SIZE": block_size}


def _inputs(
    q: Tensor, pools: dict[str, Tensor], tables: Tensor, seq_lens: list[int], block_size: int
) -> dict[str, tuple[Tensor, float | None]]:
    """Tensors, each with its poison: NaN; for block ids that of a block that does not exist; for lengths 0."""
    floats = {name: (x, None) for name, x in ({"q": q} | pools).items()}
    beyond = next(iter(pools.values())).shape[0] // block_size
    return floats | {"block_tables": (tables, beyond), "seq_lens": (torch.tensor(seq_lens), 0)}


@remembering
def run_decode(
    kernel: Function,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    seq_lens: list[int],
    block_size: int,
    against_wall: bool = False,
) -> Tensor:
    """Launch on a grid of requests × KV heads; elements that the kernel does not write stay NaN."""
    num_kv = keys.shape[1]
    inputs = _inputs(q, {"keys": keys, "values": values}, block_tables, seq_lens, block_size)
    numbers = block_tables.stride(0), q.shape[2] ** -0.5
    grid, sizes = (len(q), num_kv), _sizes(q, num_kv, block_size)
    return run_fenced(kernel, grid, inputs, {"out": tuple(q.shape)}, numbers, against_wall, **sizes)["out"]


@remembering
def run_split(
    kernel: Function,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    seq_lens: list[int],
    block_size: int,
    splits: int,
    against_wall: bool = False,
) -> dict[str, Tensor]:
    """Launch on a grid of requests × KV heads × parts; elements that the kernel does not write stay NaN."""
    num_kv = keys.shape[1]
    inputs = _inputs(q, {"keys": keys, "values": values}, block_tables, seq_lens, block_size)
    results = {"part": (*q.shape[:2], splits, q.shape[2]), "lse": (*q.shape[:2], splits)}
    numbers = block_tables.stride(0), q.shape[2] ** -0.5
    grid, sizes = (len(q), num_kv, splits), _sizes(q, num_kv, block_size)
    return run_fenced(kernel, grid, inputs, results, numbers, against_wall, **sizes, SPLITS=splits)


@remembering
def run_merge(kernel: Function, part: Tensor, lse: Tensor, against_wall: bool = False) -> Tensor:
    """Launch one program per row."""
    shapes = {"out": (part.shape[0], part.shape[2])}
    sizes = {"DIM": part.shape[2], "SPLITS": part.shape[1]}
    inputs = {"part": (part, None), "lse": (lse, None)}
    return run_fenced(kernel, (len(part),), inputs, shapes, (), against_wall, **sizes)["out"]


@remembering
def run_int8(
    kernel: Function,
    q: Tensor,
    key_codes: Tensor,
    key_scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    block_tables: Tensor,
    seq_lens: list[int],
    block_size: int,
    against_wall: bool = False,
) -> Tensor:
    """Launch on a grid of requests × KV heads; elements that the kernel does not write stay NaN."""
    num_kv = key_codes.shape[1]
    pools = {"key_codes": key_codes, "key_scales": key_scales, "value_codes": value_codes, "value_scales": value_scales}
    inputs = _inputs(q, pools, block_tables, seq_lens, block_size)
    numbers = block_tables.stride(0), q.shape[2] ** -0.5
    grid, sizes = (len(q), num_kv), _sizes(q, num_kv, block_size)
    return run_fenced(kernel, grid, inputs, {"out": tuple(q.shape)}, numbers, against_wall, **sizes)["out"]
