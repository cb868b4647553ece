"""Rollouts in training are what the drafters do later, and training on them makes the drafts better."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minillm import LLM
from minillm.batch import Segment
from minillm.errors import TrainingError
from minillm.models.decoder import Decoder
from minillm.speculative.long_model import LongModel, LongShape
from minillm.speculative.spire_model import SpireModel, SpireShape
from minillm.speculative.target_parts import TargetParts
from minillm.training.data import Passes
from minillm.training.pretrain import new_model
from minillm.training.rollouts import (
    LongLoss,
    SpireLoss,
    draft_loss,
    first_start,
    long_logits,
    rollout_targets,
    spire_logits,
    target_pass,
    with_offsets,
)
from tests.conftest import TinyPair
from tests.speculative.reading import a_request, long, spire

from .conftest import config

STEPS = 4
TEXT = [(37 * i * i + 11 * i) % 300 for i in range(30)]


def drafter_logits(tiny: TinyPair, method: Any, start: int) -> Tensor:
    """What the drafter of an engine computes step by step if the drafts are the tokens of `TEXT` from `start` on."""
    llm = LLM(str(tiny.target), speculative_config={"method": method}, block_size=4)
    table = [5, 2, 9, 1, 7, 0, 11, 3]
    llm.engine.runner.run([Segment(TEXT[:start], 0, table)])
    current = llm.engine.drafter.begin([a_request(TEXT[: start + 1], table)])
    with torch.inference_mode():
        return torch.stack([current.step(torch.tensor([token]))[0] for token in TEXT[start : start + STEPS]])


@pytest.mark.parametrize("first", [1, 4])
@pytest.mark.parametrize(
    "shape", [{"window": 6}, {"window": None, "num_layers": 1}, {"window": 5, "feedback": False}], ids=str
)
def test_a_rollout_of_spire_is_what_the_drafter_computes(tiny: TinyPair, shape: dict[str, Any], first: int) -> None:
    llm = LLM(str(tiny.target), speculative_config={"method": spire(**shape)})
    model, target = llm.engine.drafter.model, llm.engine.runner.model
    inputs = torch.tensor([TEXT[::-1], TEXT])
    positions = torch.arange(len(TEXT)).expand(2, -1)
    with torch.no_grad():
        rows = target_pass(target, inputs, positions, [layer.layer for layer in model.layers]).rows
        logits = spire_logits(model, inputs, rows, first, STEPS)[1]
    for rollout, of_rollout in enumerate(logits):
        right = drafter_logits(tiny, spire(**shape), first + rollout * STEPS)
        assert torch.allclose(of_rollout, right, atol=2e-4)


@pytest.mark.parametrize("first", [1, 4])
@pytest.mark.parametrize("shape", [{"window": 6}, {}, {"cross_attention": False}], ids=str)
def test_a_rollout_of_long_is_what_the_drafter_computes(tiny: TinyPair, shape: dict[str, Any], first: int) -> None:
    llm = LLM(str(tiny.target), speculative_config={"method": long(**shape)})
    model, target = llm.engine.drafter.model, llm.engine.runner.model
    inputs = torch.tensor([TEXT[::-1], TEXT])
    positions = torch.arange(len(TEXT)).expand(2, -1)
    with torch.no_grad():
        rows = target_pass(target, inputs, positions, [1]).rows[0]
        logits = long_logits(model, inputs, positions, rows, first, STEPS)[1]
    for rollout, of_rollout in enumerate(logits):
        right = drafter_logits(tiny, long(**shape), first + rollout * STEPS)
        assert torch.allclose(of_rollout, right, atol=2e-4)


def test_the_recorded_pass_is_the_targets(corpus: Any) -> None:
    target = new_model(config())
    for layer in target.layers:
        nn.init.normal_(layer.o_proj.weight, std=0.2)
    inputs, _ = Passes(corpus).batch(0, 2, 24)
    positions = torch.arange(24).expand(2, -1)
    said = target_pass(target, inputs, positions, [1])
    alone = target_pass(target, inputs[1:], positions[1:], [0, 1])
    assert said.logits.shape == (2, 24, 300) and len(said.rows) == 1
    assert torch.allclose(said.logits[1], alone.logits[0], atol=1e-5)
    assert torch.allclose(said.rows[0].keys[1], alone.rows[1].keys[0], atol=1e-5)


def test_targets_are_those_of_the_rollouts_tokens() -> None:
    logits = torch.arange(11.0)[None, :, None].expand(2, -1, 3)
    assert rollout_targets(logits, 2, 4)[1, :, :, 0].tolist() == [[2, 3, 4, 5], [6, 7, 8, 9]]


def test_rows_too_short_for_a_rollout_are_refused() -> None:
    with pytest.raises(TrainingError, match="rows of 4 tokens are too short for rollouts of 4"):
        rollout_targets(torch.zeros(1, 4, 3), 1, 4)


def test_loss_is_half_kl_and_half_rejection() -> None:
    """Against the sums written out in fp64."""
    logits, target_logits = torch.randn(5, 40).double(), (2 * torch.randn(5, 40)).double()
    q, p = logits.softmax(-1), target_logits.softmax(-1)
    kl = sum(float(a * math.log(a / b)) for a, b in zip(p.flatten(), q.flatten(), strict=True)) / 5
    rejected = sum(max(0.0, float(a - b)) for a, b in zip(p.flatten(), q.flatten(), strict=True)) / 5
    assert draft_loss(logits, target_logits).item() == pytest.approx(0.5 * kl + 0.5 * rejected, rel=1e-5)
    assert draft_loss(logits, logits).item() == pytest.approx(0, abs=1e-6)


def test_where_rollouts_begin_changes_with_the_batch_and_repeats_with_it(corpus: Any) -> None:
    text = Passes(corpus)
    starts = [first_start(text.batch(step, 2, 32)[0], STEPS) for step in range(40)]
    assert set(starts) == {1, 2, 3, 4}
    assert starts == [first_start(text.batch(step, 2, 32)[0], STEPS) for step in range(40)]


def test_offsets_move_all_but_the_anchors_by_one_number_per_row(corpus: Any) -> None:
    inputs, _ = Passes(corpus).batch(0, 8, 32)
    positions = with_offsets(inputs, 512)
    assert positions[:, :4].tolist() == [[0, 1, 2, 3]] * 8
    assert (positions[:, 5:] - positions[:, 4:-1] == 1).all()
    assert len({int(p) for p in positions[:, 4]}) > 4 and positions.max() < 512
    assert torch.equal(positions, with_offsets(inputs, 512))


def spire_model(target: Decoder) -> SpireModel:
    torch.manual_seed(1)
    model = SpireModel(SpireShape(target.config.hidden_size, num_layers=1, window=16), TargetParts(target))
    model.copy_blocks_of(target)
    return model


def long_model(target: Decoder) -> LongModel:
    torch.manual_seed(1)
    model = LongModel(LongShape(target.config.hidden_size), TargetParts(target))
    model.copy_block_of(target)
    return model


@pytest.fixture(scope="module")
def target(corpus: Any) -> Decoder:
    """A target that has learned a little."""
    torch.manual_seed(0)
    model = new_model(config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        inputs, targets = Passes(corpus).batch(step, 8, 64)
        positions = torch.arange(64).expand(8, -1)
        logits = target_logits(model, inputs, positions)
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    return model


def target_logits(model: Decoder, inputs: Tensor, positions: Tensor) -> Tensor:
    from minillm.models.causal import CausalAttention

    hidden = model(inputs.flatten(), positions.flatten(), CausalAttention(inputs.shape[1]))
    return model.logits(hidden).unflatten(0, inputs.shape)


@pytest.mark.parametrize(("make", "loss_of"), [(spire_model, SpireLoss), (long_model, LongLoss)], ids=["spire", "long"])
def test_training_makes_the_drafts_better(
    target: Decoder, corpus: Any, make: Callable[[Decoder], nn.Module], loss_of: Callable[[Decoder], Any]
) -> None:
    loss, model, before = loss_of(target), make(target), [p.clone() for p in target.parameters()]
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(40):
        inputs, targets = Passes(corpus).batch(step, 8, 64)
        value = loss(model, inputs, targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert all(p.grad is not None for p in model.parameters()), "everything is trained, the mixture included"
    assert all(torch.equal(a, b) for a, b in zip(before, target.parameters(), strict=True)), "the target is not"
