"""Drafting with heads on the target's last hidden state (Medusa: Cai et al. 2024; Hydra: Ankner et al. 2024).

    the step that verifies      … t₋₂  t₋₁ │ logits of t₋₁'s row choose t₀; its hidden state h goes to the heads
    the next round              h, t₀  →  x₁ x₂ x₃ …          one small network, no attention, no cache of its own

The target has already read the whole text, and h is what it made of it. So the heads need no keys and values, nothing
to catch up with, and nothing to roll back: a hidden state belongs to a number of tokens, and is used only while the
request has exactly so many. `draft_heads` describes the network; it shares the target's embedding and unembedding.

The chain ends before the first position whose estimated probability of surviving (this draft and all before it are
accepted) is below `min_survival`. The estimate depends on h and t₀ only, so it is known before a draft is drawn, and
sampled text keeps the target's distribution under every rule of acceptance.

Wins: one pass for all wide products, and no cache to fill after a prompt or a preemption. Loses: heads see only the
last hidden state and the drafts so far, so their drafts are right less often than those of a draft model, which reads
the text again. Beside a compiled target the whole round is one compiled call (`compiled_heads`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from minillm.config import in_range
from minillm.ops.transfer import indices_on_device
from minillm.request import Request
from minillm.runtime.runner import ModelRunner
from minillm.speculative.chain_drafter import ChainDrafter
from minillm.speculative.draft_heads import KINDS, DraftHeads, HeadsShape
from minillm.speculative.drafter import NO_DRAFT, Draft, DraftContext, TargetInfo
from minillm.speculative.target_heads import Chains, HeadsRound, TargetHeads, unembedding
from minillm.speculative.trained_drafter import TrainedOptions, load_drafter, read_shape


@dataclass(frozen=True)
class HeadsOptions(TrainedOptions):
    """The options of method `heads`, minillm's own."""

    min_survival: float = 0.1
    """No draft where the estimated probability that it survives is less than this; 0: always as many as wanted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("min_survival", self.min_survival, 1.0)

    def check_target(self, target: TargetInfo) -> int:
        """See `Drafter.Options`. Raises what `read_shape` raises."""
        return read_shape("heads", self.model, target, HeadsShape).num_drafts


class HeadsDrafter(ChainDrafter):
    """Drafts chains from the hidden states that the target's steps leave."""

    Options = HeadsOptions
    observes_hidden = True

    def __init__(self, runner: ModelRunner, heads: TargetHeads, options: HeadsOptions) -> None:
        super().__init__(runner, options.draft_sample_method == "greedy")
        self._heads, self.min_survival = heads, options.min_survival
        self.max_drafts = heads.heads.shape.num_drafts
        self._hidden: WeakKeyDictionary[Request, tuple[int, Tensor]] = WeakKeyDictionary()
        """Of each request, for how many of its tokens the hidden state holds, and the state, `[hidden]`."""

    @classmethod
    def build(cls, context: DraftContext) -> HeadsDrafter:
        """See `Drafter.build`. Raises what `load_drafter` raises."""
        target = context.target.model
        heads = load_drafter("heads", context, HeadsShape, DraftHeads)
        weight = target.embed_tokens.weight
        dtype = torch.float32 if weight.device.type == "cpu" else weight.dtype
        own = TargetHeads(heads.to(weight.device, dtype), weight.detach(), unembedding(target, dtype))
        return cls(context.target, own, context.options)

    @cached_property
    def heads(self) -> TargetHeads:
        """The heads: compiled beside a compiled target, whose weights are packed by the time they are first used."""
        if self.runner.executor is None or self.runner.device.type != "cpu":
            return self._heads
        from minillm.speculative import compiled_heads  # needs numba

        if not compiled_heads.can_compile(self._heads.heads.shape):
            return self._heads
        self._heads = compiled_heads.CompiledHeads(self._heads, self.runner.model)
        return self._heads

    def observe_hidden(self, requests: Sequence[Request], hidden: Tensor) -> None:
        """See `Drafter.observe_hidden`."""
        for request, row in zip(requests, hidden, strict=True):
            self._hidden[request] = request.num_tokens, row

    def request_dropped(self, request: Request) -> None:
        """See `Drafter.request_dropped`."""
        self._hidden.pop(request, None)

    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        """See `Drafter.propose`. `NO_DRAFT` for a request without the hidden state of its last step."""
        drafts = [NO_DRAFT] * len(requests)
        known = [i for i, request in enumerate(requests) if self._hidden.get(request, (0,))[0] == request.num_tokens]
        if known:
            found = self._propose([requests[i] for i in known], [num_drafts[i] for i in known])
            for i, draft in zip(known, found, strict=True):
                drafts[i] = draft
        return drafts

    def _propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        hidden = torch.stack([self._hidden[request][1] for request in requests])
        last = indices_on_device([request.token_ids[-1] for request in requests], self.runner.device)
        if self.is_greedy(requests):
            return [Draft(ids) for ids in self.heads.draft_argmax(hidden, last, num_drafts, self.min_survival)]
        begun = self.heads.begin(hidden, last, num_drafts, KINDS.index("sampled"), self.min_survival)
        if not any(begun.num_drafts):
            return [Draft([])] * len(requests)
        return self._draw_drafts(requests, begun, last)

    def _draw_drafts(self, requests: Sequence[Request], begun: HeadsRound, last: Tensor) -> list[Draft]:
        """Sample drafts; requests beside them that are greedy get the argmax."""
        drafting, device = [i for i, count in enumerate(begun.num_drafts) if count], self.runner.device
        chains = Chains(self.heads, begun, indices_on_device(drafting, device), last)

        def next_logits(active: list[int], drafted: list[list[int]]) -> Tensor:
            return chains.next_logits(active, indices_on_device([drafted[i][-1] for i in active], device))

        chosen, counts = [requests[i] for i in drafting], [begun.num_drafts[i] for i in drafting]
        found = iter(self.draw_chains(chosen, counts, chains.first_logits, next_logits))
        return [next(found) if count else Draft([]) for count in begun.num_drafts]
