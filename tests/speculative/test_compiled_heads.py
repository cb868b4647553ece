"""Draft heads in one compiled call: the drafts of plain PyTorch, for every kind of unembedding and any number of
threads and requests."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from numba import typeof
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.cache.paged import PagedKVCache
from minillm.models.decoder import Decoder
from minillm.models.held_out import held_out_prompts
from minillm.models.quantize import quantize_unembedding
from minillm.ops.cpu import heads as compiled
from minillm.ops.cpu.launch import NUMBA_NUM_THREADS
from minillm.quantization.int8 import Int8
from minillm.quantization.w8a8 import W8A8
from minillm.runtime.cpu_executor import CpuExecutor
from minillm.speculative import heads as heads_module
from minillm.speculative.compiled_heads import CompiledHeads, can_compile
from minillm.speculative.draft_heads import DraftHeads, HeadsShape
from minillm.speculative.target_heads import TargetHeads, unembedding
from minillm.trace import DraftProposed, TokensCommitted
from tests.runtime.test_cpu_executor import PLAIN, random_model

SHAPE = HeadsShape(hidden_size=64, num_drafts=4, inner_size=48, position_rank=16, token_rank=32)
TARGETS = {
    "untied": PLAIN,
    "tied": replace(PLAIN, tie_word_embeddings=True),
    "other sizes": replace(PLAIN, vocab_size=130, hidden_size=80, num_heads=3, num_kv_heads=1),
}
KINDS: dict[str, Any] = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def random_heads(shape: HeadsShape, seed: int = 0) -> DraftHeads:
    """Heads with every weight random and of weight in the result, so that a forgotten product shows."""
    torch.manual_seed(seed)
    network = DraftHeads(shape).requires_grad_(False)
    for name, parameter in network.named_parameters():
        scale = 1.0 if parameter.ndim == 1 else 1.5 * parameter.shape[1] ** -0.5
        parameter.copy_(torch.randn_like(parameter) * scale + ("norm" in name))
    return network.eval()


def both(target: Decoder, network: DraftHeads) -> tuple[TargetHeads, CompiledHeads]:
    """The same heads plain and compiled, beside copies of `target`."""
    plain_target, network = deepcopy(target), deepcopy(network)
    weight = plain_target.embed_tokens.weight
    plain = TargetHeads(network, weight, unembedding(plain_target, torch.float32))
    packed_target = deepcopy(target)
    cache = PagedKVCache(target.config, 1, 16, target.norm.weight.dtype, torch.device("cpu"))
    CpuExecutor(packed_target, cache, 16)  # packs the weights; no step runs, so none is compiled
    return plain, CompiledHeads(plain, packed_target)


def inputs(count: int, hidden_size: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(count, hidden_size), torch.randint(0, 97, (count,))


def same_round(target: Decoder, network: DraftHeads, most: list[int], tolerance: float, min_survival: float) -> None:
    plain, fast = both(target, network)
    given = inputs(len(most), network.shape.hidden_size)
    for kind in (0, 1):
        right, got = (each.begin(*given, most, kind, min_survival) for each in (plain, fast))
        assert got.num_drafts == right.num_drafts
        for a, b in ((got.logits, right.logits), (got.contexts, right.contexts)):
            assert not any(right.num_drafts) or float((a - b).norm()) <= tolerance * float(b.norm())
    assert fast.draft_argmax(*given, most, min_survival) == plain.draft_argmax(*given, most, min_survival)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("most", [[4], [1], [4, 2, 1], [3] * 7, [9, 1]], ids=str)
def test_drafts_are_those_of_plain_pytorch(name: str, most: list[int]) -> None:
    config = TARGETS[name]
    same_round(random_model(config), random_heads(replace(SHAPE, hidden_size=config.hidden_size)), most, 1e-5, 0.0)


def test_an_embedding_with_more_rows_than_the_vocabulary() -> None:
    """Prompt tokens of another drafter append theirs; no logit belongs to them."""
    config = TARGETS["other sizes"]
    target, network = random_model(config), random_heads(replace(SHAPE, hidden_size=config.hidden_size))
    more = torch.cat([target.embed_tokens.weight, torch.ones(3, config.hidden_size)])
    plain = TargetHeads(network, more, unembedding(target, torch.float32))
    cache = PagedKVCache(config, 1, 16, more.dtype, torch.device("cpu"))
    CpuExecutor(target, cache, 16)
    begun = CompiledHeads(plain, target).begin(*inputs(2, config.hidden_size), [4, 4], 0, 0.0)
    assert begun.logits.shape == (2, 4, config.vocab_size)


@pytest.mark.parametrize(
    ("kind", "of_heads"), [("float16", "bfloat16"), ("bfloat16", "bfloat16"), ("float32", "float16")]
)
def test_weights_of_every_float_type(kind: str, of_heads: str) -> None:
    """In 16 bits W D is rounded too, so the argmax may differ where two logits are close: only products before it are
    compared there."""
    target, network = random_model(PLAIN, numbers=KINDS[kind]), random_heads(SHAPE)
    for parameter in network.parameters():
        parameter.copy_(parameter.to(KINDS[of_heads]))
    plain, fast = both(target, network)
    given = inputs(3, SHAPE.hidden_size)
    right, got = (each.begin(*given, [4, 4, 4], 0, 0.0) for each in (plain, fast))
    assert float((got.logits - right.logits).norm()) <= 1e-5 * float(right.logits.norm())
    assert fast.weights.panels.itemsize == 2
    pairs = zip(plain.draft_argmax(*given, [4] * 3, 0.0), fast.draft_argmax(*given, [4] * 3, 0.0), strict=True)
    assert any(a == b for a, b in pairs)


@pytest.mark.parametrize(("scheme", "tolerance"), [(Int8(), 1e-4), (W8A8(), 3e-2)], ids=["int8", "w8a8"])
def test_a_quantised_unembedding(scheme: Any, tolerance: float) -> None:
    """Activations are rounded to two bytes or to one; plain PyTorch does not round them for INT8."""
    target, network = quantize_unembedding(random_model(PLAIN), scheme), random_heads(SHAPE)
    plain, fast = both(target, network)
    given = inputs(3, SHAPE.hidden_size)
    right, got = (each.begin(*given, [4, 3, 2], 1, 0.0) for each in (plain, fast))
    assert got.num_drafts == right.num_drafts
    assert float((got.logits - right.logits).norm()) <= tolerance * float(right.logits.norm())


@pytest.mark.parametrize("min_survival", [0.05, 0.3, 0.6, 1.0])
def test_chains_are_cut_at_the_same_position(min_survival: float) -> None:
    network = random_heads(SHAPE)
    network.confidence.weight.mul_(0.3)
    network.confidence.bias.fill_(1.0)
    same_round(random_model(PLAIN), network, [4, 4, 2, 3, 4, 1], 1e-5, min_survival)


def test_some_chains_are_cut_at_all() -> None:
    """The test above compares something only if the cut is not always everything or nothing."""
    network = random_heads(SHAPE)
    network.confidence.weight.mul_(0.3)
    network.confidence.bias.fill_(1.0)
    _, fast = both(random_model(PLAIN), network)
    lengths = {n for value in (0.05, 0.3, 0.6) for n in fast.begin(*inputs(6, 64), [4] * 6, 0, value).num_drafts}
    assert lengths >= {1, 2, 3}


@pytest.mark.skipif(NUMBA_NUM_THREADS < 2, reason="numba has one thread here")
def test_two_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast = both(random_model(PLAIN), random_heads(SHAPE))
    given = inputs(3, SHAPE.hidden_size)
    results = []
    for threads in (1, 2):
        monkeypatch.setattr(fast.launcher, "threads", lambda kind, threads=threads: threads)
        begun = fast.begin(*given, [4, 3, 2], 0, 0.0)
        results.append((begun.logits.clone(), fast.draft_argmax(*given, [4, 3, 2], 0.0)))
    (one, drafts), (two, same) = results
    assert drafts == same
    for row, count in enumerate([4, 3, 2]):
        assert torch.equal(one[row, :count], two[row, :count])


def test_every_call_has_arguments_of_the_same_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads call the machine code that was compiled for the types of the first call."""
    _, fast = both(random_model(PLAIN), random_heads(SHAPE))
    seen, call = set(), fast.launcher.call
    monkeypatch.setattr(fast.launcher, "call", lambda *given: seen.add(tuple(map(typeof, given[1:]))) or call(*given))
    for min_survival in (0, 0.5, 1):
        for most in ([4, 3, 2], [1], [0]):
            given = inputs(len(most), SHAPE.hidden_size)
            fast.begin(*given, most, 1, min_survival)
            fast.draft_argmax(*given, most, min_survival)
    assert len(seen) == 1


