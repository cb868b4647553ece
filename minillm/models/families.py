"""The model families: all their differences as data, none as code in the decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minillm.errors import CheckpointError


@dataclass(frozen=True)
class Family:
    """What a family implies beyond what its `config.json` says."""

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that transformers assumes when the file leaves them out."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values that hold whatever the file says, because the family's model does not look at them."""
    qkv_bias: bool = False
    qk_norm: bool = False
    skips_rope: bool = False
    """Some layers do without RoPE, and those are the ones that a sliding window applies to."""


FAMILIES = {
    "LlamaForCausalLM": Family("llama", fixed={"use_sliding_window": False}),
    "MistralForCausalLM": Family(
        "mistral",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        fixed={
            "attention_bias": False,
            "mlp_bias": False,
            "use_sliding_window": True,
            "layer_types": None,
            "max_window_layers": 0,
        },
    ),
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
    """The family of a `config.json`. Raises `CheckpointError` naming the supported ones if it is another."""
    by_type = [name for name, family in FAMILIES.items() if family.model_type == model_type]
    [name, *_] = architectures or by_type or [f"(model_type {model_type!r})"]
    if name in FAMILIES:
        return FAMILIES[name]
    own_code = " The code that it brings along (auto_map) is never run." if has_own_code else ""
    raise CheckpointError(f"architecture {name} is not supported; minillm reads {', '.join(FAMILIES)}.{own_code}")
