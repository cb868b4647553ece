"""Lesson 12: models and machines in the numbers that a roofline needs, and what each kind of draft reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from minillm.models.config import ModelConfig


@dataclass(frozen=True)
class Shape:
    """What a forward of a model reads and computes."""

    parameters: float
    weight_bytes: float
    """Read by every forward, once."""
    kv_bytes: float
    """Keys and values of one token, over all layers."""
    attention_flops: float
    """Operations of one query over one cached token, over all layers and heads."""
    embedding_bytes: float = 0.0
    """The input embedding, if it is a matrix of its own: stored, but a step reads a few rows of it only."""

    @classmethod
    def of(cls, config: ModelConfig, bytes_per_number: float = 4) -> Shape:
        """The shape of a model whose weights and cache have so many bytes per number. The input embedding does not
        count, because a step reads only a few rows of it; the unembedding does."""
        attention = 2 * config.hidden_size * (config.q_size + config.kv_size)
        feed_forward = 3 * config.hidden_size * config.intermediate_size
        parameters = config.num_layers * (attention + feed_forward) + config.vocab_size * config.hidden_size
        return cls(
            parameters,
            parameters * bytes_per_number,
            2 * config.num_layers * config.kv_size * bytes_per_number,
            4 * config.num_layers * config.q_size,
        )


@dataclass(frozen=True)
class Machine:
    """What a machine can do at most."""

    flops: float
    """Operations per second."""
    bandwidth: float
    """Bytes per second."""
    memory: float = math.inf
    """Bytes."""


EMBEDDING = 128_256 * 4096
"""Numbers in the input embedding of Llama-3.1-8B; the unembedding is as large."""
LLAMA_8B = Shape(8.03e9 - EMBEDDING, 2 * (8.03e9 - EMBEDDING), 2 * 32 * 8 * 128 * 2, 4 * 32 * 32 * 128, 2 * EMBEDDING)
"""Llama-3.1-8B in bfloat16: 32 layers, 32 query heads, 8 KV heads of 128. As in `Shape.of`, the parameters are those of
the layers and of the unembedding."""
H100 = Machine(989e12, 3.35e12, 80e9)
"""NVIDIA H100 SXM, data sheet: dense bfloat16, HBM3."""

StepSeconds = Callable[[int, int, float, Shape, Machine], float]
"""`(batch, rows, context, shape, machine)` → seconds, the exercise `step_seconds`."""


def speed_up(
    seconds: StepSeconds,
    tokens: float,
    gamma: int,
    batch: int,
    context: int,
    budget: int,
    shape: Shape,
    machine: Machine,
) -> float:
    """MagicDec's model: Ω · T / (γ T_D + T_V), for a draft that reads `budget` tokens of each request's cache.

    `tokens`: Ω, the tokens of a round on average. (Sadhukhan et al. 2024, equation 1, solved for the speed-up.)
    """
    plain = seconds(batch, 1, context, shape, machine)
    draft = seconds(batch, 1, min(budget, context), shape, machine)
    verify = seconds(batch, gamma + 1, context, shape, machine)
    return tokens * plain / (gamma * draft + verify)


def most_context(batch: int, shape: Shape, machine: Machine) -> int:
    """The longest context whose cache fits beside the weights, for all requests of the batch."""
    free = machine.memory - shape.weight_bytes - shape.embedding_bytes
    return int(free / (batch * shape.kv_bytes))


@dataclass(frozen=True)
class DraftKind:
    """What a draft step reads, as shares of what the target has: of its weights, and of its cache by context."""

    name: str
    weights: float
    tokens: Callable[[int], float]
    """Context → cached tokens that are read, in units of a whole token of the target (all layers, all bits)."""

    def read(self, batch: int, context: int, shape: Shape = LLAMA_8B) -> float:
        """Bytes of one draft step."""
        return shape.weight_bytes * self.weights + batch * shape.kv_bytes * self.tokens(context)


UNEMBEDDING_SHARE = EMBEDDING / LLAMA_8B.parameters
"""Of the weights that a step of Llama-3.1-8B reads."""
LAYER_SHARE = (1 - UNEMBEDDING_SHARE) / 32
FOUR_BITS = (4 + 32 / 128) / 16
"""Codes of four bits and a scale and zero point in float16 per 128 numbers, over 16 bits."""

DRAFT_KINDS = (
    DraftKind("plain step", 1.0, lambda context: context),
    DraftKind("view of 257 tokens (MagicDec)", 1.0, lambda context: min(257, context)),
    DraftKind("4-bit weights, upper nibbles (QuantSpec)", FOUR_BITS, lambda context: FOUR_BITS * context),
    DraftKind(
        "a quarter of the layers, 65 tokens (SPIRe)",
        8 * LAYER_SHARE + UNEMBEDDING_SHARE,
        lambda context: min(65, context) / 4,
    ),
    DraftKind(
        "one layer, and the last layer's cache (LongSpec)",
        LAYER_SHARE + UNEMBEDDING_SHARE,
        lambda context: (min(512, context) + context) / 32,
    ),
)
"""Modelled for Llama-3.1-8B from what the papers describe; small parts (SPIRe's memory, LongSpec's extra projections)
are left out."""
