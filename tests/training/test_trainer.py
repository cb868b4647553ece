from __future__ import annotations

import json
import math
import signal
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from minillm.errors import TrainingError
from minillm.models.causal import CausalAttention
from minillm.training.data import Passes, Windows
from minillm.training.pretrain import Recipe, Trainer, new_model, next_token_loss

from .conftest import bits_per_byte, config

# Minutes without end: progress, and with it the learning rate, follows the tokens, so runs can be compared exactly.
RECIPE = Recipe(tokens=16 * 256, tokens_per_step=256, lengths=(32, 64), warmup_steps=4)


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
    windows = Passes(corpus)
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
    trainer = Trainer(new_model(config()), Passes(corpus), RECIPE, tmp_path)
    held_out = Windows(corpus, "held_out")
    before = bits_per_byte(trainer.model, held_out, num_bytes=held_out.tokens.size, length=128)
    trainer.run()
    after = bits_per_byte(trainer.model, held_out, num_bytes=held_out.tokens.size, length=128)
    assert before == pytest.approx(8.2, abs=0.2), "a fresh model of 300 tokens knows nothing: log2(300) bits"
    assert after < before - 1


def test_interrupt_in_the_midst_of_an_update_keeps_the_last_whole_state(corpus, tmp_path, monkeypatch):
    trainer = Trainer(new_model(config()), Passes(corpus), RECIPE, tmp_path)
    trainer.save()
    saved = (tmp_path / "state.pt").read_bytes()

    def interrupted(closure=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.optimizers[1], "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert (tmp_path / "state.pt").read_bytes() == saved


def test_an_interrupt_in_the_midst_of_an_update_waits_for_its_end(corpus, tmp_path, monkeypatch):
    trainer = Trainer(new_model(config()), Passes(corpus), RECIPE, tmp_path)
    update = trainer.optimizers[1].step

    def interrupted(closure=None):
        signal.raise_signal(signal.SIGINT)
        return update()

    monkeypatch.setattr(trainer.optimizers[1], "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 1
    assert len(losses(tmp_path)) == 1


def test_a_second_interrupt_does_not_wait(corpus, tmp_path, monkeypatch):
    trainer = Trainer(new_model(config()), Passes(corpus), RECIPE, tmp_path)

    def interrupted(closure=None):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second interrupt waits")

    monkeypatch.setattr(trainer.optimizers[1], "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert not trainer.state_file.exists()


def test_a_paused_run_can_be_interrupted(corpus, tmp_path, monkeypatch):
    trainer = Trainer(new_model(config()), Passes(corpus), RECIPE, tmp_path / "target")
    (tmp_path / "pause").touch()
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("minillm.training.pretrain.time.sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert len(waits) == 1 and trainer.step == 0


def test_states_are_saved_by_the_time_of_training(corpus, tmp_path, monkeypatch):
    """Each of the 16 steps takes 8 seconds, which do not count in the first one of either length."""
    trainer = Trainer(new_model(config()), Passes(corpus), RECIPE, tmp_path)
    saved = []
    monkeypatch.setattr("minillm.training.pretrain.time.perf_counter", lambda: 8.0 * trainer.step)
    monkeypatch.setattr(trainer, "save", lambda: saved.append(trainer.step))
    trainer.run()
    assert saved == [6, 10, 14, 16], "after half a minute each, and at the end"


def test_encoding_the_text_first_is_no_training_time(corpus, tmp_path, monkeypatch):
    seconds = [0.0]

    class Encoding(Recorded):
        def batch(self, step, rows, length):
            if not self.steps:
                seconds[0] += 100
            return super().batch(step, rows, length)

    monkeypatch.setattr("minillm.training.pretrain.time.perf_counter", lambda: seconds[0])
    trainer = Trainer(new_model(config()), Encoding(Passes(corpus)), RECIPE, tmp_path)
    trainer.run()
    assert (trainer.step, trainer.seconds) == (16, 0.0)


def test_compiling_is_no_training_time(corpus, tmp_path, monkeypatch):
    """In each session the first step of either row length takes 100 seconds, any other one a second."""
    seconds = [0.0]

    def compiled(stop_at):
        lengths = set()

        def loss(model, inputs, targets):
            seconds[0] += 1 if inputs.shape[1] in lengths else 100
            lengths.add(inputs.shape[1])
            if trainer.step == stop_at:
                raise StopPressedError
            return next_token_loss(model, inputs, targets)

        return loss

    monkeypatch.setattr("minillm.training.pretrain.time.perf_counter", lambda: seconds[0])
    recipe = replace(RECIPE, tokens=math.inf, minutes=10 / 60)
    for stop_at, steps, counted in ((7, 7, 5), (None, 14, 10)):
        trainer = Trainer(new_model(config()), Passes(corpus), recipe, tmp_path, compiled(stop_at))
        with pytest.raises(StopPressedError) if stop_at else nullcontext():
            trainer.run()
        assert (trainer.step, trainer.seconds) == (steps, counted)


class Raising(torch.autograd.Function):
    """A number whose backward pass raises `problem`."""

    @staticmethod
    def forward(ctx, number, problem):
        ctx.problem = problem
        return number.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.problem


def test_a_backward_pass_that_cannot_be_compiled_is_told_with_the_way_out(corpus, tmp_path):
    """PyTorch compiles it when it first runs. Other errors stay as they are."""
    for problem, error, message in (
        (
            torch._dynamo.exc.TorchDynamoException("CppCompileError: no compiler\nmore"),
            TrainingError,
            r"backward pass \(CppCompileError: no compiler\); set TORCH_COMPILE_DISABLE=1",
        ),
        (RuntimeError("out of memory"), RuntimeError, "out of memory"),
    ):

        def loss(model, inputs, targets, problem=problem):
            return Raising.apply(next_token_loss(model, inputs, targets), problem)

        trainer = Trainer(new_model(config()), Passes(corpus), RECIPE, tmp_path / error.__name__, loss)
        with pytest.raises(error, match=message):
            trainer.run()
        assert trainer.state_file.exists()


def test_loss_that_is_no_number_stops_before_it_spoils_the_weights(corpus, tmp_path):
    def poisoned(model, inputs, targets):
        return next_token_loss(model, inputs, targets) * float("nan")

    trainer = Trainer(new_model(config()), Passes(corpus), RECIPE, tmp_path, poisoned)
    with pytest.raises(TrainingError, match="nan at step 1; no state was saved"):
        trainer.run()
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_weights_that_gave_no_number_do_not_replace_the_last_good_state(corpus, tmp_path):
    trainer = Trainer(new_model(config()), Passes(corpus), RECIPE, tmp_path)
    trainer.save()
    with torch.no_grad():
        trainer.model.embed_tokens.weight[:] = float("nan")
    with pytest.raises(TrainingError, match="nan at step 1; the last saved state remains"):
        trainer.run()
    kept = torch.load(tmp_path / "state.pt", weights_only=True)["model"]
    assert all(tensor.isfinite().all() for tensor in kept.values())


def test_learning_rate_warms_up_stays_and_decays_to_zero(corpus, tmp_path):
    trainer = Trainer(new_model(config()), Passes(corpus), RECIPE, tmp_path)
    assert trainer.learning_rate_factor() == 1 / RECIPE.warmup_steps
    trainer.step = 1000
    factors = []
    for share in (0.1, 0.5, 0.75, 1.0):
        trainer.tokens_seen = int(share * RECIPE.tokens)
        factors.append(round(trainer.learning_rate_factor(), 3))
    assert factors == [1.0, 1.0, 0.5, 0.0]


def test_a_decay_may_end_above_zero(corpus, tmp_path):
    recipe = replace(RECIPE, decay_from=0.5, decay_to=0.2)
    trainer = Trainer(new_model(config()), Passes(corpus), recipe, tmp_path)
    trainer.step = 100
    factors = []
    for share in (0.5, 0.75, 1.0):
        trainer.tokens_seen = int(share * RECIPE.tokens)
        factors.append(round(trainer.learning_rate_factor(), 3))
    assert factors == [1.0, 0.6, 0.2]


def test_text_shorter_than_a_row_is_refused(corpus):
    with pytest.raises(TrainingError, match="1000000 tokens"):
        Passes(corpus).batch(0, 1, 1_000_000)


def test_branch_begins_where_the_stable_run_is_and_leaves_it_alone(corpus, tmp_path):
    stable = Trainer(new_model(config()), Passes(corpus), replace(RECIPE, decay_from=1.0), tmp_path / "stable")
    stable.run()
    assert stable.learning_rate_factor() == 1.0, "the stable part does not decay"
    before = stable.state_file.read_bytes()
    recipe = replace(RECIPE, tokens=4 * 256, decay_from=0.0, warmup_steps=1)
    branch = Trainer(new_model(config(), 1), Passes(corpus), recipe, tmp_path / "branch", branch_of=stable.state_file)
    assert (branch.step, branch.progress, branch.learning_rate_factor()) == (16, 0.0, 1.0)
    for ours, theirs in zip(branch.model.parameters(), stable.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    branch.run()
    assert (branch.step, branch.tokens_seen, branch.learning_rate_factor()) == (20, 20 * 256, 0.0)
    again = Trainer(new_model(config()), Passes(corpus), recipe, tmp_path / "branch", branch_of=stable.state_file)
    assert again.progress == 1.0, "a branch goes on from its own state, not from the stable run's"
    assert stable.state_file.read_bytes() == before


class Recorded:
    """Batches that note the steps they are asked for."""

    def __init__(self, batches):
        self.batches, self.steps = batches, []

    def batch(self, step, rows, length):
        self.steps.append(step)
        return self.batches.batch(step, rows, length)


def test_a_branch_reads_its_own_data_from_the_beginning(corpus, tmp_path):
    """Its text has other gaps, so the passes before it need not be encoded. It goes on where it stopped."""
    stable = Trainer(new_model(config()), Passes(corpus), RECIPE, tmp_path / "stable")
    stable.run()
    recipe, data = replace(RECIPE, tokens=4 * 256), Recorded(Passes(corpus))
    with pytest.raises(StopPressedError):
        Trainer(
            new_model(config()), data, recipe, tmp_path / "branch", stopping_after(3), branch_of=stable.state_file
        ).run()
    Trainer(new_model(config()), data, recipe, tmp_path / "branch", branch_of=stable.state_file).run()
    assert data.steps == [0, 0, 1, 2, 3, 3, 3], "each session reads its first batch twice"


def test_a_run_from_a_gpu_goes_on_elsewhere(corpus, tmp_path):
    """There the rates are tensors, and AdamW is told that it is captured; on a CPU they are numbers."""
    runs = {}
    for name in ("cpu", "gpu"):
        with pytest.raises(StopPressedError):
            Trainer(new_model(config()), Passes(corpus), RECIPE, tmp_path / name, stopping_after(7)).run()
        if name == "gpu":
            file = tmp_path / name / "state.pt"
            state = torch.load(file, weights_only=True)
            for optimizer in state["optimizers"]:
                [group] = optimizer["param_groups"]
                group["lr"] = torch.tensor(group["lr"])
                if "capturable" in group:
                    group["capturable"] = True
            torch.save(state, file)
        Trainer(new_model(config()), Passes(corpus), RECIPE, tmp_path / name).run()
        runs[name] = losses(tmp_path / name)
    assert runs["gpu"] == runs["cpu"]


def test_gradients_of_parts_add_up_to_those_of_the_batch(corpus, tmp_path):
    found = []
    for tokens_at_once in (256, 64, 32):
        trainer = Trainer(
            new_model(config()),
            Passes(corpus),
            replace(RECIPE, tokens_at_once=tokens_at_once),
            tmp_path / str(tokens_at_once),
        )
        trainer._gradients(*trainer.batches.batch(0, 8, 32), rows=tokens_at_once // 32)
        found.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]))
    for parts in found[1:]:
        assert (found[0] - parts).norm() < 0.01 * found[0].norm(), "bf16 forward: equal up to its rounding"


def test_paused_run_saves_waits_and_does_not_count_the_time(corpus, tmp_path, monkeypatch):
    trainer = Trainer(new_model(config()), Passes(corpus), RECIPE, tmp_path / "target")
    (tmp_path / "pause").touch()
    waits = []

    def sleep(seconds):
        waits.append((seconds, trainer.step, trainer.state_file.exists()))
        if len(waits) == 3:
            trainer.pause_file.unlink()

    monkeypatch.setattr("minillm.training.pretrain.time.sleep", sleep)
    trainer.run()
    assert [wait[1:] for wait in waits] == [(0, True)] * 3, "no step while the file is there, and the state is on disk"
    assert trainer.step == 16


def test_the_step_that_a_paused_run_has_saved_is_in_its_log(corpus, tmp_path, monkeypatch):
    """Also where not every step is logged, as on a GPU: the run may be killed while it waits."""
    trainer = Trainer(new_model(config()), Passes(corpus), RECIPE, tmp_path / "target")
    train_step, logged = trainer.train_step, []

    def step():
        if trainer.step == 4:
            trainer.pause_file.touch()
        return train_step()

    def sleep(seconds):
        lines = (trainer.folder / "log.jsonl").read_text().splitlines()
        logged.append([json.loads(line)["step"] for line in lines])
        trainer.pause_file.unlink()

    monkeypatch.setattr(trainer, "_is_logged", lambda: False)
    monkeypatch.setattr(trainer, "train_step", step)
    monkeypatch.setattr("minillm.training.pretrain.time.sleep", sleep)
    trainer.run()
    assert logged == [[5]]


def test_attention_in_parts_is_causal_attention():
    q, k, v = (torch.randn(2 * 1100, heads, 16) for heads in (4, 2, 2))
    rows = [x.unflatten(0, (2, 1100)).transpose(1, 2) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
    found = CausalAttention(1100).attend(0, q, k, v)
    assert torch.allclose(found, expected.transpose(1, 2).flatten(0, 1), atol=1e-5)


def test_matrices_decay_by_the_recipe_of_their_own_run(corpus, tmp_path):
    """Also in a branch of a run without decay; tables and norms never do."""
    stable = Trainer(new_model(config()), Passes(corpus), RECIPE, tmp_path / "stable")
    stable.run()
    ends = {}
    for decay in (0.0, 0.5):
        recipe = replace(RECIPE, tokens=256, warmup_steps=1, weight_decay=decay)
        branch = Trainer(
            new_model(config()), Passes(corpus), recipe, tmp_path / str(decay), branch_of=stable.state_file
        )
        branch.run()
        ends[decay] = dict(branch.model.named_parameters())
    for name, before in stable.model.named_parameters():
        by = ends[0.0][name] - ends[0.5][name]
        is_matrix = before.ndim == 2 and "embed" not in name and "lm_head" not in name
        expected = RECIPE.muon_lr * 0.5 * before if is_matrix else torch.zeros_like(before)
        torch.testing.assert_close(by, expected, atol=1e-6, rtol=1e-3)
