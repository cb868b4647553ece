"""A compact checkpoint of a stable run, from which another machine can continue: 8-bit weights, tokenizer, log.

The stages after `target` and the corpus are not in it. Optimiser momenta are not stored and build up again. Weights are
rounded to multiples of 1/127 of the largest in their row.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minillm.errors import TrainingError
from minillm.training.pair import SHARES_FILE
from minillm.training.record import LOG, RECIPES
from minillm.training.state_files import STATE, copy_whole, read_state, replacing, write_state

WEIGHTS, TOKENIZER, LOGS = "stable.safetensors", "tokenizer.json", (LOG, "hardware.json", RECIPES)
COUNTERS = ("step", "tokens_seen", "tokens_before", "seconds")
LARGEST_CODE = 127


def pack_run(runs: Path, folder: Path) -> None:
    """Write the stable run of `runs` and its tokenizer into `folder`.

    Raises `TrainingError` if there is none, or it lacks a file; then nothing is written.
    """
    state_file = runs / "target" / STATE
    if not state_file.exists():
        raise TrainingError(f"{state_file} is missing; run the stage `target` first")
    tokenizer, logs = runs / "corpus" / TOKENIZER, [runs / "target" / log for log in LOGS]
    for file in (tokenizer, *logs):
        if not file.exists():
            raise TrainingError(
                f"{file} is missing; run the stages `corpus` and `target` with more --target-minutes, then pack"
            )
    state = read_state(state_file, "cpu", mmap=True)
    tensors: dict[str, Tensor] = {}
    for name, weight in state["model"].items():
        if weight.ndim == 2 and not name.startswith("lm_head"):  # tied to the embedding
            scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / LARGEST_CODE
            tensors[name] = (weight / scale).round().to(torch.int8)
            tensors[f"{name}.scale"] = scale
        elif weight.ndim == 1:
            tensors[name] = weight.clone()
    folder.mkdir(parents=True, exist_ok=True)
    for file in (tokenizer, *logs):
        copy_whole(file, folder / file.name)
    if (runs / SHARES_FILE).exists():
        copy_whole(runs / SHARES_FILE, folder / SHARES_FILE)
    else:
        (folder / SHARES_FILE).unlink(missing_ok=True)
    with replacing(folder / WEIGHTS) as fresh:  # last: a folder with weights is complete
        save_file(tensors, fresh, {key: json.dumps(state[key]) for key in COUNTERS})


def unpack_run(folder: Path, runs: Path) -> None:
    """Unpack a checkpoint of `pack_run` into `runs`, where `minillm train` continues from it.

    Raises `TrainingError` if there is no whole checkpoint, or if `runs` already has a stable run, which would be lost,
    or a corpus in tokens of another tokenizer; then nothing is written.
    """
    for name in (WEIGHTS, TOKENIZER, *LOGS):
        if not (folder / name).exists():
            raise TrainingError(f"--begin-with {folder} has no {name}; name a folder written by `minillm train --pack`")
    target = runs / "target"
    if (target / STATE).exists():
        raise TrainingError(f"{target} has a run already; name another folder with --folder")
    own = runs / "corpus" / TOKENIZER
    if own.exists() and own.read_bytes() != (folder / TOKENIZER).read_bytes():
        raise TrainingError(
            f"{own.parent} has a corpus in tokens of another tokenizer than {folder}; name another folder with --folder"
        )
    state = _packed_state(folder / WEIGHTS)
    target.mkdir(parents=True, exist_ok=True)
    own.parent.mkdir(exist_ok=True)
    copy_whole(folder / TOKENIZER, own)
    for log in LOGS:
        copy_whole(folder / log, target / log)
    if (folder / SHARES_FILE).exists():
        copy_whole(folder / SHARES_FILE, runs / SHARES_FILE)
    write_state(target / STATE, state)  # last: a folder with a state is complete


def _packed_state(file: Path) -> dict[str, Any]:
    """The state that `pack_run` wrote. Raises `TrainingError` for a file that is cut off or has something else."""
    model: dict[str, Tensor] = {}
    try:
        with safe_open(file, "pt") as packed:
            for name in packed.keys():  # noqa: SIM118 - no dict
                if not name.endswith(".scale"):
                    tensor = packed.get_tensor(name)
                    model[name] = tensor if tensor.ndim == 1 else tensor.float() * packed.get_tensor(f"{name}.scale")
            counters = {key: json.loads((packed.metadata() or {})[key]) for key in COUNTERS}
        model["lm_head.weight"] = model["embed_tokens.weight"]
    except (SafetensorError, OSError, KeyError, ValueError) as problem:
        reason = " ".join(str(problem).split())[:200]
        raise TrainingError(f"{file} is cut off or no checkpoint of `minillm train --pack` ({reason})") from None
    return {"model": model, "optimizers": None, "steps_before": 0, **counters}
