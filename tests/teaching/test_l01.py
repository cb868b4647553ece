"""Lesson 01: the references agree with PyTorch, with minillm's own decoder and sampler, and with its engine."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from minillm import LLM, SamplingParams
from minillm.models.causal import CausalAttention
from minillm.models.hub import resolve
from minillm.models.loading import load_model
from minillm.models.rope import RotaryEmbedding, inverse_frequencies
from minillm.ops.rope import rope as rotate
from minillm.sampling import SamplingRow, probs_from_logits, sample
from minillm.teaching.check_function import check_function
from minillm.teaching.decoding import retokenization_drift
from minillm.teaching.exercises.l01_decoding import (
    apply_rope,
    causal_attention,
    generate_naive,
    interleaved_rope,
    sample_next,
    total_work,
)
from minillm.tokenizer import Tokenizer
from minillm.training.recipes import TARGET
from tests.test_tokenizer import SENTENCEPIECE

SHAPES = {"num_tokens": st.integers(1, 12), "kv_heads": st.integers(1, 3), "group": st.integers(1, 3)}


def heads_of(num_tokens: int, kv_heads: int, group: int, width: int = 8) -> list[Tensor]:
    torch.manual_seed(num_tokens + 100 * kv_heads + 10_000 * group)
    return [torch.randn(num_tokens, h, width, dtype=torch.float64) for h in (kv_heads * group, kv_heads, kv_heads)]


# -------------------------------------------------------------------------------------------------- causal_attention


@settings(max_examples=40)
@given(**SHAPES)
def test_attention_is_that_of_pytorch(num_tokens: int, kv_heads: int, group: int):
    q, k, v = heads_of(num_tokens, kv_heads, group)
    transposed = (x.transpose(0, 1) for x in (q, k, v))
    want = F.scaled_dot_product_attention(*transposed, is_causal=True, enable_gqa=True).transpose(0, 1)
    torch.testing.assert_close(causal_attention(q, k, v), want, rtol=1e-12, atol=1e-12)


@settings(max_examples=40)
@given(**SHAPES)
def test_what_comes_later_changes_nothing_before(num_tokens: int, kv_heads: int, group: int):
    q, k, v = heads_of(num_tokens + 1, kv_heads, group)
    before = causal_attention(q[:-1], k[:-1], v[:-1])
    torch.testing.assert_close(causal_attention(q, k, v)[:-1], before, rtol=1e-12, atol=1e-12)


# -------------------------------------------------------------------------------------------------------- apply_rope


@settings(max_examples=20)
@given(positions=st.lists(st.integers(0, TARGET.max_position_embeddings - 1), min_size=1, max_size=9))
def test_rope_is_that_of_the_decoder(positions: list[int]):
    at = torch.tensor(positions)
    x = torch.randn(len(at), 3, TARGET.head_dim)
    freqs, scale = inverse_frequencies(TARGET.rope, TARGET.head_dim)
    assert scale == 1
    want = rotate(x, *RotaryEmbedding(TARGET)(at))
    torch.testing.assert_close(apply_rope(x, at, freqs), want, rtol=1e-5, atol=1e-5)


@given(here=st.integers(0, 500), distance=st.integers(0, 500), shift=st.integers(0, 500))
def test_a_score_depends_on_the_distance_only(here: int, distance: int, shift: int):
    torch.manual_seed(here)
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64)
    freqs = 10_000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)

    def score(query_at: int, key_at: int) -> float:
        turned = (apply_rope(x, torch.tensor([at]), freqs) for x, at in ((q, query_at), (k, key_at)))
        return float(torch.mul(*turned).sum())

    assert score(here + distance, here) == pytest.approx(score(here + distance + shift, here + shift), abs=1e-10)


def test_rope_keeps_lengths_and_leaves_its_input_alone():
    x = torch.randn(4, 2, 8)
    before = x.clone()
    turned = apply_rope(x, torch.arange(4) + 7, torch.rand(4))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(x, before)


def test_the_other_convention_pairs_neighbours():
    x = torch.tensor([[[1.0, 0.0, 2.0, 0.0]]])
    turned = interleaved_rope(x, torch.tensor([1]), torch.tensor([torch.pi / 2, 0.0]))
    torch.testing.assert_close(turned, torch.tensor([[[0.0, 1.0, 2.0, 0.0]]]))


# ------------------------------------------------------------------------------------------------------- sample_next


@settings(max_examples=150)
@given(
    logits=st.lists(st.integers(-4, 4), min_size=2, max_size=12),
    temperature=st.sampled_from((0.0, 0.5, 1.0, 1.7)),
    top_k=st.sampled_from((0, 1, 2, 3, 5)),
    top_p=st.sampled_from((0.13, 0.37, 0.61, 0.88, 1.0)),
    uniform=st.integers(0, 2**24 - 1).map(lambda n: n * 2.0**-24),
)
def test_the_same_token_as_minillm_draws(
    logits: list[int], temperature: float, top_k: int, top_p: float, uniform: float
):
    """Integer logits give many ties, where top-k keeps all and top-p keeps the lower ids."""
    row = torch.tensor(logits, dtype=torch.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    probs = probs_from_logits(row[None], [SamplingRow(params)])
    cumulative = (probs[0].double() / probs[0].double().sum()).cumsum(0)
    got = sample_next(row, uniform, temperature, top_k, top_p)
    want = int(sample(probs, torch.tensor([uniform], dtype=torch.float64)))
    assert probs[0, got] > 0
    assert got == want or float((cumulative - uniform).abs().min()) < 1e-6, "differs away from a border"


def test_pieces_of_the_unit_interval_are_the_probabilities():
    logits = torch.randn(30, generator=torch.Generator().manual_seed(3))
    probs = probs_from_logits(logits[None], [SamplingRow(SamplingParams(temperature=0.8, top_k=12, top_p=0.9))])[0]
    edges = torch.cat((torch.zeros(1), probs.double().cumsum(0)))
    for token in probs.nonzero().flatten().tolist():
        low, high = float(edges[token]), float(edges[token + 1])
        for uniform in (low + 1e-6, (low + high) / 2, high - 1e-6):
            assert sample_next(logits, uniform, 0.8, 12, 0.9) == token


# ---------------------------------------------------------------------------------------------------- generate_naive


def test_the_naive_loop_writes_what_the_engine_writes(tiny):
    model, tokenizer = load_model(str(tiny.target), torch.float32, "cpu"), Tokenizer.from_folder(tiny.target)
    llm = LLM(str(tiny.target), dtype="float32", device="cpu", enforce_eager=True)

    class Mine:
        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: None = None) -> Tensor:
            return causal_attention(q, k, v)

    @torch.no_grad()
    def forward(ids: list[int]) -> Tensor:
        return model.logits(model(torch.tensor(ids), torch.arange(len(ids)), Mine()))

    for text in ("def add(a, b):\n", "import os", "x"):
        ids = tokenizer.encode(text)
        [out] = llm.generate(text, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
        written = list(out.outputs[0].token_ids)
        assert generate_naive(forward, ids, 24, eos_id=0) == written
        stop = written[len(written) // 2]
        [out] = llm.generate(text, SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[stop]), use_tqdm=False)
        assert generate_naive(forward, ids, 24, eos_id=stop) == list(out.outputs[0].token_ids)
        assert out.outputs[0].finish_reason == "stop"


def test_attention_runs_inside_the_bundled_model():
    model = load_model("minicoder", torch.float32, "cpu")
    ids = torch.tensor(
        Tokenizer.from_folder(resolve("minicoder")).encode("for line in path.read_text().splitlines():\n")
    )

    class Mine:
        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: None = None) -> Tensor:
            return causal_attention(q, k, v)

    with torch.no_grad():
        mine, theirs = (
            model.logits(model(ids, torch.arange(len(ids)), attention))
            for attention in (Mine(), CausalAttention(len(ids)))
        )
    assert float((mine - theirs).abs().max()) < 1e-3
    assert torch.equal(mine.argmax(-1), theirs.argmax(-1))


def test_the_bundled_model_under_these_functions_is_that_of_transformers():
    """The lesson compares with minillm's decoder only; this closes the chain, for RoPE's convention above all."""
    from transformers import AutoModelForCausalLM

    folder = resolve("minicoder")
    ids = torch.tensor(Tokenizer.from_folder(folder).encode("import os\n\n\ndef walk(root):\n    for name in"))
    model = load_model("minicoder", torch.float32, "cpu")
    freqs, _ = inverse_frequencies(model.config.rope, model.config.head_dim)

    class Mine:
        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: None = None) -> Tensor:
            return causal_attention(*(apply_rope(x, torch.arange(len(ids)), freqs) for x in (q, k)), v)

    with torch.no_grad():
        nowhere = torch.zeros(len(ids), dtype=torch.int64)  # the decoder itself turns nothing at position 0
        mine = model.logits(model(ids, nowhere, Mine()))
        theirs = AutoModelForCausalLM.from_pretrained(folder).float()(ids[None]).logits[0]
    assert float((mine - theirs).abs().max()) < 1e-3


# -------------------------------------------------------------------------------------------------------- total_work


@given(num_prompt=st.integers(1, 20), num_new=st.integers(1, 12))
def test_total_work_is_what_the_loop_does(num_prompt: int, num_new: int):
    lengths: list[int] = []

    def forward(ids: list[int]) -> Tensor:
        lengths.append(len(ids))
        return torch.eye(3)[[1] * len(ids)]

    generate_naive(forward, [1] * num_prompt, num_new, eos_id=0)
    seen = sum(int(torch.ones(n, n).tril().sum()) for n in lengths)
    assert total_work(num_prompt, num_new) == (sum(lengths), seen)


def test_from_one_token_the_rows_are_a_triangle_number():
    assert total_work(1, 100) == (100 * 101 // 2, 100 * 101 * 102 // 6)


# --------------------------------------------------------------------------------------------------------- reporting


def test_a_loop_that_never_ends_is_reported():
    def forever(forward, prompt_ids: list[int], max_tokens: int, eos_id: int) -> list[int]:
        while True:
            forward(prompt_ids)

    assert "the model was called" in str(check_function("l01.generate_naive", forever))


def test_top_p_before_top_k_is_named():
    """It draws the same tokens as top-k without renormalising, so the message names both."""

    def top_p_first(logits: Tensor, uniform: float, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0):
        if temperature == 0:
            return int(logits.argmax())
        probs = torch.softmax(logits / temperature, dim=-1)
        ranked, order = probs.sort(descending=True, stable=True)
        probs[order[ranked.cumsum(0) - ranked >= top_p]] = 0
        if 0 < top_k < len(probs):
            probs[probs < probs.topk(top_k).values[-1]] = 0
        cumulative = probs.double().cumsum(0)
        return int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))

    assert "applies top_p before top_k, or" in str(check_function("l01.sample_next", top_p_first))


def test_the_references_need_no_more_than_the_lesson_shows():
    """A learner who opens a reference should find the few lines that the lesson asks for."""
    for function in (causal_attention, apply_rope, sample_next, generate_naive, total_work):
        body = inspect.getsource(function).split('"""')[2].strip().splitlines()
        assert len(body) <= 14, function.__name__


