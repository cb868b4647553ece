"""From logits to verdicts: which tokens each request gains, and whether the logits are numbers at all.

On a CPU (`judge`, `first_broken_row`) every question is asked when it comes up. On another device each answer would be
a wait, so `DeviceJudge` launches everything there is to ask and reads the answers together, at the end of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from minillm.device_sampling import DeviceSampler, SamplingPlan, implementation_beside, say_why
from minillm.engine.request import Request
from minillm.models.runner import ModelRunner
from minillm.ops.dispatch import op
from minillm.ops.transfer import current, read, send
from minillm.sampling import Draw, SamplingRow, choose, likeliest, probs_from_logits, uniform, uniforms
from minillm.speculative.device_rejection import flat_proposals, rejection_columns
from minillm.speculative.drafter import Draft
from minillm.speculative.rejection_sampler import Verdict, check_drafts, greedy_verdicts, rejection_sample


def judge(requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor) -> list[Verdict]:
    """One verdict per request. `logits`: `[sum of (drafts + 1), vocab]`; a request's row j judges its draft j, its last
    row is the bonus, or without drafts the next token.

    Where nobody's tokens depend on chance, no distribution is made: the likeliest tokens decide, with the same outcome.
    """
    token_ids = [draft.token_ids for draft in drafts]
    if _likeliest_decide(requests, drafts):
        return greedy_verdicts(token_ids, likeliest(logits))
    rows = _sampling_rows(requests, token_ids)
    seeds, first_index = [request.seed for request in requests], [request.num_tokens for request in requests]
    if not any(token_ids):
        drawn = [uniform(seed, index, Draw.SAMPLE) for seed, index in zip(seeds, first_index, strict=True)]
        return [Verdict([token], 0) for token in choose(logits, rows, drawn).tolist()]
    probs = probs_from_logits(logits, rows)
    return rejection_sample(token_ids, [draft.probs for draft in drafts], probs, seeds, first_index)


def first_broken_row(logits: Tensor) -> int | None:
    """The first row of `[num_rows, vocab]` logits with a NaN or an infinity in it, if there is any.

    One sum over all rows clears them; only if that is not finite are they looked at one by one.
    """
    if math.isfinite(logits.sum(dtype=torch.float32).item()):
        return None
    return _first_false(torch.isfinite(logits).all(dim=-1).tolist())


def _first_false(flags: Sequence[bool | int]) -> int | None:
    return next((i for i, flag in enumerate(flags) if not flag), None)


@dataclass(frozen=True)
class Launched:
    """What the device is working on: vectors of integers and of flags."""

    results: Sequence[Tensor]
    flags: Sequence[Tensor]
    """All True if the results mean anything."""
    decide: Callable[..., list[Verdict]]
    """The results, when they have been read, as verdicts."""


class DeviceJudge:
    """`judge` without waiting: the same verdicts, errors and ties, but for tokens whose uniform falls within rounding
    of a border. With the best ops there are for the device, or the `implementation` named."""

    def __init__(self, device: torch.device | str, implementation: str | None = None) -> None:
        self.device = torch.device(device)
        self.sampler = DeviceSampler(device, implementation)
        self.rejection = op("rejection", device, implementation)
        self.all_finite = op("all_finite", device, implementation)

    @classmethod
    def beside(cls, runner: ModelRunner) -> DeviceJudge | None:
        """The one for the logits of `runner`; None on a CPU, where looking at a number is no wait."""
        return None if runner.device.type == "cpu" else cls(runner.device, implementation_beside(runner))

    def judge(
        self, requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor, all_logits: Tensor
    ) -> tuple[int | None, Callable[[], list[Verdict]]]:
        """Judge `logits` as `judge` does, and look for a broken row in `all_logits`, the same and those of prompts.

        Returns what `first_broken_row` does, and the verdicts: to be asked for if there is no broken row, when they
        may raise what `judge` raises. The device is sent at most one copy and is waited for once; not at all if there
        are no rows to look at.
        """
        if not len(all_logits):
            return None, list
        with current(self.device):
            launched = self._launch(requests, drafts, logits) if requests else Launched((), (), list)
            is_finite, *found = read(self.all_finite(all_logits), *launched.results, *launched.flags)
        results, flags = found[: len(launched.results)], found[len(launched.results) :]

        def verdicts() -> list[Verdict]:
            if not all(map(all, flags)):
                say_why(lambda: _judge_on_host(requests, drafts, logits))
            return launched.decide(*results)

        return _first_false(is_finite), verdicts

    def _launch(self, requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor) -> Launched:
        token_ids, given = [draft.token_ids for draft in drafts], [draft.probs for draft in drafts]
        if _likeliest_decide(requests, drafts):
            return Launched(self.sampler.argmax(logits)[:1], (), partial(greedy_verdicts, token_ids))
        seeds, first_index = [request.seed for request in requests], [request.num_tokens for request in requests]
        check_drafts(token_ids, given, logits.shape, seeds, first_index)
        rows = _sampling_rows(requests, token_ids)
        if not any(token_ids):
            drawn = uniforms(seeds, first_index, [Draw.SAMPLE] * len(seeds))
            tokens, is_valid = self.sampler.choose(logits, rows, drawn)
            return Launched((tokens,), (is_valid,), partial(greedy_verdicts, token_ids))
        plan = SamplingPlan(rows, logits.shape[1])
        sent = send(plan.columns | rejection_columns(token_ids, seeds, first_index), self.device)
        p, is_valid = self.sampler.probs(logits, plan, sent)
        q = flat_proposals(token_ids, given, sent["drafts"], p)
        accepted, own, fits = self.rejection(sent["drafts"], sent["start"], q, p, sent["accept"], sent["own"])
        return Launched((accepted, own), (is_valid, fits), partial(_verdicts, token_ids))


def _verdicts(token_ids: Sequence[list[int]], accepted: list[int], own: list[int]) -> list[Verdict]:
    return [Verdict([*ids[:n], token], n) for ids, n, token in zip(token_ids, accepted, own, strict=True)]


def _judge_on_host(requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor) -> list[Verdict]:
    brought = [draft if draft.probs is None else replace(draft, probs=draft.probs.cpu()) for draft in drafts]
    return judge(requests, brought, logits.cpu())


def _likeliest_decide(requests: Sequence[Request], drafts: Sequence[Draft]) -> bool:
    return all(r.takes_likeliest and d.probs is None for r, d in zip(requests, drafts, strict=True))


def _sampling_rows(requests: Sequence[Request], token_ids: Sequence[Sequence[int]]) -> list[SamplingRow]:
    """One for each row of logits."""
    return [
        request.sampling_row(drafted[:j])
        for request, drafted in zip(requests, token_ids, strict=True)
        for j in range(len(drafted) + 1)
    ]
