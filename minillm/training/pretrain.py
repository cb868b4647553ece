"""Pretraining: next-token loss, fp32 weights, bf16 products (`precision.py`), Muon for matrices, AdamW for the rest.

The learning rate warms up, stays stable and decays (WSD, Hu et al. 2024). The stable run has no fixed end: it continues
in sessions for as long as there is time. From any of its states, a branch decays the rate over its own budget
(`stages.py` says what follows before the export). The stable run is not changed and may continue.

A budget is given in tokens or in minutes. Progress is the larger of the two shares used so far. The decay follows
progress, so a branch on a busy machine also ends on time, with its rate at `Recipe.decay_to` of the peak. In each
session the first step of each row length is not counted in minutes: PyTorch may compile there, which can take longer
than a short stage.
"""

from __future__ import annotations

import json
import math
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from minillm.errors import TrainingError, first_line
from minillm.models.causal import CausalAttention
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.training.captured_step import CapturedStep
from minillm.training.compiling import backward
from minillm.training.data import Batches
from minillm.training.held_signals import held_signals
from minillm.training.optimizers import optimizers
from minillm.training.precision import forward_precision
from minillm.training.record import LOG, drop_cut_line
from minillm.training.state_files import STATE, read_state, write_errors, write_state

SAVE_S = 30.0
"""Seconds of training between saved states."""
GPU_CYCLES_PER_LOG = 10
"""A step on a GPU takes milliseconds, so the log has one cycle of row lengths in so many."""
OF_THIS_RUN = ("lr", "weight_decay", "capturable")
"""Settings of an optimiser that are this run's own, not those of a saved state."""

Loss = Callable[[Any, Tensor, Tensor], Tensor]
"""`loss(module, inputs, targets)`: the mean loss of a batch, inputs and targets `[rows, length]`."""


@dataclass(frozen=True)
class Recipe:
    """The budget and the hyperparameters of a run."""

    minutes: float = math.inf
    """Budget of training time over all sessions."""
    tokens: float = math.inf
    """Budget of tokens. The run ends when either budget is used up; without one, at an interrupt."""
    tokens_per_step: int = 12288
    tokens_at_once: int = 4096
    """Tokens of one forward and backward on a CPU (a micro-batch); gradients are accumulated over a step. A GPU
    computes a step at once."""
    lengths: tuple[int, ...] = (256,)
    """Tokens per row; the steps cycle through these lengths."""
    decay_from: float = 0.5
    """Share of the budget after which the learning rate falls linearly; 1: no decay."""
    decay_to: float = 0.0
    """What it falls to, as a share of the peak."""
    warmup_steps: int = 40
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    weight_decay: float = 0.0
    """Of the matrices: each step takes this share, times the rate, off them."""

    def without_budget(self) -> dict[str, Any]:
        """What does not depend on how long the run is, as JSON values."""
        values = asdict(self) | {"lengths": list(self.lengths)}
        return {key: value for key, value in values.items() if key not in ("minutes", "tokens")}


