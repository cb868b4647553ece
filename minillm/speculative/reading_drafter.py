"""The base of small drafters that read the target's cache and keep nothing of their own from one round to the next.

    tokens of a request     [ verified …………………… | last | x₁ | x₂ | x₃ ]
    read                      in the target's cache   ┃ made in this round, then discarded

A round reads the rows of the tokens that the target has verified, and only those: the slots behind them may hold what a
rejected draft has left. Nothing is written. So a rejection, a preemption, a prefix found in the cache or a copied block
needs no care: the block table says what there is to read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from minillm.request import Request
from minillm.runtime.runner import ModelRunner
from minillm.speculative.chain_drafter import ChainDrafter
from minillm.speculative.drafter import Draft, DraftContext
from minillm.speculative.target_parts import TargetParts
from minillm.speculative.trained_drafter import TrainedOptions, load_drafter


class DraftRound(Protocol):
    """One round of drafting for some requests."""

    def step(self, token_ids: Tensor) -> Tensor:
        """The next token of each request (`[num_requests]`, int64) → logits of the one after it, `[…, vocab]`."""

    def narrow(self, kept: list[int]) -> None:
        """Go on with some of the requests, given by their indices in the last step."""


class ReadingDrafter(ChainDrafter):
    """Drafts chains; each round reads the target's cache once."""

    Options = TrainedOptions
    needs_blocks = True
    reads_target_cache = True
    method: ClassVar[str]
    """The name of the method, in the folder of its weights."""
    shape_class: ClassVar[type]
    model_class: ClassVar[Callable[[Any, TargetParts], nn.Module]]
    """`(shape, target)` → a draft without weights."""

    def __init__(self, runner: ModelRunner, model: nn.Module, greedy: bool) -> None:
        """`runner`: the target's; `model`: a draft with weights. `greedy`: every draft is the argmax."""
        super().__init__(runner, greedy)
        self.model: Any = model

    @classmethod
    def build(cls, context: DraftContext) -> ReadingDrafter:
        """See `Drafter.build`. Raises what `load_drafter` raises."""
        parts, device = TargetParts(context.target.model), context.target.device
        model = load_drafter(cls.method, context, cls.shape_class, lambda shape: cls.model_class(shape, parts))
        return cls(context.target, model.to(device, parts.dtype), context.options.draft_sample_method == "greedy")

    @abstractmethod
    def begin(self, requests: Sequence[Request]) -> DraftRound:
        """Read what a round needs. Each request has one token that the target has not verified, the last one."""

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        """See `Drafter.propose`."""
        current, going = self.begin(requests), list(range(len(requests)))

        def next_logits(active: list[int], drafted: list[list[int]]) -> Tensor:
            nonlocal going
            if len(active) < len(going):
                current.narrow([going.index(i) for i in active])
                going = active
            return current.step(self.tensor([drafted[i][-1] for i in active]))

        logits = current.step(self.tensor([request.token_ids[-1] for request in requests]))
        return self.draw_chains(requests, num_drafts, logits, next_logits)

    def tensor(self, values: Sequence[int]) -> Tensor:
        """`values` on the target's device, int64."""
        return torch.tensor(values, dtype=torch.int64, device=self.runner.device)
