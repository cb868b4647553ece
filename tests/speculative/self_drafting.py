"""What every drafter that uses the target's own cache must keep, as checks that the tests of each call."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.batch import Segment
from minillm.cache.base import KVCache
from minillm.cache.paged import PagedKVCache
from minillm.speculative.chain_drafter import ChainDrafter
from minillm.speculative.draft_policy import FixedDrafts
from minillm.trace import BlocksShared, DraftProposed, RequestPreempted, StepRan
from tests.conftest import TinyPair
from tests.speculative.three_tokens import expected_triples, p_of_triples

PROMPTS = [
    "def add(a, b):\n    return a + b\n\n\nclass Stack:",
    "for line in path.read_text():\n    if not line.strip():",
    "import os\n\n\ndef walk(root):\n    for name in os.listdir(root):",
    "def add(a, b):\n    return a + b\n\n\nclass Queue:\n    def push",
]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
FEWER_BITS: list[dict[str, Any]] = [{"quantization": "int8"}, {"quantization": "w8a8"}, {"kv_cache_dtype": "int8"}]
COOLER = 10.0
"""What the planted mistake multiplies logits by."""


def tokens(llm: LLM, params: Any = GREEDY) -> list[list[int]]:
    """Tokens of all prompts together, one list per prompt. Nothing is left in use."""
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    llm.engine.scheduler.check_integrity()
    assert llm.engine.pool.num_used == 0
    return [output.outputs[0].token_ids for output in outputs]


def survives_preemption_prefix_sharing_and_chunks(
    tiny: TinyPair, speculative: dict[str, Any], sampled: bool, **options: Any
) -> None:
    """The tokens are those of an engine without drafts, also where prompts are found in the prefix cache."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    if sampled:  # top_k=1: chance takes part in every step, and has one outcome
        params = SamplingParams(temperature=0.7, top_k=1, seed=4, max_tokens=24, ignore_eos=True)
    options |= {"block_size": 4, "max_num_batched_tokens": 40, "max_num_seqs": 4}
    plain = LLM(str(tiny.target), **options)
    right = [plain.generate(p, params, use_tqdm=False)[0].outputs[0].token_ids for p in PROMPTS]
    llm = LLM(str(tiny.target), num_kv_blocks=22, speculative_config=speculative, **options)
    for _ in range(2):  # the second time prompts are found in the prefix cache
        with llm.trace() as trace:
            assert tokens(llm, params) == right
        assert trace.of(DraftProposed)
    assert trace.of(RequestPreempted) and trace.of(BlocksShared)
    assert any(len(step.work) > 1 for step in trace.of(StepRan))


