"""`config.json`, in and out: a checkpoint's words on one side, `ModelConfig` on the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from minillm.errors import CheckpointError, UnsupportedError
from minillm.models.config import ModelConfig, RopeConfig
from minillm.models.families import family_of


def model_config(stored: Mapping[str, Any]) -> ModelConfig:
    """The decoder that a `config.json` describes. Raises `CheckpointError` if minillm cannot run it as it was meant."""
    family = family_of(stored)
    raw = {**family.defaults, **stored, **family.fixed}
    _refuse_what_the_decoder_lacks(raw)
    hidden, num_layers, num_heads = (
        _count(raw, key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    num_kv_heads = _count(raw, "num_key_value_heads", default=num_heads)
    head_dim = _count(raw, "head_dim", default=hidden // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(
            f"{num_heads} query heads over {num_kv_heads} KV heads of {head_dim} channels: the first must be a "
            "multiple of the second, and the channels even"
        )
    bias = bool(raw.get("attention_bias"))
    rope = _rope(raw)
    rope_layers = _rope_layers(raw, num_layers) if family.skips_rope else ()
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    return ModelConfig(
        vocab_size=_count(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_context(raw, rope),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
        qkv_bias=family.qkv_bias or bias,
        o_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias")),
        qk_norm=family.qk_norm,
        sliding_window=window,
        sliding_layers=_sliding_layers(raw, num_layers, rope_layers) if window else (),
        rope_layers=rope_layers,
        eos_token_ids=end_tokens(raw.get("eos_token_id")),
        bos_token_id=raw.get("bos_token_id"),
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
    )


def llama_config(config: ModelConfig, dtype: torch.dtype) -> dict[str, object]:
    """`config` in the words of a Llama `config.json`, as old and new transformers read it.

    Raises `UnsupportedError` if a Llama cannot be like that.
    """
    if config.qk_norm or config.sliding_window or config.rope_layers or config.qkv_bias != config.o_bias:
        raise UnsupportedError("only the Llama family can be written: no head norms, no window, all biases or none")
    eos = list(config.eos_token_ids)
    scaling = {"rope_type": config.rope.kind, **config.rope.parameters}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": None if config.rope.kind == "default" else scaling,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "bos_token_id": config.bos_token_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def end_tokens(value: int | list[int] | None) -> tuple[int, ...]:
    """`eos_token_id` as checkpoints spell it: one id, several, or none."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _refuse_what_the_decoder_lacks(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act {raw['hidden_act']!r} is not supported; the decoder has silu")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(f"the weights are quantised ({method}); load the original checkpoint instead")
    kinds = set(raw.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise CheckpointError(f"layers of type {', '.join(sorted(kinds))} are not supported, only full and sliding")


def _count(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{key} is {value!r}; it must be a whole number of at least 1")
    return value


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Both spellings: `rope_parameters`, and the older `rope_theta` beside `rope_scaling`."""
    found = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in found.values()):
        raise CheckpointError("RoPE that differs from layer to layer is not supported")
    kind = found.pop("rope_type", None) or found.pop("type", None) or "default"
    found.pop("type", None)
    theta = found.pop("rope_theta", None) or raw.get("rope_theta") or 10_000.0
    if (found.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise CheckpointError("partial_rotary_factor below 1 is not supported: the decoder rotates whole heads")
    if kind in ("llama3", "yarn"):
        context = _count(raw, "max_position_embeddings")
        key = "original_max_position_embeddings"
        original = found[key] = raw.get(key) or found.get(key) or context
        found["factor"] = found.get("factor") or context / original
    return RopeConfig(theta=float(theta), kind=kind, parameters=found)


def _context(raw: Mapping[str, Any], rope: RopeConfig) -> int:
    """Checkpoints that gained YaRN afterwards often still state the context from before; vLLM widens it, too."""
    context = _count(raw, "max_position_embeddings")
    if rope.kind == "yarn":
        context = max(context, int(rope.parameter("factor") * rope.parameter("original_max_position_embeddings")))
    return context


def _rope_layers(raw: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """SmolLM3: a 1 in `no_rope_layers` means, in spite of its name, that the layer has RoPE."""
    if raw.get("no_rope_layers") is None:
        interval = _count(raw, "no_rope_layer_interval")
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    return tuple(bool(rotates) for rotates in _per_layer(raw, "no_rope_layers", num_layers))


def _sliding_layers(raw: Mapping[str, Any], num_layers: int, rope_layers: tuple[bool, ...]) -> tuple[bool, ...]:
    if raw.get("layer_types"):
        return tuple(kind == "sliding_attention" for kind in _per_layer(raw, "layer_types", num_layers))
    if rope_layers:
        return tuple(not rotates for rotates in rope_layers)
    return tuple(layer >= (raw.get("max_window_layers") or 0) for layer in range(num_layers))


def _per_layer(raw: Mapping[str, Any], key: str, num_layers: int) -> list[Any]:
    if len(raw[key]) < num_layers:
        raise CheckpointError(f"{key} lists {len(raw[key])} layers, the model has {num_layers}")
    return raw[key][:num_layers]
