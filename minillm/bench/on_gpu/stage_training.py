"""Stage 9 of the GPU benchmark: training the bundled target, with its steps as CUDA graphs and without.

Both runs start from the same weights and see the same random tokens, new ones in every step, so the loss stays near
that of a guess: log 4096 = 8.3 nats. A captured step that read an old batch again, or lost an update, would soon have
another loss.
"""

from __future__ import annotations

import tempfile
import time
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
    """Train in both ways, compare the losses of all steps, and report the tokens per second."""
    config, steps = setup.size_for((TARGET, 50), (DRAFT, 3))
    recipe = setup.size_for(Recipe(), Recipe(tokens_per_step=64, lengths=(32,)))
    loss = Compiled(next_token_loss) if not setup.is_rehearsal else next_token_loss
    losses: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (CAPTURED, PLAIN):
            model = new_model(config).to(setup.device)
            trainer = Trainer(model, RandomTokens(), recipe, Path(folder, name), loss, capture=name == CAPTURED)
            losses[name], seconds[name] = [], []
            for _ in range(steps):
                began = time.perf_counter()
                losses[name].append(trainer.train_step())
                seconds[name].append(time.perf_counter() - began)
    apart = max(abs(a - b) for a, b in zip(losses[CAPTURED], losses[PLAIN], strict=True))
    report.counted("losses of captured steps, largest difference", apart, "nats", SAME, steps=steps)
    for name, times in seconds.items():
        rates = sorted(recipe.tokens_per_step / s for s in times[WARM_UP:])
        report.measured(f"training the target, {name}", rates, "tokens/s", tokens_per_step=recipe.tokens_per_step)
