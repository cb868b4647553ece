"""The schema of `config.json`: every field that affects what the decoder computes, with its type and range.

The ranges are wider than any published model, and narrow enough that no single field can exhaust the machine's memory.
Products of two fields are checked against the stored weights or the free memory (`loading`). Fields not named here are
ignored, except for those in `SWITCHES`, which raise an error unless they are off.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from minillm.errors import CheckpointError
from minillm.json_files import float_in_range, int_in_range, short_repr

MAX_LAYERS = 1024
MAX_CONTEXT = 2**24
TokenId = Annotated[int, Meta(ge=0, le=2**24)]
Context = int_in_range(1, MAX_CONTEXT)
Switch = Annotated[bool | None, Meta(description="true or false")]
EndTokens = Annotated[TokenId | list[TokenId] | None, Meta(description="a token's id, a list of ids, or null")]
TopK = Annotated[int, Meta(ge=-1)]
TopP = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.001, le=1000)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
NewTokens = Annotated[int, Meta(ge=1)]
Dtype = Annotated[
    Literal["float32", "float16", "bfloat16", "float64"] | None,
    Meta(description="float32, float16, bfloat16 or float64"),
]


class RopeScaling(Struct, forbid_unknown_fields=True):
    """`rope_scaling`, or its newer spelling `rope_parameters`. An entry that is not named here raises an error."""

    rope_type: Annotated[str | None, Meta(description="the name of a kind of scaling")] = None
    type: Annotated[str | None, Meta(description="the name of a kind of scaling")] = None
    rope_theta: float_in_range(1, 1e15) = None  # type: ignore[valid-type]
    partial_rotary_factor: float_in_range(0, 1) = None  # type: ignore[valid-type]
    factor: float_in_range(0, 1e6) = None  # type: ignore[valid-type]
    low_freq_factor: float_in_range(0, 1e6) = None  # type: ignore[valid-type]
    high_freq_factor: float_in_range(0, 1e6) = None  # type: ignore[valid-type]
    original_max_position_embeddings: Context = None  # type: ignore[valid-type]
    beta_fast: float_in_range(0, 1e6) = None  # type: ignore[valid-type]
    beta_slow: float_in_range(0, 1e6) = None  # type: ignore[valid-type]
    attention_factor: float_in_range(0, 1e3) = None  # type: ignore[valid-type]
    mscale: float_in_range(0, 1e3) = None  # type: ignore[valid-type]
    mscale_all_dim: float_in_range(0, 1e3) = None  # type: ignore[valid-type]
    truncate: Switch = None
    finetuned: Switch = None
    """Changes nothing."""
    attn_factor: float_in_range(0, 1e3) = None  # type: ignore[valid-type]
    """Ignored, as in transformers; vLLM multiplies YaRN's factor on cos and sin by it."""


class StoredConfig(Struct):
    """The fields of `config.json` that minillm reads. None: missing, or null."""

    architectures: Annotated[list[str] | None, Meta(description="a list of names")] = None
    model_type: Annotated[str | None, Meta(description="a name")] = None
    vocab_size: int_in_range(1, 2**24) = None  # type: ignore[valid-type]
    hidden_size: int_in_range(1, 2**17) = None  # type: ignore[valid-type]
    intermediate_size: int_in_range(1, 2**20) = None  # type: ignore[valid-type]
    num_hidden_layers: int_in_range(1, MAX_LAYERS) = None  # type: ignore[valid-type]
    num_attention_heads: int_in_range(1, 2**12) = None  # type: ignore[valid-type]
    num_key_value_heads: int_in_range(1, 2**12) = None  # type: ignore[valid-type]
    head_dim: int_in_range(1, 2**12) = None  # type: ignore[valid-type]
    max_position_embeddings: Context = None  # type: ignore[valid-type]
    original_max_position_embeddings: Context = None  # type: ignore[valid-type]
    rms_norm_eps: float_in_range(0, 1) = None  # type: ignore[valid-type]
    rope_theta: float_in_range(1, 1e15) = None  # type: ignore[valid-type]
    rope_scaling: Annotated[RopeScaling | None, Meta(description="an object, or null")] = None
    rope_parameters: Annotated[RopeScaling | None, Meta(description="an object, or null")] = None
    partial_rotary_factor: float_in_range(0, 1) = None  # type: ignore[valid-type]
    hidden_act: Annotated[
        Literal["silu", "swish"] | None, Meta(description="'silu' or 'swish', which the decoder computes")
    ] = None
    tie_word_embeddings: Switch = None
    attention_bias: Switch = None
    mlp_bias: Switch = None
    use_sliding_window: Switch = None
    sliding_window: int_in_range(1, 2**31 - 1) = None  # type: ignore[valid-type]
    max_window_layers: int_in_range(0, MAX_LAYERS) = None  # type: ignore[valid-type]
    layer_types: Annotated[
        list[Literal["full_attention", "sliding_attention"]] | None,
        Meta(description="'full_attention' or 'sliding_attention' for each layer"),
    ] = None
    no_rope_layers: Annotated[list[Literal[0, 1]] | None, Meta(description="0 or 1 for each layer")] = None
    no_rope_layer_interval: int_in_range(1, MAX_LAYERS) = None  # type: ignore[valid-type]
    eos_token_id: EndTokens = None
    bos_token_id: Annotated[TokenId | None, Meta(description="a token's id, or null")] = None
    dtype: Dtype = None
    torch_dtype: Dtype = None
    quantization_config: Annotated[dict[str, Any] | None, Meta(description="an object, or null")] = None


