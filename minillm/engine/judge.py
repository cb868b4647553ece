"""From logits to verdicts: which tokens each request gains, and whether all logits are finite.

On a CPU, `HostJudge` reads each number where it needs it. On another device every read would wait for all kernels
launched before, so `DeviceJudge` launches everything first and reads all results together, at the end of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from minillm.ops.dispatch import op
from minillm.ops.transfer import copy_to_device, copy_to_host, on_device
from minillm.request import Request
from minillm.runtime.runner import ModelRunner
from minillm.sampling import Draw, SamplingRow, argmax, choose, probs_from_logits, uniform, uniforms
from minillm.sampling.device import DeviceSampler, SamplingPlan, raise_host_error
from minillm.speculative.device_rejection import flat_draft_probs, rejection_inputs
from minillm.speculative.drafter import Draft
from minillm.speculative.rejection_sampler import (
    EXACT,
    AcceptRule,
    Rule,
    Verdict,
    check_drafts,
    greedy_tree_verdict,
    greedy_verdicts,
    judge_tree,
    path_to,
)


def judge(requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor, rule: Rule = EXACT) -> list[Verdict]:
    """One verdict per request. `logits`: `[sum of (drafts + 1), vocab]`; a request's row j judges its draft j, its last
    row is the bonus, or without drafts the next token. Of a tree, row j follows node j - 1.

    If all requests are greedy and no draft was sampled, the argmax of each row decides: the exact rule would give the
    same verdicts from one-hot distributions.
    """
    if any(draft.parents is not None for draft in drafts):
        return _judge_trees(requests, drafts, logits, rule)
    token_ids = [draft.token_ids for draft in drafts]
    if rule.is_exact and _all_take_argmax(requests, drafts):
        return greedy_verdicts(token_ids, argmax(logits))
    rows = _sampling_rows(requests, drafts)
    seeds, first_index = [request.seed for request in requests], [request.num_tokens for request in requests]
    if not any(token_ids):
        drawn = [uniform(seed, index, Draw.SAMPLE) for seed, index in zip(seeds, first_index, strict=True)]
        return [Verdict([token], 0) for token in choose(logits, rows, drawn).tolist()]
    probs = probs_from_logits(logits, rows)
    return rule.verdicts(token_ids, [draft.probs for draft in drafts], probs, seeds, first_index)


def _judge_trees(requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor, rule: Rule) -> list[Verdict]:
    """`judge` if some draft is a tree. The chains of the step are judged as they would be without it."""
    parts = logits.split([len(draft.token_ids) + 1 for draft in drafts])
    chains = [i for i, draft in enumerate(drafts) if draft.parents is None]
    found: dict[int, Verdict] = {}
    if chains:
        of_chains = torch.cat([parts[i] for i in chains])
        judged = judge([requests[i] for i in chains], [drafts[i] for i in chains], of_chains, rule)
        found = dict(zip(chains, judged, strict=True))
    one_by_one = rule if isinstance(rule, AcceptRule) else EXACT
    for i, (request, draft, rows) in enumerate(zip(requests, drafts, parts, strict=True)):
        if draft.parents is None:
            continue
        if rule.is_exact and _all_take_argmax([request], [draft]):
            found[i] = greedy_tree_verdict(draft.token_ids, draft.parents, argmax(rows))
        else:
            probs = probs_from_logits(rows, _sampling_rows([request], [draft]))
            found[i] = judge_tree(
                draft.token_ids, draft.parents, draft.probs, probs, request.seed, request.num_tokens, one_by_one
            )
    return [found[i] for i in range(len(requests))]


class BrokenRowError(Exception):
    """Row `row` of a step's logits has a NaN or an infinity; the engine knows whose it is."""

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row} of the logits is not finite")
        self.row = row


class HostJudge:
    """Judges logits in the memory of the CPU, or with a rule that only the host knows."""

    def __init__(self, rule: Rule = EXACT) -> None:
        self.rule = rule

    def judge(
        self, requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor, all_logits: Tensor
    ) -> list[Verdict]:
        """See `judge`. Raises `BrokenRowError` for the first row of `all_logits`, which are `logits` and those of
        prompts, that is not finite."""
        if (row := first_broken_row(all_logits)) is not None:
            raise BrokenRowError(row)
        return judge(requests, drafts, logits, self.rule) if requests else []


def first_broken_row(logits: Tensor) -> int | None:
    """The first row of `[num_rows, vocab]` logits with a NaN or an infinity in it, if there is any.

    One sum over all rows is computed first; rows are tested one by one only if it is not finite.
    """
    if math.isfinite(_sum(logits)):
        return None
    return _first_false(torch.isfinite(logits).all(dim=-1).tolist())


def _sum(logits: Tensor) -> float:
    """The sum of all logits, in float32. On a CPU NumPy adds, in one thread. PyTorch takes several for more than 32,768
    numbers, and where other programs run, it may wait for them longer than for the step."""
    if logits.device.type != "cpu":
        return logits.sum(dtype=torch.float32).item()
    with np.errstate(over="ignore", invalid="ignore"):
        return float(logits.detach().float().numpy().sum())


