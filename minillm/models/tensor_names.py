"""Maps each tensor of a checkpoint to its place in a `Decoder`, for loading and for saving.

A checkpoint stores q, k and v separately, and gate and up as well. The decoder merges each group into one matrix, so
that one product replaces several. A stored tensor is therefore a range of rows of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from minillm.models.config import ModelConfig
from minillm.models.shards import Shards

PREFIX = "model."
EMBEDDING, UNEMBEDDING = f"{PREFIX}embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Part:
    """The rows of one parameter of `Decoder` that one stored tensor fills."""

    parameter: str
    first_row: int
    shape: tuple[int, ...]
    """Shape of the stored tensor; its first dimension counts the rows."""

    def of(self, model: nn.Module) -> Tensor:
        """Return these rows of `model`, as a view."""
        return model.get_parameter(self.parameter).narrow(0, self.first_row, self.shape[0])


def decoder_shards(folder: Path, config: ModelConfig) -> Shards:
    """Open the tensors of a decoder's checkpoint, with the names of `stored_parts`.

    Like transformers, accept names without the prefix `model.`, and a tied embedding that is stored only as `lm_head`.
    Raises `CheckpointError` if the folder has no readable safetensors.
    """
    shards = Shards(folder)
    if "norm.weight" in shards.names and not any(name.startswith(PREFIX) for name in shards.names):
        for name in shards.names - {UNEMBEDDING}:
            shards.rename(name, PREFIX + name)
    if config.tie_word_embeddings and UNEMBEDDING in shards.names and EMBEDDING not in shards.names:
        shards.rename(UNEMBEDDING, EMBEDDING)
    return shards


def stored_parts(config: ModelConfig) -> dict[str, Part]:
    """Return every tensor that a checkpoint with this configuration must contain, by stored name."""
    table = (config.vocab_size, config.hidden_size)
    parts = {EMBEDDING: Part("embed_tokens.weight", 0, table)}
    in_layer = dict(_layer_parts(config))
    for i in range(config.num_layers):
        for name, part in in_layer.items():
            parts[f"model.layers.{i}.{name}"] = replace(part, parameter=f"layers.{i}.{part.parameter}")
    parts["model.norm.weight"] = Part("norm.weight", 0, (config.hidden_size,))
    if not config.tie_word_embeddings:
        parts[UNEMBEDDING] = Part("lm_head.weight", 0, table)
    return parts


def _layer_parts(config: ModelConfig) -> Iterator[tuple[str, Part]]:
    hidden, inner, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    projections = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    yield "input_layernorm.weight", Part("input_norm.weight", 0, (hidden,))
    yield from _linear_parts(projections, "qkv_proj", hidden, config.qkv_bias)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", Part("q_norm.weight", 0, (config.head_dim,))
        yield "self_attn.k_norm.weight", Part("k_norm.weight", 0, (config.head_dim,))
    yield from _linear_parts({"self_attn.o_proj": hidden}, "o_proj", q, config.o_bias)
    yield "post_attention_layernorm.weight", Part("post_attention_norm.weight", 0, (hidden,))
    gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
    yield from _linear_parts(gate_up, "mlp.gate_up_proj", hidden, config.mlp_bias)
    yield from _linear_parts({"mlp.down_proj": hidden}, "mlp.down_proj", inner, config.mlp_bias)


def _linear_parts(stored: dict[str, int], merged: str, columns: int, bias: bool) -> Iterator[tuple[str, Part]]:
    """Yield the parts of one linear. `stored`: output sizes by stored name, in their order in `merged`."""
    row = 0
    for name, rows in stored.items():
        yield f"{name}.weight", Part(f"{merged}.weight", row, (rows, columns))
        if bias:
            yield f"{name}.bias", Part(f"{merged}.bias", row, (rows,))
        row += rows