class GenerationConfig(Struct):
    """The fields of `generation_config.json` that minillm reads."""

    eos_token_id: EndTokens = None
    temperature: Annotated[Temperature | None, Meta(description="a number from 0 to 2, or null")] = None
    top_k: Annotated[TopK | None, Meta(description="an integer from -1, or null")] = None
    top_p: Annotated[TopP | None, Meta(description="a number above 0 and up to 1, or null")] = None
    min_p: Annotated[MinP | None, Meta(description="a number from 0 to 1, or null")] = None
    repetition_penalty: Annotated[
        RepetitionPenalty | None, Meta(description="a number from 0.001 to 1000, or null")
    ] = None
    presence_penalty: Annotated[Penalty | None, Meta(description="a number from -2 to 2, or null")] = None
    frequency_penalty: Annotated[Penalty | None, Meta(description="a number from -2 to 2, or null")] = None
    max_new_tokens: Annotated[NewTokens | None, Meta(description="an integer from 1, or null")] = None

    def sampling_defaults(self) -> dict[str, float]:
        """The fields of `SamplingParams` that the checkpoint gives a value; those that vLLM reads."""
        penalties = "repetition_penalty", "presence_penalty", "frequency_penalty"
        found = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p", *penalties)}
        found["max_tokens"] = self.max_new_tokens
        return {name: value for name, value in found.items() if value is not None}


SWITCHES: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "use_bidirectional_attention": (False,),
    "position_embedding_type": ("rope", "rotary"),
    "alibi": (False,),
    "parallel_attn": (False,),
    "use_parallel_residual": (False,),
    "attn_logit_softcapping": (0, 0.0),
    "final_logit_softcapping": (0, 0.0),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "logit_scale": (1, 1.0),
    "scale_emb": (1, 1.0),
    "scale_depth": (),
    "attention_chunk_size": (),
    "attn_temperature_tuning": (False, 0),
    "attention_sinks": (False, 0),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "num_experts": (0,),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0,),
    "moe_intermediate_size": (),
    "q_lora_rank": (),
    "kv_lora_rank": (),
    "v_head_dim": (),
    "per_layer_config": ({},),
}
"""Features of other decoders, by field, and the values that switch them off. Null switches all but `is_causal` off."""


def refuse_switches(stored: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """Raise `CheckpointError` if `stored` switches on a feature that the decoder lacks.

    `known`: fields that the family's own decoder implements.
    """
    for name, off_values in SWITCHES.items():
        if name not in stored or name in known:
            continue
        value = stored[name]
        is_null = value is None and name != "is_causal"  # transformers takes that null for false
        if not is_null and value not in off_values:
            allowed = f"{' or '.join(map(repr, off_values))} or left out" if off_values else "left out"
            raise CheckpointError(
                f"{name} is {short_repr(value)}, which minillm's decoder does not support; it must be {allowed}"
            )
