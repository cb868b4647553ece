"""One rank's runner of a checkpoint, and two steps to run on it."""

from __future__ import annotations

from pathlib import Path

import torch

from minillm.batch import Segment
from minillm.cache.paged import PagedKVCache
from minillm.parallel.group import Group
from minillm.parallel.loading import load_part
from minillm.runtime.runner import ModelRunner

CPU = torch.device("cpu")


def split_runner(folder: Path, group: Group, block_size: int = 4, num_blocks: int = 16) -> ModelRunner:
    """This rank's runner of the checkpoint in `folder`, in float64, with a cache."""
    model = load_part(folder, group, torch.float64)
    cache = PagedKVCache(model.config, num_blocks, block_size, torch.float64, CPU)
    return ModelRunner(model, cache, block_size)


STEPS = (
    [Segment([7, 250, 3, 9, 11], 0, [2, 5], num_logits=5), Segment([40, 41], 0, [3])],
    [Segment([12], 5, [2, 5]), Segment([272, 1, 2], 2, [3, 4], num_logits=2)],
)
"""Two steps of two requests: prefills, then a decode beside a chunk."""
