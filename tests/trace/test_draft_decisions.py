"""A trace tells how many drafts requests may have and why, whoever decided it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minillm import LLM, SamplingParams
from minillm.request import Request
from minillm.speculative.adaptive_drafts import AdaptiveDrafts
from minillm.speculative.draft_policy import DraftPlan, FixedDrafts
from minillm.speculative.loss_limit import LossLimit
from minillm.speculative.step_costs import StepCosts
from minillm.trace import DraftsPlanned, StepRan, Trace
from tests.conftest import TinyPair


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def decisions(trace: Trace) -> list[tuple[str, list[str], list[int], bool]]:
    """Reason, requests, numbers of drafts, and whether anything was predicted."""
    return [(e.reason, e.request_ids, e.num_drafts, bool(e.speedups)) for e in trace.of(DraftsPlanned)]


class AlwaysHopeful(AdaptiveDrafts):
    """Learns from the clock only what steps without drafts take."""

    def step_finished(self, drafts: Mapping[Request, int], num_rows: int, num_context: int, seconds: float) -> None:
        if not drafts:
            self.plain_times.add(num_rows, num_context, seconds)


class StatedSeconds(LossLimit):
    """On a machine where a step with drafts takes as long as nine without."""

    def step_finished(self, drafts: Mapping[Request, int], num_rows: int, num_context: int, seconds: float) -> None:
        super().step_finished(drafts, num_rows, num_context, 9.0 if drafts else 1.0)


def test_steps_to_be_compared_and_a_rest_after_a_loss_are_told_once_with_their_reason(tiny: TinyPair) -> None:
    """The draft model is the target, so every draft is accepted."""
    draft = {"method": "draft_model", "model": str(tiny.target), "num_speculative_tokens": 2}
    llm = LLM(str(tiny.target), enforce_eager=True, speculative_config=draft)
    hopeful = AlwaysHopeful(2, StepCosts({1: 1.0, 64: 1.0}))
    policy = llm.engine.scheduler.draft_policy = StatedSeconds(hopeful, hopeful.plain_times)
    with llm.trace() as trace:
        llm.generate("def f(", greedy(60), use_tqdm=False)
    assert decisions(trace) == [
        ("predicted", ["0"], [2], True),
        ("compared", ["0"], [0], False),
        ("predicted", ["0"], [2], False),
        ("loss", ["0"], [0], False),
    ]
    latest, steps = [0], []
    for event in trace:
        if isinstance(event, DraftsPlanned):
            latest = event.num_drafts
        elif isinstance(event, StepRan) and event.work[0].kind != "prefill":
            steps.append((latest != [0], event.work[0].kind == "verify"))
    assert all(told == drafted for told, drafted in steps) and len(steps) > 30
    with llm.trace() as later:  # drafting still rests
        llm.generate("def f(", greedy(5), use_tqdm=False)
    assert decisions(later) == [("loss", ["1"], [0], False)]
    seeded = Request("seeded", "", [1], 1, SamplingParams(seed=3), 9, seed=3)
    plan = policy.plan([Request("other", "", [1], 1, greedy(9), 9, seed=0), seeded], 2)
    assert (plan.reason, plan.num_drafts) == ("loss", [0, 2])


def test_a_decision_is_told_again_for_another_request_and_not_when_one_ends(tiny: TinyPair) -> None:
    class Resting(FixedDrafts):
        def plan(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
            return DraftPlan([0] * len(requests), num_steps=3, reason="loss")

    llm = LLM(str(tiny.target), enforce_eager=True, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    llm.engine.scheduler.draft_policy = Resting(2)
    with llm.trace() as trace:
        llm.submit(["def f(", "import os"], [greedy(30), greedy(5)])
        for _ in range(12):
            llm.engine.step()
        llm.submit(["for i"], greedy(5))
        while llm.engine.has_requests:
            llm.engine.step()
    assert [(ids, counts) for _, ids, counts, _ in decisions(trace)] == [(["0", "1"], [0, 0]), (["0", "2"], [0, 0])]


def test_more_requests_than_may_draft_are_told_and_so_is_the_fixed_number_behind_them(tiny: TinyPair) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "adaptive": False, "disable_by_batch_size": 1}
    llm = LLM(str(tiny.target), enforce_eager=True, speculative_config=ngram)
    with llm.trace() as trace:
        llm.generate("def f(", greedy(5), use_tqdm=False)
        assert not trace.of(DraftsPlanned)  # nothing was decided
        llm.generate(["def f(", "import os"], [greedy(5), greedy(9)], use_tqdm=False)
    assert decisions(trace) == [("batch_size", ["1", "2"], [0, 0], False), ("fixed", ["2"], [2], False)]
