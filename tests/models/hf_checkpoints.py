"""Small random checkpoints of every family, written by transformers, with its logits as the truth."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}


def rope_options(kind: str, theta: float = 10_000.0, **parameters: float) -> dict[str, Any]:
    """RoPE as the installed transformers takes it: in one dictionary since version 5, before that in two places."""
    if int(version("transformers").split(".")[0]) >= 5:
        return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **parameters}}
    return {"rope_theta": theta, "rope_scaling": None if kind == "default" else {"rope_type": kind, **parameters}}


def respelled(stored: dict[str, Any]) -> dict[str, Any]:
    """The contents of a `config.json` as transformers 5 writes them, if an older one did, and the other way round."""
    changed = dict(stored)
    if "rope_parameters" in stored:
        rope = dict(changed.pop("rope_parameters"))
        changed["rope_theta"], kind = rope.pop("rope_theta"), rope.pop("rope_type")
        changed["torch_dtype"] = changed.pop("dtype")
        if kind != "default":
            changed["rope_scaling"] = {"type": kind, **rope}
    else:
        scaling = changed.pop("rope_scaling", None) or {"rope_type": "default"}
        changed["rope_parameters"] = {**scaling, "rope_theta": changed.pop("rope_theta")}
    return changed


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one KV head per query head": ("Llama", {"num_key_value_heads": 4}),
    "llama, wide heads, other eps": ("Llama", {"head_dim": 20, "rms_norm_eps": 1e-2}),
    "llama, another rope base": ("Llama", rope_options("default", 500_000.0)),
    "llama, linear rope": ("Llama", rope_options("linear", factor=3.0)),
    "llama, dynamic rope": ("Llama", rope_options("dynamic", factor=3.0)),
    "llama, llama3 rope": ("Llama", rope_options("llama3", 500.0, **LLAMA3)),
    "llama, yarn rope": ("Llama", rope_options("yarn", **YARN)),
    "llama, yarn rope with its own numbers": (
        "Llama",
        rope_options("yarn", **YARN, attention_factor=1.3, beta_fast=8.0, beta_slow=2.0, truncate=False),
    ),
    "llama, yarn rope with mscale": ("Llama", rope_options("yarn", **YARN, mscale=1.4, mscale_all_dim=0.7)),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, window": ("Mistral", {"sliding_window": 5}),
    "mistral, window in listed layers": (
        "Ministral",
        {
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, window in the upper layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen2, window in listed layers": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2, window switched off": ("Qwen2", {"use_sliding_window": False, "sliding_window": 4}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3, biases and window": (
        "Qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 2,
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "smollm3, listed layers and window": (
        "SmolLM3",
        {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 5},
    ),
    "smollm3, window in listed layers although it is switched off": (
        "SmolLM3",
        {
            "use_sliding_window": False,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
}


@dataclass(frozen=True)
class HfCheckpoint:
    """A folder, 24 token ids, and the logits (`[24, vocab_size]`) that transformers computes for them."""

    folder: Path
    token_ids: Tensor
    logits: Tensor


def make(case: str, folder: Path, max_shard_size: str = "1GB") -> HfCheckpoint:
    """Write the checkpoint of `case`. Every number is random, norms and biases too, so that none can be mixed up."""
    import transformers

    family, changes = CASES[case]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
    torch.manual_seed(sum(map(ord, case)))
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    token_ids = torch.randint(0, config.vocab_size, (24,))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25 + (parameter.ndim == 1))
        logits = model(token_ids[None]).logits[0]
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return HfCheckpoint(folder, token_ids, logits)
