"""A compact checkpoint of a stable run, from which another machine can continue: 8-bit weights, tokenizer, log.

Optimiser momenta are not stored and build up again. Weights are rounded to multiples of 1/127 of the largest in their
row.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from minillm.errors import TrainingError

WEIGHTS, TOKENIZER, LOGS = "stable.safetensors", "tokenizer.json", ("log.jsonl", "hardware.json")
COUNTERS = ("step", "tokens_seen", "tokens_before", "seconds")
LARGEST_CODE = 127


def pack_run(runs: Path, folder: Path) -> None:
    """Write the stable run of `runs` and its tokenizer into `folder`. Raises `TrainingError` if there is none."""
    state_file = runs / "target" / "state.pt"
    if not state_file.exists():
        raise TrainingError(f"{state_file} is missing; run the stage `target` first")
    state = torch.load(state_file, weights_only=True, mmap=True)
    tensors: dict[str, Tensor] = {}
    for name, weight in state["model"].items():
        if weight.ndim == 2 and not name.startswith("lm_head"):  # tied to the embedding
            scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / LARGEST_CODE
            tensors[name] = (weight / scale).round().to(torch.int8)
            tensors[f"{name}.scale"] = scale
        elif weight.ndim == 1:
            tensors[name] = weight.clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, {key: json.dumps(state[key]) for key in COUNTERS})
    shutil.copy(runs / "corpus" / TOKENIZER, folder / TOKENIZER)
    for log in LOGS:
        shutil.copy(runs / "target" / log, folder / log)


def unpack_run(folder: Path, runs: Path) -> None:
    """Unpack a checkpoint of `pack_run` into `runs`, where `minillm train` continues from it.

    Raises `TrainingError` if there is no checkpoint, or if `runs` already has a stable run, which would be lost.
    """
    if not (folder / WEIGHTS).exists():
        raise TrainingError(f"there is no {WEIGHTS} in {folder}")
    target = runs / "target"
    if (target / "state.pt").exists():
        raise TrainingError(f"{target} has a run already; name another folder with --folder")
    target.mkdir(parents=True, exist_ok=True)
    (runs / "corpus").mkdir(exist_ok=True)
    shutil.copy(folder / TOKENIZER, runs / "corpus" / TOKENIZER)
    for log in LOGS:
        shutil.copy(folder / log, target / log)
    model: dict[str, Tensor] = {}
    with safe_open(folder / WEIGHTS, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - no dict
            if not name.endswith(".scale"):
                tensor = file.get_tensor(name)
                model[name] = tensor if tensor.ndim == 1 else tensor.float() * file.get_tensor(f"{name}.scale")
        counters = {key: json.loads(file.metadata()[key]) for key in COUNTERS}
    model["lm_head.weight"] = model["embed_tokens.weight"]
    torch.save({"model": model, "optimizers": None, **counters}, target / "state.pt")
