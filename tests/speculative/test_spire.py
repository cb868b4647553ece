"""The target's last blocks as a draft, with feedback memory: the formula, the mask, and what remains of a round."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from minillm import LLM
from minillm.batch import Segment
from minillm.errors import ConfigError, UnsupportedError
from minillm.models.decoder import Decoder, DecoderLayer
from minillm.ops.rope import rope
from minillm.speculative.masked_attention import PADDING, hidden_keys, masked_attention
from minillm.speculative.spire import SpireDrafter, SpireRound, visible
from minillm.speculative.spire_model import Context, KVRows, Rollout, SpireModel, SpireShape
from minillm.speculative.target_parts import TargetParts
from minillm.trace import TokensCommitted
from tests.conftest import TinyPair, random_model
from tests.speculative.reading import a_request, drafts_follow_from_the_text, spire, spire_of, target_of
from tests.speculative.self_drafting import (
    follows_the_target_unless_drafts_are_drawn_cooler,
    length_does_not_depend_on_what_is_drawn,
    tokens,
)

# ----------------------------------------------------------------------------------------------- the formula, naively


def one_head(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    scores = torch.stack([q @ k for k in keys]) / math.sqrt(len(q))
    return (scores.softmax(0)[:, None] * torch.stack(values)).sum(0)


def heads_of(layer: DecoderLayer, x: Tensor, position: int, parts: TargetParts) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of one token, `[heads, head_dim]` each, from the definition."""
    normed = x / (x.pow(2).mean() + layer.input_norm.eps).sqrt() * layer.input_norm.weight
    heads = (layer.qkv_proj.weight @ normed).view(-1, layer.head_dim)
    q, k, v = heads.split((layer.num_heads, layer.num_kv_heads, layer.num_kv_heads))
    cos, sin = parts.rotations(torch.tensor([position]))
    return rope(q[None], cos, sin)[0], rope(k[None], cos, sin)[0], v


