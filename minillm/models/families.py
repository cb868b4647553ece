"""The model families: their differences, as data. A family whose computation differs names its own decoder class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from minillm.errors import CheckpointError
from minillm.json_files import short_repr


@dataclass(frozen=True)
class Family:
    """Properties of a family that its `config.json` does not state."""

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that transformers assumes for missing fields."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values that override the file, because the family's model in transformers ignores these fields."""
    qkv_bias: bool = False
    qk_norm: bool = False
    skips_rope: bool = False
    """Some layers have no RoPE. A sliding window applies to exactly those layers."""
    decoder: type | None = None
    """A `Decoder` subclass, where data is not enough. It runs in plain PyTorch unless an executor supports it."""
    own_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `config.json` that only this decoder reads, with their defaults."""


MISTRAL = Family(
    "mistral",
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    fixed={"attention_bias": False, "mlp_bias": False, "use_sliding_window": True, "max_window_layers": 0},
)
FAMILIES = {
    "LlamaForCausalLM": Family("llama", fixed={"use_sliding_window": False}),
    "MistralForCausalLM": MISTRAL,
    # transformers loads a Mistral whose configuration has `layer_types` as this.
    "MinistralForCausalLM": replace(MISTRAL, model_type="ministral"),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        fixed={"attention_bias": False, "mlp_bias": False},
        qkv_bias=True,
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
        fixed={"mlp_bias": False},
        qk_norm=True,
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        defaults={
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
        skips_rope=True,
    ),
}


def family_of(architectures: Sequence[str] | None, model_type: str | None, has_own_code: bool = False) -> Family:
    """Return the family of a `config.json`. Raises `CheckpointError` with the supported families for any other."""
    by_type = [name for name, family in FAMILIES.items() if family.model_type == model_type]
    [name, *_] = architectures or by_type or [""]
    if name in FAMILIES:
        return FAMILIES[name]
    own_code = " Code in the checkpoint (auto_map) is never run." if has_own_code else ""
    named = short_repr(name) if architectures else f"(model_type {short_repr(model_type)})"
    raise CheckpointError(f"architecture {named} is not supported; minillm supports {', '.join(FAMILIES)}.{own_code}")
