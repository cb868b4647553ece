"""When a training step is captured, replayed and run as it is. CUDA's graphs are replaced by a recording of the step:
that a captured step computes the same on a GPU is checked by `minillm bench gpu`."""

from __future__ import annotations

import json
import signal
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.training import pretrain
from minillm.training.captured_step import CapturedStep
from minillm.training.data import Passes
from minillm.training.pretrain import GPU_CYCLES_PER_LOG, Recipe, Trainer, new_model
from minillm.training.trained_drafters import TRAINED
from tests.runtime.software_graph import WAITING

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
    def capture(graph, stream):
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
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
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


def refused_capture(tries):
    """A capture that fails when it begins, and adds its stream to `tries`."""

    @contextmanager
    def capture(graph, stream):
        tries.append(stream)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")
        yield

    return capture


def test_a_step_that_cannot_be_captured_runs_as_it_is(calls, monkeypatch, capsys):
    step, seen = calls
    tries = []
    monkeypatch.setattr(torch.cuda, "graph", refused_capture(tries))
    captured = CapturedStep(step, torch.device("cpu"))
    for value in (1, 2, 3):
        assert captured(*batch(2, value)) == 8 * value
    assert [(mode, int(inputs[0, 0])) for mode, inputs in seen] == [("run", 1), ("run", 2), ("run", 3)]
    said = capsys.readouterr()
    assert len(tries) == 1 and "without CUDA graphs" in said.out + said.err and "more" not in said.out + said.err


def test_a_failed_capture_ends_all_replays_and_releases_their_graphs(calls, monkeypatch):
    """The uncaptured step may need their memory."""
    step, seen = calls
    captured = CapturedStep(step, torch.device("cpu"))
    for value in (1, 2):
        captured(*batch(2, value))
    [graph] = (weakref.ref(found.graph) for found in captured.captured.values())
    monkeypatch.setattr(torch.cuda, "graph", refused_capture([]))
    for rows in (3, 3, 2):
        captured(*batch(rows, 3))
    assert [(mode, len(inputs)) for mode, inputs in seen[-4:]] == [("replayed", 2), ("run", 3), ("run", 3), ("run", 2)]
    assert graph() is None


def failing_capture(monkeypatch, problem):
    """A step that raises `problem` while it is captured, which CUDA notices at the end of the capture."""
    capturing = []

    @contextmanager
    def failing(graph, stream):
        capturing.append(graph)
        try:
            yield
        finally:
            capturing.clear()
            raise RuntimeError("operation failed due to a previous error during capture")

    def step(inputs, targets):
        if capturing:
            raise problem
        return inputs.sum()

    monkeypatch.setattr(torch.cuda, "graph", failing)
    return step


def test_a_failed_capture_tells_its_reason_and_restores_the_stream(calls, monkeypatch, capsys):
    now, restored = Stream(), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now)
    monkeypatch.setattr(torch.cuda, "set_stream", restored.append)
    step = failing_capture(monkeypatch, RuntimeError("item waits for the device"))
    captured = CapturedStep(step, torch.device("cpu"))
    assert [int(captured(*batch(2, value))) for value in (1, 2)] == [8, 16]
    said = capsys.readouterr()
    assert "item waits for the device" in said.out + said.err
    assert restored == [now]


def test_an_interrupt_of_a_capture_is_not_taken_for_a_failure(calls, monkeypatch):
    captured = CapturedStep(failing_capture(monkeypatch, KeyboardInterrupt()), torch.device("cpu"))
    captured(*batch(2, 1))
    with pytest.raises(KeyboardInterrupt):
        captured(*batch(2, 2))


def test_steps_share_one_stream(calls, monkeypatch):
    """On a stream of its own, each would allocate all of its memory anew."""
    made, entered = [], []

    def new_stream(device):
        made.append(Stream(device))
        return made[-1]

    def enter(stream):
        entered.append(stream)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "graph", refused_capture(entered))
    captured = CapturedStep(calls[0], torch.device("cpu"))
    for value in range(5):
        captured(*batch(2, value))
    assert len(made) == 1
    assert entered == made * 6, "five steps and one attempt to capture"


