"""When a training step is captured, replayed and run as it is. CUDA's graphs are replaced by a recording of the step:
that a captured step computes the same on a GPU is checked by `minillm bench gpu`."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch

from minillm.training.captured_step import CapturedStep
from minillm.training.data import Passes
from minillm.training.pretrain import GPU_CYCLES_PER_LOG, Recipe, Trainer, new_model

from .conftest import config


class Graph:
    """Replays the step that ran while it was recorded."""

    def replay(self):
        self.again()


class Stream:
    def __init__(self, device=None):
        pass

    def wait_stream(self, other):
        pass


@pytest.fixture
def calls(monkeypatch):
    """What the step was called with: a pair of whether it was captured or replayed, and the batch."""
    seen, mode = [], ["run"]

    @contextmanager
    def capture(graph):
        mode[0], count = "captured", len(seen)
        yield
        mode[0] = "run"
        (_, inputs), *_ = seen[count:]
        graph.again = lambda: seen.append(("replayed", inputs.clone()))

    def step(inputs, targets):
        seen.append((mode[0], inputs if mode[0] == "captured" else inputs.clone()))
        return inputs.sum()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    return step, seen


def batch(rows, value):
    return torch.full((rows, 4), value), torch.zeros(rows, 4)


def test_the_first_batch_of_a_shape_runs_and_the_second_is_captured(calls):
    step, seen = calls
    captured = CapturedStep(step, torch.device("cpu"))
    for rows, value in ((2, 1), (2, 2), (3, 3), (2, 4), (3, 5)):
        captured(*batch(rows, value))
    done = [(mode, len(inputs), int(inputs[0, 0])) for mode, inputs in seen if mode != "captured"]
    assert done == [("run", 2, 1), ("replayed", 2, 2), ("run", 3, 3), ("replayed", 2, 4), ("replayed", 3, 5)]


def test_a_step_that_cannot_be_captured_runs_as_it_is(calls, monkeypatch, capsys):
    step, seen = calls
    tries = []

    @contextmanager
    def broken(graph):
        tries.append(graph)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")
        yield

    monkeypatch.setattr(torch.cuda, "graph", broken)
    captured = CapturedStep(step, torch.device("cpu"))
    for value in (1, 2, 3):
        assert captured(*batch(2, value)) == 8 * value
    assert [(mode, int(inputs[0, 0])) for mode, inputs in seen] == [("run", 1), ("run", 2), ("run", 3)]
    said = capsys.readouterr()
    assert len(tries) == 1 and "without CUDA graphs" in said.out + said.err and "more" not in said.out + said.err


def test_a_gpu_logs_whole_cycles_of_row_lengths_and_the_last_step(corpus, tmp_path, monkeypatch):
    recipe = Recipe(tokens=(2 * GPU_CYCLES_PER_LOG + 3) * 64, tokens_per_step=64, lengths=(32, 64), warmup_steps=1)
    trainer = Trainer(new_model(config()), Passes(corpus), recipe, tmp_path)
    logged = []
    trainer._captured = trainer._update  # as on a GPU
    monkeypatch.setattr(trainer, "_log", lambda: logged.append(trainer.step))
    trainer.run()
    assert logged == [1, 2, 21, 22, 23]
