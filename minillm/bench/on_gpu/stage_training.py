"""Stage 9 of the GPU benchmark: training the bundled target, with its steps as CUDA graphs and without.

Both runs start from the same weights and see the same random tokens, new ones in every step, so the loss stays near
that of a guess: log 4096 = 8.3 nats. A captured step that read an old batch again, or lost an update, would soon have
another loss.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch
from torch import Tensor

from minillm.bench.on_gpu.findings import Report, Target
from minillm.bench.on_gpu.stage_setup import StageSetup
from minillm.training.compiling import Compiled
from minillm.training.pretrain import Recipe, Trainer, new_model, next_token_loss
from minillm.training.recipes import DRAFT, TARGET

SAME = Target(at_most=0.02)
CAPTURED, PLAIN = "captured", "launched one by one"
WARM_UP = 2
"""Steps before the timed ones: the first one compiles, the second one is captured."""


class RandomTokens:
    """Batches of random tokens, the same for the same step."""

    def batch(self, step: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and next tokens, each `[rows, length]`, int64."""
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(TARGET.vocab_size, (rows, length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def training(setup: StageSetup, report: Report) -> None:
    """Train in both ways, reporting the tokens per second of each, and compare the losses of all steps."""
    with tempfile.TemporaryDirectory() as folder:
        captured, plain = (
            report.part(_rate(name), _one_way, setup, report, Path(folder, name), name) for name in (CAPTURED, PLAIN)
        )
    if captured is not None and plain is not None:
        apart = max(abs(a - b) for a, b in zip(captured, plain, strict=True))
        report.counted("losses of captured steps, largest difference", apart, "nats", SAME, steps=len(plain))


def _one_way(setup: StageSetup, report: Report, folder: Path, name: str) -> list[float]:
    """Train in one way and report its tokens per second. Returns the loss of every step."""
    config, steps = setup.size_for((TARGET, 50), (DRAFT, 3))
    recipe = setup.size_for(Recipe(), Recipe(tokens_per_step=64, lengths=(32,)))
    model = new_model(config).to(setup.device)
    losses, rates = [], []
    with redirect_stdout(StringIO()) as notices:  # why steps are not compiled or not captured
        loss = next_token_loss if setup.is_rehearsal else Compiled(next_token_loss)
        trainer = Trainer(model, RandomTokens(), recipe, folder, loss, capture=name == CAPTURED)
        for _ in range(steps):
            began = time.perf_counter()
            losses.append(trainer.train_step())
            rates.append(recipe.tokens_per_step / (time.perf_counter() - began))
    if notices.getvalue():
        report.note(f"{_rate(name)}: notices", notices.getvalue().strip())
    if name == CAPTURED and not setup.is_rehearsal:
        report.counted("training steps captured as CUDA graphs", trainer.num_graphs, "of 1 shape", Target(at_least=1))
    report.measured(_rate(name), rates[WARM_UP:], "tokens/s", tokens_per_step=recipe.tokens_per_step)
    return losses


def _rate(name: str) -> str:
    """Return the name of the metric of one way."""
    return f"training the target, {name}"