def _first_false(flags: Sequence[bool | int]) -> int | None:
    return next((i for i, flag in enumerate(flags) if not flag), None)


@dataclass(frozen=True)
class Launched:
    """Work launched on the device: vectors of integers and of flags."""

    results: Sequence[Tensor]
    flags: Sequence[Tensor]
    """All True if the results are valid."""
    decide: Callable[..., list[Verdict]]
    """Turns the results, once read, into verdicts."""


class DeviceJudge:
    """`HostJudge` with one read per step: the same verdicts, errors and ties, except for a token whose uniform lies
    within rounding of a border. Uses the best ops for the device, or those of `implementation`."""

    def __init__(self, device: torch.device | str, implementation: str | None = None) -> None:
        self.device = torch.device(device)
        self.sampler = DeviceSampler(device, implementation)
        self.rejection = op("rejection", device, implementation)
        self.all_finite = op("all_finite", device, implementation)

    @classmethod
    def for_runner(cls, runner: ModelRunner) -> DeviceJudge | None:
        """The judge for the logits of `runner`; None on a CPU, where reading a number does not wait."""
        return None if runner.device.type == "cpu" else cls(runner.device, runner.sampling_implementation)

    def judge(
        self, requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor, all_logits: Tensor
    ) -> list[Verdict]:
        """See `HostJudge.judge`. Sends at most one copy to the device and waits for one read; neither without rows."""
        if not len(all_logits):
            return []
        if any(draft.parents is not None for draft in drafts):  # each row of a tree decides which row counts next
            if (row := first_broken_row(all_logits)) is not None:
                raise BrokenRowError(row)
            return _judge_on_host(requests, drafts, logits)
        with on_device(self.device):
            launched = self._launch(requests, drafts, logits) if requests else Launched((), (), list)
            is_finite, *found = copy_to_host(self.all_finite(all_logits), *launched.results, *launched.flags)
        results, flags = found[: len(launched.results)], found[len(launched.results) :]
        if (row := _first_false(is_finite)) is not None:
            raise BrokenRowError(row)
        if not all(map(all, flags)):
            raise_host_error(lambda: _judge_on_host(requests, drafts, logits))
        return launched.decide(*results)

    def _launch(self, requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor) -> Launched:
        token_ids, given = [draft.token_ids for draft in drafts], [draft.probs for draft in drafts]
        if _all_take_argmax(requests, drafts):
            return Launched(self.sampler.argmax(logits)[:1], (), partial(greedy_verdicts, token_ids))
        seeds, first_index = [request.seed for request in requests], [request.num_tokens for request in requests]
        check_drafts(token_ids, given, logits.shape, seeds, first_index)
        rows = _sampling_rows(requests, drafts)
        if not any(token_ids):
            drawn = uniforms(seeds, first_index, [Draw.SAMPLE] * len(seeds))
            tokens, is_valid = self.sampler.choose(logits, rows, drawn)
            return Launched((tokens,), (is_valid,), partial(greedy_verdicts, token_ids))
        plan = SamplingPlan(rows, logits.shape[1])
        sent = copy_to_device(plan.columns | rejection_inputs(token_ids, seeds, first_index), self.device)
        p, is_valid = self.sampler.probs(logits, plan, sent)
        q = flat_draft_probs(token_ids, given, sent["drafts"], p)
        accepted, own, fits = self.rejection(sent["drafts"], sent["start"], q, p, sent["accept"], sent["own"])
        return Launched((accepted, own), (is_valid, fits), partial(_verdicts, token_ids))


def _verdicts(token_ids: Sequence[list[int]], accepted: list[int], own: list[int]) -> list[Verdict]:
    return [Verdict([*ids[:n], token], n) for ids, n, token in zip(token_ids, accepted, own, strict=True)]


def _judge_on_host(requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor) -> list[Verdict]:
    brought = [draft if draft.probs is None else replace(draft, probs=draft.probs.cpu()) for draft in drafts]
    return judge(requests, brought, logits.cpu())


def _all_take_argmax(requests: Sequence[Request], drafts: Sequence[Draft]) -> bool:
    return all(r.takes_argmax and d.probs is None for r, d in zip(requests, drafts, strict=True))


def _sampling_rows(requests: Sequence[Request], drafts: Sequence[Draft]) -> list[SamplingRow]:
    """One for each row of logits."""
    return [
        request.sampling_row(context)
        for request, draft in zip(requests, drafts, strict=True)
        for context in ([], *(_context(draft, node) for node in range(len(draft.token_ids))))
    ]


def _context(draft: Draft, node: int) -> list[int]:
    """The draft tokens from the root to `node`."""
    return draft.token_ids[: node + 1] if draft.parents is None else path_to(node, draft.token_ids, draft.parents)
