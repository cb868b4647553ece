"""Anchors: of a finished line only its end is seen and stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minillm import LLM
from minillm.cache.anchors import AnchorsKVCache
from minillm.errors import ConfigError, MinillmError, UnsupportedError
from minillm.models.decoder import Decoder
from minillm.trace import DraftProposed, RequestPreempted
from tests.cache.engines import engine, tokens
from tests.cache.prompt_steps import Definition, outputs_are_the_definitions, random_text, step_of
from tests.cache.runs import ENGINES, PROMPTS, PreemptingScheduler, draft_of, generated, paged
from tests.cache.steps import CONTEXT, CPU, small_config, tensor_bytes
from tests.conftest import TinyPair

ANCHORS = {0, 3}


def token_at(position: int) -> int:
    return position * position % 13


def definition(window: int, sinks: int) -> Definition:
    def made(q: Tensor, k: Tensor, v: Tensor, prompt: int) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(0, 1) for x in (k, v))
        gone = torch.zeros(len(keys), len(q), len(q), dtype=torch.bool)
        for p in range(len(q)):
            for j in range(p + 1):
                line_ended = any(token_at(i) in ANCHORS for i in range(j, p))
                seen = token_at(j) in ANCHORS or j < sinks or j > p - window or not line_ended
                gone[:, p, j] = not seen
        return keys, values, gone

    return made


def make(window: int, sinks: int, spare: int, dtype: torch.dtype = torch.float64) -> AnchorsKVCache:
    cache = AnchorsKVCache(small_config(), 3, CONTEXT, dtype, CPU, window=window, sinks=sinks, spare=spare)
    cache.anchor_ids = torch.tensor(sorted(ANCHORS))
    return cache


@pytest.mark.parametrize("window, sinks, spare", [(1, 0, 3), (5, 2, 16), (9, 1, 4), (100, 0, 3)])
def test_a_query_sees_anchors_its_own_line_sinks_and_window(window: int, sinks: int, spare: int) -> None:
    """Chunks, places that change hands, and drafts that end a line and are rejected."""
    config = small_config()
    for seed in range(2):
        texts = [random_text(config, n, 0) for n in (40, 25, 55)]
        cache = make(window, sinks, spare)
        outputs_are_the_definitions(cache, config, definition(window, sinks), seed, texts, token_at)


def test_a_draft_that_ends_a_line_drops_nothing_that_is_needed_when_it_is_rejected() -> None:
    """A draft model runs its drafts one step after the other; then all of them are rolled back at once."""
    text = random_text(small_config(), 40, None)
    outs = []
    for drafts in ([], [0, 1, 1]):  # 0 ends a line
        cache = make(window=2, sinks=0, spare=3)
        parts = [(0, 30, [1] * 30), *((30 + i, 31 + i, [token]) for i, token in enumerate(drafts)), (30, 31, [1])]
        for past, end, token_ids in parts:
            step = step_of([(0, past, end - past, None)], token_ids)
            for layer in range(2):
                out = cache.attend(layer, *(x[layer][past:end] for x in (text.q, text.k, text.v)), step)
        outs.append(out)
    torch.testing.assert_close(outs[1], outs[0])


def test_rows_out_of_sight_are_dropped_and_their_bytes_with_them() -> None:
    config, cache = small_config(), make(window=4, sinks=1, spare=2)
    text = random_text(config, CONTEXT, None)
    for past, end in ((0, 100), (100, 101)):
        step = step_of([(0, past, end - past, None)], [token_at(i) for i in range(past, end)])
        for layer in range(2):
            cache.attend(layer, *(x[layer][past:end] for x in (text.q, text.k, text.v)), step)
    # The newest token that can be rolled back to is 99; its line began after the last anchor before it.
    line = max(i for i in range(99) if token_at(i) in ANCHORS) + 1
    held = [j for j in range(101) if token_at(j) in ANCHORS or j < 1 or j > 99 - 4 or j >= line]
    assert cache.requests[0].positions.tolist() == held and len(held) < 40
    assert cache.num_bytes == len(held) * (2 * 2 * config.kv_size * 8 + 8 + 8 + 1)
    assert tensor_bytes(cache) == cache.num_bytes + cache.model_bytes
    assert cache.num_bytes <= cache.bytes_per_block(config, CONTEXT, torch.float64)


def test_a_window_as_long_as_the_context_gives_the_plain_tokens(tiny: TinyPair) -> None:
    layout = {"layout": "anchors", "window": 256}
    for options in ENGINES:
        assert generated(str(tiny.target), layout, **options) == paged(str(tiny.target))
    assert generated(str(tiny.target), layout, speculative_config=draft_of(tiny)) == paged(str(tiny.target))


def test_the_same_tokens_however_they_were_computed(tiny: TinyPair) -> None:
    options, model = {"kv_cache_config": {"layout": "anchors", "window": 3, "sinks": 1}}, str(tiny.target)
    llm = engine(options, model)
    assert llm.engine.tokenizer.encode("\n")[0] in llm.engine.runner.cache.anchor_ids
    expected = tokens(llm, PROMPTS, 20)
    assert expected != tokens(engine({}, model), PROMPTS, 20)
    assert tokens(engine(options, model, max_num_batched_tokens=5, max_num_seqs=3), PROMPTS, 20) == expected
    llm = engine(options, model, scheduler_cls=PreemptingScheduler, max_num_batched_tokens=24, max_num_seqs=4)
    with llm.trace() as trace:
        assert tokens(llm, PROMPTS, 20) == expected
    assert trace.of(RequestPreempted)
    llm = engine(options, model, speculative_config=draft_of(tiny))
    with llm.trace() as trace:
        assert tokens(llm, PROMPTS, 20) == expected
    assert trace.of(DraftProposed)


def test_what_it_cannot_do_is_refused(tiny: TinyPair) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"window": 0}, r"window=0 must be an integer of at least 1"),
        ({"sinks": -1}, r"sinks=-1 must be"),
        ({"spare": 1.5}, r"spare=1.5 must be"),
    ]
    for options, words in bad:
        with pytest.raises(ConfigError, match=words):
            LLM(str(tiny.target), kv_cache_config={"layout": "anchors", **options})
    with pytest.raises(UnsupportedError, match="sliding window of 9 tokens"):
        AnchorsKVCache.bytes_per_block(small_config(sliding_window=9), CONTEXT, torch.float32)
    with pytest.raises(ConfigError, match="there is no tokenizer"):
        make(4, 1, 2).prepare(Decoder(small_config()))
    with pytest.raises(UnsupportedError, match=r"num_speculative_tokens=3 .*can roll back 2 tokens"):
        LLM(str(tiny.target), kv_cache_config={"layout": "anchors", "spare": 2}, speculative_config=draft_of(tiny))


def test_rolling_back_further_than_allowed_is_an_error() -> None:
    config, cache = small_config(), make(4, 1, 2)
    text = random_text(config, 40, None)
    cache.attend(0, text.q[0], text.k[0], text.v[0], step_of([(0, 0, 40, None)], [1] * 40))
    with pytest.raises(MinillmError, match=r"from 40 tokens to 37, but layout 'anchors' allows spare=2"):
        cache.attend(0, text.q[0][:1], text.k[0][:1], text.v[0][:1], step_of([(0, 37, 1, None)], [1]))
