"""Stage 6 of the GPU benchmark: the measured speed-up of speculative decoding against the predicted one.

The target is the 8B shape and the draft model the 1B shape, both with random weights, so the target would accept almost
nothing. Acceptance is therefore synthetic: the engine does all of its work, and then each draft is accepted with a
fixed probability a, up to the first rejected one. A round then yields E = (1 - a^(γ+1)) / (1 - a) tokens (Leviathan et
al. 2023, section 3.1). The promised speed-up is E / (γ·c + v), with E as drawn in the run, c = t(draft) / t(target) and
v = t(verify) / t(decode). c and v are measured here on the runners, reading the tokens included. Mechanical efficiency
is the engine's measured speed-up divided by the predicted one, which is a single number from medians: so its spread is
that of the engine alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from minillm.bench.device_clock import TimedFunction, ratios
from minillm.bench.on_gpu.findings import Report, Target
from minillm.bench.on_gpu.random_models import (
    BLOCK_SIZE,
    CONFIGS,
    SMALL,
    fast_runner,
    random_model,
    read_tokens,
    segments,
    target_name,
)
from minillm.bench.on_gpu.stage_setup import StageSetup
from minillm.cache.block_pool import BlockPool
from minillm.cache.paged import PagedKVCache
from minillm.config import EngineArgs
from minillm.engine.engine import Engine
from minillm.request import Request
from minillm.runtime.runner import ModelRunner
from minillm.sampling import SamplingParams
from minillm.speculative.draft_model import DraftModelDrafter
from minillm.speculative.draft_policy import FixedDrafts
from minillm.speculative.drafter import Draft
from minillm.speculative.rejection_sampler import Verdict

EFFICIENCY = Target(at_least=0.9)
ACCEPTANCE, DRAFTS = 0.8, 4
ROUNDS = 5


class NoText:
    """Stands in for a tokenizer: the tokens have no text."""

    def token_text(self, token_id: int) -> str:
        """No text."""
        return ""


class SyntheticJudge:
    """Does the work of the engine's own judge and waits for its outcome, then draws at random how many to accept.

    It has its own random generator, with the same seed in every run.
    """

    def __init__(self, inner: Any, acceptance: float, seed: int = 0) -> None:
        self.inner, self.acceptance, self.rng = inner, acceptance, random.Random(seed)

    def judge(
        self, requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor, all_logits: Tensor
    ) -> list[Verdict]:
        """See `HostJudge.judge`."""
        verdicts = self.inner.judge(requests, drafts, logits, all_logits)
        return [self._drawn(draft, verdict) for draft, verdict in zip(drafts, verdicts, strict=True)]

    def _drawn(self, draft: Draft, verdict: Verdict) -> Verdict:
        accepted = 0
        while accepted < len(draft.token_ids) and self.rng.random() < self.acceptance:
            accepted += 1
        return Verdict([*draft.token_ids[:accepted], verdict.token_ids[-1]], accepted)


def tokens_per_round(acceptance: float, drafts: int) -> float:
    """Return E, the expected tokens per round, including the recovered or bonus token. `acceptance` is below 1."""
    return (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


def speculation(setup: StageSetup, report: Report) -> None:
    """Measure c and v on the runners, then the engine with and without drafts in turn."""
    name, draft_name = target_name(setup), setup.size_for(SMALL, "rehearsal draft")
    past, new_tokens = setup.size_for(256, 8), setup.size_for(192, 9)
    length = past + new_tokens + 4 * BLOCK_SIZE
    target = fast_runner(setup, random_model(setup, name), PagedKVCache, 1, length)
    draft = fast_runner(setup, random_model(setup, draft_name, seed=1), PagedKVCache, 1, length)
    report.note("target, draft", [name, draft_name])
    decode, catch_up, verify = (segments(1, n, past, length, CONFIGS[name].vocab_size) for n in (1, 2, DRAFTS + 1))
    catch_up = [replace(catch_up[0], num_logits=1)]  # the last draft and the bonus token, or one recovered token
    timings = setup.time(
        TimedFunction("decode", _times(lambda: read_tokens(target.run(decode)))),
        TimedFunction("verify", _times(lambda: read_tokens(target.run(verify)))),
        TimedFunction("draft", _times(lambda: draft.draft(catch_up, DRAFTS))),
    )
    costs = [1 / r / DRAFTS for r in ratios(timings, "draft", "decode")]
    verifying = [1 / r for r in ratios(timings, "verify", "decode")]
    report.measured("c", costs, "draft / target", drafts=DRAFTS)
    report.measured("v", verifying, "verify / decode")
    report.counted("E", tokens_per_round(ACCEPTANCE, DRAFTS), "tokens a round", acceptance=ACCEPTANCE, drafts=DRAFTS)
    round_cost = (timings["draft"].median + timings["verify"].median) / timings["decode"].median  # γ·c + v
    each_cost = [DRAFTS * c + v for c, v in zip(costs, verifying, strict=True)]
    _engines(setup, report, target, draft, past, new_tokens, round_cost, each_cost)


def _engines(
    setup: StageSetup,
    report: Report,
    target: ModelRunner,
    draft: ModelRunner,
    past: int,
    new_tokens: int,
    round_cost: float,
    each_cost: Sequence[float],
) -> None:
    gains, drawn = [], 0.0
    for turn in range(setup.size_for(ROUNDS, 1) + 1):
        each = []
        for drafter in (None, draft):
            loop = Loop(target, drafter, past, new_tokens)
            each.append(setup.clock.seconds(loop.run) / loop.num_tokens)
        drawn = loop.num_tokens / loop.num_rounds
        if turn:  # the first turn warms up
            gains.append(each[0] / each[1])
    report.counted("E, as drawn", drawn, "tokens a round")
    promises = [drawn / cost for cost in each_cost]
    report.modelled("promised speed-up", drawn / round_cost, "times", promises, acceptance=ACCEPTANCE)
    report.measured("engine with drafts over without", gains, "times")
    report.measured("mechanical efficiency", [g * round_cost / drawn for g in gains], "of the promise", EFFICIENCY)


class Loop:
    """An engine whose target and draft model have prefilled the prompt, and which is timed from then on."""

    def __init__(self, target: ModelRunner, draft: ModelRunner | None, past: int, new_tokens: int) -> None:
        drafter = DraftModelDrafter(draft, 2048, greedy=True) if draft else None
        blocks = target.cache.keys.shape[1] // BLOCK_SIZE  # type: ignore[attr-defined]
        config = EngineArgs("random", block_size=BLOCK_SIZE, max_num_seqs=1, enable_prefix_caching=False)
        self.engine = Engine(
            target,
            BlockPool(blocks, BLOCK_SIZE),
            config,
            NoText(),  # type: ignore[arg-type]
            drafter,
            FixedDrafts(DRAFTS) if drafter else None,
        )
        self.engine.judge = SyntheticJudge(self.engine.judge, ACCEPTANCE)  # type: ignore[assignment]
        most = new_tokens + 3 * DRAFTS  # so that no timed round is cut short
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
        ids = [(5 * i + 2) % target.model.config.vocab_size for i in range(past)]
        self.request = Request("one", "", ids, past, params, most, seed=0)
        self.engine.add_request(self.request)
        for _ in range(2):  # the target prefills the prompt, then the draft model
            self.engine.step()
        self.first, self.wanted = self.request.num_output_tokens, new_tokens
        self.num_rounds = 0

    @property
    def num_tokens(self) -> int:
        """The number of tokens generated while timed."""
        return self.request.num_output_tokens - self.first

    def run(self) -> None:
        """Decode until there are at least as many tokens as wanted."""
        while self.request.num_output_tokens < self.wanted:
            self.engine.step()
            self.num_rounds += 1


def _times(run: Callable[[], Any]) -> Callable[[int], Any]:
    def several(count: int) -> None:
        for _ in range(count):
            run()

    return several
