"""The record of a training run, read from its files on disk. The model card states only these facts."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from minillm.errors import TrainingError
from minillm.training.precision import forward_dtype
from minillm.training.state_files import STATE, read_json, read_state, write_json

LOG, RECIPES = "log.jsonl", "recipes.json"


@dataclass(frozen=True)
class Hardware:
    """The hardware and versions of a run."""

    cpu: str
    cores: int
    threads: int
    torch: str
    python: str
    gpu: str | None = None
    """The GPU that trained; None if the CPU did."""
    products: str = "bfloat16"
    """The dtype of matrix products."""

    @classmethod
    def here(cls, device: str | torch.device) -> Hardware:
        """This machine, with PyTorch's current number of threads. `device`: where the model is trained."""
        device = torch.device(device)
        return cls(
            _cpu_name(),
            os.cpu_count() or 1,
            torch.get_num_threads(),
            torch.__version__,
            platform.python_version(),
            torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            str(forward_dtype(device.type)).removeprefix("torch."),
        )

    def append_to(self, folder: Path) -> None:
        """Append it to `folder/hardware.json`, unless the previous session ran on the same hardware."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "hardware.json"
        noted = read_json(file) if file.exists() else []
        if noted[-1:] != [asdict(self)]:
            write_json(file, [*noted, asdict(self)])

    @classmethod
    def load(cls, folder: Path) -> tuple[Hardware, ...]:
        """Read the entries that `append_to` wrote, in order. Raises `TrainingError` if there are none, or others."""
        file = folder / "hardware.json"
        if not file.exists():
            raise TrainingError(
                f"{file} is missing; run the stage that writes it, or Hardware.here(device).append_to(folder)"
            )
        try:
            return tuple(cls(**values) for values in read_json(file))
        except TypeError as problem:
            raise TrainingError(f"{file} does not list hardware ({problem}); restore it") from None


@dataclass(frozen=True)
class RecipeFrom:
    """The recipe of a run from some token on, without its budget: a stable run may get another one."""

    tokens: int
    recipe: dict[str, Any]

    def append_to(self, folder: Path) -> None:
        """Append it to `folder/recipes.json`, unless the recipe is the one before."""
        folder.mkdir(parents=True, exist_ok=True)
        noted = read_json(folder / RECIPES) if (folder / RECIPES).exists() else []
        if not noted or noted[-1]["recipe"] != self.recipe:
            write_json(folder / RECIPES, [*noted, asdict(self)])

    @classmethod
    def load(cls, folder: Path) -> tuple[RecipeFrom, ...]:
        """Read what `append_to` wrote. Raises `TrainingError` if it wrote nothing, or there is something else."""
        file = folder / RECIPES
        if not file.exists():
            raise TrainingError(f"{file} is missing; restore it, or remove {folder} to start again")
        try:
            return tuple(cls(**values) for values in read_json(file))
        except TypeError as problem:
            raise TrainingError(f"{file} does not list recipes ({problem}); restore it") from None


@dataclass(frozen=True)
class LogRow:
    """One step of a run as `Trainer` logs it."""

    step: int
    tokens: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class RunRecord:
    """One run of `Trainer`: its log and where it ran."""

    log: tuple[LogRow, ...]
    hardware: tuple[Hardware, ...]
    """The hardware of its sessions; consecutive sessions on the same hardware give one entry."""
    recipes: tuple[RecipeFrom, ...] = ()
    """Its recipe, and each later one that differed."""

    @classmethod
    def load(cls, folder: Path) -> RunRecord:
        """Read `folder`. Raises `TrainingError` if there was no run, or its log is damaged.

        Steps that were lost in a crash are left out: those behind the saved state, and of those that were repeated
        later, the earlier entries. So is a last line that was cut off.
        """
        file = folder / LOG
        if not file.exists():
            raise TrainingError(f"{folder} has no log.jsonl, so nothing was trained there; run that stage first")
        rows = list(_log_rows(file))
        if not rows:
            raise TrainingError(f"{file} has no step, so nothing was trained there; run that stage first")
        last = read_state(folder / STATE, "cpu", mmap=True)["step"] if (folder / STATE).exists() else rows[-1].step
        by_step = {row.step: row for row in rows if row.step <= min(last, rows[-1].step)}
        return cls(tuple(by_step[step] for step in sorted(by_step)), Hardware.load(folder), RecipeFrom.load(folder))

    @property
    def tokens(self) -> int:
        """Tokens trained on, repetitions included."""
        return self.log[-1].tokens

    @property
    def earlier_tokens(self) -> int:
        """Tokens that another model had seen whose weights this run began with: what the log has as step 0."""
        return self.log[0].tokens if self.log[0].step == 0 else 0

    @property
    def minutes(self) -> float:
        """Minutes spent in training steps, over all sessions, as `Trainer` counts them."""
        return self.log[-1].seconds / 60

    def recipe_changes(self) -> list[dict[str, Any]]:
        """What changed in the recipe while the run went on: the new values, and how many tokens it had seen by then."""
        found = []
        for before, now in zip(self.recipes, self.recipes[1:], strict=False):
            changed = {key: value for key, value in now.recipe.items() if value != before.recipe.get(key)}
            found.append({"after_tokens": now.tokens, **changed})
        return found

    def summary(self) -> dict[str, object]:
        """The record as JSON values for `training.json`."""
        return {
            "steps": self.log[-1].step,
            "tokens": self.tokens,
            "earlier_tokens": self.earlier_tokens,
            "minutes": round(self.minutes, 1),
            "hardware": [asdict(hardware) for hardware in self.hardware],
            "recipe_changes": self.recipe_changes(),
        }


def drop_cut_line(folder: Path) -> None:
    """Take a last line that was cut off in a crash off the log of `folder`, so that more lines can follow."""
    file = folder / LOG
    if file.exists():
        lines = file.read_bytes()
        whole = lines.rfind(b"\n") + 1
        if whole < len(lines):
            os.truncate(file, whole)


def _log_rows(file: Path) -> Iterator[LogRow]:
    """The lines of a log, without a last one that is incomplete."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            yield LogRow(**json.loads(line))
        except (ValueError, TypeError):
            if number == len(lines) and not line.endswith("\n"):
                return
            raise TrainingError(f"line {number} of {file} is no step of a run: {line.strip()[:80]!r}") from None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
