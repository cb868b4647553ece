"""A segment whose block table leaves out blocks: the step attends to the others alone, at true distances."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.batch import Batch, Segment
from minillm.cache.base import KVCache
from minillm.cache.paged import PagedKVCache
from minillm.cache.paged_int4 import PagedInt4KVCache
from minillm.cache.paged_int8 import PagedInt8KVCache
from minillm.runtime.runner import ModelRunner
from tests.runtime.test_cpu_executor import PLAIN, random_model

SIZE = 4
PROMPT, TABLE = [(7 * i + i * i) % 97 for i in range(22)], [7, 3, 11, 0, 30, 2, 19]
CHOSEN = [0, 3]
"""Blocks of the view beside the newest, which begins with token 20."""
SKIPPED = 12
VIEW = [*(TABLE[i] for i in CHOSEN), *TABLE[5:]]
NEW = [50, 51, 52]


def runner(layout: type[KVCache] = PagedKVCache, fast: bool = False) -> ModelRunner:
    """A runner whose cache holds PROMPT. Its attention is sharp, so that positions decide which token is drafted."""
    model = random_model(PLAIN)
    for block in model.layers:
        block.qkv_proj.weight.mul_(2)
    one = ModelRunner(model, layout(PLAIN, 40, SIZE, torch.float32, torch.device("cpu")), SIZE)
    if fast:
        assert one.use_executor() is None
    one.run([Segment(PROMPT, 0, TABLE)])
    return one


def view(token_ids: list[int] = NEW, start: int = 10, **changes: Any) -> Segment:
    """Tokens 22, 23, … of the request, whose view holds tokens 0 to 3, 12 to 15, 20 and 21."""
    return replace(Segment(token_ids, start, VIEW, len(token_ids), num_skipped=SKIPPED), **changes)


class Chosen:
    """Attention over the chosen tokens of the prompt and the new tokens, written out."""

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        seen = [t for t in range(len(PROMPT)) if t // SIZE in (*CHOSEN, 5)]
        slots = [TABLE[t // SIZE] * SIZE + t % SIZE for t in seen]
        keys, values = torch.cat((self.cache.keys[layer, slots], k)), torch.cat((self.cache.values[layer, slots], v))
        mask = F.pad(torch.ones(len(q), len(q), dtype=torch.bool).tril(), (len(seen), 0), value=True)
        rows = (x.transpose(0, 1) for x in (q, keys, values))
        return F.scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True).transpose(0, 1)


def expected() -> Tensor:
    one = runner()
    with torch.inference_mode():
        hidden = one.model(torch.tensor(NEW), torch.tensor([22, 23, 24]), Chosen(one.cache))
        return one.model.logits(hidden)


@pytest.mark.parametrize("fast", [False, True], ids=["pytorch", "compiled"])
def test_only_the_blocks_in_the_table_are_attended_to(fast: bool) -> None:
    assert torch.allclose(runner(fast=fast).run([view()]), expected(), atol=1e-5)


@pytest.mark.parametrize("wrong", [{"num_skipped": 0}, {"num_skipped": 11}, {"block_table": [7, 3, 2, 19]}], ids=str)
@pytest.mark.parametrize("fast", [False, True], ids=["pytorch", "compiled"])
def test_a_position_that_is_not_true_or_another_block_shows(fast: bool, wrong: dict[str, Any]) -> None:
    assert not torch.allclose(runner(fast=fast).run([view(**wrong)]), expected(), atol=1e-3)


@pytest.mark.parametrize("fast", [False, True], ids=["pytorch", "compiled"])
def test_keys_are_stored_where_a_whole_table_would_have_put_them(fast: bool) -> None:
    """And with the same rotation: so in the first layer, where keys do not depend on what was attended to, the cache is
    the same to the last bit."""
    sparse, whole = runner(fast=fast), runner(fast=fast)
    sparse.run([view()]), whole.run([Segment(NEW, 22, TABLE)])
    slots = [TABLE[t // SIZE] * SIZE + t % SIZE for t in range(25)]
    assert torch.equal(sparse.cache.keys[0, slots], whole.cache.keys[0, slots])
    assert not torch.equal(sparse.cache.keys[1, slots], whole.cache.keys[1, slots])


@pytest.mark.parametrize("layout", [PagedKVCache, PagedInt8KVCache, PagedInt4KVCache])
def test_drafting_in_one_call_is_drafting_step_by_step(layout: type[KVCache]) -> None:
    """Two requests, one of which leaves nothing out, over a boundary between blocks."""
    step = [view([50], num_logits=1), Segment([9, 4, 1], 0, [5, 6, 12])]
    right = runner(layout).draft(step, 4)
    compiled = runner(layout, fast=True)
    assert compiled.draft(step, 4) == compiled.draft_step_by_step(step, 4, [1.0, 1.0], 0.0)[0] == right
    assert runner(layout).draft([replace(step[0], num_skipped=0), step[1]], 4) != right


def test_a_tree_may_follow_in_a_view() -> None:
    step = [view(parents=(-1, -1), num_logits=3)]
    right = runner().run(step)
    assert torch.allclose(runner(fast=True).run(step), right, atol=1e-5)
    assert not torch.allclose(runner().run([view(parents=(-1, 0))]), right, atol=1e-3)


@pytest.mark.parametrize("fast", [False, True], ids=["pytorch", "compiled"])
def test_queries_of_chosen_tokens_come_with_the_logits(fast: bool) -> None:
    """Rotated by their positions; those of the first layer are computed here once more."""
    one = runner(fast=fast)
    step = [Segment([1], 0, [20]), view()]
    logits, _, queries = one.run_observed(step, [1, 3])
    assert queries.shape == (3, 2, 4, 32)
    assert torch.equal(logits, runner(fast=fast).run(step))
    plain = runner()
    layer = plain.model.layers[0]
    x = plain.model.embed_tokens(torch.tensor([NEW[0], NEW[2]]))
    cos, sin = plain.model.rope(torch.tensor([22, 24]))
    heads = layer.qkv_proj(layer.input_norm(x)).view(2, -1, 32)[:, :4]
    rotated = heads * cos + heads.roll(16, dims=-1) * sin
    assert torch.allclose(queries[0], rotated, atol=1e-5)
