"""A prompt is edited: what stays exact, what does not, and that no other request is touched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.errors import PromptError, RequestTooLargeError, UnsupportedError
from minillm.reuse.edit import edited_prompt
from minillm.reuse.kv_span import KVSpan
from minillm.reuse.scratch import Scratch
from minillm.trace import BlocksEvicted
from tests.conftest import TinyPair

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TEXT = "def walk(root):\n    for name in os.listdir(root):\n        yield name\n\nprint(list(walk('.')))\n" * 2


@pytest.fixture
def llm(tiny: TinyPair) -> LLM:
    return LLM(str(tiny.target), block_size=4, enforce_eager=True)


def tokens(llm: LLM, prompt: object) -> list[int]:
    [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
    return output.outputs[0].token_ids


def computed(llm: LLM, token_ids: Sequence[int]) -> KVSpan:
    with Scratch(llm, len(token_ids)) as scratch:
        scratch.forward(token_ids, 0)
        return scratch.read(0, len(token_ids), token_ids)


def stored(llm: LLM, prompt: dict) -> KVSpan:
    """What the prefix cache has of an edited prompt."""
    ids = prompt["prompt_token_ids"]
    with Scratch(llm, len(ids)) as scratch:
        count = scratch.copy_cached(ids, prompt["cache_salt"])
        return scratch.read(0, count, ids[:count])


def test_without_an_edit_the_tokens_are_the_plain_ones(llm: LLM) -> None:
    ids = llm.engine.tokenizer.encode(TEXT)
    plain = tokens(llm, {"prompt_token_ids": ids})
    prompt = edited_prompt(llm, ids, 10, 10, [], salt="a")
    assert torch.equal(stored(llm, prompt).keys, computed(llm, ids).keys[:, : len(ids) // 4 * 4])
    assert tokens(llm, prompt) == plain


def test_an_edit_at_the_end_has_no_suffix_and_is_exact(llm: LLM) -> None:
    ids = llm.engine.tokenizer.encode(TEXT)
    new = llm.engine.tokenizer.encode("import os\n")
    prompt = edited_prompt(llm, ids, len(ids) - 5, len(ids), new, salt="a")
    assert tokens(llm, prompt) == tokens(llm, {"prompt_token_ids": prompt["prompt_token_ids"]})


@pytest.mark.parametrize(
    ("start", "stop", "new"), [(8, 12, "x" * 9), (8, 20, "y"), (0, 3, "class A:"), (30, 30, "z z")]
)
def test_what_an_edit_stores(llm: LLM, start: int, stop: int, new: str) -> None:
    """Before the edit: as computed. The new tokens: as computed. Behind it: the first layer as computed, where a key
    and a value depend on the token and its position alone; deeper values stay those of the old text."""
    ids, new_ids = llm.engine.tokenizer.encode(TEXT), llm.engine.tokenizer.encode(new)
    prompt = edited_prompt(llm, ids, start, stop, new_ids, salt="a")
    after = prompt["prompt_token_ids"]
    assert after == [*ids[:start], *new_ids, *ids[stop:]]
    found, right, before = stored(llm, prompt), computed(llm, after), computed(llm, ids)
    count, edited = found.end, start + len(new_ids)
    assert count == len(after) // 4 * 4
    torch.testing.assert_close(found.keys[:, :edited], right.keys[:, :edited], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.keys[0], right.keys[0, :count], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.values[0], right.values[0, :count], rtol=1e-4, atol=1e-4)
    shift = edited - stop
    assert torch.equal(found.values[:, edited:], before.values[:, stop : count - shift])
    assert (found.values[1, edited:] - right.values[1, edited:count]).abs().max() > 1e-3


def test_another_way_to_move_keys_is_used_for_the_suffix_alone(llm: LLM) -> None:
    ids, asked = llm.engine.tokenizer.encode(TEXT), []

    def rotate(keys: Tensor, frequencies: Tensor, delta: int) -> Tensor:
        asked.append((keys.shape[1], len(frequencies), delta))
        return torch.full_like(keys, 7.0)

    found = stored(llm, edited_prompt(llm, ids, 10, 14, [5, 6], salt="seam", rotate=rotate))
    assert asked == [(len(ids) - 14, 8, -2)]
    assert bool((found.keys[:, 12:] == 7).all()) and not bool((found.keys[:, :12] == 7).any())


def test_only_the_new_tokens_and_the_last_block_are_computed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, ran = llm.engine.tokenizer.encode(TEXT), []
    tokens(llm, {"prompt_token_ids": ids})
    real = llm.engine.runner.run
    monkeypatch.setattr(llm.engine.runner, "run", lambda s: ran.extend(len(x.token_ids) for x in s) or real(s))
    prompt = edited_prompt(llm, ids, 10, 14, [5, 6], salt="a")
    rest = len(ids) % 4  # what the prefix cache has no full block for
    assert ran == ([rest] if rest else []) + [2]
    [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens >= len(prompt["prompt_token_ids"]) - 4


def test_no_request_without_the_salt_sees_edited_keys(llm: LLM) -> None:
    ids = llm.engine.tokenizer.encode(TEXT)
    prompt = edited_prompt(llm, ids, 4, 12, [9], salt="a")
    plain = {"prompt_token_ids": prompt["prompt_token_ids"]}
    with llm.trace():
        [output] = llm.generate(plain, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens <= 4
    fresh = LLM(llm.model, block_size=4, enforce_eager=True)
    assert output.outputs[0].token_ids == tokens(fresh, plain)


def test_after_eviction_the_edited_prompt_is_computed_exactly(llm: LLM) -> None:
    ids = llm.engine.tokenizer.encode(TEXT)
    prompt = edited_prompt(llm, ids, 4, 12, [9], salt="a")
    llm.reset_prefix_cache()
    assert tokens(llm, prompt) == tokens(llm, {"prompt_token_ids": prompt["prompt_token_ids"]})


def test_all_blocks_come_back(llm: LLM) -> None:
    ids = llm.engine.tokenizer.encode(TEXT)
    edited_prompt(llm, ids, 4, 12, [9], salt="a")
    llm.engine.scheduler.check_integrity()
    assert llm.engine.pool.num_used == 0
    with pytest.raises(RuntimeError), Scratch(llm, 8):
        raise RuntimeError
    assert llm.engine.pool.num_used == 0 and not llm.engine.lock._is_owned()


def test_a_listener_that_raises_while_blocks_are_taken_keeps_neither_lock_nor_blocks(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), block_size=4, num_kv_blocks=6, max_model_len=24, enforce_eager=True)
    tokens(llm, "import os")  # its blocks stay cached

    def broken(event: object) -> None:
        if isinstance(event, BlocksEvicted):
            raise RuntimeError("a listener is broken")

    llm.engine.listeners.append(broken)
    with pytest.raises(RuntimeError, match="a listener is broken"), Scratch(llm, 24):
        pass
    assert not llm.engine.lock._is_owned()
    llm.engine.scheduler.check_integrity()


@pytest.mark.parametrize("interrupted", ["allocate", "free"])
def test_an_interrupt_while_blocks_are_taken_or_given_back_loses_none(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    llm.submit("def", SamplingParams(max_tokens=9))
    llm.engine.step()
    pool = llm.engine.pool
    used, allocate, free = pool.num_used, pool.allocate, pool.free

    def interrupted_allocate(count: int) -> None:
        allocate(count)
        raise KeyboardInterrupt

    def interrupted_free(blocks: list[int]) -> None:
        free(blocks[:1])
        raise KeyboardInterrupt

    ways = {"allocate": interrupted_allocate, "free": interrupted_free}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pool, interrupted, ways[interrupted])
        with Scratch(llm, 12):
            pass
    assert not llm.engine.lock._is_owned() and pool.num_used == used > 0
    llm.engine.scheduler.check_integrity()


def test_ids_may_be_an_array(llm: LLM) -> None:
    ids = llm.engine.tokenizer.encode(TEXT)
    array = np.array(ids)
    for new in ([5], np.array([5, 6]), np.array([], dtype=np.int64), torch.tensor([5, 6])):
        for old in (array, torch.tensor(ids)):
            prompt = edited_prompt(llm, old, 1, 2, new, salt="a")
            assert prompt["prompt_token_ids"] == [ids[0], *new, *ids[2:]]
            assert all(type(token) is int for token in prompt["prompt_token_ids"])
    with Scratch(llm, len(ids)) as scratch:
        assert torch.equal(scratch.forward(array, 0), scratch.forward(ids, 0))


def test_refusals_name_the_value_and_the_fix(llm: LLM, tiny: TinyPair) -> None:
    with pytest.raises(PromptError, match=r"span 5:3 .* 4 tokens"):
        edited_prompt(llm, [1, 2, 3, 4], 5, 3, [], salt="a")
    for salt in ("", 5):
        with pytest.raises(PromptError, match="salt"):
            edited_prompt(llm, [1, 2, 3, 4], 1, 2, [], salt=salt)
    for token in ("x", 10**30):
        with pytest.raises(PromptError, match=f"prompt token 3 is {token!r}; ids must be integers"):
            edited_prompt(llm, [1, 2, 3, token, 4, 5], 2, 5, [7], salt="a")
    for start, stop in ((0.0, 1), (0, None)):
        with pytest.raises(PromptError, match=f"the span {start}:{stop} must be two integers"):
            edited_prompt(llm, [1, 2, 3, 4], start, stop, [5], salt="x")  # type: ignore[arg-type]
    for old, new in ((5, [5]), ([1, 2, 3, 4], None), ("abc", [5]), (torch.ones(1, 1), [5]), ([1], np.array(5))):
        with pytest.raises(PromptError, match=r"(token|new)_ids=.* must be a sequence of token ids"):
            edited_prompt(llm, old, 0, 1, new, salt="x")  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="deletes all 4 tokens; leave at least one"):
        edited_prompt(llm, [1, 2, 3, 4], 0, 4, [], salt="a")
    with pytest.raises(PromptError, match="0 tokens have no logits"), Scratch(llm, 4) as scratch:
        scratch.forward([], 0)
    with pytest.raises(RequestTooLargeError, match="300 tokens are more than max_model_len"):
        Scratch(llm, 300)
    small = LLM(str(tiny.target), block_size=4, num_kv_blocks=3, max_model_len=12, enforce_eager=True)
    small.submit("def", SamplingParams(max_tokens=9))
    small.engine.step()
    with pytest.raises(RequestTooLargeError, match="need 3 blocks"), Scratch(small, 12):
        pass
    quantised = LLM(str(tiny.target), kv_cache_dtype="int8", enforce_eager=True)
    with pytest.raises(UnsupportedError, match="kv_cache_dtype='auto'"):
        Scratch(quantised, 4)


def test_an_edit_that_does_not_fit_is_refused_before_the_text_is_computed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.engine.runner, "run", lambda segments: pytest.fail("it was computed"))
    with pytest.raises(PromptError, match="prompt token 1 is 1000000000; ids must be integers"):
        edited_prompt(llm, [1, 2, 3, 4], 1, 2, [10**9], salt="a")
    with pytest.raises(RequestTooLargeError, match="303 tokens are more than max_model_len"):
        edited_prompt(llm, [1, 2, 3, 4], 1, 2, [5] * 300, salt="a")


def divergence(p: Tensor, q: Tensor) -> float:
    """KL(p‖q) of logits."""
    log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum())


def test_rotating_the_suffix_brings_it_nearer_to_the_truth_than_leaving_it() -> None:
    """On the bundled model, an edit that shifts the suffix by 40 tokens: mean KL over five edits."""
    llm = LLM("minicoder", enforce_eager=True)
    encode, config = llm.engine.tokenizer.encode, llm.engine.runner.model.config
    suffix = encode("\n\ndef area(width, height):\n    return width * height\n\n\nprint(area(")
    losses = {"rotated": 0.0, "left": 0.0}
    for name in ("sum", "parse", "read", "draw", "count"):
        old = encode(f'def {name}(x):\n    """Return it."""\n')
        new = old + encode("# a comment that says nothing, to move what follows\n") * 3
        before = computed(llm, [*old, *suffix])
        with Scratch(llm, len(new) + len(suffix)) as scratch:
            right = scratch.forward([*new, *suffix], 0)
            tail = before.between(len(old), before.end)
            for way in losses:
                scratch.forward(new, 0)
                scratch.write(tail.moved_to(len(new), config) if way == "rotated" else tail.placed_at(len(new)))
                logits = scratch.forward(suffix[-1:], len(new) + len(suffix) - 1)
                losses[way] += divergence(right, logits) / 5
    assert 0 < losses["rotated"] < 0.5 * losses["left"]