def test_the_tokenizer_of_the_bundled_model_does_not_survive_a_round_trip_of_text():
    """What the lesson shows on generated text: the same text, other tokens."""
    tokenizer = Tokenizer.from_folder(resolve("minicoder"))
    ids = [tokenizer.encode(part)[0] for part in (" c", "an")]
    assert tokenizer.decode(ids) == " can"
    assert tokenizer.encode(" can") != ids
    half = tokenizer.encode("ö")[:1]
    assert tokenizer.encode(tokenizer.decode(half)) != half


class Generated:
    """An LLM that completes each prompt with tokens that are given."""

    def __init__(self, tokenizer: Tokenizer, new: list[list[str]]) -> None:
        self.engine = SimpleNamespace(tokenizer=tokenizer)
        self.new = [[tokenizer.backend.token_to_id(token) for token in tokens] for tokens in new]

    def generate(self, prompts: list[str], params: SamplingParams, use_tqdm: bool) -> list[SimpleNamespace]:
        encoded = map(self.engine.tokenizer.encode, prompts)
        return [
            SimpleNamespace(prompt_token_ids=ids, outputs=[SimpleNamespace(token_ids=new)])
            for ids, new in zip(encoded, self.new, strict=True)
        ]


def test_the_token_in_front_of_a_text_is_no_drift():
    llm = Generated(SENTENCEPIECE, [["bc", "\n", "a"], ["b", "c", "a"]])
    [(number, written, returned)] = retokenization_drift(llm, ["é", "é"], 0.0)
    assert number == 1
    names = [list(map(SENTENCEPIECE.backend.id_to_token, ids)) for ids in (written, returned)]
    assert names == [["<s>", "▁", "é", "b", "c"], ["<s>", "▁", "é", "bc"]]
