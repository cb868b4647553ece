"""`WorkerPool`: tasks on the workers of a Ray cluster; a lost worker's task is done again by another.

A worker is an object that is built once on some machine of the cluster (it loads a model, say) and then takes one task
at a time. The results come in the order in which they are done. A task that has lost `MAX_LOSSES` workers is not tried
again: it may be what ends them. The other tasks are still done before the error is raised. But if `MAX_LOSSES` tasks
are given up before any is done, no worker may be able to run at all, and the pool ends.

Ray Data's `map_batches` would also run the workers. It writes files from its workers under names of its own, so a run
that is stopped and started again would not know what is done; that is why there is a pool here.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from minillm.cluster.session import lost_errors, ray_session
from minillm.config import at_least
from minillm.errors import ConfigError, EngineDeadError, first_line

Task = TypeVar("Task")
Result = TypeVar("Result")
MAX_LOSSES = 3
CLOSE_S = 10
NO_ROOM_S = 300.0
"""How long a machine that was lost may take to come back, if no other could run a worker: Ray would wait for ever."""
UNITS = 10_000
"""Ray counts processors and GPUs in ten-thousandths."""


class Worker(Protocol[Task, Result]):
    """What a pool runs. If it has a method `close`, that is called after its last task."""

    def run(self, task: Task) -> Result:
        """Do one task."""


class TasksGivenUpError(EngineDeadError):
    """The tasks `numbers` have lost too many workers. All others are done."""

    def __init__(self, message: str, numbers: Sequence[int]) -> None:
        super().__init__(message)
        self.numbers = numbers


class Pool(Protocol):
    """Something that does tasks, such as a `WorkerPool`."""

    def map(self, make: Callable[[], Worker[Task, Result]], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """Do `tasks` by workers that `make` builds. Yields `(number of the task, its result)` as they are done."""


def check_resources(name: str, wanted: float, whole_above_one: bool = False) -> None:
    """Raise `ConfigError` for an amount of processors or GPUs that Ray does not give. `whole_above_one`: of GPUs, a
    part of one or whole ones."""
    if not 0 <= wanted < math.inf:  # nan is in no range
        raise ConfigError(f"{name}={wanted:g} must be at least 0, and finite")
    if whole_above_one and wanted > 1 and wanted != int(wanted):
        raise ConfigError(f"{name}={wanted:g} must be a whole number, or at most 1")


def room(num_cpus: float, num_gpus: float) -> float:
    """How many workers with so many processors and GPUs the connected cluster's machines hold together, if nothing else
    runs there. Each worker is on one machine, and a part of a GPU on one GPU."""
    import ray

    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(min(_room(each.get("CPU", 0), num_cpus), _room(each.get("GPU", 0), num_gpus, True)) for each in machines)


def _room(there: float, wanted: float, of_one: bool = False) -> float:
    """`of_one`: a part of one is taken from one, so of two GPUs 0.6 goes into each once."""
    if not wanted:
        return math.inf
    if of_one and wanted < 1:
        return there * _room(1, wanted)
    return round(there * UNITS) // max(1, round(wanted * UNITS))


class WorkerPool:
    """At most `num_workers` at a time in a Ray cluster, each with its own `num_cpus` and `num_gpus`. `address`: of the
    cluster, as in `ray_session`."""

    def __init__(self, num_workers: int, num_cpus: float = 1, num_gpus: float = 0, address: str | None = None) -> None:
        at_least("num_workers", num_workers, 1)
        check_resources("num_cpus", num_cpus)
        check_resources("num_gpus", num_gpus, whole_above_one=True)
        self.num_workers, self.address = num_workers, address
        self.options = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_restarts": 0, "max_task_retries": 0}
        self.num_lost = 0
        """Workers that ended before their task."""

    def map(self, make: Callable[[], Worker[Task, Result]], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """See `Pool`. The cluster is connected to, or started, only when there are tasks and the first result is asked
        for: the caller has checked by then what can be checked without it.

        Raises what a worker raises, the errors of `ray_session`, `ConfigError` if no machine could run a worker,
        `EngineDeadError` if later none is left that could, or if the workers end before any task is done, and
        `TasksGivenUpError`.
        """
        if tasks:
            with ray_session(self.address):
                yield from self._run(make, tasks)

    def _run(self, make: Callable[[], Worker[Task, Result]], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        import ray
        from ray.exceptions import RayTaskError

        cpus, gpus = self.options["num_cpus"], self.options["num_gpus"]
        if not room(cpus, gpus):
            raise ConfigError(
                f"a worker needs {cpus:g} CPUs and {gpus:g} GPUs, and no machine of the cluster has both; ask for fewer"
            )
        build = ray.remote(**self.options)(_Actor).remote
        waiting, losses = deque(range(len(tasks))), dict.fromkeys(range(len(tasks)), 0)
        running: dict[Any, tuple[Any, int]] = {}
        given_up: list[int] = []
        is_any_done = False
        closing: list[Any] = []

        def start(actor: Any) -> None:
            if waiting:
                number = waiting.popleft()
                running[actor.run.remote(tasks[number])] = actor, number
            else:
                closing.append(actor.close.remote())

        try:
            for _ in range(min(self.num_workers, len(tasks))):
                start(build(make))
            while running:
                ready, _ = ray.wait(list(running), num_returns=1, timeout=NO_ROOM_S)
                if not ready:
                    if not room(cpus, gpus):
                        raise EngineDeadError(
                            f"a worker needs {cpus:g} CPUs and {gpus:g} GPUs, and no machine that has both is left in "
                            "the cluster; run it again when one is back"
                        )
                    continue
                [done] = ready
                actor, number = running.pop(done)
                try:
                    result = ray.get(done)
                except RayTaskError as problem:
                    raise problem.cause or problem from None
                except lost_errors() as problem:
                    self.num_lost += 1
                    losses[number] += 1
                    if losses[number] < MAX_LOSSES:
                        waiting.appendleft(number)
                    else:
                        given_up.append(number)
                    if waiting and len(given_up) == MAX_LOSSES and not is_any_done:
                        raise EngineDeadError(
                            f"{self.num_lost} workers have ended and no task is done; the last one: "
                            f"{first_line(problem)}; look into Ray's logs, then run it again"
                        ) from None
                    if waiting:
                        start(build(make))
                    continue
                is_any_done = True
                start(actor)
                del actor  # Ray ends an idle worker when its last handle is gone; others may wait for its processors
                yield number, result
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
        finally:
            for actor, _ in running.values():
                ray.kill(actor)
        if given_up:
            raise TasksGivenUpError(
                f"{len(given_up)} of {len(tasks)} tasks lost {MAX_LOSSES} workers each and are given up, the first is "
                f"task {given_up[0]}; all others are done: look into Ray's logs, then run it again",
                given_up,
            )
        if self.num_lost:
            words = f"workers lost: {self.num_lost}; others have done their tasks again; see Ray's logs for the reasons"
            warnings.warn(words, RuntimeWarning, stacklevel=3)  # behind `map`


class _Actor:
    """A worker in a process of its own, built with its first task: what `make` raises is raised by the pool."""

    def __init__(self, make: Callable[[], Worker[Any, Any]]) -> None:
        self.make = make
        self.worker: Worker[Any, Any] | None = None

    def run(self, task: Any) -> Any:
        if self.worker is None:
            self.worker = self.make()
        return self.worker.run(task)

    def close(self) -> None:
        if hasattr(self.worker, "close"):
            self.worker.close()
