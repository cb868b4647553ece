"""Drafting chains with a model, one forward per draft: the loop that draft models and self-drafting targets share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from minillm.batch import Segment
from minillm.errors import ConfigError, NonFiniteLogitsError
from minillm.quantization.schemes import make_scheme
from minillm.request import Request
from minillm.runtime.runner import ModelRunner, check_finite
from minillm.sampling import Draw, argmax, probs_from_logits, sample, uniform
from minillm.sampling.device import DeviceSampler
from minillm.speculative.drafter import Draft, Drafter

SAMPLE_METHODS = ("probabilistic", "greedy")


def check_sample_method(value: str) -> None:
    """Raise `ConfigError` unless `draft_sample_method` is one of `SAMPLE_METHODS`."""
    if value not in SAMPLE_METHODS:
        raise ConfigError(f"draft_sample_method={value!r} must be 'greedy' or 'probabilistic'")


def check_quantization(name: str | None) -> None:
    """Raise `UnsupportedError` unless weights can be quantised like this; None: they are not."""
    if name is not None:
        make_scheme(name)


def warn_of_broken_logits(drafter: Drafter, problem: NonFiniteLogitsError) -> None:
    """Warn that drafting has ended early."""
    name = type(drafter).__name__
    warnings.warn(f"{name} drafts no further in this step: {problem}", RuntimeWarning, stacklevel=2)


class ChainDrafter(Drafter):
    """The base of drafters that run a model. All requests form one batch, with one forward per draft."""

    runs_model = True
    min_survival = 0.0
    """Chains may end before the draft with which their estimated probability of surviving falls below this."""

    def __init__(self, runner: ModelRunner, greedy: bool) -> None:
        """`greedy`: every draft is the argmax, also for requests that sample."""
        self.runner = runner
        self.greedy = greedy

    @cached_property
    def sampler(self) -> DeviceSampler | None:
        """Samples tokens on a GPU; None on a CPU."""
        return DeviceSampler.for_device(self.runner.device, self.runner.sampling_implementation)

    def is_greedy(self, requests: Sequence[Request]) -> bool:
        """Whether all drafts of these requests are the argmax. Their q is one-hot, so they need no distribution."""
        return self.greedy or all(request.takes_argmax for request in requests)

    def propose_for_timing(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        """See `Drafter.propose_for_timing`. What a model thinks of made-up text must not end the chains."""
        min_survival, self.min_survival = self.min_survival, 0.0
        try:
            return self.propose(requests, num_drafts)
        finally:
            self.min_survival = min_survival

    def draft_argmax(
        self, first: Sequence[Segment], num_drafts: Sequence[int], min_survival: float = 0.0
    ) -> list[list[int]]:
        """The `num_drafts[i]` most likely tokens after each segment i, with one call of the runner for each different
        number of drafts. The block tables have room for them.

        A chain ends before the draft with which the product of their probabilities falls below `min_survival`. Where
        logits are NaN or infinite, all chains end.
        """
        tokens: list[list[int]] = [[] for _ in first]
        survival = [1.0] * len(first)
        segments, drafted, longest = list(first), 0, max(num_drafts)
        for count in sorted(set(num_drafts)):
            active = [i for i, most in enumerate(num_drafts) if most >= count and len(tokens[i]) == drafted]
            step, so_far = [segments[i] for i in active], [survival[i] for i in active]
            if not active:
                break
            try:
                if min_survival:
                    found, so_far = self.runner.draft_while_confident(step, count - drafted, so_far, min_survival)
                else:
                    found = self.runner.draft(step, count - drafted)
            except NonFiniteLogitsError as problem:
                warn_of_broken_logits(self, problem)
                break
            for i, new, product in zip(active, found, so_far, strict=True):
                tokens[i] += new
                survival[i] = product
                if new and count < longest:
                    segments[i] = replace(segments[i], token_ids=new[-1:], start=segments[i].end + len(new) - 1)
            drafted = count
        return tokens

    def draw_chains(
        self,
        requests: Sequence[Request],
        num_drafts: Sequence[int],
        logits: Tensor,
        next_logits: Callable[[list[int], list[list[int]]], Tensor],
    ) -> list[Draft]:
        """Draft `num_drafts[i]` (≥ 1) tokens for each request i.

        `logits`: those of each request's first draft, `[num_requests, vocab]`. `next_logits(active, drafted)`: those
        of the next draft of each `active` request, given the drafts of all requests so far, `[len(active), vocab]`.

        Where logits are NaN or infinite, all chains end; the target can go on without drafts. What was drawn before is
        kept: to throw it away because of what it led to would change the distribution of the output.
        """
        tokens: list[list[int]] = [[] for _ in requests]
        probs: list[list[Tensor]] = [[] for _ in requests]
        is_greedy, active = self.is_greedy(requests), list(range(len(requests)))
        for step in range(max(num_drafts)):
            if step:
                active = [i for i in active if step < num_drafts[i]]
                logits = next_logits(active, tokens)
            try:
                if is_greedy:
                    check_finite(logits)
                    drawn, rows = argmax(logits), None
                else:
                    drawn, rows = self._draw(logits, [(requests[i], tokens[i]) for i in active])
            except NonFiniteLogitsError as problem:
                warn_of_broken_logits(self, problem)
                break
            for place, i in enumerate(active):
                tokens[i].append(drawn[place])
                if rows is not None:
                    probs[i].append(rows[place])
        if not any(probs):
            return [Draft(drafted) for drafted in tokens]
        rows = torch.stack([row for of_request in probs for row in of_request])
        return [Draft(t, q) for t, q in zip(tokens, rows.split([len(t) for t in tokens]), strict=True)]

    def _draw(self, logits: Tensor, states: list[tuple[Request, list[int]]]) -> tuple[list[int], Tensor]:
        """Sample the next draft of each request, given its drafts so far. Returns the drafts and their distributions.

        The tokens are copied to the host, which builds the next forward; the distributions stay on the device.
        """
        rows = [request.sampling_row(drafted) for request, drafted in states]
        # Keyed by the round: a position that is drafted again later must not get the number that was rejected here.
        uniforms = [uniform(r.seed, r.num_tokens, Draw.DRAFT, len(drafted)) for r, drafted in states]
        if self.sampler is not None:
            return self.sampler.draw(logits, rows, np.array(uniforms))
        probs = probs_from_logits(logits, rows)
        return sample(probs, uniforms).tolist(), probs
