"""From logits to verdicts: which tokens each request gains."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from minillm.engine.request import Request
from minillm.sampling import Draw, choose, likeliest, probs_from_logits, uniform
from minillm.speculative.drafter import Draft
from minillm.speculative.rejection_sampler import Verdict, greedy_verdicts, rejection_sample


def judge(requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor) -> list[Verdict]:
    """One verdict per request. `logits`: `[sum of (drafts + 1), vocab]`; a request's row j judges its draft j, its last
    row is the bonus, or without drafts the next token.

    Where nobody's tokens depend on chance, no distribution is made: the likeliest tokens decide, with the same outcome.
    """
    token_ids = [draft.token_ids for draft in drafts]
    if all(r.takes_likeliest and d.probs is None for r, d in zip(requests, drafts, strict=True)):
        return greedy_verdicts(token_ids, likeliest(logits))
    rows = [
        request.sampling_row(drafted[:j])
        for request, drafted in zip(requests, token_ids, strict=True)
        for j in range(len(drafted) + 1)
    ]
    seeds, first_index = [request.seed for request in requests], [request.num_tokens for request in requests]
    if not any(token_ids):
        uniforms = [uniform(seed, index, Draw.SAMPLE) for seed, index in zip(seeds, first_index, strict=True)]
        return [Verdict([token], 0) for token in choose(logits, rows, uniforms).tolist()]
    probs = probs_from_logits(logits, rows)
    return rejection_sample(token_ids, [draft.probs for draft in drafts], probs, seeds, first_index)
