"""What the parts of a step cost, measured when an engine starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from minillm import LLM
from minillm.speculative import step_costs
from minillm.speculative.step_costs import StepCosts
from tests.conftest import TinyPair

TRUE = StepCosts({n: 1.0 + 0.1 * n for n in range(1, 65)}, 0.001, 0.4, 0.2, 0.03, 0.0002, 0.0003)


def seconds(run: Callable[[], Any]) -> float:
    """What a run takes on a machine with the costs `TRUE`."""
    assert isinstance(run, partial)
    if run.func is step_costs._forward:
        _, _, past, rows = run.args
        return TRUE.target(rows, past, rows)
    requests, num_drafts = run.args
    return TRUE.draft(len(requests), num_drafts[0], sum(request.num_computed_tokens for request in requests))


def test_costs_are_those_of_the_machine(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose times are exact, so all costs must be found."""

    def timed(runs: Mapping[str | int, Callable[[], Any]], plain: Callable[[], Any]) -> dict[str | int, float]:
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
