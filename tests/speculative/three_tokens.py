"""The first three tokens of sampled completions through a whole engine, against their exact probabilities."""

from __future__ import annotations

from typing import Any

import torch

from minillm import LLM, SamplingParams
from minillm.speculative.draft_policy import DraftPolicy
from minillm.trace import TokensCommitted
from tests.chi_square import pooled_p_value
from tests.conftest import TinyPair

PROMPT = "def add(a, b):"
COUNT = 400
"""Completions."""
TOP = 3
"""Tokens that each distribution has."""
TEMPERATURE = 1.3
Expected = dict[tuple[int, ...], float]


def sampled(seed: int | None) -> SamplingParams:
    return SamplingParams(seed=seed, top_k=TOP, temperature=TEMPERATURE, max_tokens=16, ignore_eos=True)


def expected_triples(tiny: TinyPair, **options: Any) -> Expected:
    """The probabilities of the first three tokens, from the target alone. `options`: of its engine."""
    llm = LLM(str(tiny.target), enforce_eager=True, **options)
    prompt = llm.get_tokenizer().encode(PROMPT)
    found: Expected = {(): 1.0}
    for _ in range(3):
        asked = [{"prompt_token_ids": [*prompt, *path]} for path in found]
        raw = SamplingParams(temperature=0, max_tokens=1, logprobs=TOP, ignore_eos=True)
        grown = {}
        for (path, above), output in zip(found.items(), llm.generate(asked, raw, use_tqdm=False), strict=True):
            row = output.outputs[0].logprobs[0]
            probs = torch.tensor([entry.logprob / TEMPERATURE for entry in row.values()]).double().softmax(0)
            grown |= {(*path, token): above * p for token, p in zip(row, probs.tolist(), strict=True)}
        found = grown
    return found


def p_of_triples(
    tiny: TinyPair,
    expected: Expected,
    config: dict[str, Any],
    policy: DraftPolicy | None = None,
    options: dict[str, Any] | None = None,
    **attributes: Any,
) -> float:
    """The p-value of the engine's first three tokens, χ² with the rare triples in one cell. A request is aborted as
    soon as it has them. `options`: of the engine. `attributes` are set on the drafter first. With a `policy`, requests
    have no seed of their own. Rejected drafts say nothing about how they were drawn, so some must be accepted.

    A mistake that makes probabilities p into p′ gives a p-value below 1e-6 in half of the runs if Σ (p′ - p)² / p is
    0.09, with nine to eleven cells.
    """
    llm = LLM(str(tiny.target), max_num_seqs=COUNT, enforce_eager=True, speculative_config=config, **(options or {}))
    for name, value in attributes.items():
        setattr(llm.engine.drafter, name, value)
    if policy is not None:
        llm.engine.scheduler.draft_policy = policy
    requests = llm.submit([PROMPT] * COUNT, [sampled(None if policy else seed) for seed in range(COUNT)])
    with llm.trace() as trace:
        while llm.engine.requests:
            for request in llm.engine.step():
                if request.num_output_tokens >= 3:
                    llm.engine.abort(request.request_id)
    assert sum(event.num_accepted for event in trace.of(TokensCommitted)) >= COUNT // 4
    got = [tuple(request.output_token_ids[:3]) for request in requests]
    assert set(got) <= set(expected)
    return pooled_p_value(torch.tensor([got.count(path) for path in expected]), torch.tensor([*expected.values()]))
