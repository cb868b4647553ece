"""How a case of lesson 01 uses the learner's `sample_next` and `generate_naive`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.teaching.exercise import Function


def draw_some(
    sample: Function, logits: Tensor, uniforms: Sequence[float], temperature: float, top_k: int, top_p: float
) -> list[object]:
    """Return the token for each of several uniforms, so that one case tests every border between tokens."""
    return [sample(logits, uniform, temperature, top_k, top_p) for uniform in uniforms]


def count_rows(generate: Function, prompt_ids: list[int], max_tokens: int, eos_id: int) -> dict[str, object]:
    """Run `generate` on a model of ten tokens whose next token is (sum of the text so far) mod 10; record its calls.

    A row in the middle is the most certain one, so that taking the largest of all logits goes wrong.
    """
    lengths: list[int] = []

    def forward(ids: list[int]) -> Tensor:
        lengths.append(len(ids))
        if len(lengths) > 3 * (max_tokens + 1):
            raise RuntimeError(f"the model was called {len(lengths)} times for {max_tokens} tokens")
        sums = torch.as_tensor(ids).cumsum(0) % 10
        certainty = torch.full((len(sums), 1), 5.0)
        certainty[len(sums) // 2] = 9.0
        return torch.zeros(len(sums), 10).scatter(1, sums[:, None], certainty)

    return {"new tokens": generate(forward, prompt_ids, max_tokens, eos_id), "rows per forward": lengths}
