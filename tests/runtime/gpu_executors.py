"""Executors to test, with software graphs where there is no GPU. Import after `tests.ops.triton.conftest`."""

from __future__ import annotations

from minillm.cache.base import KVCache
from minillm.cache.paged import PagedKVCache
from minillm.models.decoder import Decoder
from minillm.runtime.gpu_executor import GpuExecutor
from tests.runtime.gpu_cases import BLOCK_SIZE, WHERE, empty_cache
from tests.runtime.software_graph import SoftwareGraphs

ON_GPU = WHERE.type == "cuda"


def executor_of(
    model: Decoder, graphs: bool = True, layout: type[KVCache] = PagedKVCache, max_num_seqs: int = 4
) -> GpuExecutor:
    """Return an executor over a cache of its own; without `graphs` it pads steps in the same way."""
    cache = empty_cache(model, layout)
    capture = None if ON_GPU else SoftwareGraphs()
    return GpuExecutor(model, cache, BLOCK_SIZE, max_num_seqs, 64, use_graphs=graphs, capture=capture)
