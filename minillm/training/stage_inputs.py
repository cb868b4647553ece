"""What a stage was started from, recorded in `inputs.json` of its folder: its input models, and its budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minillm.errors import TrainingError
from minillm.training.pretrain import Recipe
from minillm.training.state_files import read_json, write_json

FILE, BUDGET = "inputs.json", "budget"


def read_inputs(folder: Path) -> dict[str, Any]:
    """What was recorded in `folder`; empty if nothing was. Raises `TrainingError` for a broken file."""
    file = folder / FILE
    if not file.exists():
        return {}
    found = read_json(file)
    if not isinstance(found, dict):
        raise TrainingError(f"{file} is no JSON object; restore it, or remove {folder} to start again")
    return found


def check_inputs(folder: Path, inputs: Mapping[str, int | str], fix: str = "remove it to start again") -> None:
    """Record what a stage started from, unless that is recorded. Raises `TrainingError`, which ends with `fix`, if the
    stage was started from something else."""
    recorded = read_inputs(folder)
    started = {key: recorded[key] for key in inputs if recorded.get(key, inputs[key]) != inputs[key]}
    if started:
        now = {key: inputs[key] for key in started}
        raise TrainingError(f"{folder} was started with {started}, now there is {now}; {fix}")
    if not recorded.keys() >= inputs.keys():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILE, {**inputs, **recorded}, indent=None)


def check_budget(folder: Path, recipe: Recipe) -> None:
    """Record the budget of a run. Raises `TrainingError` if the run was started with another one.

    The learning rate follows the share of the budget that is used, so with another budget it would jump. A recipe
    without decay may get another budget.
    """
    if recipe.decay_from >= 1:
        return
    recorded, budget = read_inputs(folder), _budget(recipe)
    if BUDGET not in recorded:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILE, {**recorded, BUDGET: budget}, indent=None)
    elif recorded[BUDGET] != budget:
        raise TrainingError(
            f"{folder} was started with a budget of {_words(recorded[BUDGET])}, now it is {_words(budget)}, and the "
            "learning rate would jump; give the same budget, or remove the folder to start again"
        )


def _budget(recipe: Recipe) -> dict[str, float | None]:
    return {
        name: None if math.isinf(value) else value
        for name, value in (("minutes", recipe.minutes), ("tokens", recipe.tokens))
    }


def _words(budget: Mapping[str, float | None]) -> str:
    return " and ".join(f"{value:,g} {name}" for name, value in budget.items() if value is not None) or "no end"
