"""Checkpoints that tests make for themselves: small, random, quick, and loadable by transformers."""

from __future__ import annotations

import functools
import gc
import signal
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from _pytest.terminal import TerminalReporter
from hypothesis import settings

from minillm.engine.engine import Engine
from minillm.models.config import ModelConfig, RopeConfig
from minillm.models.decoder import Decoder
from minillm.models.loading import save_llama
from minillm.speculative import config as speculative_config
from minillm.training.train_tokenizer import save_tokenizer, train_tokenizer

settings.register_profile("no clock", deadline=None)  # how long an example takes says nothing of a test
settings.load_profile("no clock")

SHIPPED_ADAPTIVE = True
"""What `minillm.speculative.config.ADAPTIVE` is outside of tests; see `every_draft`."""
COLLECT_AFTER = 10_000
"""New objects after which the garbage collector runs. After every 700, as usual, it takes one second in sixteen; what
tests say about garbage, they say after a collection of their own, or without any."""
SLOW_S = 60
LONGEST_FILES = (
    "engine/test_same_tokens.py",  # before the next one: other workers then find what minicoder needs already compiled
    "runtime/test_cpu_executor.py",
    "teaching/grading/test_grading.py",
    "teaching/test_exercises.py",
    "teaching/test_l09.py",
    "browser/test_book.py",
    "cache/test_measured_bytes.py",
    "runtime/test_gpu_graphs.py",
    "parallel/test_engine.py",
    "browser/test_lesson_00.py",
    "browser/test_lessons.py",
    "browser/test_replay.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files: workers take whole files, so a long one at the end would leave the others idle. The
    notebooks come next, because they come first in the Makefile."""

    def rank(item: pytest.Item) -> int:
        return next((i for i, name in enumerate(LONGEST_FILES) if name in item.nodeid), len(LONGEST_FILES))

    items.sort(key=rank)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Say at once what failed or was slow: of a run that is ended from outside nothing else would be known."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(_AtOnce(terminal))


class _AtOnce:
    def __init__(self, terminal: TerminalReporter) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.duration > SLOW_S:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = str(crash or report.longrepr)[:300] if report.failed else "slow"
            self.terminal.write_line(f"\n{report.nodeid} ({report.when}, {report.duration:.0f} s): {why}")


TEXTS = [
    "def add(a, b):\n    return a + b\n\n\nclass Stack:\n    def push(self, item):\n        self.items.append(item)\n",
    "for line in path.read_text().splitlines():\n    if not line.strip():\n        continue\n    print(line)\n",
    "import os\n\n\ndef walk(root):\n    for name in os.listdir(root):\n        yield name, 'ümläut', 12345\n",
] * 20


@dataclass(frozen=True)
class TinyPair:
    """Folders of a random target and a random draft with one tokenizer of 300 tokens."""

    target: Path
    draft: Path


def random_model(
    seed: int, hidden: int, layers: int, heads: int, kv_heads: int, vocab: int = 300, head_dim: int = 16
) -> Decoder:
    """A decoder whose logits spread widely, so that its greedy text wanders and its ties are rare."""
    config = ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=256,
        rope=RopeConfig(),
        eos_token_ids=(0,),
    )
    torch.manual_seed(seed)
    model = Decoder(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=1.4 / parameter.shape[1] ** 0.5)
    torch.nn.init.normal_(model.embed_tokens.weight, std=1.0)
    return model


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector away from thousands of tests and the modules they import: a collection would take a
    second each time, and in a forked process copy their memory."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(COLLECT_AFTER, 10, 10)
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def every_draft() -> Iterator[None]:
    """Engines draft whatever it costs: their tests want drafts. Tests of adapting ask for it with `adaptive`."""
    assert speculative_config.ADAPTIVE is SHIPPED_ADAPTIVE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculative_config, "ADAPTIVE", False)
        yield


@pytest.fixture(scope="session", autouse=True)
def every_block_comes_back() -> Iterator[None]:
    """Whenever an engine has become idle, no block of its pool has an owner, and all are accounted for."""

    def checked(change: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(change)
        def call(engine: Engine, *args: object) -> object:
            found = change(engine, *args)
            if not engine.requests and not engine._in_step.locked():
                engine.scheduler.check_integrity()
            return found

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("step", "abort"):
            patch.setattr(Engine, name, checked(getattr(Engine, name)))
        yield


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> None:
    """SIGINT interrupts, here and in the processes that tests start, though a shell that runs this in the background
    told it to ignore the signal."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """Each test begins with PyTorch's number of threads as it was chosen. The first step on several threads starts
    numba's, in the OpenMP library that PyTorch runs on too, and PyTorch then has as many."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """A pair whose draft is the target with noise on its weights, so that it is right about half the time."""
    root = tmp_path_factory.mktemp("tiny")
    tokenizer = train_tokenizer(TEXTS, 300)
    target = random_model(0, 48, 2, 4, 2)
    draft = random_model(0, 48, 2, 4, 2)
    draft.load_state_dict(target.state_dict())
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 2:
                parameter.add_(torch.randn_like(parameter) * 0.12 * parameter.std())
    for name, model in (("target", target), ("draft", draft)):
        save_llama(model, root / name, torch.float32)
        save_tokenizer(tokenizer, root / name, 256)
    return TinyPair(root / "target", root / "draft")


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole book of this clone, in which the replay of lesson 0 plays; Sphinx had nothing to say against it."""
    from minillm.book.site import build_book

    site = tmp_path_factory.mktemp("book") / "site"
    assert build_book(Path(__file__).parents[1], site, replays=["00_tour"]) == []
    return site
