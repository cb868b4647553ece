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
    """Every rank sends its bytes to all others in one step: one latency, and for a sum more bytes than a ring."""
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
    logits_bytes: float
    """Bytes of one token's logits, over the whole vocabulary."""
    ring: AllReduce

    def exchange_seconds(self, batch: float, size: int) -> float:
        """What a step of `batch` tokens exchanges in one group: two all-reduces per layer and one for the embedding,
        each by the faster of both algorithms, and one all-gather, in which every rank sends its part of the logits."""
        link = self.link.bandwidth, self.link.latency
        hidden = batch * self.hidden_bytes
        all_reduce = min(self.ring(hidden, size, *link), one_shot_seconds(hidden, size, *link))
        all_gather = one_shot_seconds(batch * self.logits_bytes / size, size, *link)
        return (2 * self.num_layers + 1) * all_reduce + all_gather

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
