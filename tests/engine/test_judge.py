"""Judging without probabilities gives the verdicts that judging with them gives, and broken logits are refused."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from minillm import LLM, SamplingParams
from minillm.batch import Segment
from minillm.engine.judge import judge
from minillm.errors import NonFiniteLogitsError
from minillm.request import Request
from minillm.sampling import SamplingRow, argmax, probs_from_logits
from minillm.speculative.block_verification import BlockRule
from minillm.speculative.drafter import Draft
from minillm.speculative.rejection_sampler import EXACT, Rule, greedy_verdicts, rejection_sample
from tests.conftest import TinyPair

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["def add(a, b):", "for line in", "class"]


def engine(tiny: TinyPair, drafted: bool, **options: Any) -> LLM:
    config = {"model": str(tiny.draft), "num_speculative_tokens": 4} if drafted else None
    return LLM(str(tiny.target), block_size=4, speculative_config=config, **options)


def random_round(rng: random.Random) -> tuple[list[list[int]], torch.Tensor]:
    """Drafts of some requests, right more often than not, and logits of few distinct values, so that there are ties."""
    vocab = rng.choice([2, 5, 40])
    counts = [rng.choice([0, 1, 2, 5]) for _ in range(rng.randint(1, 4))]
    logits = torch.tensor([[float(rng.randint(0, 3)) for _ in range(vocab)] for _ in range(sum(counts) + len(counts))])
    best, drafts = iter(argmax(logits)), []
    for count in counts:
        right = [next(best) for _ in range(count + 1)]
        drafts.append([x if rng.random() < 0.7 else rng.randrange(vocab) for x in right[:count]])
    return drafts, logits


def test_verdicts_without_probabilities_are_those_of_rejection_sampling() -> None:
    rng, accepted = random.Random(0), set()
    for _ in range(400):
        drafts, logits = random_round(rng)
        probs = probs_from_logits(logits, [SamplingRow(GREEDY)] * len(logits))
        nobody = [None] * len(drafts)
        expected = rejection_sample(drafts, nobody, probs, list(range(len(drafts))), [9] * len(drafts))
        assert greedy_verdicts(drafts, argmax(logits)) == expected
        accepted |= {(len(x), verdict.num_accepted) for x, verdict in zip(drafts, expected, strict=True)}
    assert accepted == {(k, n) for k in (0, 1, 2, 5) for n in range(k + 1)}


@pytest.mark.parametrize("rule", [EXACT, BlockRule()], ids=["standard", "block"])
@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, temperature=1.0, seed=1)], ids=["greedy", "sampled"])
def test_a_chain_is_judged_as_without_the_tree_beside_it(rule: Rule, params: SamplingParams) -> None:
    tree = Draft([1, 2, 3], parents=[-1, -1, 0])
    accepted = set()
    for seed in range(60):
        logits = torch.randn(10, 5, generator=torch.Generator().manual_seed(seed))
        q = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed + 1000)).softmax(-1)
        chain = Draft([int(row.argmax()) for row in q], None if params is GREEDY else q)
        plain = Draft([])
        requests = [Request(str(i), "", [1, 2], 2, params, 9, seed=seed + i) for i in range(3)]
        [alone, bare] = judge(requests[:2], [chain, plain], logits[:5], rule)
        mixed = judge(requests, [chain, plain, tree], logits[:9], rule)
        assert mixed[:2] == [alone, bare]
        accepted.add(alone.num_accepted)
    assert len(accepted) > 2


@pytest.mark.parametrize(
    "changes",
    [
        *({"repetition_penalty": 1.9}, {"min_tokens": 9}, {"temperature": 0.7, "seed": 3}, {"frequency_penalty": 2.0}),
        *({"logit_bias": {3: 1.0}}, {"allowed_token_ids": [1, 2]}, {"bad_words": ["a"]}),
    ],
    ids=str,
)
def test_one_request_that_needs_probabilities_gets_them_and_changes_nobody(changes: dict[str, Any]) -> None:
    """Beside a plain greedy request, whose verdict is what it is alone."""
    torch.manual_seed(1)
    logits = torch.randn(7, 30)
    plain, bent = (
        Request("a", "", [3, 4, 5], 2, params, 24, 7, stop_ids=frozenset({int(logits[4].argmax())}))
        for params in (GREEDY, replace(GREEDY, **changes))
    )
    assert plain.takes_argmax and not bent.takes_argmax
    drafts = [Draft([int(logits[0].argmax()), int(logits[1].argmax()), 0]), Draft([1, 2])]
    alone = judge([plain], drafts[:1], logits[:4])
    assert judge([plain, bent], drafts, logits)[0] == alone[0]
    assert alone[0].token_ids[:2] == drafts[0].token_ids[:2]
    if "min_tokens" in changes:
        assert judge([bent], drafts[1:], logits[4:])[0].token_ids[0] not in bent.stop_ids


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_one_broken_logit_names_its_request_and_costs_nobody_else(tiny: TinyPair, drafted: bool, bad: float) -> None:
    llm = engine(tiny, drafted)
    expected = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    run, calls = llm.engine.runner.run, []

    def break_one(segments: Sequence[Segment]) -> torch.Tensor:
        calls.append(segments[-1].end)
        logits = run(segments).clone()
        if len(calls) == 3:
            logits[-1, 17] = bad
        return logits

    llm.engine.runner.run = break_one
    requests = llm.submit(PROMPTS, GREEDY)
    with pytest.raises(NonFiniteLogitsError) as told:
        while llm.engine.has_requests:
            llm.engine.step()
    assert f"logits for request {requests[-1].request_id} at token {calls[-1]};" in str(told.value)
    while llm.engine.has_requests:
        llm.engine.step()
    assert [request.output_token_ids for request in requests] == expected


class CountCalls(TorchFunctionMode):
    """Counts calls of PyTorch that are made in Python, but for those within the forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not self.paused
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("drafted, per_step", [(False, 8), (True, 8 + 4 * 5)], ids=["plain", "drafted"])
def test_a_greedy_step_asks_little_of_pytorch(tiny: TinyPair, drafted: bool, per_step: int) -> None:
    """A call costs microseconds whatever the model, so a step of a small one is made of them: sum, its number, the
    most likely tokens; and those again for every draft. No distribution, no copy of the logits."""
    llm = engine(tiny, drafted)
    calls = CountCalls()
    for runner in (llm.engine.runner, *([llm.engine.drafter.runner] if drafted else [])):

        def forward(segments: Sequence[Any], run: Any = runner.run) -> torch.Tensor:
            calls.paused = True
            logits = run(segments)
            calls.paused = False
            return logits

        runner.run = forward
    llm.submit(PROMPTS, GREEDY)
    llm.engine.step()
    with calls:
        while llm.engine.has_requests:
            calls.count = 0
            llm.engine.step()
            assert 0 < calls.count <= per_step