def stops_completions_aborts_and_later_requests_are_plain(
    tiny: TinyPair, speculative: dict[str, Any], **options: Any
) -> None:
    """Each request ends as it does without drafts, and leaves no block in use."""

    def run(llm: LLM) -> list[tuple[list[int], str | None]]:
        many = SamplingParams(n=3, seed=5, max_tokens=14, ignore_eos=True, temperature=0.8, top_k=1)
        requests = llm.submit([PROMPTS[2]], many) + llm.submit([PROMPTS[3]], stops)
        for count in range(40):
            if count == 3:
                requests += llm.submit([PROMPTS[2], PROMPTS[0]], GREEDY)
                llm.engine.abort(requests[1].request_id)
            llm.engine.step()
        llm.engine.scheduler.check_integrity()
        assert not llm.engine.has_requests and llm.engine.pool.num_used == 0
        return [(r.output_token_ids, r.finish_reason) for r in requests]

    plain = LLM(str(tiny.target), block_size=4, **options)
    whole = plain.generate(PROMPTS[3], GREEDY, use_tqdm=False)[0].outputs[0].text
    stops = SamplingParams(temperature=0, max_tokens=30, stop=whole[len(whole) // 2 :][:3])
    right, got = run(plain), run(LLM(str(tiny.target), block_size=4, speculative_config=speculative, **options))
    assert [reason for _, reason in got] == [reason for _, reason in right]
    assert "stop" in [reason for _, reason in got] and got[1][1] == "abort"
    assert [one for i, one in enumerate(got) if i != 1] == [one for i, one in enumerate(right) if i != 1]


def an_interrupt_after_drafting_leaves_nothing_behind(tiny: TinyPair, speculative: dict[str, Any]) -> None:
    """Every third time, the step ends between drafting and verifying. The tokens are those without drafts."""
    llm = LLM(str(tiny.target), block_size=4, speculative_config=speculative)
    real, calls = llm.engine.drafter.propose, []

    def propose(*args: Any) -> Any:
        calls.append(real(*args))
        if len(calls) % 3 == 0:
            raise KeyboardInterrupt
        return calls[-1]

    llm.engine.drafter.propose = propose
    requests = llm.submit(PROMPTS, GREEDY)
    while llm.engine.has_requests:
        with suppress(KeyboardInterrupt):
            llm.engine.step()
        llm.engine.scheduler.check_integrity()
    assert len(calls) > 3
    assert [r.output_token_ids for r in requests] == tokens(LLM(str(tiny.target), block_size=4))


def cache_is_that_of_a_plain_run(
    tiny: TinyPair, speculative: dict[str, Any], llm: LLM | None = None, tolerance: float = 1e-4, **options: Any
) -> None:
    """After every step, keys and values of the computed tokens are those that one prefill stores."""
    llm = llm or LLM(str(tiny.target), block_size=4, speculative_config=speculative, enforce_eager=True, **options)
    plain = LLM(str(tiny.target), block_size=4, enforce_eager=True, **options)
    engine, checked = llm.engine, 0
    [request] = llm.submit([PROMPTS[2]], GREEDY)
    while engine.has_requests:
        engine.step()
        if not request.block_table:
            break
        count = request.num_computed_tokens
        slots = [request.block_table[i // 4] * 4 + i % 4 for i in range(count)]
        plain.engine.runner.run([Segment(request.token_ids[:count], 0, list(range(-(-count // 4))))])
        for mine, right in zip(*(rows_of(one.engine.runner.cache) for one in (llm, plain)), strict=True):
            assert torch.allclose(mine[:, slots], right[:, :count], atol=tolerance)
        checked += 1
    assert checked > 5


def tokens_of_fewer_bits_are_those_undrafted(tiny: TinyPair, speculative: dict[str, Any], **options: Any) -> None:
    """With weights or a cache of fewer bits, the tokens are those of the same bits without drafts."""
    drafted, plain = (
        LLM(str(tiny.target), block_size=4, enforce_eager=True, speculative_config=config, **options)
        for config in (speculative, None)
    )
    assert tokens(drafted) == tokens(plain)


def rows_of(cache: KVCache) -> tuple[Tensor, Tensor]:
    """All keys and all values as attention reads them, `[num_layers, num_slots, num_kv_heads, head_dim]` each."""
    if isinstance(cache, PagedKVCache):
        return cache.keys, cache.values
    rows = cache.stored_rows()
    return rows.dequantise(*rows.keys), rows.dequantise(*rows.values)


def lengths_after_each_token(llm: LLM) -> dict[int, set[int]]:
    """How many drafts the first round had, by the token that the prompt's step chose, over many seeds.

    Each set has one element unless the length depends on what was drawn. Then q is not what the drafts were drawn from;
    a test of the text's distribution sees that only if the difference is large.
    """
    params = [SamplingParams(seed=i, max_tokens=6, ignore_eos=True, top_k=3) for i in range(60)]
    with llm.trace() as trace:
        outputs = llm.generate([PROMPTS[0]] * len(params), params, use_tqdm=False)
    first: dict[str, int] = {}
    for event in trace.of(DraftProposed):
        first.setdefault(event.request_id, len(event.token_ids))
    found: dict[int, set[int]] = {}
    for output in outputs:
        found.setdefault(output.outputs[0].token_ids[0], set()).add(first[output.request_id])
    return found


def length_does_not_depend_on_what_is_drawn(llm: LLM) -> None:
    """After the same tokens, the first round has the same number of drafts."""
    lengths = lengths_after_each_token(llm)
    assert len(lengths) == 3 and all(len(seen) == 1 for seen in lengths.values())


def follows_the_target_unless_drafts_are_drawn_cooler(
    tiny: TinyPair, speculative: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """χ² of the first three tokens, without seeds of the requests' own: what a drafter observed does not choose the
    drafts of a request with a seed. A correct engine fails with probability 1e-6 over the engine's seed. With the
    planted mistake, drafts are drawn from a cooler distribution than the one that is told as q."""
    expected, policy = expected_triples(tiny, **options), FixedDrafts(2)
    assert p_of_triples(tiny, expected, speculative, policy, options) > 1e-6
    draw = ChainDrafter._draw

    def cooler(self: ChainDrafter, logits: Tensor, states: Any) -> tuple[list[int], Tensor]:
        return draw(self, logits * COOLER, states)[0], draw(self, logits, states)[1]

    monkeypatch.setattr(ChainDrafter, "_draw", cooler)
    assert p_of_triples(tiny, expected, speculative, policy, options) < 1e-6