def naive_rollout(model: SpireModel, context: list[tuple[Tensor, Tensor]], token_ids: list[int], start: int) -> Tensor:
    """Logits of each draft step, one token, block and head at a time. `context`: keys and values of the target per
    block, `[start, num_kv_heads, head_dim]` each."""
    shape, parts = model.shape, model.target
    known = [{s: (keys[s], values[s]) for s in range(start)} for keys, values in context]
    found = []
    for t, token in enumerate(token_ids, start=start):
        states = [parts.embedding[token]]
        for layer, rows in zip(model.layers, known, strict=True):
            x = states[-1]
            q, k, v = heads_of(layer, x, t, parts)
            seen = [s for s in rows if shape.window is None or s > t - shape.window or s < shape.num_sinks]
            groups = layer.num_heads // layer.num_kv_heads
            out = [
                one_head(
                    q[h], [*(rows[s][0][h // groups] for s in seen), k[h // groups]],
                    [*(rows[s][1][h // groups] for s in seen), v[h // groups]],
                )
                for h in range(layer.num_heads)
            ]  # fmt: skip
            x = x + layer.o_proj.weight @ torch.cat(out)
            states.append(x + layer.mlp(layer.post_attention_norm(x[None]))[0])
        weights = model.mixture.exp() / model.mixture.exp().sum()
        memory = sum(w * x for w, x in zip(weights, states, strict=True))
        for layer, rows in zip(model.layers, known, strict=True):
            rows[t] = heads_of(layer, memory, t, parts)[1:]
        found.append(parts.logits(model.norm(states[-1][None]))[0])
    return torch.stack(found)


def double_model(layers: int = 3, **shape: Any) -> SpireModel:
    model = spire_of(random_model(1, 32, layers, 4, 2).double(), **shape)
    model.mixture.copy_(torch.tensor([0.3, -0.8, 0.5])[: len(model.mixture)])
    return model.double()


@pytest.mark.parametrize("shape", [{}, {"window": 5}, {"window": 3, "num_sinks": 0}, {"window": None}], ids=str)
@pytest.mark.parametrize("start", [1, 2, 9])
def test_the_rollout_is_the_formula(shape: dict[str, Any], start: int) -> None:
    model = double_model(**shape)
    rows = [(torch.randn(start, 2, 16).double(), torch.randn(start, 2, 16).double()) for _ in model.layers]
    drafted = [7, 3, 250, 3, 11]
    expected = naive_rollout(model, rows, drafted, start)
    context = Context([KVRows(k[None], v[None]) for k, v in rows], torch.arange(start)[None])
    current = SpireRound(model, context, torch.tensor([start]))
    for token, right in zip(drafted, expected, strict=True):
        assert torch.allclose(current.step(torch.tensor([token]))[0], right, atol=1e-4)


class OneStepLate(Rollout):
    """A planted mistake: the memory of a token is seen one step too late."""

    def end_step(self, rows: list[KVRows]) -> None:
        late, self.late = getattr(self, "late", rows), rows
        super().end_step(late)


def test_a_memory_that_comes_one_step_late_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.speculative.spire.Rollout", OneStepLate)
    with pytest.raises(AssertionError):
        test_the_rollout_is_the_formula({}, 9)


def test_a_window_that_is_one_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_more(queries: Tensor, keys: Tensor, window: int | None = None, num_sinks: int = 0) -> Tensor:
        return hidden_keys(queries, keys, window and window + 1, num_sinks)

    monkeypatch.setattr("minillm.speculative.spire_model.hidden_keys", one_more)
    with pytest.raises(AssertionError):
        test_the_rollout_is_the_formula({"window": 5}, 9)


def test_requests_that_draft_together_do_not_see_each_other() -> None:
    model, drafted = double_model(window=4), [[5, 6, 7], [8, 9, 10], [11, 12, 13]]
    starts = [2, 9, 5]
    rows = [[(torch.randn(n, 2, 16).double(), torch.randn(n, 2, 16).double()) for _ in model.layers] for n in starts]
    positions = torch.full((3, 9), PADDING)
    stacked = [KVRows(torch.full((3, 9, 2, 16), 9.0).double(), torch.full((3, 9, 2, 16), 9.0).double()) for _ in "ab"]
    for i, (n, own) in enumerate(zip(starts, rows, strict=True)):
        positions[i, :n] = torch.arange(n)
        for block, (k, v) in zip(stacked, own, strict=True):
            block.keys[i, :n], block.values[i, :n] = k, v
    together = SpireRound(model, Context(stacked, positions), torch.tensor(starts))
    first = together.step(torch.tensor([d[0] for d in drafted]))
    together.narrow([0, 2])
    rest = [together.step(torch.tensor([drafted[0][j], drafted[2][j]])) for j in (1, 2)]
    for i, row in ((0, 0), (2, 1)):
        right = naive_rollout(model, rows[i], drafted[i], starts[i])
        assert torch.allclose(torch.stack([first[i], rest[0][row], rest[1][row]]), right, atol=1e-4)


def test_a_query_that_sees_nothing_gets_zeros_and_the_others_their_softmax() -> None:
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    hidden = torch.rand(2, 3, 5) < 0.4
    hidden[0, 1] = True
    hidden[1, 2] = False
    out = masked_attention(q, k, v, hidden)
    for g in range(2):
        for i in range(3):
            seen = [n for n in range(5) if not hidden[g, i, n]]
            for h in range(4):
                right = one_head(q[g, i, h], [*k[g, seen, h // 2]], [*v[g, seen, h // 2]]) if seen else torch.zeros(8)
                assert torch.allclose(out[g, i, h], right, atol=1e-6)


def test_no_row_of_a_mask_is_hidden_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may compute NaN gradients for such a row. The other rows do not depend on it, to the last bit."""
    masks, attention = [], F.scaled_dot_product_attention

    def noted(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
        masks.append(attn_mask)
        return attention(q, k, v, attn_mask=attn_mask)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    q, k, v = torch.randn(2, 3, 4, 8, requires_grad=True), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    hidden = torch.tensor([[True] * 5, [False, True, True, True, True], [False, False, False, True, True]])[None]
    out = masked_attention(q, k, v, hidden)
    out.sum().backward()
    assert (masks[0] == 0).any(-1).all()
    assert (out[:, 0] == 0).all() and (q.grad[:, 0] == 0).all() and q.grad.isfinite().all()
    hidden[0, 0, 2] = False
    assert torch.equal(out[:, 1:], masked_attention(q, k, v, hidden)[:, 1:])


# ------------------------------------------------------------------------------------------ drafts equal to the target


@pytest.fixture(scope="module")
def one_block(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target of one block. Its keys and values are made of the embedding, so a draft of this block whose memory is
    the embedding is the target."""
    return target_of(tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with a sliding window of six tokens."""
    return target_of(tmp_path_factory.mktemp("windowed"), 1, sliding_window=6)


def shares(target: str, method: Any, **options: Any) -> list[float]:
    """The share of accepted drafts of each round; the text is that without drafts."""
    llm = LLM(target, speculative_config={"method": method, **options}, block_size=4)
    with llm.trace() as trace:
        assert tokens(llm) == tokens(LLM(target, block_size=4))
    return [e.num_accepted / e.num_drafts for e in trace.of(TokensCommitted) if e.num_drafts]


def test_a_draft_that_is_the_target_has_every_draft_accepted(one_block: str) -> None:
    """Catches a memory that comes late, a position or slot that is one off, and rows that another round left."""
    found = shares(one_block, spire(last_input=True, num_layers=1, window=None))
    assert found and set(found) == {1.0}


def test_so_with_the_same_sliding_window(windowed: str) -> None:
    found = shares(windowed, spire(last_input=True, num_layers=1, window=6, num_sinks=0))
    assert found and set(found) == {1.0}
    for window in (5, 7):
        assert set(shares(windowed, spire(last_input=True, num_layers=1, window=window, num_sinks=0))) != {1.0}


@pytest.mark.parametrize("num_sinks", [0, 2])
def test_a_draft_without_feedback_over_all_blocks_is_the_target(tiny: TinyPair, num_sinks: int) -> None:
    shape = {"num_layers": 2, "feedback": False, "num_sinks": num_sinks}
    found = shares(str(tiny.target), spire(window=None, **shape))
    assert found and set(found) == {1.0}
    assert set(shares(str(tiny.target), spire(window=5, **shape))) != {1.0}


def test_each_block_reads_the_layer_that_it_was_copied_from(tiny: TinyPair) -> None:
    """With all blocks, the first draft of a round sees what the target sees."""
    found = shares(str(tiny.target), spire(num_layers=2, window=None), num_speculative_tokens=1)
    assert found and set(found) == {1.0}


def test_without_feedback_a_window_sees_what_an_ordinary_decoder_sees(windowed: str, tmp_path: Path) -> None:
    """Two blocks with a window: the rows of the first tokens of the window depend on tokens before it."""
    target = target_of(tmp_path, 2, sliding_window=6)
    found = shares(target, spire(num_layers=2, feedback=False, window=6, num_sinks=0))
    assert found and set(found) == {1.0}


# ------------------------------------------------------------------------------------------------- through the engine


SHAPES = {"published": {"window": 6}, "dense": {"window": None}, "no feedback": {"window": 6, "feedback": False}}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_greedy_tokens_are_the_plain_ones(tiny: TinyPair, block_size: int, shape: dict[str, Any]) -> None:
    options: dict[str, Any] = {"block_size": block_size}
    llm = LLM(str(tiny.target), speculative_config={"method": spire(num_layers=1, **shape)}, **options)
    with llm.trace() as trace:
        assert tokens(llm) == tokens(LLM(str(tiny.target), **options))
    judged = [e for e in trace.of(TokensCommitted) if e.num_drafts]
    assert 0 < sum(e.num_accepted for e in judged) < sum(e.num_drafts for e in judged)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_drafts_follow_from_the_text(tiny: TinyPair, shape: dict[str, Any]) -> None:
    method = spire(num_layers=1, **shape)
    assert drafts_follow_from_the_text(str(tiny.target), method, num_kv_blocks=34, max_num_batched_tokens=24) > 20


class TrustsTheLastToken(SpireDrafter):
    """A planted mistake: the last token counts as verified: its slot is read, where a rejected draft left rows."""

    def begin(self, requests: Any) -> SpireRound:
        lengths = [request.num_tokens for request in requests]
        return SpireRound(self.model, self._cached(requests, lengths), self.tensor(lengths))


def test_reading_a_slot_that_is_not_verified_is_seen(tiny: TinyPair) -> None:
    with pytest.raises(AssertionError):
        drafts_follow_from_the_text(str(tiny.target), spire(TrustsTheLastToken, num_layers=1, window=6))


class RemembersTheLastRound(SpireDrafter):
    """A planted mistake: the memories of the last round's drafts are those of this round's, accepted or not."""

    def begin(self, requests: Any) -> SpireRound:
        fresh, self.last = super().begin(requests), getattr(self, "last", None)
        current, last = fresh.rollout, self.last and self.last.rollout
        if last is not None and last.starts.shape == current.starts.shape and last.num_steps:
            current.memories = [own[0] for own in last.own]
            end = current.end_step
            current.end_step = lambda rows: end(current.memories)
        self.last = fresh
        return fresh


def test_memories_that_outlive_their_round_are_seen(tiny: TinyPair) -> None:
    with pytest.raises(AssertionError):
        drafts_follow_from_the_text(str(tiny.target), spire(RemembersTheLastRound, num_layers=1, window=6))


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
def test_quantised_caches_are_read_too(tiny: TinyPair, kv_cache_dtype: str) -> None:
    options: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "enforce_eager": True}
    llm = LLM(str(tiny.target), speculative_config={"method": spire(num_layers=1)}, **options)
    assert tokens(llm) == tokens(LLM(str(tiny.target), **options))


def test_nothing_is_written_and_there_is_no_pool(tiny: TinyPair) -> None:
    method = spire(num_layers=1)
    llm, plain = LLM(str(tiny.target), speculative_config={"method": method}), LLM(str(tiny.target))
    cache = llm.engine.runner.cache
    assert cache.num_bytes == plain.engine.runner.cache.num_bytes
    for pool in (cache.keys, cache.values):
        pool.zero_()
    llm.engine.runner.run([Segment(list(range(20)), 0, [0, 1])])
    before = [pool.clone() for pool in (cache.keys, cache.values)]
    [draft] = llm.engine.drafter.propose([a_request(list(range(21)), [0, 1])], [4])
    assert len(draft.token_ids) == 4
    assert all(torch.equal(a, b) for a, b in zip(before, (cache.keys, cache.values), strict=True))


def test_what_lies_behind_the_verified_tokens_is_never_read(tiny: TinyPair) -> None:
    drafts = []
    for rest in (0.0, float("nan")):
        llm = LLM(str(tiny.target), speculative_config={"method": spire(num_layers=1)})
        cache = llm.engine.runner.cache
        for pool in (cache.keys, cache.values):
            pool.fill_(rest)
        llm.engine.runner.run([Segment(list(range(40, 60)), 0, [2, 5])])
        request = a_request([*range(40, 60), 3], [2, 5])
        drafts.append(llm.engine.drafter.propose([request], [4])[0].token_ids)
    assert drafts[0] == drafts[1]


def test_sampled_text_follows_the_target(one_block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """χ², with a target of one block, so that most drafts are right; a correct engine fails with probability 1e-6 over
    the engine's seed."""
    target = TinyPair(Path(one_block), Path(one_block))
    follows_the_target_unless_drafts_are_drawn_cooler(target, {"method": spire(num_layers=1)}, monkeypatch)


def test_the_length_of_a_chain_does_not_depend_on_what_is_drawn(tiny: TinyPair) -> None:
    length_does_not_depend_on_what_is_drawn(LLM(str(tiny.target), speculative_config={"method": spire(num_layers=1)}))


def test_a_layout_that_stores_rows_in_its_own_way_is_refused(tiny: TinyPair) -> None:
    for layout in ("contiguous", "kivi", "sinks"):
        with pytest.raises(UnsupportedError, match="use layout 'paged'"):
            LLM(
                str(tiny.target), kv_cache_config={"layout": layout}, speculative_config={"method": spire(num_layers=1)}
            )


# ------------------------------------------------------------------------------------------------------------ options


def test_positions_that_a_token_sees() -> None:
    assert visible(5, None, 1) == [0, 1, 2, 3, 4]
    assert visible(9, 4, 1) == [0, 6, 7, 8]
    assert visible(9, 4, 0) == [6, 7, 8]
    assert visible(2, 4, 3) == [0, 1]
    assert visible(1, 1, 0) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0}, "num_layers=0 must be an integer of at least 1"),
        ({"window": 0}, "window=0"),
        ({"window": 1, "num_sinks": 0}, "window=1 must be an integer of at least 2"),
        ({"num_sinks": -1}, "num_sinks=-1"),
        ({"feedback": "yes"}, "feedback='yes' must be True or False"),
    ],
)
def test_a_shape_is_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpireShape(32, **options)


def test_more_blocks_than_the_target_has_are_refused() -> None:
    target: Decoder = random_model(1, 32, 2, 4, 2)
    with pytest.raises(ConfigError, match="num_layers=3 is more than the 2 blocks"):
        spire_of(target, num_layers=3)
