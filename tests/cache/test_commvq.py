"""The CommVQ layout: what attention reads is what the codebooks say, whatever the engine does around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minillm import LLM
from minillm.batch import Batch, Segment
from minillm.bench.zoo_cache import build, continuation, read_prompt
from minillm.cache.commvq import CommVQKVCache
from minillm.cache.paged import PagedKVCache
from minillm.cache.paged_latent import RestoredRows
from minillm.errors import ConfigError, UnsupportedError
from minillm.models.calibration import CalibrationTexts, calibration_rows
from minillm.models.decoder import Decoder
from minillm.models.loading import load_model, save_llama
from minillm.tokenizer import Tokenizer
from minillm.trace import BlocksShared, RequestPreempted
from minillm.training.train_tokenizer import save_tokenizer, train_tokenizer
from tests.cache.engines import engine, tokens
from tests.cache.runs import PROMPTS, PreemptingScheduler, draft_of
from tests.cache.steps import CPU, rotated, small_config, tensor_bytes
from tests.conftest import TEXTS, TinyPair, random_model

COMMVQ: dict[str, Any] = {"kv_cache_config": {"layout": "commvq", "bits": 2}}


class Rows(CalibrationTexts):
    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = lambda: rows


@pytest.fixture(scope="module")
def prepared() -> CommVQKVCache:
    """Of a random model, trained on random tokens."""
    torch.manual_seed(0)
    model = Decoder(small_config()).requires_grad_(False)
    cache = CommVQKVCache(model.config, 4, 16, torch.float32, CPU, bits=3)
    cache.prepare(model, Rows(torch.randint(0, 300, (4, 100)).tolist()))
    return cache


def test_what_is_read_is_the_code_of_the_key_before_rope_rotated_to_its_position(prepared: CommVQKVCache) -> None:
    config = prepared.config
    batch = Batch.from_segments([Segment([1] * 20, 0, [2, 0])], 16, CPU)
    torch.manual_seed(1)
    keys, values = torch.randn(2, 20, 2, 8)
    slots = batch.key_slots[0, :20]
    for layer in range(2):
        at = torch.arange(20)
        prepared.attend(layer, torch.randn(20, 4, 8), rotated(config, layer, keys, at), values, batch)
        for is_key, plain in ((True, keys), (False, values)):
            book = prepared.codebooks[is_key][layer]
            expected = book.decode(book.encode(plain.transpose(0, 1))).transpose(0, 1)
            expected = rotated(config, layer, expected, at) if is_key else expected
            found = RestoredRows(prepared, layer, is_key)[slots]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_codebooks_are_trained_on_keys_before_rope() -> None:
    """The mean key of layer 0, whose inputs are the embeddings: every token as at position 0."""
    torch.manual_seed(3)
    model, text = Decoder(small_config()).requires_grad_(False), torch.randint(0, 300, (150,))
    cache = CommVQKVCache(model.config, 1, 16, torch.float32, CPU, bits=1)
    cache.prepare(model, Rows([text[:90].tolist(), text[90:].tolist()]))
    cos, sin = model.rope(torch.zeros(150, dtype=torch.int64))
    _, keys, values = model.layers[0].heads(model.embed_tokens(text), cos, sin)
    for is_key, expected in ((True, keys), (False, values)):
        torch.testing.assert_close(cache.codebooks[is_key][0].mean[:, 0], expected.mean(0), rtol=1e-3, atol=1e-4)


def test_any_seed_that_pytorch_takes_is_taken() -> None:
    model = Decoder(small_config()).requires_grad_(False)
    cache = CommVQKVCache(model.config, 1, 16, torch.float32, CPU, seed=2**63 - 1)
    cache.prepare(model, Rows([list(range(40))]))
    assert cache.model_bytes > 0


def test_codebooks_are_trained_on_keys_that_the_model_computes() -> None:
    """A text that is longer than a sliding window is cut to it, because full attention would compute others."""
    torch.manual_seed(4)
    config = small_config(sliding_window=9, sliding_layers=(True, False))
    model, row = Decoder(config).requires_grad_(False), torch.randint(0, 300, (40,)).tolist()
    means = []
    for length in (40, 9, 8):
        cache = CommVQKVCache(config, 1, 16, torch.float32, CPU, bits=1)
        cache.prepare(model, Rows([row[:length]]))
        means.append(cache.codebooks[True][1].mean)
    assert torch.equal(means[0], means[1]) and not torch.equal(means[1], means[2])


def test_bytes_are_counted_and_real(prepared: CommVQKVCache) -> None:
    """64 slots: 3 bits per number and a position; the codebooks are counted apart."""
    assert prepared.num_bytes == 64 * (2 * 2 * 16 * 3 // 8 + 4)
    assert prepared.num_bytes == 4 * prepared.bytes_per_block(prepared.config, 16, torch.float32, bits=3)
    books = 2 * 2 * (3 * 256 * 8 * 2 + 8 * 4) + 2 * 2 * (3 * (64 * 2 + 8 * 4) + 8 * 4)
    assert prepared.model_bytes == books
    assert tensor_bytes(prepared) == prepared.num_bytes + books + prepared.frequencies.nbytes
    share = CommVQKVCache.bytes_per_block(small_config(), 16, torch.float16, bits=2)
    assert share == 16 * (2 * 2 * 16 * 2 // 8 + 4)
    assert PagedKVCache.bytes_per_block(small_config(), 16, torch.float16) == 16 * 2 * 2 * 16 * 2


def test_the_same_tokens_however_they_were_computed(tiny: TinyPair) -> None:
    """In float64: together, alone, in chunks, preempted, from the prefix cache, drafted in chains and trees."""
    model = str(tiny.target)
    expected = tokens(engine(COMMVQ, model), PROMPTS, 16)
    assert expected != tokens(engine({}, model), PROMPTS, 16)
    llm = engine(COMMVQ, model, block_size=4)
    with llm.trace() as trace:
        assert [tokens(llm, [prompt], 16)[0] for prompt in [*PROMPTS, PROMPTS[2]]] == [*expected, expected[2]]
    assert trace.of(BlocksShared)
    llm = engine(COMMVQ, model, scheduler_cls=PreemptingScheduler, max_num_batched_tokens=9, max_num_seqs=4)
    with llm.trace() as trace:
        assert tokens(llm, PROMPTS, 16) == expected
    assert trace.of(RequestPreempted)
    assert tokens(engine(COMMVQ, model, speculative_config=draft_of(tiny)), PROMPTS, 16) == expected


def test_more_bits_are_closer_to_the_plain_cache(tiny: TinyPair) -> None:
    """On text that the codebooks were not trained on."""
    tokenizer, model = Tokenizer.from_folder(tiny.target), load_model(tiny.target, torch.float32, CPU)
    row = tokenizer.encode("".join(TEXTS[:3]))[:200]
    found = []
    for options in ({}, *({"kv_cache_config": {"layout": "commvq", "bits": bits}} for bits in (1, 3))):
        runner = build(options, model, len(row), texts=Rows(calibration_rows(tokenizer)[:40]))
        read_prompt(runner, row, 100)
        found.append(continuation(runner, row, 100, one_by_one=0).logprobs)
    exact = found[0].double()
    one, three = (float((exact.exp() * (exact - other)).sum(-1).mean()) for other in found[1:])
    assert one > 3 * three > 0


def test_what_it_cannot_do_is_refused(tiny: TinyPair) -> None:
    for options, words in (
        ({"bits": 0}, r"bits=0 must be an integer of at least 1"),
        ({"bits": 9}, r"bits=9 must be at most 8; layout 'paged' stores the model's dtype"),
        ({"seed": -1}, r"seed=-1 must be"),
        ({"seed": 2**63}, r"seed=9223372036854775808 must be at most 9223372036854775807"),
    ):
        with pytest.raises(ConfigError, match=words):
            LLM(str(tiny.target), kv_cache_config={"layout": "commvq", **options})
    with pytest.raises(UnsupportedError, match=r"codes 8 channels at once, and this model's heads have 12"):
        CommVQKVCache.widths(small_config(head_dim=12))
    with pytest.raises(ConfigError, match="trains its codebooks on calibration texts, and there are none"):
        CommVQKVCache(small_config(), 1, 16, torch.float32, CPU).prepare(Decoder(small_config()))


def test_the_codebooks_do_not_depend_on_how_the_weights_are_kept(tmp_path: Path) -> None:
    """The default engine keeps 16-bit weights as they are stored until it knows that PyTorch runs the model."""
    tokenizer = train_tokenizer(TEXTS, 300)
    save_llama(random_model(4, 64, 2, 4, 2, tokenizer.get_vocab_size(), 16), tmp_path, torch.bfloat16)
    save_tokenizer(tokenizer, tmp_path, 256)
    kept, eager = (
        LLM(str(tmp_path), device="cpu", enforce_eager=eager, kv_cache_config={"layout": "commvq"}).engine.runner.cache
        for eager in (False, True)
    )
    points = torch.randn(2, 9, 16)
    for is_key in (True, False):
        for one, other in zip(kept.codebooks[is_key], eager.codebooks[is_key], strict=True):
            codes = other.encode(points)
            assert torch.equal(one.encode(points), codes) and torch.equal(one.decode(codes), other.decode(codes))