def test_a_default_device_and_dtype_of_the_process_change_nothing() -> None:
    target, network = random_model(PLAIN), random_heads(SHAPE)
    plain, given = both(target, network)[0], inputs(2, SHAPE.hidden_size)
    CpuExecutor(target, PagedKVCache(PLAIN, 1, 16, torch.float32, torch.device("cpu")), 16)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):  # as a GPU: what is made there without a device cannot be read here
            fast = CompiledHeads(plain, target)
            drafts = fast.draft_argmax(*given, [4, 4], 0.0)
            assert fast.begin(*given, [4, 4], 1, 0.0).logits.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    assert drafts == plain.draft_argmax(*given, [4, 4], 0.0)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_drafts_end_where_logits_are_broken(broken: float) -> None:
    _, fast = both(random_model(PLAIN), random_heads(SHAPE))
    hidden, last = inputs(2, SHAPE.hidden_size)
    right = fast.draft_argmax(hidden, last, [4, 4], 0.0)
    hidden[0, 3] = broken
    assert fast.draft_argmax(hidden, last, [4, 4], 0.0) == [[], right[1]]


def test_a_product_that_is_left_out_is_seen() -> None:
    """Each matrix counts: with any of them at zero the drafts or their number differ."""
    for index in range(compiled.POSITION_OUT + SHAPE.num_drafts):
        plain, fast = both(random_model(PLAIN), random_heads(SHAPE))
        given = inputs(8, SHAPE.hidden_size)
        first, size = int(fast.matrices[index, 0]), int(fast.matrices[index, 1] * fast.matrices[index, 2])
        fast.weights.panels[first : first + size] = 0
        right, got = (each.begin(*given, [4] * 8, 0, 0.2).num_drafts for each in (plain, fast))
        drafts = [each.draft_argmax(*given, [4] * 8, 0.0) for each in (plain, fast)]
        assert right != got or drafts[0] != drafts[1], index


