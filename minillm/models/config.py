"""The configuration of a decoder: its shape, and the switches in which model families differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minillm.errors import CheckpointError


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base and, for long-context checkpoints, how its frequencies are scaled."""

    theta: float = 10_000.0
    kind: str = "default"
    """`default`, `linear`, `dynamic`, `llama3` or `yarn`, as in the checkpoint's `rope_parameters`."""
    parameters: dict[str, float] = field(default_factory=dict)
    """The other parameters of that kind (`factor`, `low_freq_factor`, …), unchanged from the checkpoint."""

    def parameter(self, name: str) -> float:
        """Return a parameter that this kind requires. Raises `CheckpointError` if the checkpoint lacks it."""
        value = self.parameters.get(name)
        if not isinstance(value, int | float):
            raise CheckpointError(f"RoPE of kind {self.kind!r} needs the number {name!r}, config.json has {value!r}")
        return value


@dataclass(frozen=True)
class ModelConfig:
    """Shape and switches of one decoder-only transformer (Llama, Mistral, Qwen2, Qwen3, SmolLM)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """The context length in tokens: positions go from 0 to this - 1."""
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    """Qwen2; Llama with `attention_bias`."""
    o_bias: bool = False
    """Llama with `attention_bias`."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Qwen3: RMSNorm over each head of q and k before RoPE."""
    sliding_window: int | None = None
    """Mistral: a token attends to itself and the `sliding_window - 1` tokens before it. None: to all before it."""
    sliding_layers: tuple[bool, ...] = ()
    """Per layer, whether it uses the window; empty: all layers do."""
    rope_layers: tuple[bool, ...] = ()
    """Per layer, whether it applies RoPE (some of SmolLM3's do not); empty: all layers do."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"
    """The dtype that the checkpoint states, or else that of its weights."""
    decoder: type | None = None
    """A `Decoder` subclass for a different architecture; None: `Decoder`. Executors do not run subclasses."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """Fields of `SamplingParams`, for requests that give none."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `config.json` that this subclass reads: the family's `own_fields`."""

    @property
    def q_size(self) -> int:
        """Total width of the query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Total width of the key (or value) heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def has_windows(self) -> bool:
        """Whether some layer attends to a sliding window."""
        return any(self.window(layer) is not None for layer in range(self.num_layers))

    def window(self, layer: int) -> int | None:
        """The sliding window of `layer` in tokens, or None for full attention."""
        if self.sliding_window is None or (self.sliding_layers and not self.sliding_layers[layer]):
            return None
        return self.sliding_window

    def rotates(self, layer: int) -> bool:
        """Whether `layer` applies RoPE."""
        return not self.rope_layers or self.rope_layers[layer]
