"""The quality of a target and its draft: bits per byte on held-out code, and the acceptance rates of the draft.

Everything is computed in fp32 from fixed seeds, so the same models give the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from minillm.errors import TrainingError
from minillm.models.decoder import Decoder
from minillm.training.continuations import PROMPT_LENGTH, SPAN, continue_rows, new_writer
from minillm.training.data import Windows
from minillm.training.pretrain import dense_logits

NUM_DRAFTS = 4
"""The γ of `greedy_tokens_per_forward`."""
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Agreement:
    """Agreement of draft and target on one kind of text, at every token given all tokens before it."""

    tokens: int
    top1: float
    """Share of tokens where both have the same argmax: the acceptance rate at temperature 0."""
    overlap: float
    """Mean Σ min(p, q) over the vocabulary: the acceptance rate at temperature 1."""


@dataclass(frozen=True)
class Evaluation:
    """All measurements of a pair."""

    target_bits_per_byte: float
    draft_bits_per_byte: float
    code: Agreement
    """On held-out code."""
    greedy: Agreement
    """On the target's completions of held-out prompts at temperature 0."""
    sampled: Agreement
    """The same at temperature 1."""
    greedy_repetition: float
    """Share of 8-token spans of the greedy text that repeat an earlier one. Repetition inflates `greedy`."""
    num_drafts: int
    greedy_tokens_per_forward: float
    """Tokens the target gains per forward with `num_drafts` drafts at temperature 0, replayed on its greedy text."""


@dataclass(frozen=True)
class Comparison:
    """Both models on the same batches; every tensor is `[rows, length]`."""

    agree: Tensor
    overlap: Tensor
    target_nats: Tensor
    draft_nats: Tensor

    def agreement(self) -> Agreement:
        """Means over all tokens."""
        return Agreement(self.agree.numel(), self.agree.float().mean().item(), self.overlap.mean().item())


def evaluate(
    target: Decoder,
    drafts: Mapping[str, Decoder],
    checkpoint: Path,
    held_out: Windows,
    bytes_per_token: float,
    rows: int = 64,
    new_tokens: int = 192,
    code_length: int = 512,
) -> dict[str, Evaluation]:
    """Compare the target with each of `drafts` on all of `held_out` and on `rows` texts of `new_tokens` tokens that the
    target generates. Returns an evaluation per draft, by its name.

    The texts are completions of held-out prompts, once greedy and once at temperature 1. `checkpoint`: the folder that
    the target is exported to. `bytes_per_token`: the mean of `held_out`.
    """
    prompts, _ = held_out.batch(0, rows, PROMPT_LENGTH)
    length = PROMPT_LENGTH + new_tokens
    writer = new_writer(checkpoint, length, str(target.embed_tokens.weight.device), dtype="float32")
    greedy_text = continue_rows(writer, prompts, length, torch.zeros(rows), seed=0)
    sampled_text = continue_rows(writer, prompts, length, torch.ones(rows), seed=0)
    repeated = sum(repetition(row[PROMPT_LENGTH:]) for row in greedy_text) / rows
    bits = 1 / math.log(2) / bytes_per_token
    found = {}
    for name, draft in drafts.items():
        code = compare(target, draft, held_out.in_order(4, code_length))
        greedy = compare(target, draft, list(_split(greedy_text)), skip=PROMPT_LENGTH - 1)
        sampled = compare(target, draft, list(_split(sampled_text)), skip=PROMPT_LENGTH - 1)
        found[name] = Evaluation(
            target_bits_per_byte=code.target_nats.mean().item() * bits,
            draft_bits_per_byte=code.draft_nats.mean().item() * bits,
            code=code.agreement(),
            greedy=greedy.agreement(),
            sampled=sampled.agreement(),
            greedy_repetition=repeated,
            num_drafts=NUM_DRAFTS,
            greedy_tokens_per_forward=tokens_per_forward(greedy.agree, NUM_DRAFTS),
        )
    return found


@torch.no_grad()
def compare(target: Decoder, draft: Decoder, batches: list[Batch], skip: int = 0) -> Comparison:
    """Run both models over `batches` of inputs and next tokens. The first `skip` tokens of each row are ignored.

    Raises `TrainingError` if there are no batches.
    """
    if not batches:
        raise TrainingError("the held-out text is too short to evaluate on; make a corpus of more files")
    parts, device = [], target.embed_tokens.weight.device
    for batch in tqdm(batches, desc="comparing target and draft", leave=False):
        inputs, targets = (part.to(device) for part in batch)
        log_p, log_q = (F.log_softmax(dense_logits(model, inputs).float(), dim=-1) for model in (target, draft))
        values = (
            log_p.argmax(-1) == log_q.argmax(-1),
            torch.minimum(log_p, log_q).exp().sum(-1),
            F.nll_loss(log_p, targets.flatten(), reduction="none"),
            F.nll_loss(log_q, targets.flatten(), reduction="none"),
        )
        parts.append([value.view_as(inputs)[:, skip:].cpu() for value in values])
    return Comparison(*(torch.cat(column) for column in zip(*parts, strict=True)))


def tokens_per_forward(agree: Tensor, num_drafts: int) -> float:
    """Tokens per target forward in a replay of greedy speculation on the target's text.

    `agree` `[rows, length]`: whether the draft's argmax is the target's token. The replay is exact: an accepted draft
    is the target's token, so at temperature 0 the draft always continues this text. A round gains the drafts before the
    first wrong one, at most `num_drafts`, and one token of the target.
    """
    tokens = rounds = 0
    for row in agree.tolist():
        position = 0
        while position + num_drafts < len(row):
            drafts = row[position : position + num_drafts]
            position += 1 + (drafts.index(False) if False in drafts else num_drafts)
            rounds += 1
        tokens += position
    return tokens / rounds


def repetition(row: Tensor) -> float:
    """The share of the spans of `SPAN` tokens in `row` (`[length]`) that repeat an earlier one, 0 to 1."""
    tokens = row.tolist()
    spans = [tuple(tokens[i : i + SPAN]) for i in range(len(tokens) - SPAN + 1)]
    return 1 - len(set(spans)) / len(spans)


def _split(text: Tensor, rows: int = 8) -> Iterator[Batch]:
    for part in text.split(rows):
        yield part[:, :-1].contiguous(), part[:, 1:].contiguous()