def test_steps_run_and_are_captured_on_the_gpu_of_the_model(calls, monkeypatch):
    current, found = [], []

    @contextmanager
    def device(chosen):
        current.append(chosen)
        yield
        current.pop()

    def step(inputs, targets):
        found.extend(current)
        return calls[0](inputs, targets)

    monkeypatch.setattr(torch.cuda, "device", device)
    captured = CapturedStep(step, torch.device("cpu"))
    for value in (1, 2):
        captured(*batch(2, value))
    assert found == [torch.device("cpu")] * 2


class Waits(TorchDispatchMode):
    """Notes the operations for which the host waits for a GPU."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found |= {func.overloadpacket.__name__} & WAITING
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", TRAINED)
def test_a_loss_that_waits_for_the_gpu_says_that_it_cannot_be_captured(method, corpus):
    target = new_model(config(layers=4))
    module, loss = TRAINED[method].new_module(target), TRAINED[method].loss(target)
    inputs, targets = Passes(corpus).batch(0, 4, 32)
    with Waits() as waits:
        loss(module, inputs, targets).backward()
    assert getattr(loss, "can_be_captured", True) == (not waits.found), waits.found


@pytest.fixture
def model(monkeypatch):
    """One on a GPU, for a trainer."""
    monkeypatch.setattr(pretrain, "optimizers", lambda *settings: [])
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    return SimpleNamespace(parameters=lambda: iter([on_gpu]))


def test_a_trainer_releases_its_graphs_when_it_is_done(calls, model, tmp_path, monkeypatch):
    """Without waiting for a garbage collection: the next stage needs their memory."""
    monkeypatch.setattr(Trainer, "_update", lambda self, inputs, targets: calls[0](inputs, targets))
    trainer = Trainer(model, None, Recipe(), tmp_path)
    trainer._captured.device = torch.device("cpu")
    for value in (1, 2):
        trainer._captured(*batch(2, value))
    [graph] = (weakref.ref(found.graph) for found in trainer._captured.captured.values())
    del trainer
    assert graph() is None


def test_a_loss_that_cannot_be_captured_is_not(model, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(pretrain, "CapturedStep", lambda step, device, capture: asked.append(capture))
    Trainer(model, None, Recipe(), tmp_path)
    Trainer(model, None, Recipe(), tmp_path, SimpleNamespace(can_be_captured=False))
    Trainer(model, None, Recipe(), tmp_path, capture=False)
    assert asked == [True, False, False]


def test_an_interrupt_on_a_gpu_lets_the_step_end_and_saves_it(corpus, tmp_path):
    """There nearly all of a step is one call. The signal comes in the midst of the seventh."""
    recipe = Recipe(tokens=16 * 64, tokens_per_step=64, lengths=(32, 64), warmup_steps=1)
    trainer = Trainer(new_model(config()), Passes(corpus), recipe, tmp_path)

    def step(inputs, targets):
        if trainer.step == 6:
            signal.raise_signal(signal.SIGINT)
        return trainer._update(inputs, targets)

    trainer._captured = step
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert torch.load(trainer.state_file, weights_only=True)["step"] == 7
    logged = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert logged == [1, 2, 7]


def test_a_gpu_logs_whole_cycles_of_row_lengths_and_the_last_step(corpus, tmp_path):
    recipe = Recipe(tokens=(2 * GPU_CYCLES_PER_LOG + 3) * 64, tokens_per_step=64, lengths=(32, 64), warmup_steps=1)
    trainer = Trainer(new_model(config()), Passes(corpus), recipe, tmp_path)
    trainer._captured = trainer._update  # as on a GPU
    trainer.run()
    logged = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert logged == [1, 2, 21, 22, 23]


def test_a_trainer_counts_the_shapes_whose_steps_are_captured(calls, corpus, tmp_path):
    trainer = Trainer(new_model(config()), Passes(corpus), Recipe(), tmp_path)
    assert trainer.num_graphs == 0
    trainer._captured = CapturedStep(calls[0], torch.device("cpu"))
    for rows in (2, 2, 3):
        trainer._captured(*batch(rows, 1))
    assert trainer.num_graphs == 1
