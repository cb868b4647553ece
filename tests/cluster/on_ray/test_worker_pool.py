"""Workers on two nodes: a lost worker's task is done again by another, and no result is lost or doubled."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from minillm import LLM, SamplingParams
from minillm.cluster.generation import GenerationSettings, GenerationWorker, generate_file
from minillm.cluster.worker_pool import MAX_LOSSES, WorkerPool
from minillm.errors import ConfigError, EngineDeadError, PromptError
from tests.conftest import TinyPair


@dataclass
class Squares:
    """A worker that is killed by certain tasks: by the first try, or by every try."""

    folder: Path
    kills_once: tuple[int, ...] = ()
    kills_always: tuple[int, ...] = ()

    def run(self, number: int) -> tuple[int, str]:
        (self.folder / f"{number}-{os.getpid()}").touch()
        tries = len(list(self.folder.glob(f"{number}-*")))
        if number in self.kills_always or (number in self.kills_once and tries == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if number < 0:
            raise PromptError(f"{number} is negative")
        return number * number, ray.get_runtime_context().get_node_id()


def test_tasks_are_done_once_and_on_both_nodes(tmp_path: Path) -> None:
    pool = WorkerPool(2, num_cpus=2)  # a node has three, so one worker each
    found = dict(pool.map(partial(Squares, tmp_path), list(range(12))))
    assert {number: square for number, (square, _) in found.items()} == {n: n * n for n in range(12)}
    assert len({node for _, node in found.values()}) == 2
    assert pool.num_lost == 0


def test_a_killed_workers_task_is_done_by_another(tmp_path: Path) -> None:
    pool = WorkerPool(2, num_cpus=1)
    results = list(pool.map(partial(Squares, tmp_path, kills_once=(0, 3)), list(range(8))))
    assert sorted(number for number, _ in results) == list(range(8))
    assert pool.num_lost == 2
    assert len({path.name.split("-")[1] for path in tmp_path.glob("3-*")}) == 2


def test_a_task_that_ends_every_worker_is_given_up_after_the_others_are_done(tmp_path: Path) -> None:
    pool, done = WorkerPool(1, num_cpus=1), []
    with pytest.raises(EngineDeadError, match=r"1 of 4 tasks lost 3 workers each .* the first is task 1"):
        for number, _ in pool.map(partial(Squares, tmp_path, kills_always=(1,)), list(range(4))):
            done.append(number)
    assert sorted(done) == [0, 2, 3]
    assert pool.num_lost == MAX_LOSSES


def test_what_a_worker_raises_is_raised_here(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="-1 is negative"):
        list(WorkerPool(1).map(partial(Squares, tmp_path), [-1]))


def test_a_worker_that_no_machine_can_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs 64 CPUs and 0 GPUs, and no machine"):
        list(WorkerPool(1, num_cpus=64).map(partial(Squares, tmp_path), [1]))


class Killed(GenerationWorker):
    """An engine whose process is killed in its first shard, after it has generated."""

    def __init__(self, settings: GenerationSettings, marker: Path) -> None:
        super().__init__(settings)
        self.marker = marker

    def run(self, items: Sequence[Any]) -> list[dict[str, Any]]:
        rows = super().run(items)
        if not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return rows


def test_batch_generation_over_a_killed_worker_writes_each_prompt_once(
    tmp_path: Path, tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [f"def f{number}(a, b):" for number in range(20)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    engine = {"device": "cpu", "enforce_eager": True, "block_size": 4}
    settings = GenerationSettings(str(tiny.target), engine, {"temperature": 0.0, "max_tokens": 8})
    monkeypatch.setattr("minillm.cluster.generation.GenerationWorker", partial(Killed, marker=tmp_path / "killed"))
    pool = WorkerPool(2)
    parts = generate_file(file, tmp_path / "out", settings, pool, shard=4)
    assert pool.num_lost == 1
    rows = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    outputs = LLM(str(tiny.target), **engine).generate(
        prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False
    )
    assert [row["id"] for row in rows] == list(range(20))
    assert [row["token_ids"] for row in rows] == [output.outputs[0].token_ids for output in outputs]
    assert len(list((tmp_path / "out").glob("part-*"))) == 5
