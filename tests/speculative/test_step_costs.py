"""What the parts of a step cost, measured when an engine starts."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import pytest

from minillm import LLM
from minillm.batch import Segment
from minillm.runtime.gpu_executor import MAX_GRAPH_QUERY_LEN
from minillm.runtime.runner import ModelRunner
from minillm.speculative import step_costs
from minillm.speculative.step_costs import StepCosts
from tests.conftest import TinyPair

TRUE = StepCosts({n: 1.0 + 0.1 * n for n in range(1, 65)}, 0.001, 0.4, 0.2, 0.03, 0.0002, 0.0003)


def seconds(run: Callable[[], Any]) -> float:
    """What a run takes on a machine with the costs `TRUE`."""
    assert isinstance(run, partial)
    if run.func is step_costs._forward:
        _, tables, past, rows = run.args
        return TRUE.target(rows, past * len(tables), rows / len(tables))
    requests, num_drafts = run.args
    return TRUE.draft(len(requests), num_drafts[0], sum(request.num_computed_tokens for request in requests))


def test_costs_are_those_of_the_machine(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose times are exact, so all costs must be found."""

    def timed(
        runs: Mapping[str | int, Callable[[], Any]], plain: Callable[[], Any], drafting: Collection[str]
    ) -> dict[str | int, float]:
        assert {name for name in runs if name in drafting} == {n for n in runs if "draft" in str(n) or n == "requests"}
        for run in runs.values():
            run()
        assert plain is runs[1]
        return {name: seconds(run) for name, run in runs.items()}

    monkeypatch.setattr(step_costs, "_time_in_turn", timed)
    options = {"method": "draft_model", "model": str(tiny.draft), "num_speculative_tokens": 4, "adaptive": True}
    llm = LLM(str(tiny.target), device="cpu", speculative_config=options, num_kv_blocks=64)
    costs = llm.llm_engine.engine.scheduler.draft_policy.policy.costs
    for name in ("context_token", "context_row", "first_draft", "next_draft", "next_request", "context_draft"):
        assert getattr(costs, name) == pytest.approx(getattr(TRUE, name)), name
    assert costs.forward[5] - costs.forward[1] == pytest.approx(TRUE.target(5, 64, 5) - TRUE.target(1, 64))


def test_without_room_for_a_long_text_nothing_is_known_of_its_costs(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The long text would be the short one, and the difference of two measurements no price of a token."""
    draw = random.Random(1)
    monkeypatch.setattr(
        step_costs,
        "_time_in_turn",
        lambda runs, plain, drafting: {name: seconds(run) * draw.uniform(0.98, 1.02) for name, run in runs.items()},
    )
    options = {"method": "draft_model", "model": str(tiny.draft), "num_speculative_tokens": 4, "adaptive": True}
    llm = LLM(str(tiny.target), device="cpu", speculative_config=options, num_kv_blocks=24)
    costs = llm.llm_engine.engine.scheduler.draft_policy.policy.costs
    assert costs.context_token == costs.context_row == costs.context_draft == 0
    assert costs.first_draft == pytest.approx(TRUE.draft(1, 1, 64), rel=0.1)


@pytest.mark.parametrize(("max_num_seqs", "num_drafts", "largest"), [(8, 4, 64), (2, 4, 32), (1, 4, 16), (1, 30, 24)])
def test_forwards_of_many_rows_are_of_several_requests(
    max_num_seqs: int, num_drafts: int, largest: int, tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in most steps. On a GPU so many rows of one request would be a prefill, which has no CUDA graph."""
    assert step_costs.ROWS_PER_REQUEST <= MAX_GRAPH_QUERY_LEN
    steps: list[list[Segment]] = []
    run = ModelRunner.run
    monkeypatch.setattr(ModelRunner, "run", lambda self, segments: steps.append(segments) or run(self, segments))
    found: dict[int, list[Segment]] = {}

    def timed(runs: Mapping[str | int, Callable[[], Any]], **_: Any) -> dict[str | int, float]:
        for name, forward in runs.items():
            forward()
            if isinstance(name, int):
                found[name] = steps[-1]
        return dict.fromkeys(runs, 1.0)

    monkeypatch.setattr(step_costs, "_time_in_turn", timed)
    options = {
        "method": "draft_model",
        "model": str(tiny.draft),
        "num_speculative_tokens": num_drafts,
        "adaptive": True,
    }
    LLM(str(tiny.target), device="cpu", speculative_config=options, num_kv_blocks=64, max_num_seqs=max_num_seqs)
    assert max(found) == largest
    for rows, segments in found.items():
        counts = [len(segment.token_ids) for segment in segments]
        assert sum(counts) == rows and max(counts) <= max(16, num_drafts + 1) and len(counts) <= max_num_seqs
        blocks = [block for segment in segments for block in segment.block_table]
        assert len(set(blocks)) == len(blocks)


@pytest.mark.parametrize(("num_drafts", "block_size"), [(17, 16), (9, 4), (16, 1), (100, 16)])
@pytest.mark.parametrize("method", ["draft_model", "self_sparse"])
def test_any_number_of_drafts_can_be_measured(
    method: str, num_drafts: int, block_size: int, tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measured requests have blocks for all of them."""
    monkeypatch.setattr(step_costs, "SECONDS", 0.0)
    options = {"method": method, "num_speculative_tokens": num_drafts, "adaptive": True}
    if method == "draft_model":
        options["model"] = str(tiny.draft)
    llm = LLM(str(tiny.target), device="cpu", speculative_config=options, block_size=block_size, num_kv_blocks=1024)
    assert llm.llm_engine.engine.pool.num_used == 0


class Cold:
    """A machine on which the target takes half as long again just behind drafts, and whose clock shows only that."""

    def __init__(self, plain: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plain, self.now, self.cold, self.calls = plain, 0.0, 0, 0
        monkeypatch.setattr(step_costs.time, "perf_counter", lambda: self.now)

    def target(self, multiple: float = 1.0) -> None:
        """A forward."""
        self.now += multiple * self.plain * (1.5 if self.cold else 1.0)
        self.cold, self.calls = max(0, self.cold - 1), self.calls + 1

    def draft(self) -> None:
        """Drafts."""
        self.now += 3 * self.plain
        self.cold, self.calls = step_costs.SETTLING_STEPS, self.calls + 1

    def times(self) -> dict[str | int, float]:
        """What is measured, over a plain step."""
        forwards = {n: partial(self.target, 1 + 0.1 * (n - 1)) for n in (1, 2, 8, 64)}
        runs = {**forwards, "long": partial(self.target, 1.7), "draft": self.draft, "drafts": self.draft}
        found = step_costs._time_in_turn(runs, plain=runs[1], drafting=("draft", "drafts"))
        return {name: seconds / self.plain for name, seconds in found.items()}


def test_nothing_is_compared_with_a_step_just_behind_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Cold(0.0003, monkeypatch).times()
    assert found == pytest.approx({1: 1.0, 2: 1.1, 8: 1.7, 64: 7.3, "long": 1.7, "draft": 3.0, "drafts": 3.0})


def test_a_slow_model_is_measured_once_and_without_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Cold(0.3, monkeypatch)
    assert machine.times().keys() == {1, 2, 8, "long", "draft", "drafts"}
    assert machine.calls == 2 + 6 + 12
