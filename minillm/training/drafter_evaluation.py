"""How often the drafts of a trained drafter are accepted, by position, on text that it was not trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from minillm.errors import TrainingError
from minillm.models.decoder import Decoder
from minillm.training.continuations import PROMPT_LENGTH, continue_rows, new_writer
from minillm.training.data import Windows
from minillm.training.heads_loss import greedy_survival, sampled_reach
from minillm.training.target_states import Targets

Guesses = Callable[[nn.Module, Decoder, Tensor, Tensor], tuple[Targets, Tensor]]
"""`(module, target, inputs, next tokens)` → what the drafts are compared with, and their log-probabilities
`[rows, roots, count, vocab]`."""
CODE_LENGTH, CODE_ROWS = 512, 32


@dataclass(frozen=True)
class Acceptance:
    """Acceptance by position on one kind of text: of the drafts that are judged, the share that is accepted."""

    roots: int
    greedy: list[float]
    """At temperature 0."""
    sampled: list[float]
    """At temperature 1: Σ min(p, q)."""

    @staticmethod
    def tokens_per_round(by_position: list[float]) -> float:
        """1 + Σᵢ Πⱼ≤ᵢ αⱼ: the tokens that a round with all drafts gains on average, the target's own included."""
        total = survived = 1.0
        for rate in by_position:
            survived *= rate
            total += survived
        return total


@torch.no_grad()
def acceptance(
    guesses: Guesses, module: nn.Module, target: Decoder, batches: Iterable[tuple[Tensor, Tensor]], skip: int = 0
) -> Acceptance:
    """Measure on `batches` of inputs and next tokens, without the roots in the first `skip` tokens of each row.

    Raises `TrainingError` without batches.
    """
    device, sums, roots = target.embed_tokens.weight.device, None, 0
    for inputs, targets in tqdm(batches, desc="measuring acceptance", leave=False):
        compared, log_q = guesses(module, target, inputs.to(device), targets.to(device))
        first = -(-skip // compared.text.shape[-1])
        compared, log_q = Targets(*(part[:, first:] for part in compared)), log_q[:, first:]
        reached, agree = greedy_survival(compared, log_q)
        alpha = torch.minimum(compared.log_probs, log_q).exp().sum(-1)
        weight = sampled_reach(compared, log_q)
        found = torch.stack([x.double().sum((0, 1)) for x in (reached, reached * agree, weight, weight * alpha)])
        sums = found if sums is None else sums + found
        roots += agree.shape[0] * agree.shape[1]
    if sums is None:
        raise TrainingError("the held-out text is too short to evaluate on; make a corpus of more files")
    reached, agreed, weight, alpha = sums
    return Acceptance(roots, _rates(agreed, reached), _rates(alpha, weight))


def _rates(accepted: Tensor, judged: Tensor) -> list[float]:
    """accepted / judged by position; 0 where none was judged."""
    return [a / n if n else 0.0 for a, n in zip(accepted.tolist(), judged.tolist(), strict=True)]


def evaluate_drafter(
    guesses: Guesses,
    module: nn.Module,
    target: Decoder,
    checkpoint: Path,
    held_out: Windows,
    rows: int = 64,
    new_tokens: int = 192,
) -> dict[str, dict[str, object]]:
    """Acceptance on held-out code, and on `rows` texts that the target writes in fp32 after held-out prompts: greedy,
    and at temperature 1. JSON values of `Acceptance` by kind of text. `checkpoint`: the target's folder."""
    length = PROMPT_LENGTH + new_tokens
    writer = new_writer(checkpoint, length, str(target.embed_tokens.weight.device), dtype="float32")
    prompts, _ = held_out.batch(0, rows, PROMPT_LENGTH)
    found = {"code": acceptance(guesses, module, target, held_out.in_order(4, CODE_LENGTH)[: CODE_ROWS // 4])}
    for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        text = continue_rows(writer, prompts, length, torch.full((rows,), temperature), seed=0)
        parts = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in text.split(8)]
        found[kind] = acceptance(guesses, module, target, parts, skip=PROMPT_LENGTH)
    return {kind: asdict(values) for kind, values in found.items()}
