"""Decode speed of one greedy request at a time, in minillm, transformers and llama.cpp.

All systems get the same held-out prompts, threads and number of new tokens. *Decode time* runs from the first new
tokens of a completion to its last, and is divided by the number of tokens after the first ones. Prefill is excluded for
all systems; `end_to_end_tokens_per_s` in the result includes it. (minillm's draft model prefills after the first token,
so minillm's decode time with a draft includes that. In assisted generation it is part of the excluded prefill.)

Systems in full precision must give equal tokens. For a quantised one, `same tokens` is the share of tokens before the
first difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minillm.bench.harness import compare, result
from minillm.bench.shapes import SHAPES, model_or_shape
from minillm.bench.systems import (
    Workload,
    choose,
    decode_system,
    draft_for,
    left_out,
    peak_memory,
    prepared,
    prompt_ids,
    room_for_prompt,
)
from minillm.errors import ConfigError

FP32, COMPILED, ASSISTED = "transformers fp32", "transformers fp32 compiled", "transformers fp32 assisted"
BUNDLED: dict[str, tuple[str, ...]] = {
    FP32: (),
    COMPILED: (FP32,),
    ASSISTED: (FP32,),
    "llama.cpp f32": (FP32,),
    "llama.cpp Q8_0": (FP32, "llama.cpp f32"),
    "minillm eager fp32": (FP32,),
    "minillm fp32": (FP32, COMPILED, "minillm eager fp32", "llama.cpp f32"),
    "minillm fp32 + draft": ("minillm fp32", FP32, ASSISTED),
    "minillm fp32 + suffix": ("minillm fp32", FP32, ASSISTED),
    "minillm int8": (FP32, COMPILED, "minillm fp32", "llama.cpp Q8_0"),
    "minillm int8 + draft": ("minillm int8", FP32, ASSISTED),
    "minillm int8 + ngram": ("minillm int8", FP32, ASSISTED),
    "minillm int8 + suffix": ("minillm int8", FP32, ASSISTED),
    "minillm w8a8": (FP32, COMPILED, "minillm fp32", "llama.cpp Q8_0"),
    "minillm w8a8 + draft": ("minillm w8a8", FP32, ASSISTED),
    "minillm w8a8 + suffix": ("minillm w8a8", FP32, ASSISTED),
    "minillm int4": (FP32, "minillm int8"),
}
"""System → its baselines, one row each."""
BF16 = "transformers bf16"
LARGE: dict[str, tuple[str, ...]] = {
    BF16: (),
    "llama.cpp bf16": (BF16,),
    "llama.cpp Q8_0": (BF16, "llama.cpp bf16"),
    "minillm bf16": (BF16, "llama.cpp bf16"),
    "minillm fp32": (BF16, "llama.cpp bf16"),
    "minillm int8": (BF16, "minillm fp32", "llama.cpp Q8_0"),
    "minillm w8a8": (BF16, "minillm fp32", "llama.cpp Q8_0"),
    "minillm int4": (BF16, "minillm int8"),
}
"""The same for a shape that is too large for fp32 weights, without a draft. transformers is not compiled here, because
torch.compile takes minutes at this size. `minillm fp32` computes in fp32, but the weights come in bf16."""


@dataclass(frozen=True)
class Size:
    """Default sizes of a run."""

    prompts: int
    longest_prompt: int
    new_tokens: int


LARGEST = "0.4b"
SIZES = {None: Size(8, 256, 128), "0.4b": Size(4, 128, 32)}
SHORTEST_PROMPT = 65
ROUNDS = 6


def run(
    model: str | None = None,
    draft: str | None = None,
    shape: str | None = None,
    systems: Sequence[str] | None = None,
    rounds: int = ROUNDS,
    prompts: int | None = None,
    new_tokens: int | None = None,
    drafts: int = 4,
) -> dict[str, Any]:
    """Run every system in turn, `rounds` times. Returns the result as JSON values.

    `shape` runs a random checkpoint of that shape (see `shapes`) in place of a model, without drafts. `systems`
    restricts the run to these systems. Raises `ConfigError` for an unknown system or shape, for a shape with a model
    or a draft, and for fewer than two new tokens or more than the model has room for.
    """
    if shape is not None and draft is not None:
        raise ConfigError(f"--draft {draft} is not used with --shape {shape}: leave one of them out")
    if new_tokens is not None and new_tokens < 2:
        raise ConfigError(f"--new-tokens {new_tokens} must be at least 2: the time after the first token is measured")
    known, size = (LARGE, SIZES.get(shape, SIZES[LARGEST])) if shape in SHAPES else (BUNDLED, SIZES[None])
    names = choose(list(known), systems)
    model = model_or_shape(model, shape)
    draft = draft_for(model, draft)
    missing = left_out(names, draft)
    names = [name for name in names if name not in missing]
    new_tokens = new_tokens or size.new_tokens
    longest = min(size.longest_prompt, room_for_prompt(model, new_tokens, SHORTEST_PROMPT))
    workload = Workload(
        model=model,
        draft=draft,
        prompts=prompt_ids(model, prompts or size.prompts, SHORTEST_PROMPT, longest),
        new_tokens=new_tokens,
        num_drafts=drafts,
    )
    with prepared(workload, names) as ready:
        systems_to_compare = [
            decode_system(name, ready, tuple(base for base in known[name] if base in names) or None) for name in names
        ]
        rows = compare(systems_to_compare, rounds, lambda name: peak_memory(name, ready))
    return result("decode", {**_config(workload, shape, rounds), "left_out": missing}, rows)


def _config(workload: Workload, shape: str | None, rounds: int) -> dict[str, Any]:
    import torch

    return {
        "model": shape or workload.model,
        "draft": workload.draft,
        "batch": 1,
        "new_tokens": workload.new_tokens,
        "prompt_tokens": [len(ids) for ids in workload.prompts],
        "num_speculative_tokens": workload.num_drafts,
        "sampling": "greedy",
        "counted": "decoding: the tokens after the first ones, prefill left out for all",
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "rounds": rounds,
    }
