from __future__ import annotations

import json

import pytest
import torch

from minillm.errors import TrainingError
from minillm.training.data import Windows
from minillm.training.pretrain import Recipe, Trainer, bits_per_byte, new_model, next_token_loss

from .conftest import config

# Minutes without end: progress, and with it the learning rate, follows the tokens, so runs can be compared exactly.
RECIPE = Recipe(
    minutes=1e9, tokens=16 * 256, tokens_per_step=256, short_length=32, long_length=64, warmup_steps=4, save_every=1000
)


class StopPressedError(Exception):
    """Stands for the stop button."""


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def stopping_after(calls):
    """A loss that is interrupted in its `calls + 1`-th call."""
    count = 0

    def loss(model, inputs, targets):
        nonlocal count
        count += 1
        if count > calls:
            raise StopPressedError
        return next_token_loss(model, inputs, targets)

    return loss


def test_resumed_run_gives_the_same_losses_and_weights(corpus, tmp_path):
    windows = Windows(corpus, "train")
    whole = Trainer(new_model(config()), windows, RECIPE, tmp_path / "whole")
    whole.run()
    with pytest.raises(StopPressedError):
        Trainer(new_model(config()), windows, RECIPE, tmp_path / "parts", stopping_after(7)).run()
    resumed = Trainer(new_model(config(), seed=1), windows, RECIPE, tmp_path / "parts")
    assert resumed.step == 7
    resumed.run()
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 16
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_training_learns(corpus, tmp_path):
    trainer = Trainer(new_model(config()), Windows(corpus, "train"), RECIPE, tmp_path)
    held_out = Windows(corpus, "held_out")
    before = bits_per_byte(trainer.model, held_out, num_bytes=held_out.tokens.size, length=128)
    trainer.run()
    after = bits_per_byte(trainer.model, held_out, num_bytes=held_out.tokens.size, length=128)
    assert before == pytest.approx(8.2, abs=0.2), "a fresh model of 300 tokens knows nothing: log2(300) bits"
    assert after < before - 1


def test_interrupt_in_the_midst_of_an_update_keeps_the_last_whole_state(corpus, tmp_path, monkeypatch):
    trainer = Trainer(new_model(config()), Windows(corpus, "train"), RECIPE, tmp_path)
    trainer.save()
    saved = (tmp_path / "state.pt").read_bytes()

    def interrupted(closure=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.optimizers[1], "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert (tmp_path / "state.pt").read_bytes() == saved


def test_loss_that_is_no_number_stops_before_it_spoils_the_weights(corpus, tmp_path):
    def poisoned(model, inputs, targets):
        return next_token_loss(model, inputs, targets) * float("nan")

    trainer = Trainer(new_model(config()), Windows(corpus, "train"), RECIPE, tmp_path, poisoned)
    with pytest.raises(TrainingError, match="nan at step 1"):
        trainer.run()
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_learning_rate_warms_up_stays_and_decays_to_zero(corpus, tmp_path):
    trainer = Trainer(new_model(config()), Windows(corpus, "train"), RECIPE, tmp_path)
    assert trainer.learning_rate_factor() == 1 / RECIPE.warmup_steps
    trainer.step = 1000
    factors = []
    for share in (0.1, 0.5, 0.75, 1.0):
        trainer.tokens_seen = int(share * RECIPE.tokens)
        factors.append(round(trainer.learning_rate_factor(), 3))
    assert factors == [1.0, 1.0, 0.5, 0.0]


def test_text_shorter_than_a_row_is_refused(corpus):
    with pytest.raises(TrainingError, match="1000000 tokens"):
        Windows(corpus, "train").batch(0, 1, 1_000_000)
