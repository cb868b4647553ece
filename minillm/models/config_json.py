"""Converts between a checkpoint's `config.json` and `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from msgspec.structs import asdict

from minillm.errors import CheckpointError, UnsupportedError
from minillm.json_files import short_repr, validated
from minillm.models.config import ModelConfig, RopeConfig
from minillm.models.config_schema import MAX_CONTEXT, RopeScaling, StoredConfig, refuse_switches
from minillm.models.families import family_of
from minillm.models.rope import SCALINGS

REQUIRED_PARAMETERS = {"linear": ("factor",), "llama3": ("low_freq_factor", "high_freq_factor")}
"""The parameters that a kind of scaling requires; for `llama3` and `yarn` the others follow from the context length."""


def model_config(stored: Mapping[str, Any]) -> ModelConfig:
    """Convert the contents of a `config.json`. Raises `CheckpointError` if minillm cannot run this model exactly."""
    named = validated({key: stored.get(key) for key in ("architectures", "model_type")}, StoredConfig)
    family = family_of(named.architectures, named.model_type, has_own_code="auto_map" in stored)
    _refuse_rope_by_layer(stored)
    _refuse_unknown_rope(stored)
    raw = validated({**family.defaults, **stored, **family.fixed}, StoredConfig)
    refuse_switches(stored, family.own_fields)
    if raw.quantization_config:
        method = raw.quantization_config.get("quant_method", "unknown")
        method = (
            method if isinstance(method, str) and method.isidentifier() and len(method) < 60 else short_repr(method)
        )
        raise CheckpointError(f"the weights are quantised ({method}); load the original checkpoint instead")
    vocab_size, hidden, num_layers, num_heads = (
        _required(raw, key) for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    num_kv_heads = raw.num_key_value_heads or num_heads
    head_dim = raw.head_dim or hidden // num_heads
    if num_heads % num_kv_heads or head_dim % 2 or head_dim < 2:
        raise CheckpointError(
            f"{num_heads} query heads over {num_kv_heads} KV heads of {head_dim} channels: the number of query heads "
            "must be a multiple of the number of KV heads, and the number of channels must be even"
        )
    bias = bool(raw.attention_bias)
    rope = _rope(raw)
    rope_layers = _rope_layers(raw, num_layers) if family.skips_rope else ()
    is_listed = family.skips_rope and raw.layer_types  # SmolLM3's masks follow the list, whatever the switch says
    window = raw.sliding_window if raw.use_sliding_window or is_listed else None
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=_required(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_context_length(raw, rope),
        rms_norm_eps=1e-6 if raw.rms_norm_eps is None else raw.rms_norm_eps,
        rope=rope,
        tie_word_embeddings=bool(raw.tie_word_embeddings),
        qkv_bias=family.qkv_bias or bias,
        o_bias=bias,
        mlp_bias=bool(raw.mlp_bias),
        qk_norm=family.qk_norm,
        sliding_window=window,
        sliding_layers=_sliding_layers(raw, num_layers, rope_layers) if window else (),
        rope_layers=rope_layers,
        eos_token_ids=end_tokens(raw.eos_token_id, vocab_size),
        bos_token_id=raw.bos_token_id,
        dtype=raw.dtype or raw.torch_dtype or "float32",
        decoder=family.decoder,
        extra={name: stored.get(name, default) for name, default in family.own_fields.items()},
    )


def llama_config(config: ModelConfig, dtype: torch.dtype) -> dict[str, object]:
    """Return `config` as the contents of a Llama `config.json`, readable by old and new transformers.

    Raises `UnsupportedError` if the Llama architecture cannot represent it.
    """
    own = config.qk_norm or config.sliding_window or config.rope_layers or config.decoder
    if own or config.qkv_bias != config.o_bias:
        raise UnsupportedError(
            "only the Llama family can be saved: no q/k norms, no sliding window, RoPE in every layer, and biases on "
            "all of q, k, v and o or on none of them"
        )
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


def end_tokens(value: int | list[int] | None, vocab_size: int) -> tuple[int, ...]:
    """Convert a checkpoint's `eos_token_id` (one id, a list, or none) to a tuple without duplicates.

    Raises `CheckpointError` for an id outside the vocabulary.
    """
    ids = () if value is None else (value,) if isinstance(value, int) else tuple(value)
    outside = [token for token in ids if token >= vocab_size]
    if outside:
        raise CheckpointError(f"eos_token_id has {outside[0]}; ids of this model go from 0 to {vocab_size - 1}")
    return tuple(dict.fromkeys(ids))


def _required(raw: StoredConfig, key: str) -> Any:
    """Return a field that must be present; the schema has already checked its type and range."""
    value = getattr(raw, key)
    if value is None:
        raise CheckpointError(f"{key} is missing or null; the decoder needs it")
    return value


def _refuse_rope_by_layer(stored: Mapping[str, Any]) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        found = stored.get(key)
        if isinstance(found, Mapping) and any(isinstance(value, Mapping) for value in found.values()):
            raise CheckpointError(f"{key} differs from layer to layer, which is not supported")


def _refuse_unknown_rope(stored: Mapping[str, Any]) -> None:
    """Name the kind, before an entry that only that kind has is taken for a mistake."""
    for key in ("rope_scaling", "rope_parameters"):
        found = stored.get(key)
        kind = (found.get("rope_type") or found.get("type")) if isinstance(found, Mapping) else None
        if isinstance(kind, str) and kind not in SCALINGS:
            raise CheckpointError(
                f"RoPE of kind {short_repr(kind)} is not supported; minillm has {', '.join(SCALINGS)}"
            )


def _rope(raw: StoredConfig) -> RopeConfig:
    """Read RoPE from either spelling: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
    found = _entries(raw.rope_scaling) or _entries(raw.rope_parameters)
    found.pop("finetuned", None)
    found.pop("attn_factor", None)
    kind = found.pop("rope_type", None) or found.pop("type", None) or "default"
    found.pop("type", None)
    theta = found.pop("rope_theta", None) or raw.rope_theta or 10_000.0
    if (found.pop("partial_rotary_factor", None) or raw.partial_rotary_factor or 1.0) != 1.0:
        raise CheckpointError("partial_rotary_factor below 1 is not supported: RoPE covers all channels of a head")
    if kind in ("llama3", "yarn"):
        context = _required(raw, "max_position_embeddings")
        key = "original_max_position_embeddings"
        original = found[key] = raw.original_max_position_embeddings or found.get(key) or context
        found["factor"] = found.get("factor") or context / original
    rope = RopeConfig(theta=float(theta), kind=kind, parameters=found)
    for name in REQUIRED_PARAMETERS.get(kind, ()):
        rope.parameter(name)
    if kind == "llama3" and not rope.parameter("low_freq_factor") < rope.parameter("high_freq_factor"):
        raise CheckpointError(
            f"low_freq_factor is {found['low_freq_factor']} and high_freq_factor {found['high_freq_factor']}; the "
            "first must be below the second"
        )
    return rope


