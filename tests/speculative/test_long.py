"""One block that reads the target's last layer: the formula, what it may read, and what remains of a round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minillm import LLM
from minillm.batch import Batch, Segment
from minillm.errors import ConfigError
from minillm.models.layers import RMSNorm
from minillm.ops.rope import rope
from minillm.speculative.long import LongDrafter, LongRound, RecentRows
from minillm.speculative.long_model import LongModel, LongShape
from minillm.speculative.spire_model import KVRows
from minillm.trace import TokensCommitted
from tests.conftest import TinyPair, random_model
from tests.speculative.reading import a_request, drafts_follow_from_the_text, long, long_of, method, target_of
from tests.speculative.self_drafting import (
    follows_the_target_unless_drafts_are_drawn_cooler,
    length_does_not_depend_on_what_is_drawn,
    tokens,
)
from tests.speculative.test_spire import heads_of, one_head

SHAPES = {"published": {"window": 6}, "narrow": {"intermediate_size": 32}, "no cross": {"cross_attention": False}}


def norm(layer: RMSNorm, x: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + layer.eps).sqrt() * layer.weight


def naive_logits(model: LongModel, keys: Tensor, values: Tensor, text: list[int]) -> Tensor:
    """Logits after the last token of `text`, one head at a time. `keys`, `values`: the target's rows of the verified
    tokens, `[verified, num_kv_heads, head_dim]`."""
    parts, block, last = model.target, model.block, len(text) - 1
    groups = block.num_heads // block.num_kv_heads
    rows = [heads_of(block, parts.embedding[token], t, parts) for t, token in enumerate(text)]
    seen = range(max(0, last - model.shape.window + 1), last + 1)
    out = [
        one_head(rows[last][0][h], [rows[s][1][h // groups] for s in seen], [rows[s][2][h // groups] for s in seen])
        for h in range(block.num_heads)
    ]
    x = parts.embedding[text[last]] + block.o_proj.weight @ torch.cat(out)
    if model.cross is not None:
        q = (model.cross.q_proj.weight @ norm(model.cross.norm, x)).view(-1, block.head_dim)
        q = rope(q[None], *parts.rotations(torch.tensor([last])))[0]
        out = [one_head(q[h], [*keys[:, h // groups]], [*values[:, h // groups]]) for h in range(block.num_heads)]
        x = x + model.cross.o_proj.weight @ torch.cat(out)
    x = x + block.mlp(norm(block.post_attention_norm, x)[None])[0]
    return parts.logits(norm(model.norm, x)[None])[0]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("num_tokens", [2, 6, 7, 23])
def test_a_round_is_the_formula(tiny: TinyPair, shape: dict[str, Any], num_tokens: int) -> None:
    """Against float64 and naive loops, over the target's own cache."""
    llm = LLM(str(tiny.target), speculative_config={"method": long(**shape)}, block_size=4, enforce_eager=True)
    drafter, runner, table = llm.engine.drafter, llm.engine.runner, [3, 9, 4, 11, 0, 8, 7]
    text = [(7 * i) % 300 for i in range(num_tokens)]
    runner.run([Segment(text[:-1], 0, table)])
    current = drafter.begin([a_request(text, table)])
    slots = [table[i // 4] * 4 + i % 4 for i in range(num_tokens - 1)]
    keys, values = (rows[slots].double() for rows in runner.cache.stored_rows().layer(1, 16))
    exact = long_of(runner.model.double(), **shape).double()
    with torch.inference_mode():
        for token in (None, 5, 250, 5):
            text = text if token is None else [*text, token]
            found = current.step(torch.tensor(text[-1:]))[0]
            assert torch.allclose(found.double(), naive_logits(exact, keys, values, text), atol=2e-4)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_greedy_tokens_are_the_plain_ones(tiny: TinyPair, block_size: int, shape: dict[str, Any]) -> None:
    llm = LLM(str(tiny.target), speculative_config={"method": long(**shape)}, block_size=block_size)
    with llm.trace() as trace:
        assert tokens(llm) == tokens(LLM(str(tiny.target), block_size=block_size))
    judged = [e for e in trace.of(TokensCommitted) if e.num_drafts]
    assert judged and sum(e.num_accepted for e in judged) < sum(e.num_drafts for e in judged)


@pytest.mark.parametrize("window", [1, 6, 512])
def test_drafts_follow_from_the_text(tiny: TinyPair, window: int) -> None:
    options: dict[str, Any] = {"num_kv_blocks": 34, "max_num_batched_tokens": 24}
    assert drafts_follow_from_the_text(str(tiny.target), long(window=window), **options) > 20


class SeesDraftSlots(LongRound):
    """A planted mistake: cross-attention reads the slots of the tokens that are being drafted, too."""

    def _verified(self) -> Batch:
        return self.runner.batch([Segment([0], r.num_tokens - 1, r.block_table) for r in self.requests])


def test_cross_attention_that_reads_slots_which_are_not_verified_is_seen(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minillm.speculative.long.LongRound", SeesDraftSlots)
    with pytest.raises(AssertionError):
        drafts_follow_from_the_text(str(tiny.target), long())


class TrustsDrafts(LongDrafter):
    """A planted mistake: the rows of drafts are kept as if all of them had been accepted."""

    def propose(self, requests: Any, num_drafts: Any) -> Any:
        drafts = super().propose(requests, num_drafts)
        for request, draft in zip(requests, drafts, strict=True):
            known, count = self._recent[request], len(draft.token_ids)
            positions = torch.arange(known.end, known.end + count)
            new = self.model.rows(torch.tensor([request.token_ids[-1], *draft.token_ids[:-1]]), positions)
            rows = KVRows(torch.cat((known.rows.keys, new.keys)), torch.cat((known.rows.values, new.values)))
            self._recent[request] = RecentRows(known.end + count, rows)
        return drafts


def test_rows_of_rejected_drafts_that_are_kept_are_seen(tiny: TinyPair) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        drafts_follow_from_the_text(str(tiny.target), long(TrustsDrafts))


def test_what_lies_behind_the_verified_tokens_is_never_read(tiny: TinyPair) -> None:
    drafts = []
    for rest in (0.0, float("nan")):
        llm = LLM(str(tiny.target), speculative_config={"method": long()})
        cache = llm.engine.runner.cache
        for pool in (cache.keys, cache.values):
            pool.fill_(rest)
        llm.engine.runner.run([Segment(list(range(40, 60)), 0, [2, 5])])
        drafts.append(llm.engine.drafter.propose([a_request([*range(40, 60), 3], [2, 5])], [4])[0].token_ids)
    assert drafts[0] == drafts[1]


def test_memory_does_not_grow_with_the_text(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), speculative_config={"method": long(window=8)})
    plain = LLM(str(tiny.target))
    assert llm.engine.runner.cache.num_bytes == plain.engine.runner.cache.num_bytes
    drafter = llm.engine.drafter
    table = list(range(13))
    llm.engine.runner.run([Segment([i % 300 for i in range(200)], 0, table)])
    request = a_request([i % 300 for i in range(20)], table)
    for length in (20, 21, 24, 90, 200):
        request.token_ids[:] = [i % 300 for i in range(length)]
        drafter.propose([request], [3])
        assert drafter._recent[request].rows.keys.shape == (7, 2, 16)
        assert drafter._recent[request].end == length - 1
    drafter.request_dropped(request)
    assert request not in drafter._recent


def test_rows_that_are_kept_are_those_of_the_tokens(tiny: TinyPair) -> None:
    """Also after a stretch without drafts that is longer than the window."""
    llm = LLM(str(tiny.target), speculative_config={"method": long(window=8)})
    drafter, table = llm.engine.drafter, list(range(13))
    text = [(7 * i) % 300 for i in range(120)]
    llm.engine.runner.run([Segment(text, 0, table)])
    request = a_request(text[:3], table)
    for length in (3, 5, 9, 16, 17, 100, 101):
        request.token_ids[:] = text[:length]
        with torch.inference_mode():
            drafter._catch_up([request])
            positions = range(max(0, length - 8), length - 1)
            right = drafter.model.rows(torch.tensor([text[p] for p in positions]), torch.tensor([*positions]))
        kept = drafter._recent[request].rows
        assert torch.allclose(kept.keys, right.keys, atol=1e-5) and torch.allclose(kept.values, right.values, atol=1e-5)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
def test_quantised_caches_are_read_too(tiny: TinyPair, kv_cache_dtype: str) -> None:
    options: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "enforce_eager": True}
    llm = LLM(str(tiny.target), speculative_config={"method": long()}, **options)
    assert tokens(llm) == tokens(LLM(str(tiny.target), **options))


def test_sampled_text_follows_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """χ², with a target of one block, so that many drafts are right; a correct engine fails with probability 1e-6 over
    the engine's seed."""
    target = TinyPair(Path(target_of(tmp_path, 1)), tmp_path)
    follows_the_target_unless_drafts_are_drawn_cooler(target, {"method": long()}, monkeypatch)


def test_the_length_of_a_chain_does_not_depend_on_what_is_drawn(tiny: TinyPair) -> None:
    length_does_not_depend_on_what_is_drawn(LLM(str(tiny.target), speculative_config={"method": long()}))


def test_cross_attention_starts_with_queries_that_fit_the_targets_keys() -> None:
    """Without self-attention and MLP, the block is the attention of the target's last block over its rows."""
    target = random_model(1, 32, 1, 4, 2)
    model = long_of(target)
    x = torch.randn(3, 32)
    cos, sin = model.target.rotations(torch.arange(3))
    assert torch.allclose(model.cross.queries(x, cos, sin), target.layers[0].heads(x, cos, sin)[0], atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window=0 must be an integer of at least 1"),
        ({"intermediate_size": 0}, "intermediate_size=0"),
        ({"cross_attention": 1}, "cross_attention=1 must be True or False"),
    ],
)
def test_a_shape_is_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LongShape(32, **options)


def test_all_kinds_of_requests_may_draft_together(tiny: TinyPair) -> None:
    """Requests with fewer drafts leave the round earlier, and change nothing for the others."""
    llm = LLM(str(tiny.target), speculative_config={"method": method(LongDrafter, long_of)}, block_size=4)
    texts = [[(k * i + 1) % 300 for i in range(n)] for k, n in ((3, 9), (5, 2), (7, 21))]
    tables = [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11, 12]]
    for text, table in zip(texts, tables, strict=True):
        llm.engine.runner.run([Segment(text[:-1], 0, table)])
    requests = [a_request(text, table) for text, table in zip(texts, tables, strict=True)]
    together = llm.engine.drafter.propose(requests, [1, 4, 2])
    alone = [llm.engine.drafter.propose([r], [n])[0] for r, n in zip(requests, [1, 4, 2], strict=True)]
    assert [d.token_ids for d in together] == [d.token_ids for d in alone]
