"""The target drafts for itself with a few learned embeddings (Parallel Prompt Decoding: Chen et al. 2024).

    the draft forward      [ t₀   m₁   m₂   m₃ ]       over the target's own cache, all rows in one pass
    its logits               x₁   x₂   x₃   x₄
    the verification       [ t₀   x₁   x₂   x₃   x₄ ]

A prompt token mᵢ is an input embedding outside the vocabulary, trained so that the frozen target's logits at its row
predict the token i positions later. All prompt tokens together are a few vectors of the hidden size: 0.01% of the
bundled target. Drafts do not depend on each other, so later ones are less accurate.

Difference from the paper: there the prompt tokens are appended to the verification, after every draft that may be the
last accepted one, so a round is one forward of many rows. Here they are a forward of the drafter, after the one token
that is known to be the last. That forward also computes the row of t₀, so x₁ is the target's own choice and is always
accepted. (With `draft_sample_method="greedy"` x₁ is the argmax, which may be rejected if the request samples or has
penalties.) A round is two forwards of few rows and gains at least two tokens. On a CPU, where each row costs,
that is no more expensive; where rows are free, as on a large GPU with one request, the paper's way is better.

The prompt tokens are the last rows of a chain: no other row reads them. Their keys and values go to slots in which the
verification stores those of the drafts (`self_drafter` describes why no other request can find them).

Wins: nothing but the embeddings is trained and stored. Loses: a draft forward reads all weights of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor, nn

from minillm.batch import Segment
from minillm.models.decoder import Decoder
from minillm.ops.transfer import indices_on_device
from minillm.request import Request
from minillm.runtime.runner import ModelRunner
from minillm.sampling import argmax
from minillm.speculative.chain_drafter import ChainDrafter
from minillm.speculative.drafter import Draft, DraftContext, TargetInfo
from minillm.speculative.trained_drafter import TrainedOptions, load_drafter, read_shape


@dataclass(frozen=True)
class PromptTokensOptions(TrainedOptions):
    """The options of method `prompt_tokens`, minillm's own."""

    def check_target(self, target: TargetInfo) -> int:
        """See `Drafter.Options`. Raises what `read_shape` raises."""
        return read_shape("prompt_tokens", self.model, target, PromptTokensShape).num_drafts + 1


@dataclass(frozen=True)
class PromptTokensShape:
    """The sizes of the embeddings."""

    hidden_size: Annotated[int, Meta(ge=1, le=65_536)]
    num_drafts: Annotated[int, Meta(ge=1, le=63)] = 3
    """Number of prompt tokens. A round drafts one token more."""


class PromptTokens(nn.Module):
    """The learned embeddings."""

    def __init__(self, shape: PromptTokensShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.num_drafts, shape.hidden_size)

    def initialise(self, model: Decoder) -> None:
        """Start at the mean of the target's embeddings, with a little noise."""
        weight = model.embed_tokens.weight.detach()
        with torch.no_grad():
            noise = torch.randn(self.embedding.weight.shape).to(weight.device)
            self.embedding.weight.copy_(weight.mean(0) + 0.1 * weight.std() * noise)


def add_input_embeddings(model: Decoder, rows: Tensor) -> int:
    """Append `rows` (`[n, hidden]`) to the embedding of `model`, not to its unembedding. Returns the id of the first.
    These ids are valid inputs, and never outputs."""
    weight = model.embed_tokens.weight
    grown = torch.cat((weight.detach(), rows.to(weight.device, weight.dtype)))
    model.embed_tokens = nn.Embedding.from_pretrained(grown)
    return len(weight)


class PromptTokensDrafter(ChainDrafter):
    """Drafts chains with one forward of the target over prompt tokens."""

    Options = PromptTokensOptions
    needs_blocks = True

    def __init__(self, runner: ModelRunner, greedy: bool, prompt_ids: Sequence[int]) -> None:
        super().__init__(runner, greedy)
        self.prompt_ids = list(prompt_ids)
        """The input ids of the prompt tokens."""
        self.max_drafts = len(self.prompt_ids) + 1

    @classmethod
    def build(cls, context: DraftContext) -> PromptTokensDrafter:
        """See `Drafter.build`. Raises what `load_drafter` raises."""
        prompts = load_drafter("prompt_tokens", context, PromptTokensShape, PromptTokens)
        first = add_input_embeddings(context.target.model, prompts.embedding.weight)
        ids = range(first, first + prompts.shape.num_drafts)
        return cls(context.target, context.options.draft_sample_method == "greedy", ids)

    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        """See `Drafter.propose`."""
        counts = [min(most, len(self.prompt_ids) + 1) for most in num_drafts]
        logits = self.runner.run([self._segment(*pair) for pair in zip(requests, counts, strict=True)])
        if self.is_greedy(requests):
            tokens, ends = argmax(logits), list(accumulate(counts))
            return [Draft(tokens[end - count : end]) for end, count in zip(ends, counts, strict=True)]
        first = [end - count for end, count in zip(accumulate(counts), counts, strict=True)]

        def rows(active: Sequence[int], position: int) -> Tensor:
            return logits.index_select(0, indices_on_device([first[i] + position for i in active], logits.device))

        return self.draw_chains(
            requests,
            counts,
            rows(range(len(requests)), 0),
            lambda active, drafted: rows(active, len(drafted[active[0]])),
        )

    def _segment(self, request: Request, count: int) -> Segment:
        """The last committed token and the prompt tokens of `count` drafts."""
        tokens = [request.token_ids[-1], *self.prompt_ids[: count - 1]]
        return Segment(tokens, request.num_tokens - 1, request.block_table, count)
