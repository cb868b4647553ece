"""Lesson 16: the time of a decode step on several GPUs, modelled: reading, computing, and exchanging."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minillm.teaching.workshop.l12_costs import Machine, Shape

AllReduce = Callable[[float, int, float, float], float]
"""`(bytes, ranks, bandwidth, latency)` → seconds: the exercise `all_reduce_seconds`."""


@dataclass(frozen=True)
class Link:
    """What connects two ranks."""

    name: str
    bandwidth: float
    """Bytes per second, in each direction."""
    latency: float
    """Seconds until a message arrives, however short."""


def one_shot_seconds(num_bytes: float, size: int, bandwidth: float, latency: float) -> float:
    """Every rank sends everything to all others in one step and adds up by itself: one latency, more bytes."""
    return latency + (size - 1) * num_bytes / bandwidth if size > 1 else 0.0


@dataclass(frozen=True)
class Cluster:
    """`num_gpus` GPUs that run one model: as groups of ranks, each group a replica."""

    num_gpus: int
    gpu: Machine
    link: Link
    shape: Shape
    num_layers: int
    hidden_bytes: float
    """Bytes of one token in an all-reduce."""
    ring: AllReduce

    def exchange_seconds(self, batch: float, size: int) -> float:
        """All all-reduces of a step of `batch` tokens in one group, each by the faster of both algorithms."""
        arguments = batch * self.hidden_bytes, size, self.link.bandwidth, self.link.latency
        return 2 * self.num_layers * min(self.ring(*arguments), one_shot_seconds(*arguments))

    def step_seconds(self, requests: float, size: int) -> float:
        """A decode step if so many requests are spread evenly over the groups of `size` ranks."""
        batch = requests * size / self.num_gpus
        read = self.shape.weight_bytes / size / self.gpu.bandwidth
        compute = 2 * self.shape.parameters * batch / size / self.gpu.flops
        return max(read, compute) + self.exchange_seconds(batch, size)

    def tokens_per_second(self, requests: float, size: int) -> float:
        """Of all groups together."""
        return requests / self.step_seconds(requests, size)

    def cache_tokens(self, size: int) -> int:
        """Tokens whose keys and values fit beside the weights, which each group has once."""
        weights = self.num_gpus / size * (self.shape.weight_bytes + self.shape.embedding_bytes)
        return int((self.num_gpus * self.gpu.memory - weights) / self.shape.kv_bytes)
