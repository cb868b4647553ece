"""Gathering rows of an embedding table as one sparse product (inspired by SparseTransX: Anik and Azad 2025).

    head + relation - tail  of many triples   =   A E,      A: one row per triple with the entries +1, +1, -1

A gather copies rows of the table to a new place before anything is computed, three times for a triple. A sparse product
reads each row where it is and adds it to the result at once, and its backward pass is a sparse product with Aᵀ. PyTorch
has a function for such sums, `embedding_bag`, which copies no rows either (`by_bag`). `minillm bench beside` times all
three on this machine.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def incidence(rows: Tensor, signs: Tensor, num_rows: int) -> Tensor:
    """The sparse matrix A. `rows`: `[n, k]`, which rows of the table each result adds up; `signs`: `[k]`, with which
    factors. `[n, num_rows]`, CSR."""
    count, width = rows.shape
    starts = torch.arange(0, count * width + 1, width, device=rows.device)
    order = rows.argsort(dim=1)  # CSR wants ascending columns
    columns = rows.gather(1, order).flatten()
    values = signs.expand(count, -1).gather(1, order).flatten()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")  # so PyTorch says, once
        return torch.sparse_csr_tensor(starts, columns, values, (count, num_rows), check_invariants=False)


def by_gather(table: Tensor, rows: Tensor, signs: Tensor) -> Tensor:
    """Σ_k signs[k] · table[rows[:, k]], by gathering: `[n, dim]`."""
    return (table[rows] * signs[:, None]).sum(1)


def by_bag(table: Tensor, rows: Tensor, signs: Tensor) -> Tensor:
    """The same with PyTorch's function for sums of embeddings, which adds up rows where they are: `[n, dim]`."""
    return F.embedding_bag(rows, table, mode="sum", per_sample_weights=signs.expand(rows.shape))


def by_product(table: Tensor, matrix: Tensor) -> Tensor:
    """The same as one sparse product with `incidence(rows, signs, len(table))`."""
    return matrix @ table


def seconds(work: Callable[[], object]) -> float:
    """The shortest time of 20 runs of `work`."""
    work()
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