@pytest.mark.parametrize("field", ["hidden_size", "inner_size", "position_rank", "token_rank"])
def test_sizes_that_are_no_multiple_of_sixteen_stay_in_pytorch(field: str) -> None:
    assert can_compile(SHAPE) and not can_compile(replace(SHAPE, **{field: 24}))


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_the_bundled_heads_draft_the_same_compiled_and_in_pytorch(
    monkeypatch: pytest.MonkeyPatch, sampled: bool
) -> None:
    """And the target's tokens are those without drafts. In 16 bits W D is rounded, which may change a draft, never a
    token."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    if sampled:
        params = SamplingParams(temperature=0.8, top_k=1, seed=1, max_tokens=24, ignore_eos=True)
    prompts = [held.prompt for held in held_out_prompts()[:4]]

    def run(method: str | None) -> tuple[list[list[int]], int, int]:
        config = method and {"method": method, "num_speculative_tokens": 5, "adaptive": False}
        llm = LLM("minicoder", device="cpu", speculative_config=config)
        with llm.trace() as trace:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        drafted = sum(len(event.token_ids) for event in trace.of(DraftProposed))
        accepted = sum(event.num_accepted for event in trace.of(TokensCommitted))
        if method and llm.engine.drafter.runner.executor is not None:
            is_compiled = isinstance(llm.engine.drafter.heads, CompiledHeads)
            assert is_compiled is (heads_module.HeadsDrafter.heads is REAL)
        return [output.outputs[0].token_ids for output in outputs], drafted, accepted

    right, _, _ = run(None)
    fast, drafted, accepted = run("heads")
    monkeypatch.setattr(heads_module.HeadsDrafter, "heads", property(lambda self: self._heads))
    plain, plain_drafted, plain_accepted = run("heads")
    assert fast == plain == right
    assert abs(drafted - plain_drafted) <= 0.03 * plain_drafted
    assert abs(accepted - plain_accepted) <= 0.05 * plain_accepted and accepted > 0


REAL = heads_module.HeadsDrafter.heads
