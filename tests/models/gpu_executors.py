"""Executors to test: recorded by software where there is no GPU. To be imported after `tests.ops.triton.conftest`."""

from __future__ import annotations

from minillm.cache.base import KVCache
from minillm.cache.paged import PagedKVCache
from minillm.models.decoder import Decoder
from minillm.models.gpu_executor import GpuExecutor
from tests.models.gpu_cases import BLOCK_SIZE, WHERE, empty_cache
from tests.models.software_graph import SoftwareGraphs

ON_GPU = WHERE.type == "cuda"


def executor_of(
    model: Decoder, graphs: bool = True, layout: type[KVCache] = PagedKVCache, max_num_seqs: int = 4
) -> GpuExecutor:
    """An executor over a cache of its own; with `graphs` or, filling steps up alike, without."""
    cache = empty_cache(model, layout)
    capture = None if ON_GPU else SoftwareGraphs()
    return GpuExecutor(model, cache, BLOCK_SIZE, max_num_seqs, 64, use_graphs=graphs, capture=capture)
