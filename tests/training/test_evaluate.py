from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minillm.errors import TrainingError
from minillm.training import continuations, target_evaluation
from minillm.training.data import Windows
from minillm.training.drafter_evaluation import evaluate_drafter
from minillm.training.evaluate import compare, evaluate, repetition, tokens_per_forward
from minillm.training.export import export
from minillm.training.pretrain import dense_logits, new_model
from minillm.training.stage_runs import as_shipped
from minillm.training.target_evaluation import Amount, evaluate_target

from .conftest import bits_per_byte, config


@pytest.fixture
def pair(corpus, tmp_path):
    """A target and its draft, and the target's folder."""
    target, draft = as_shipped(new_model(config())), new_model(config(layers=1), seed=3)
    export(target, corpus / "tokenizer.json", tmp_path / "target")
    return target, draft, tmp_path / "target"


def test_a_model_agrees_with_itself(corpus, pair):
    model, _, checkpoint = pair
    held_out = Windows(corpus, "held_out")
    (found,) = evaluate(
        model, {"itself": model}, checkpoint, held_out, 2.0, rows=2, new_tokens=20, code_length=64
    ).values()
    for text in (found.code, found.greedy, found.sampled):
        assert text.top1 == 1.0
        assert text.overlap == pytest.approx(1.0, abs=1e-5)
    assert found.greedy.tokens == found.sampled.tokens == 2 * 20
    assert found.greedy_tokens_per_forward == found.num_drafts + 1
    assert found.target_bits_per_byte == found.draft_bits_per_byte


def test_same_models_give_the_same_numbers(corpus, pair):
    target, draft, checkpoint = pair
    held_out = Windows(corpus, "held_out")
    drafts = {"once": draft, "itself": target, "again": draft}
    found = evaluate(target, drafts, checkpoint, held_out, 2.0, rows=2, new_tokens=20, code_length=64)
    assert list(found) == list(drafts)
    assert found["once"] == found["again"] != found["itself"]
    assert found == evaluate(target, drafts, checkpoint, held_out, 2.0, rows=2, new_tokens=20, code_length=64)


def test_every_evaluation_writes_its_text_in_fp32_on_the_device_of_the_target(corpus, monkeypatch):
    """An engine would choose a GPU if there is one, and there the bf16 of the checkpoint."""
    made = []

    def engine(model, dtype="auto", device="auto", **options):
        made.append((dtype, device))
        raise LookupError

    monkeypatch.setattr(continuations, "LLM", engine)
    monkeypatch.setattr(target_evaluation, "LLM", engine)
    target, folder = SimpleNamespace(embed_tokens=torch.nn.Embedding(1, 1, device="meta")), Path("target")
    held_out = Windows(corpus, "held_out")
    for measure in (
        lambda: evaluate(target, {}, folder, held_out, 2.0, rows=2),
        lambda: evaluate_drafter(None, None, target, folder, held_out),
        lambda: evaluate_target(target, folder, corpus, Amount()),
    ):
        with pytest.raises(LookupError):
            measure()
    assert made == [("float32", "meta")] * 3


def test_bits_per_byte_is_the_one_of_each_model_alone(corpus, pair):
    target, draft, checkpoint = pair
    held_out = Windows(corpus, "held_out")
    num_bytes = 3 * held_out.tokens.size
    (found,) = evaluate(
        target, {"draft": draft}, checkpoint, held_out, 3.0, rows=2, new_tokens=8, code_length=128
    ).values()
    assert found.target_bits_per_byte == pytest.approx(bits_per_byte(target, held_out, num_bytes, 128), rel=1e-5)
    assert found.draft_bits_per_byte == pytest.approx(bits_per_byte(draft, held_out, num_bytes, 128), rel=1e-5)


def test_agreement_and_overlap_are_those_of_the_two_distributions(corpus):
    """Against the definitions, with models whose opinions differ."""
    target, draft = new_model(config()), new_model(config(layers=1), seed=3)
    draft.embed_tokens.weight.data.mul_(8)
    batch = Windows(corpus, "held_out").in_order(2, 16)[0]
    found = compare(target, draft, [batch]).agreement()
    with torch.no_grad():
        p, q = (torch.softmax(dense_logits(model, batch[0]).double(), -1) for model in (target, draft))
    assert found.overlap == pytest.approx(1 - 0.5 * (p - q).abs().sum(-1).mean().item(), abs=1e-5)
    assert found.overlap < 0.99
    assert found.top1 == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())


def test_prompt_tokens_do_not_count(corpus):
    model = new_model(config())
    batches = Windows(corpus, "held_out").in_order(2, 32)
    assert compare(model, model, batches, skip=30).agree.shape[1] == 2


@pytest.mark.parametrize(
    ("agree", "expected"),
    [
        ([True] * 15, 5.0),
        ([False] * 15, 1.0),
        ([True, False] * 10, 2.0),
        # Rounds: T T F → 3, T T T T F → 5, F → 1; then too few tokens are left for a whole round.
        ([True, True, False, True, True, True, True, False, False, True, True, True, True], 3.0),
    ],
)
def test_replayed_rounds_gain_the_right_run_and_one_more(agree, expected):
    assert tokens_per_forward(torch.tensor([agree]), 4) == expected


def test_repetition_counts_spans_said_before():
    assert repetition(torch.arange(100)) == 0
    assert repetition(torch.zeros(107, dtype=torch.int64)) == pytest.approx(0.99)


def test_too_little_text_is_a_clear_error(corpus):
    with pytest.raises(TrainingError, match="too short"):
        compare(new_model(config()), new_model(config()), [])
