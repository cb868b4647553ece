"""Prefill speed: prompt tokens per second until the first new token, by the length of the prompt.

Held-out prompts are concatenated to each length; batch 1, nothing cached. Peers have their fastest setting at each
length, because attention takes a larger share of a longer prompt. Prefill is compute-bound and decode is
memory-bound, so the results differ from those of `decode`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from minillm.bench.completion import Completer
from minillm.bench.harness import Counted, Row, System, compare, result
from minillm.bench.shapes import SHAPES, model_or_shape
from minillm.bench.systems import (
    Workload,
    choose,
    exported,
    left_out,
    load,
    peak_memory,
    prompt_ids,
    with_best_settings,
)
from minillm.bench.tables import speed_table
from minillm.errors import ConfigError
from minillm.models.hub import resolve
from minillm.models.loading import load_config

if TYPE_CHECKING:
    from rich.table import Table

LENGTHS, LARGE_LENGTHS = (128, 512, 1000), (512, 1000, 4000)
ROUNDS = 15
FP32, BF16 = "transformers fp32", "transformers bf16"
BUNDLED: dict[str, tuple[str, ...]] = {
    FP32: (),
    BF16: (FP32,),
    "llama.cpp f32": (FP32,),
    "llama.cpp bf16": (BF16,),
    "llama.cpp Q8_0": (FP32,),
    "minillm fp32": (FP32, "llama.cpp f32"),
    "minillm bf16": (BF16, "llama.cpp bf16", FP32),
    "minillm int8": (FP32, "llama.cpp Q8_0"),
    "minillm w8a8": (FP32, "llama.cpp Q8_0"),
}
"""System → its baselines, one row for each length and baseline."""
LARGE: dict[str, tuple[str, ...]] = {
    BF16: (),
    "llama.cpp bf16": (BF16,),
    "llama.cpp Q8_0": (BF16,),
    "minillm bf16": (BF16, "llama.cpp bf16"),
    "minillm fp32": (BF16, "llama.cpp bf16"),
    "minillm int8": (BF16, "llama.cpp Q8_0"),
    "minillm w8a8": (BF16, "llama.cpp Q8_0"),
}


def run(
    model: str | None = None,
    shape: str | None = None,
    systems: Sequence[str] | None = None,
    rounds: int = ROUNDS,
    lengths: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Run every system in turn, `rounds` times for each length. Returns the result as JSON values.

    `model`, `shape`: see `model_or_shape`. Lengths that the model has no room for are left out. Raises `ConfigError`
    for an unknown system or shape, and for a model that has no room for any length.
    """
    import torch

    known = LARGE if shape in SHAPES else BUNDLED
    wanted = lengths or (LARGE_LENGTHS if shape in SHAPES else LENGTHS)
    names = choose(list(known), systems)
    model = model_or_shape(model, shape)
    missing = left_out(names, None)
    names = [name for name in names if name not in missing]
    room = load_config(resolve(model)).max_position_embeddings - 1  # for the new token
    lengths = [length for length in wanted if length <= room]
    if not lengths:
        raise ConfigError(f"{model} has room for prompts of {room} tokens; the shortest here has {min(wanted)}")
    no_room = f"the model has room for prompts of {room} tokens"
    missing |= {f"prompts of {length} tokens": no_room for length in wanted if length > room}
    prompts = [joined_prompt(model, length) for length in lengths]
    workload = Workload(model, None, prompts, new_tokens=1)
    rows: list[Row] = []
    with exported(workload, names) as files:
        loaded: dict[tuple[str, str | None], Completer] = {}
        for prompt in prompts:
            best = with_best_settings(replace(files, prompts=[prompt]), names)
            ready = replace(best, prompts=prompts)  # caches have room for the longest, and serve every length
            systems_to_compare = []
            for name in names:
                key = name, ready.settings.get(name)
                if key not in loaded:
                    loaded[key] = load(name, ready)
                baselines = tuple(base for base in known[name] if base in names)
                tried = ready.tried.get(name, {})
                systems_to_compare.append(_system(name, loaded[key], prompt, baselines, tried))
            last = prompt is prompts[-1]
            rows += compare(
                systems_to_compare, rounds, partial(peak_memory, workload=ready) if last else lambda name: None
            )
    config = {
        "model": shape or model,
        "batch": 1,
        "prompt_tokens": lengths,
        "counted": "prompt tokens until the first new token",
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "left_out": missing,
    }
    return result("prefill", config, rows)


def table(outcome: dict[str, Any]) -> Table:
    """The rows for the terminal, with the prompt length."""
    return speed_table(outcome, {"prompt_tokens": "prompt"}, unit="prompt token")


def joined_prompt(model: str, length: int) -> list[int]:
    """Token ids of concatenated held-out prompts, cut off after `length` tokens."""
    ids: list[int] = []
    count = 1
    while len(ids) < length:
        ids = [token for prompt in prompt_ids(model, count, 1, length) for token in prompt]
        count += 1
    return ids[:length]


def _system(
    name: str, completer: Completer, prompt: list[int], baselines: tuple[str, ...], tried: Mapping[str, float]
) -> System:
    seconds = [0.0]

    def run_once() -> list[list[int]]:
        found = completer.complete(prompt, 1)
        seconds[0] = found.prefill_s
        return [found.token_ids]

    return System(
        name,
        run_once,
        baselines or None,
        lambda: {
            **completer.details,
            **({"tried_ms_per_prompt": tried} if tried else {}),
            "prompt_tokens": len(prompt),
        },
        lambda: Counted(seconds[0], len(prompt)),
    )
