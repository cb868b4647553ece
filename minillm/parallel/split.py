"""Which part of a model each rank holds (Shoeybi et al. 2019, Megatron-LM, section 3).

    tensor                   split        rank r of n holds
    q_proj, k_proj, v_proj   by columns   1/n of the heads: rows of the stored matrix, which is [out, in]
    o_proj                   by rows      the columns of the stored matrix that read those heads
    gate_proj, up_proj       by columns   1/n of the inner channels
    down_proj                by rows      the columns of the stored matrix that read those channels
    embed_tokens, lm_head    vocabulary   1/n of the tokens, rounded up
    norms                    not split    all of it

"By columns" and "by rows" are of W in y = x W, as in the literature. The bias of a matrix split by rows must be added
once: rank 0 holds it, the others hold zeros.

With more ranks than KV heads, n / num_kv_heads ranks hold a copy of the same KV head, as in vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minillm.errors import ConfigError, UnsupportedError
from minillm.models.config import ModelConfig

MOST_RANKS = 64
"""Bounds the search for sizes that an error message proposes."""


@dataclass(frozen=True)
class Piece:
    """The rows and columns of a stored tensor that one rank holds; None: all of them."""

    rows: range | None = None
    columns: range | None = None
    on_rank_0_only: bool = False
    """Other ranks hold zeros instead."""


def check_split(config: ModelConfig, size: int) -> None:
    """Raise `ConfigError` if the model cannot be split over `size` ranks, `UnsupportedError` for a model family with a
    decoder of its own."""
    if config.decoder is not None:
        raise UnsupportedError(
            f"tensor_parallel_size={size}: {config.decoder.__name__} computes its layers in its own way and cannot be "
            "split; leave the option out"
        )
    if reason := _indivisible(config, size):
        possible = ", ".join(map(str, possible_sizes(config)))
        raise ConfigError(f"tensor_parallel_size={size} does not divide the model: {reason}; possible are {possible}")


def possible_sizes(config: ModelConfig) -> list[int]:
    """The numbers of ranks, up to `MOST_RANKS`, that the model can be split over."""
    return [size for size in range(1, MOST_RANKS + 1) if not _indivisible(config, size)]


def _indivisible(config: ModelConfig, size: int) -> str | None:
    """What of the model `size` does not divide, in words; None if it can be split."""
    heads, kv_heads, inner = config.num_heads, config.num_kv_heads, config.intermediate_size
    if heads % size:
        return f"it has {heads} query heads"
    if kv_heads % size and size % kv_heads:
        return f"its {kv_heads} KV heads can neither be split nor copied evenly"
    return f"its MLP has {inner} inner channels" if inner % size else None


def config_of_rank(config: ModelConfig, size: int) -> ModelConfig:
    """The shape of what one rank holds. `vocab_size` is its part of the vocabulary."""
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=config.intermediate_size // size,
        vocab_size=-(-config.vocab_size // size),
    )


def piece_of(name: str, config: ModelConfig, rank: int, size: int) -> Piece:
    """What `rank` holds of the tensor with this stored name. `config`: of the whole model."""
    own = config_of_rank(config, size)
    *_, module, kind = ["", *name.split(".")]
    if module in ("embed_tokens", "lm_head"):
        first = rank * own.vocab_size
        return Piece(range(min(first, config.vocab_size), min(first + own.vocab_size, config.vocab_size)))
    if module == "q_proj":
        return Piece(_slice(rank, own.q_size))
    if module in ("k_proj", "v_proj"):
        return Piece(_slice(rank * config.num_kv_heads // size if size > config.num_kv_heads else rank, own.kv_size))
    if module in ("gate_proj", "up_proj"):
        return Piece(_slice(rank, own.intermediate_size))
    if module in ("o_proj", "down_proj"):
        if kind == "bias":
            return Piece(on_rank_0_only=True)
        return Piece(columns=_slice(rank, own.q_size if module == "o_proj" else own.intermediate_size))
    return Piece()


def _slice(index: int, width: int) -> range:
    return range(index * width, (index + 1) * width)
