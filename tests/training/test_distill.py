from __future__ import annotations

import math

import pytest
import torch

from minillm.training.data import Passes, Windows
from minillm.training.distill import TEXT_WEIGHT, DistillationLoss, HalfAndHalf, distillation_loss
from minillm.training.evaluate import compare
from minillm.training.pretrain import Recipe, Trainer, dense_logits, new_model, next_token_loss

from .conftest import config


@pytest.fixture(scope="module")
def target(corpus, tmp_path_factory):
    recipe = Recipe(tokens=60 * 512, tokens_per_step=512, lengths=(64,), warmup_steps=4)
    trainer = Trainer(new_model(config()), Passes(corpus), recipe, tmp_path_factory.mktemp("target"))
    trainer.run()
    trainer.model.zero_grad(set_to_none=True)
    return trainer.model


def test_distillation_brings_the_draft_to_the_target(target, corpus, tmp_path):
    """The draft starts from nothing, and its Σ min(p, q) on held-out text rises far above what it was."""
    recipe = Recipe(tokens=80 * 512, tokens_per_step=512, lengths=(64,), warmup_steps=4)
    code = Passes(corpus)
    batches = HalfAndHalf(code, Windows(corpus, "held_out", seed=1))
    trainer = Trainer(new_model(config(layers=1), seed=5), batches, recipe, tmp_path, DistillationLoss(target))
    held_out = Windows(corpus, "held_out").in_order(4, 128)
    before = compare(target, trainer.model, held_out).agreement()
    trainer.run()
    after = compare(target, trainer.model, held_out).agreement()
    assert after.overlap > before.overlap + 0.2
    assert after.top1 > before.top1 + 0.2


def test_a_draft_equal_to_the_target_has_only_the_text_left_to_learn(target, corpus):
    inputs, targets = Passes(corpus).batch(0, 2, 64)
    loss = DistillationLoss(target)(target, inputs, targets).item()
    assert loss == pytest.approx(TEXT_WEIGHT * next_token_loss(target, inputs, targets).item(), abs=2e-3)


def test_loss_is_kl_plus_rejection_plus_text(corpus):
    """Against the sums written out in fp64, for random models."""
    draft = new_model(config(layers=1), seed=1)
    inputs, targets = Passes(corpus).batch(0, 2, 16)
    target_logits = torch.randn(32, 300) * 2
    p = torch.softmax(target_logits.double(), -1)
    q = torch.softmax(dense_logits(draft, inputs).detach().double(), -1)
    kl = sum(float(a * math.log(a / b)) for a, b in zip(p.flatten(), q.flatten(), strict=True)) / 32
    rejected = sum(max(0.0, float(a - b)) for a, b in zip(p.flatten(), q.flatten(), strict=True)) / 32
    text = -sum(math.log(q[i, t]) for i, t in enumerate(targets.flatten())) / 32
    loss = distillation_loss(draft, inputs, targets, target_logits).item()
    assert loss == pytest.approx(kl + rejected + 0.1 * text, rel=1e-3)


def test_the_target_is_not_trained(target, corpus):
    before = [p.clone() for p in target.parameters()]
    inputs, targets = Passes(corpus).batch(0, 2, 16)
    DistillationLoss(target)(new_model(config(layers=1)), inputs, targets).backward()
    assert all(p.grad is None for p in target.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, target.parameters(), strict=True))


def test_half_of_a_batch_is_the_targets_own(corpus):
    code, own = Passes(corpus), Windows(corpus, "held_out")
    inputs, targets = HalfAndHalf(code, own).batch(3, 7, 32)
    assert torch.equal(inputs[:4], code.batch(3, 4, 32)[0])
    assert torch.equal(inputs[4:], own.batch(3, 3, 32)[0])
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
