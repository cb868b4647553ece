"""Stage 6 of the GPU benchmark: how much of what speculation promises arrives.

The 8B shape as target, the 1B shape as draft, both random, so nobody would agree. Acceptance is therefore synthetic:
the engine does all of its work, and then each draft is taken to be accepted with a fixed probability a, up to the first
that is not. A round then yields E = (1 - a^(γ+1)) / (1 - a) tokens (Leviathan et al. 2023, section 3.1). The speed-up
that arithmetic promises is E / (γ·c + v), with E as chance has drawn it, c = t(draft) / t(target) and v = t(verify) /
t(decode), measured here on the runners, tokens read. Mechanical efficiency is the engine's measured speed-up over that
promise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from minillm.bench.device_clock import Way, ratios
from minillm.bench.on_gpu.models import (
    BLOCK_SIZE,
    CONFIGS,
    SMALL,
    fast_runner,
    random_model,
    read_tokens,
    segments,
    target_name,
)
from minillm.bench.on_gpu.report import Report, Target
from minillm.bench.on_gpu.site import Site
from minillm.cache.block_pool import BlockPool
from minillm.cache.paged import PagedKVCache
from minillm.config import EngineConfig
from minillm.engine.engine import Engine
from minillm.engine.judge import DeviceJudge
from minillm.engine.request import Request
from minillm.models.runner import ModelRunner
from minillm.sampling import SamplingParams
from minillm.speculative.draft_model import DraftModelDrafter
from minillm.speculative.drafter import Draft
from minillm.speculative.rejection_sampler import Verdict

EFFICIENCY = Target(at_least=0.9)
ACCEPTANCE, DRAFTS = 0.8, 4
ROUNDS = 5


class NoText:
    """In place of a tokenizer: the tokens mean nothing."""

    def token_text(self, token_id: int) -> str:
        """No text."""
        return ""


class SyntheticJudge:
    """Judges as the engine's own does, waits for the outcome as long, and then lets chance decide how many to accept.

    The chances are those of a generator of its own: the same in every run.
    """

    def __init__(self, inner: Any, acceptance: float, seed: int = 0) -> None:
        self.inner, self.acceptance, self.rng = inner, acceptance, random.Random(seed)

    def judge(
        self, requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor, all_logits: Tensor
    ) -> tuple[int | None, Callable[[], list[Verdict]]]:
        """See `DeviceJudge.judge`."""
        broken, decide = self.inner.judge(requests, drafts, logits, all_logits)

        def decided() -> list[Verdict]:
            return [self._drawn(draft, verdict) for draft, verdict in zip(drafts, decide(), strict=True)]

        return broken, decided

    def _drawn(self, draft: Draft, verdict: Verdict) -> Verdict:
        accepted = 0
        while accepted < len(draft.token_ids) and self.rng.random() < self.acceptance:
            accepted += 1
        return Verdict([*draft.token_ids[:accepted], verdict.token_ids[-1]], accepted)


def tokens_per_round(acceptance: float, drafts: int) -> float:
    """E: what a round yields, its own token included. `acceptance` below 1."""
    return (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


def speculation(site: Site, report: Report) -> None:
    """c and v on the runners, then the engine with and without drafts in turn."""
    name, draft_name = target_name(site), site.pick(SMALL, "rehearsal draft")
    past, new_tokens = site.pick(256, 8), site.pick(192, 9)
    length = past + new_tokens + 4 * BLOCK_SIZE
    target = fast_runner(site, random_model(site, name), PagedKVCache, 1, length)
    draft = fast_runner(site, random_model(site, draft_name, seed=1), PagedKVCache, 1, length)
    report.note("target, draft", [name, draft_name])
    decode, catch_up, verify = (segments(1, n, past, length, CONFIGS[name].vocab_size) for n in (1, 2, DRAFTS + 1))
    catch_up = [replace(catch_up[0], num_logits=1)]  # the last guess and the bonus, or one token: two at most
    timings = site.time(
        Way("decode", _times(lambda: read_tokens(target.run(decode)))),
        Way("verify", _times(lambda: read_tokens(target.run(verify)))),
        Way("draft", _times(lambda: draft.draft(catch_up, DRAFTS))),
    )
    costs = [1 / r / DRAFTS for r in ratios(timings, "draft", "decode")]
    verifying = [1 / r for r in ratios(timings, "verify", "decode")]
    report.measured("c", costs, "draft / target", drafts=DRAFTS)
    report.measured("v", verifying, "verify / decode")
    report.counted("E", tokens_per_round(ACCEPTANCE, DRAFTS), "tokens a round", acceptance=ACCEPTANCE, drafts=DRAFTS)
    round_cost = (timings["draft"].median + timings["verify"].median) / timings["decode"].median  # γ·c + v
    _engines(site, report, target, draft, past, new_tokens, round_cost)


def _engines(
    site: Site, report: Report, target: ModelRunner, draft: ModelRunner, past: int, new_tokens: int, round_cost: float
) -> None:
    gains, drawn = [], 0.0
    for turn in range(site.pick(ROUNDS, 1) + 1):
        each = []
        for drafter in (None, draft):
            loop = Loop(target, drafter, past, new_tokens)
            each.append(site.clock.seconds(loop.run) / loop.num_tokens)
        drawn = loop.num_tokens / loop.num_rounds
        if turn:  # the first warms up
            gains.append(each[0] / each[1])
    report.counted("E, as drawn", drawn, "tokens a round")
    report.modelled("promised speed-up", drawn / round_cost, "times", acceptance=ACCEPTANCE)
    report.measured("engine with drafts over without", gains, "times")
    report.measured("mechanical efficiency", [g * round_cost / drawn for g in gains], "of the promise", EFFICIENCY)


class Loop:
    """An engine that has read its prompt, target and draft both, and from then on is timed."""

    def __init__(self, target: ModelRunner, draft: ModelRunner | None, past: int, new_tokens: int) -> None:
        drafter = DraftModelDrafter(draft, 2048, greedy=True) if draft else None
        blocks = target.cache.keys.shape[1] // BLOCK_SIZE  # type: ignore[attr-defined]
        config = EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=1, enable_prefix_caching=False)
        self.engine = Engine(
            target,
            BlockPool(blocks, BLOCK_SIZE),
            config,
            NoText(),  # type: ignore[arg-type]
            drafter,
            DRAFTS if drafter else 0,
        )
        inner = self.engine.device_judge or DeviceJudge("cpu", "reference")
        self.engine.device_judge = SyntheticJudge(inner, ACCEPTANCE)  # type: ignore[assignment]
        most = new_tokens + 3 * DRAFTS  # so that no round within what is timed is cut short
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
        ids = [(5 * i + 2) % target.model.config.vocab_size for i in range(past)]
        self.request = Request("one", "", ids, past, params, most, seed=0)
        self.engine.add_request(self.request)
        for _ in range(2):  # the target reads the prompt, then the draft
            self.engine.step()
        self.first, self.wanted = self.request.num_output_tokens, new_tokens
        self.num_rounds = 0

    @property
    def num_tokens(self) -> int:
        """What was generated in the time that counts."""
        return self.request.num_output_tokens - self.first

    def run(self) -> None:
        """Decode until there are as many tokens as are wanted, or a few more."""
        while self.request.num_output_tokens < self.wanted:
            self.engine.step()
            self.num_rounds += 1


def _times(run: Callable[[], Any]) -> Callable[[int], Any]:
    def several(count: int) -> None:
        for _ in range(count):
            run()

    return several
