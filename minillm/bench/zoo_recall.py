"""Recall over one cache: how much of a definition comes back from far away."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minillm.bench.zoo_cache import continuation, read_prompt
from minillm.bench.zoo_texts import RecallTask
from minillm.runtime.runner import ModelRunner


@dataclass(frozen=True)
class Recall:
    """How much of a definition comes back from `distance` tokens away."""

    distance: int
    tasks: int
    exact: float
    """Share of answers with every token right."""
    tokens: float
    """Share of tokens that are right."""
    tokens_error: float
    """Standard error of `tokens` over the tasks."""
    nats: float
    """Mean negative log-probability of the tokens."""


def recall(runner: ModelRunner, distance: int, tasks: Sequence[RecallTask]) -> Recall:
    """Run recall tasks. The first token of an answer is not counted: it is predicted from within the prompt."""
    rights, nats = [], []
    for task in tasks:
        row = [*task.prompt, *task.answer]
        read_prompt(runner, row, len(task.prompt))
        logprobs = continuation(runner, row, len(task.prompt), one_by_one=0).logprobs
        wanted = torch.tensor(task.answer[1:])
        rights.append((logprobs.argmax(-1) == wanted).double())
        nats.append(-float(logprobs.gather(1, wanted.unsqueeze(1)).mean()))
    shares = torch.stack(rights).mean(1)
    return Recall(
        distance,
        len(tasks),
        exact=float((shares == 1).double().mean()),
        tokens=float(shares.mean()),
        tokens_error=float(shares.std() / len(shares) ** 0.5) if len(shares) > 1 else 0.0,
        nats=statistics.mean(nats),
    )
