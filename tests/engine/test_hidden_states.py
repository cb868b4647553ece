"""After every step a drafter that asks for it gets the hidden state of the last accepted token of each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.batch import Segment
from minillm.engine.step_rows import StepRows
from minillm.request import Request
from minillm.speculative.draft_model import DraftModelDrafter
from minillm.speculative.draft_tree import DraftTreeDrafter
from minillm.trace import RequestPreempted
from tests.conftest import TinyPair
from tests.speculative.self_drafting import GREEDY, PROMPTS


class Watcher(DraftModelDrafter):
    """A draft model that also records the hidden states."""

    observes_hidden = True
    seen: list[tuple[list[int], Tensor]]

    def observe_hidden(self, requests: Sequence[Request], hidden: Tensor) -> None:
        assert len(requests) == len(hidden) and not any(request.finished for request in requests)
        self.seen += [(list(r.token_ids), row.clone()) for r, row in zip(requests, hidden, strict=True)]


class TreeWatcher(DraftTreeDrafter):
    observes_hidden = True
    observe_hidden = Watcher.observe_hidden


def watching(target: str, draft: str, method: type = Watcher, **options: Any) -> LLM:
    llm = LLM(target, speculative_config={"method": method, "model": draft}, **options)
    llm.engine.drafter.seen = []
    return llm


def wrong_rows(llm: LLM, target: str) -> tuple[int, int]:
    """How many recorded states are not those of a plain forward over all tokens but the last, and how many are."""
    plain = LLM(target, enforce_eager=True, block_size=64).engine.runner
    wrong = right = 0
    for token_ids, hidden in llm.engine.drafter.seen:
        table = list(range(-(-len(token_ids) // 64)))
        expected = plain.run_observed([Segment(token_ids[:-1], 0, table)]).hidden[0]
        if torch.allclose(hidden, expected, atol=2e-3 * expected.abs().max().item()):
            right += 1
        else:
            wrong += 1
    return wrong, right


@pytest.mark.parametrize(
    ("eager", "options"),
    [
        (True, {}),
        (True, {"method": TreeWatcher}),
        (True, {"num_kv_blocks": 20, "max_num_batched_tokens": 9, "max_num_seqs": 3}),
        (False, {}),
        (False, {"method": TreeWatcher}),
    ],
    ids=["pytorch", "pytorch, trees", "pytorch, preempted and in chunks", "compiled", "compiled, trees"],
)
def test_hidden_state_is_that_of_the_token_before_the_last(tiny: TinyPair, eager: bool, options: dict) -> None:
    names = (str(tiny.target), str(tiny.draft)) if eager else ("minicoder", "minicoder-draft")
    llm = watching(*names, enforce_eager=eager, block_size=4 if eager else 16, **options)
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    with llm.trace() as trace:
        for _ in range(2):  # the second time all prompts are found in the prefix cache
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert bool(trace.of(RequestPreempted)) == ("num_kv_blocks" in options)
    assert all(len(output.outputs[0].token_ids) == 14 for output in outputs)
    wrong, right = wrong_rows(llm, names[0])
    assert wrong == 0 and right > 20


def test_the_row_of_another_token_is_noticed(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted mistakes: the first judged row, as if nothing had been accepted, and the last, as if everything had."""
    real = StepRows.of_last_tokens
    for shift in (lambda item, verdict: 0, lambda item, verdict: item.num_judged - 1):

        def shifted(self: StepRows, verdicts: Any, shift: Any = shift) -> list[int]:
            rows = real(self, verdicts)
            pairs = [(i, v) for i, v in zip(self.scheduled, verdicts, strict=True) if v is not None]
            return [r - v.num_accepted + shift(i, v) for r, (i, v) in zip(rows, pairs, strict=True)]

        monkeypatch.setattr(StepRows, "of_last_tokens", shifted)
        llm = watching(str(tiny.target), str(tiny.draft), enforce_eager=True, block_size=4)
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert wrong_rows(llm, str(tiny.target))[0] > 5


def test_prompt_logprobs_do_not_shift_the_rows(tiny: TinyPair) -> None:
    llm = watching(str(tiny.target), str(tiny.draft), enforce_eager=True, block_size=4)
    params = [SamplingParams(temperature=0, max_tokens=9, prompt_logprobs=i % 2 or None) for i in range(len(PROMPTS))]
    llm.generate(PROMPTS, params, use_tqdm=False)
    wrong, right = wrong_rows(llm, str(tiny.target))
    assert wrong == 0 and right >= 8


def test_no_hidden_states_are_kept_for_a_drafter_that_does_not_ask(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), speculative_config={"method": "draft_model", "model": str(tiny.draft)})
    llm.engine.runner.run_observed = None  # would raise
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def test_a_later_step_leaves_a_hidden_state_as_it_is() -> None:
    runner = LLM("minicoder").engine.runner
    hidden = runner.run_observed([Segment([5, 6, 7], 0, [0])]).hidden
    before = hidden.clone()
    runner.run([Segment([9, 10, 11, 12], 0, [1])])
    assert torch.equal(hidden, before)


def test_without_a_draft_policy_nothing_is_drafted_or_observed(tiny: TinyPair) -> None:
    llm = watching(str(tiny.target), str(tiny.draft), enforce_eager=True)
    llm.engine.scheduler.draft_policy = None
    found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    plain = LLM(str(tiny.target), enforce_eager=True).generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in found] == [output.outputs[0].token_ids for output in plain]
    assert not llm.engine.drafter.seen
