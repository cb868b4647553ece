"""The target drafts with weights in four bits over its own cache: the tokens are those of the same cache undrafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minillm import LLM
from minillm.cache.paged_two_level import UpperNibbles
from minillm.errors import ConfigError, UnsupportedError
from minillm.export.write_quantized import quantize_checkpoint
from minillm.models.quantize import decoder_linears
from minillm.quantization.base import QuantizedLinear
from minillm.quantization.int4 import Int4
from minillm.quantization.schemes import make_scheme
from minillm.trace import TokensCommitted
from tests.conftest import TinyPair
from tests.speculative.self_drafting import (
    cache_is_that_of_a_plain_run,
    follows_the_target_unless_drafts_are_drawn_cooler,
    stops_completions_aborts_and_later_requests_are_plain,
    survives_preemption_prefix_sharing_and_chunks,
    tokens,
)

QUANT: dict[str, Any] = {"method": "self_quant", "num_speculative_tokens": 3}
TWO_LEVEL: dict[str, Any] = {"kv_cache_config": {"layout": "paged_two_level"}}
LAYOUTS = [pytest.param({}, id="paged"), pytest.param(TWO_LEVEL, id="two levels")]


def acceptance(events: list[Any]) -> float:
    judged = [e for e in events if e.num_drafts]
    return sum(e.num_accepted for e in judged) / sum(e.num_drafts for e in judged)


@pytest.mark.parametrize(
    ("layout", "eager"),
    [
        pytest.param({}, True, id="paged, pytorch"),
        pytest.param(TWO_LEVEL, True, id="two levels, pytorch"),
        pytest.param(TWO_LEVEL, False, id="two levels, compiled"),
    ],
)
def test_greedy_tokens_are_those_of_the_same_cache_undrafted(
    tiny: TinyPair, layout: dict[str, Any], eager: bool
) -> None:
    target = str(tiny.target) if eager else "minicoder"
    options: dict[str, Any] = {"block_size": 5 if eager else 16, "enforce_eager": eager, **layout}
    llm = LLM(target, speculative_config=QUANT, **options)
    for runner in (llm.engine.runner, llm.engine.drafter.runner):
        assert (runner.executor is None) == eager
    with llm.trace() as trace:
        assert tokens(llm) == tokens(LLM(target, **options))
    assert 0.1 < acceptance(trace.of(TokensCommitted)) < 1


def test_the_draft_is_the_target_in_four_bits_and_has_no_cache(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), speculative_config=QUANT, kv_cache_memory_bytes=2**20, **TWO_LEVEL)
    plain = LLM(str(tiny.target), kv_cache_memory_bytes=2**20, **TWO_LEVEL)
    target, draft = llm.engine.runner, llm.engine.drafter.runner
    assert llm.engine.pool.num_blocks == plain.engine.pool.num_blocks  # all of the memory is the target's
    assert type(draft.cache) is UpperNibbles and draft.cache.keys[0] is target.cache.keys[0]
    for (_, mine), (_, right) in zip(decoder_linears(draft.model), decoder_linears(target.model), strict=True):
        assert isinstance(mine, QuantizedLinear) and isinstance(mine.scheme, Int4)
        assert not isinstance(right, QuantizedLinear)
    over_whole_rows = LLM(str(tiny.target), speculative_config=QUANT).engine
    assert over_whole_rows.drafter.runner.cache is over_whole_rows.runner.cache


@pytest.mark.parametrize("eager", [True, False], ids=["pytorch", "compiled"])
def test_the_same_weights_over_the_same_cache_are_always_right(tiny: TinyPair, eager: bool) -> None:
    """Catches a slot or position that is one off, and keys left behind by another round."""
    target = str(tiny.target) if eager else "minicoder"
    llm = LLM(target, enforce_eager=eager, speculative_config={**QUANT, "quantization": None})
    assert llm.engine.drafter.runner.model is llm.engine.runner.model
    with llm.trace() as trace:
        assert tokens(llm) == tokens(LLM(target, enforce_eager=eager))
    assert acceptance(trace.of(TokensCommitted)) == 1


def test_a_draft_reads_the_upper_level_only(tiny: TinyPair) -> None:
    """With rubbish in the lower level it drafts the same; the target does not write the same."""
    llm = LLM(str(tiny.target), block_size=4, speculative_config=QUANT, **TWO_LEVEL)
    cache, real, rounds = llm.engine.runner.cache, llm.engine.drafter.propose, []

    def propose(requests: Any, num_drafts: Any) -> Any:
        drafts = real(requests, num_drafts)
        kept = [pools[3].clone() for pools in (cache.keys, cache.values)]
        for pools in (cache.keys, cache.values):
            pools[3].random_(0, 256)
        assert [d.token_ids for d in real(requests, num_drafts)] == [d.token_ids for d in drafts]
        for pools, lower in zip((cache.keys, cache.values), kept, strict=True):
            pools[3].copy_(lower)
        rounds.append(drafts)
        return drafts

    llm.engine.drafter.propose = propose
    right = tokens(LLM(str(tiny.target), block_size=4, **TWO_LEVEL))
    assert tokens(llm) == right and rounds
    assert tokens(LLM(str(tiny.target), block_size=4, kv_cache_dtype="int4")) != right


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_preemption_prefix_sharing_and_chunks(tiny: TinyPair, layout: dict[str, Any], sampled: bool) -> None:
    survives_preemption_prefix_sharing_and_chunks(tiny, QUANT, sampled, **layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_completions_stops_and_aborts(tiny: TinyPair, layout: dict[str, Any]) -> None:
    stops_completions_aborts_and_later_requests_are_plain(tiny, QUANT, **layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cache_holds_what_a_plain_run_would_have_put_there(tiny: TinyPair, layout: dict[str, Any]) -> None:
    """With two levels, a number near the border of two codes may differ by one step of the lower."""
    cache_is_that_of_a_plain_run(tiny, QUANT, tolerance=0.03 if layout else 1e-4, **layout)


def test_keys_of_the_draft_that_stay_in_the_cache_are_seen(tiny: TinyPair) -> None:
    """A planted mistake: the draft writes into the cache after the verification, too."""
    llm = LLM(str(tiny.target), block_size=4, speculative_config=QUANT, **TWO_LEVEL)
    runner, drafter = llm.engine.runner, llm.engine.drafter
    real = runner.run

    def run(segments: Any) -> torch.Tensor:
        logits = real(segments)
        drafter.runner.run(segments)
        return logits

    runner.run = run
    with pytest.raises(AssertionError):
        cache_is_that_of_a_plain_run(tiny, QUANT, llm, tolerance=0.03, **TWO_LEVEL)


def test_sampled_text_follows_the_target(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A χ² test; a correct engine fails with probability 1e-6 over the engine's seed."""
    follows_the_target_unless_drafts_are_drawn_cooler(tiny, QUANT, monkeypatch, **TWO_LEVEL)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"quantization": "int5"}, ConfigError, "int5"),
        ({"draft_sample_method": "random"}, ConfigError, "draft_sample_method='random'"),
        ({"budget": 8}, ConfigError, "budget=8.*'self_sparse'.*'self_quant'"),
    ],
    ids=str,
)
def test_bad_options_name_themselves(
    tiny: TinyPair, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        LLM(str(tiny.target), speculative_config={**QUANT, **options})


def test_a_quantised_target_is_its_own_draft_or_refused(tiny: TinyPair, tmp_path: Path) -> None:
    target = str(tmp_path / "int8")
    quantize_checkpoint(str(tiny.target), make_scheme("int8"), Path(target))
    with pytest.raises(ConfigError, match="quantised with 'int8'; give 'quantization': None"):
        LLM(target, speculative_config=QUANT)
    plain = tokens(LLM(target, enforce_eager=True))
    for quantization in (None, "int8"):
        config = {**QUANT, "quantization": quantization}
        assert tokens(LLM(target, speculative_config=config, enforce_eager=True)) == plain


def test_layouts_without_blocks_are_refused(tiny: TinyPair) -> None:
    with pytest.raises(UnsupportedError, match=r"'self_quant' reads the blocks.*'kivi' stores each request"):
        LLM(str(tiny.target), kv_cache_config={"layout": "kivi"}, speculative_config=QUANT)