class Trainer:
    """One module in training: its optimisers, its progress, and its state on disk.

    All parameters of `model` are trained. What the loss needs beside it, such as a frozen target, belongs to the loss.
    `loss`: default next-token cross-entropy. `branch_of`: the state file of another run, from which this one starts
    with the same weights and optimisers, at the beginning of its own data. While `pause_file` exists (default: `pause`
    in the parent folder), the run waits between two steps; the wait does not count as training time. `capture`: on a
    GPU, run steps as CUDA graphs, unless the loss has an attribute `can_be_captured` that is False.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        recipe: Recipe,
        folder: Path,
        loss: Loss | None = None,
        branch_of: Path | None = None,
        capture: bool = True,
        pause_file: Path | None = None,
    ) -> None:
        self.model, self.batches, self.recipe, self.folder = model, batches, recipe, folder
        self.loss = loss or next_token_loss
        self.pause_file = pause_file or folder.parent / "pause"
        self.device = next(model.parameters()).device
        chosen = optimizers(model, recipe.muon_lr, recipe.adam_lr, recipe.weight_decay)
        self.optimizers = [optimizer for optimizer, _ in chosen]
        self.base_rates = [rate for _, rate in chosen]
        on_gpu = self.device.type == "cuda"
        capture = capture and getattr(self.loss, "can_be_captured", True)
        # With a strong reference to the trainer, its graphs would stay in GPU memory until a garbage collection.
        update = partial(Trainer._update, weakref.proxy(self))
        self._captured = CapturedStep(update, self.device, capture) if on_gpu else None
        self.step = 0
        """Steps so far, including those of the run that this one branched from."""
        self.tokens_seen = 0
        """Tokens so far, including those of the run that this one branched from."""
        self.tokens_before = 0
        """Tokens seen when this run branched off."""
        self.steps_before = 0
        """Steps when this run branched off: its own steps count its place in the data."""
        self.seconds = 0.0
        self._is_whole = True
        """Whether the state in memory may replace the saved one."""
        self._last_loss, self._last_logged = math.nan, 0
        folder.mkdir(parents=True, exist_ok=True)
        if self.state_file.exists():
            self._load(self.state_file)
        elif branch_of is not None:
            self._load(branch_of)
            self.tokens_before, self.steps_before, self.seconds = self.tokens_seen, self.step, 0.0
        if self._captured is not None:
            _keep_rates_on(self.optimizers, self.device)

    @property
    def state_file(self) -> Path:
        """The file that stores the run between sessions."""
        return self.folder / STATE

    @property
    def num_graphs(self) -> int:
        """Steps captured as CUDA graphs, one per shape of a batch; 0 on a CPU."""
        return 0 if self._captured is None else len(self._captured.captured)

    @property
    def progress(self) -> float:
        """Share of the budget used up, 0 to 1; 0 for a run without a budget."""
        tokens = self.tokens_seen - self.tokens_before
        return min(1.0, max(self.seconds / 60 / self.recipe.minutes, tokens / self.recipe.tokens))

    def learning_rate_factor(self) -> float:
        """Factor of the learning rate: linear warm-up, stable, then linear decay to `decay_to`."""
        warm = min(1.0, (self.step + 1) / self.recipe.warmup_steps)
        if self.recipe.decay_from >= 1.0:
            return warm
        left = min(1.0, (1.0 - self.progress) / (1.0 - self.recipe.decay_from))
        return warm * (left + (1.0 - left) * self.recipe.decay_to)

    def run(self) -> None:
        """Train until the budget is used up. An interrupt lets the present step end, saves the state and stops.

        A second interrupt does not wait. During an optimiser update it does not save either, because the state would be
        inconsistent; then the last saved state remains. So it does after a loss that is no number, for which this
        raises `TrainingError`: the weights that gave it are of no use. The step of every saved state is in the log.
        """
        drop_cut_line(self.folder)
        if self.progress < 1.0:
            self._next_batch()  # the first step reads it again: encoding its text first is no training time
        endless = math.isinf(self.recipe.tokens) and math.isinf(self.recipe.minutes)
        done = round(100 * self.progress, 1)
        bar = tqdm(total=None if endless else 100, initial=done, desc=self.folder.name, unit="%", mininterval=5)
        saved_at = self.seconds
        compiled: set[int] = set()
        with held_signals() as deliver:
            try:
                while self.progress < 1.0:
                    self._wait_while_paused(deliver)
                    length, began = self._next_length(), time.perf_counter()
                    loss = self.train_step()
                    if length in compiled:
                        self.seconds += time.perf_counter() - began
                    compiled.add(length)
                    if self._is_logged():
                        self._log()
                    postfix = {"loss": f"{loss:.3f}", "tokens": f"{self.tokens_seen / 1e6:.2f}M", "step": self.step}
                    bar.set_postfix(postfix, refresh=False)
                    bar.update(round(100 * self.progress, 1) - bar.n)
                    if self.seconds - saved_at >= SAVE_S:
                        self._log_and_save()
                        saved_at = self.seconds
                    deliver()
            finally:
                bar.close()
                if self._is_whole:
                    self._log_and_save()

    def _wait_while_paused(self, deliver: Callable[[], None]) -> None:
        """`deliver`: see `held_signals`."""
        if self.pause_file.exists():
            self._log_and_save()
        while self.pause_file.exists():
            deliver()
            time.sleep(0.5)

    def _log_and_save(self) -> None:
        if self.step > self._last_logged:
            self._log()
        self.save()

    def save(self) -> None:
        """Write the whole state, from which the next session continues. The old state stays until it is complete."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "tokens_before": self.tokens_before,
            "steps_before": self.steps_before,
            "seconds": self.seconds,
        }
        write_state(self.state_file, state)

    def load_newer(self) -> None:
        """Load the saved state again if it is of another step than this trainer."""
        if self.state_file.exists() and read_state(self.state_file, "cpu", mmap=True)["step"] != self.step:
            self._load(self.state_file)

    def _load(self, file: Path) -> None:
        state = read_state(file, self.device)
        try:
            self.model.load_state_dict(state["model"])
            if state["optimizers"] is not None:  # a checkpoint from `pack_run` has none
                for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                    group = optimizer.param_groups[0]
                    kept = {key: group[key] for key in OF_THIS_RUN if key in group}
                    optimizer.load_state_dict(saved)
                    optimizer.param_groups[0].update(kept)
        except (RuntimeError, ValueError, KeyError) as problem:
            raise TrainingError(
                f"{file} is the state of another model ({first_line(problem)}); name another folder, or "
                f"remove {file.parent} to start again"
            ) from None
        self.step, self.tokens_seen, self.seconds = state["step"], state["tokens_seen"], state["seconds"]
        self._last_logged = self.step
        self.tokens_before = state["tokens_before"]
        self.steps_before = state["steps_before"]

    def train_step(self) -> float:
        """Train on the next batch. Returns its mean loss."""
        inputs, targets = self._next_batch()
        self._set_rates(self.learning_rate_factor())
        if self._captured is None:
            rows = max(1, self.recipe.tokens_at_once // inputs.shape[1])
            value = self._gradients(inputs, targets, rows).item()
            self._is_whole = False
        else:
            self._is_whole = False
            value = self._captured(inputs, targets).item()
        if not math.isfinite(value):
            kept = "the last saved state remains" if self.state_file.exists() else "no state was saved"
            raise TrainingError(
                f"the loss became {value} at step {self.step + 1}; {kept}. To train with a lower rate, remove "
                f"{self.folder}"
            )
        if self._captured is None:
            self._step_optimizers()
        self.step += 1
        self.tokens_seen += inputs.numel()
        self._last_loss = value
        self._is_whole = True
        return value

    def _next_batch(self) -> tuple[Tensor, Tensor]:
        """The batch of the next step, the same however often it is asked for."""
        length = self._next_length()
        return self.batches.batch(self.step - self.steps_before, self.recipe.tokens_per_step // length, length)

    def _next_length(self) -> int:
        """Tokens per row of the next step."""
        return self.recipe.lengths[(self.step - self.steps_before) % len(self.recipe.lengths)]

    def _set_rates(self, factor: float) -> None:
        for optimizer, rate in zip(self.optimizers, self.base_rates, strict=True):
            group = optimizer.param_groups[0]
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor

    def _update(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """A whole step on a batch in the memory of the device. Returns its mean loss."""
        loss = self._gradients(inputs, targets, rows=len(inputs))
        self._step_optimizers()
        return loss

    def _step_optimizers(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def _gradients(self, inputs: Tensor, targets: Tensor, rows: int) -> Tensor:
        """Compute the gradients of the batch's mean loss, `rows` rows at a time. Returns that loss."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        device, total = self.device, torch.zeros((), device=self.device)
        for part, labels in zip(inputs.split(rows), targets.split(rows), strict=True):
            loss = self.loss(self.model, part.to(device), labels.to(device)) * (len(part) / len(inputs))
            total += loss.detach()
            backward(loss)
        return total

    def _is_logged(self) -> bool:
        """Whether the last step is: on a CPU every one, on a GPU one cycle of row lengths in ten, and the end."""
        cycle = (self.step - 1 - self.steps_before) // len(self.recipe.lengths)
        return self._captured is None or cycle % GPU_CYCLES_PER_LOG == 0 or self.progress >= 1.0

    def _log(self) -> None:
        loss = round(self._last_loss, 4)
        row = {"step": self.step, "tokens": self.tokens_seen, "seconds": round(self.seconds, 2), "loss": loss}
        file = self.folder / LOG
        with write_errors(file), file.open("a") as log:
            log.write(json.dumps(row) + "\n")
        self._last_logged = self.step


def _keep_rates_on(optimizers: list[torch.optim.Optimizer], device: torch.device) -> None:
    """Make the learning rates tensors of a GPU, which a captured step reads anew."""
    for optimizer in optimizers:
        group = optimizer.param_groups[0]
        group["lr"] = torch.tensor(float(group["lr"]), device=device)
        if "capturable" in group:
            group["capturable"] = True


def dense_logits(model: Decoder, inputs: Tensor) -> Tensor:
    """Logits of every position of `inputs` (`[rows, length]`) → `[rows · length, vocab_size]`."""
    rows, length = inputs.shape
    positions = torch.arange(length, device=inputs.device).repeat(rows)
    return model.logits(model(inputs.flatten(), positions, CausalAttention(length)))


def next_token_loss(model: Decoder, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats."""
    with forward_precision(inputs.device.type):
        logits = dense_logits(model, inputs)
    return F.cross_entropy(logits.float(), targets.flatten())


def initialise(model: Decoder) -> None:
    """Normal weights with standard deviation 0.02; zeros where a layer writes to the residual stream (identity)."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    for layer in model.layers:
        nn.init.zeros_(layer.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)


def new_model(config: ModelConfig, seed: int = 0) -> Decoder:
    """A newly initialised model, the same for the same seed."""
    torch.manual_seed(seed)
    model = Decoder(config)
    initialise(model)
    return model
