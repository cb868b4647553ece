"""Every lossless method on the bundled pair and 200 held-out prompts: greedy tokens are those of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import pytest

from minillm import LLM, SamplingParams
from minillm.bench.speculation import slice_prompts
from minillm.models.held_out import held_out_prompts
from minillm.request import Request
from minillm.trace import BlocksShared, DraftProposed, RequestPreempted
from tests.speculative.reading import long, spire

pytestmark = pytest.mark.long

DRAFT = {"method": "draft_model", "model": "minicoder-draft"}
METHODS: dict[str, dict[str, Any]] = {
    "draft_model": DRAFT,
    "draft_model, likely": {**DRAFT, "min_survival": 0.1},
    "draft_model, blocks": {**DRAFT, "rejection_sample_method": "block"},
    "draft_tree": {**DRAFT, "method": "draft_tree"},
    "draft_tree, measured": {**DRAFT, "method": "draft_tree", "tree_shape": "measured"},
    "staged": {**DRAFT, "method": "staged"},
    "ngram": {"method": "ngram", "prompt_lookup_min": 2},
    "suffix": {"method": "suffix"},
    "suffix or draft_model": {"method": "suffix", "fallback": DRAFT},
    "heads": {"method": "heads"},
    "prompt_tokens": {"method": "prompt_tokens"},
    "self_sparse": {"method": "self_sparse"},
    "self_quant": {"method": "self_quant"},
    "spire": {"method": spire()},
    "long": {"method": long()},
}
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@cache
def prompts() -> list[str]:
    """The 128 held-out prompts, the ends of the prompts of the benchmark's slices, and the first halves of 24."""
    found = [prompt.prompt for prompt in held_out_prompts()]
    found += [text[-600:] for name, texts in slice_prompts().items() if name != "long files" for text in texts]
    halves = [text[: len(text) // 2] for text in found if len(text) > 100]
    return found + halves[: 200 - len(found)]


@cache
def plain(layout: str) -> tuple[list[list[int]], list[SamplingParams], list[tuple[list[int], str, str | None]]]:
    """Without drafts and alone: the tokens of each prompt; and parameters with stop strings and several completions,
    with the tokens, text and finish reason of each completion."""
    llm = LLM("minicoder", max_num_seqs=1, enable_prefix_caching=False, kv_cache_config={"layout": layout})
    outputs = [output.outputs[0] for output in llm.generate(prompts(), GREEDY, use_tqdm=False)]
    params = [replace(GREEDY, stop=one.text[8:11] or None) if i % 3 == 0 else GREEDY for i, one in enumerate(outputs)]
    # top_k=1: the completions are greedy, but each is drawn.
    params = [replace(one, n=2, temperature=0.8, top_k=1) if i % 5 == 0 else one for i, one in enumerate(params)]
    found = [one for output in llm.generate(prompts(), params, use_tqdm=False) for one in output.outputs]
    return (
        [one.token_ids for one in outputs],
        params,
        [(one.token_ids, one.text, one.finish_reason) for one in found],
    )


@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("method", METHODS)
def test_alone_and_together(method: str, adaptive: bool) -> None:
    """Together: with little memory, chunked prompts, stop strings, several completions and aborted requests."""
    layout = "paged_two_level" if method == "self_quant" else "paged"
    options = {"speculative_config": {**METHODS[method], "adaptive": adaptive}, "kv_cache_config": {"layout": layout}}
    right, params, completions = plain(layout)
    assert len(right) == len(set(prompts())) == 200

    alone = LLM("minicoder", max_num_seqs=1, **options)
    with alone.trace() as trace:
        found = [output.outputs[0].token_ids for output in alone.generate(prompts(), GREEDY, use_tqdm=False)]
    assert found == right
    assert trace.of(DraftProposed)
    del alone

    llm = LLM("minicoder", block_size=4, max_num_seqs=16, max_num_batched_tokens=96, num_kv_blocks=90, **options)
    for _ in range(2):  # the second time some prompts are found in the prefix cache
        with llm.trace() as trace:
            requests = llm.submit(prompts(), params)
            step_until_done(llm, requests)
        assert trace.of(RequestPreempted) and trace.of(BlocksShared)
        assert {"stop", "length", "abort"} <= {request.finish_reason for request in requests}
        for request, (token_ids, text, reason) in zip(requests, completions, strict=True):
            if request.finish_reason == "abort":
                assert request.output_token_ids == token_ids[: len(request.output_token_ids)]
            else:
                assert (request.output_token_ids, request.text, request.finish_reason) == (token_ids, text, reason)


def step_until_done(llm: LLM, requests: list[Request]) -> None:
    """Run all requests. Every 20 steps one of those that have begun is aborted. Nothing stays in use."""
    for step in count(1):
        if not llm.engine.has_requests:
            break
        llm.engine.step()
        begun = [request for request in requests if not request.finished and request.output_token_ids]
        if step % 20 == 0 and begun:
            llm.engine.abort(begun[0].request_id)
    llm.engine.scheduler.check_integrity()
    assert llm.engine.pool.num_used == 0