def _entries(scaling: RopeScaling | None) -> dict[str, Any]:
    return {key: value for key, value in asdict(scaling or RopeScaling()).items() if value is not None}


def _context_length(raw: StoredConfig, rope: RopeConfig) -> int:
    """Return the context length. With YaRN it is at least factor · original length, as in vLLM, because
    checkpoints that were extended with YaRN often still state the original length. With linear scaling it is the length
    that the checkpoint states, as in transformers; vLLM multiplies that by the factor."""
    context: int = _required(raw, "max_position_embeddings")
    if rope.kind == "yarn":
        original, factor = rope.parameter("original_max_position_embeddings"), rope.parameter("factor")
        context = max(context, int(factor * original))
        if context > MAX_CONTEXT:
            raise CheckpointError(
                f"factor is {factor:g} and original_max_position_embeddings {original}: this gives a context of "
                f"{context:,} tokens, over the limit of {MAX_CONTEXT:,}"
            )
    return context


def _rope_layers(raw: StoredConfig, num_layers: int) -> tuple[bool, ...]:
    """SmolLM3: despite the field's name, a 1 in `no_rope_layers` means that the layer has RoPE."""
    if raw.no_rope_layers is None:
        interval = _required(raw, "no_rope_layer_interval")
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    return tuple(bool(rotates) for rotates in _per_layer("no_rope_layers", raw.no_rope_layers, num_layers))


def _sliding_layers(raw: StoredConfig, num_layers: int, rope_layers: tuple[bool, ...]) -> tuple[bool, ...]:
    if raw.layer_types:
        return tuple(kind == "sliding_attention" for kind in _per_layer("layer_types", raw.layer_types, num_layers))
    if rope_layers:
        return tuple(not rotates for rotates in rope_layers)
    return tuple(layer >= (raw.max_window_layers or 0) for layer in range(num_layers))


def _per_layer(key: str, listed: list[Any], num_layers: int) -> list[Any]:
    if len(listed) < num_layers:
        raise CheckpointError(f"{key} lists {len(listed)} layers, but the model has {num_layers}")
    return listed[:num_layers]
