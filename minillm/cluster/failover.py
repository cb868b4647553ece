"""The failover check: two nodes on one machine, many requests, and in the middle of them a replica is killed.

    node 1  gateway, replica a           500 requests, 24 at a time, about documents of a few blocks each
    node 2  replica b ✗ SIGKILL, replica c         after a third of the answers
                                          counted: answers per request, their tokens against one engine's, and how many
                                          prompt tokens the replicas' prefix caches had, for each router

Answers and tokens are counted. Nothing is timed, because all nodes share the processors of one machine; `costs` adds
the processor time and the memory of the cluster's own processes.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from minillm.bench.harness import LIBRARIES, describe_run
from minillm.bench.processes import free_port
from minillm.cluster import costs
from minillm.cluster.replica import ReplicaSettings
from minillm.cluster.session import check_ray, set_environment
from minillm.config import at_least
from minillm.errors import EngineDeadError

if TYPE_CHECKING:
    from rich.table import Table

ENGINE = {"num_kv_blocks": 96, "enforce_eager": True, "max_num_seqs": 8, "device": "cpu"}
"""A cache that holds some of the documents, not all."""
START_TRIES = 3
ROUTED = (3, 100, 1000)
"""Numbers of replicas for which the router's choice is measured."""
NODE = {"object_store_memory": 80 << 20, "include_dashboard": False}


@dataclass(frozen=True)
class FailoverSettings:
    """What is sent, and to how many replicas."""

    model: str = "minicoder"
    requests: int = 500
    replicas: int = 3
    documents: int = 12
    document_tokens: int = 128
    new_tokens: int = 8
    concurrent: int = 24
    block_size: int = 16
    max_imbalance: int = 16
    routers: tuple[str, ...] = ("power_of_two", "prefix")
    """In this order; a replica is killed in each."""
    engine: dict[str, Any] = field(default_factory=lambda: dict(ENGINE))

    def __post_init__(self) -> None:
        for name in ("requests", "replicas", "documents", "document_tokens", "new_tokens", "concurrent", "block_size"):
            at_least(name, getattr(self, name), 1)


def prompts_of(settings: FailoverSettings) -> list[list[int]]:
    """The prompts: a document and a few tokens of its own each, the documents in random order (always the same)."""
    from minillm.cluster.prefix_of_request import PrefixReader

    vocab = PrefixReader(settings.model, settings.block_size).tokenizer.vocab_size
    draw = random.Random(0)
    documents = [[draw.randrange(1, vocab) for _ in range(settings.document_tokens)] for _ in range(settings.documents)]
    return [[*draw.choice(documents), *(draw.randrange(1, vocab) for _ in range(4))] for _ in range(settings.requests)]


def expected_tokens(settings: FailoverSettings, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What one engine in this process generates, greedy."""
    from minillm.llm import LLM
    from minillm.sampling import SamplingParams

    llm = LLM(settings.model, block_size=settings.block_size, **settings.engine)
    params = SamplingParams(temperature=0, max_tokens=settings.new_tokens)
    outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@contextmanager
def two_nodes(cpus_per_node: int) -> Iterator[None]:
    """A cluster of two nodes in this machine's processes, and a connection to it."""
    check_ray()
    set_environment()
    import ray

    cluster = _started(cpus_per_node)
    try:
        ray.init(address=cluster.address, namespace="minillm", log_to_driver=False, logging_level="error")
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def _started(cpus_per_node: int) -> Any:
    """The two nodes. On a busy machine Ray's processes may wait too short for each other: it is tried `START_TRIES`
    times. Raises `EngineDeadError`."""
    from ray.cluster_utils import Cluster

    for _ in range(START_TRIES):
        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=cpus_per_node, **NODE)
            cluster.add_node(num_cpus=cpus_per_node, object_store_memory=NODE["object_store_memory"])
            return cluster
        except Exception as found:  # Ray raises this class itself
            cluster.shutdown()
            problem = found
    raise EngineDeadError(f"Ray's nodes do not start on this machine: {problem}") from problem


def run(settings: FailoverSettings | None = None) -> dict[str, Any]:
    """Run the check on two simulated nodes. Returns the result as JSON values."""
    settings = settings or FailoverSettings()
    prompts = prompts_of(settings)
    expected = expected_tokens(settings, prompts)  # before there is a cluster: it refuses what no replica can run
    with two_nodes(cpus_per_node=settings.replicas // 2 + 2):
        return measure(settings, prompts, expected)


def measure(
    settings: FailoverSettings, prompts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Run the check with every router, in the connected cluster; its replicas must be on this machine. `expected`: the
    tokens of one engine."""
    rows = [_with_router(settings, router, prompts, expected) for router in settings.routers]
    routing = [costs.routing_costs(count) for count in ROUTED]
    config = asdict(settings)
    about = describe_run("failover", config, (*LIBRARIES, "ray"))
    return {**about, "config": config, "rows": rows, "routing": routing}


def _with_router(
    settings: FailoverSettings, router: str, prompts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]
) -> dict[str, Any]:
    from minillm.cluster.application import ClusterSettings, serving

    engine = {"block_size": settings.block_size, **settings.engine}
    limits = {"blocks_per_replica": settings.engine["num_kv_blocks"]} if "num_kv_blocks" in settings.engine else {}
    wanted = ClusterSettings(
        ReplicaSettings(settings.model, engine),
        num_replicas=settings.replicas,
        router=router,
        max_imbalance=settings.max_imbalance,
        router_limits=limits,
    )
    with serving(wanted, port=free_port()) as url:
        client = _Client(url, settings)
        before = costs.processor_seconds()
        asyncio.run(client.run(prompts))
        spent = {role: after - before[role] for role, after in costs.processor_seconds().items()}
        memory = costs.replica_bytes()
    per_request = {role: 1000 * spent[role] / len(prompts) for role in ("proxy", "gateway")}
    measured = {"processor_ms_per_request": per_request, "replica_bytes": statistics.median(memory)}
    return {"router": router, **_counts(client, expected), **measured}


class _Client:
    """Sends all requests. After a third of the answers it kills the replica that has given most of them. It repeats
    nothing."""

    def __init__(self, url: str, settings: FailoverSettings) -> None:
        self.url, self.settings = url, settings
        self.answers: list[tuple[int, int, str, dict[str, Any]]] = []
        """Number of the request, status, replica, body (empty after an error): one entry per answer, in the order in
        which they come."""
        self.sent_again = 0
        """Answers of requests that had lost a replica."""
        self.killed = ""
        self.in_flight_at_kill = 0
        self._in_flight = 0

    async def run(self, prompts: Sequence[Sequence[int]]) -> None:
        import aiohttp

        waiting = iter(enumerate(prompts))
        limit = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=limit, connector=aiohttp.TCPConnector(limit=0)) as session:

            async def work() -> None:
                for number, prompt in waiting:
                    await self._ask(session, number, prompt)
                    counts = self.per_replica
                    if not self.killed and counts.total() >= max(1, len(prompts) // 3):
                        await self._kill(counts.most_common(1)[0][0])

            await asyncio.gather(*(work() for _ in range(self.settings.concurrent)))

    async def _ask(self, session: Any, number: int, prompt: Sequence[int]) -> None:
        import aiohttp

        body = {"prompt": list(prompt), "max_tokens": self.settings.new_tokens, "temperature": 0}
        self._in_flight += 1
        try:
            async with session.post(f"{self.url}/v1/completions", json=body | {"return_token_ids": True}) as response:
                found = await response.json() if response.status == 200 else {}  # Serve's own errors are no JSON
                self.sent_again += int(response.headers.get("x-minillm-tries", "1")) > 1
                self.answers.append((number, response.status, response.headers.get("x-minillm-replica", ""), found))
        except (aiohttp.ClientError, OSError, ValueError):
            pass  # the request has no answer, and `answers` no entry of it
        finally:
            self._in_flight -= 1

    @property
    def per_replica(self) -> Counter[str]:
        """The number of answers of each replica. Serve's own errors, which name none, are left out."""
        return Counter(replica for _, _, replica, _ in self.answers if replica)

    async def _kill(self, replica: str) -> None:
        """End the process of a replica, as if its machine lost power."""
        self.killed, self.in_flight_at_kill = replica, self._in_flight
        os.kill(await asyncio.to_thread(process_of, replica), signal.SIGKILL)


def process_of(replica: str) -> int:
    """The process id of a replica, by the name that its answers carry."""
    import ray

    actor = ray.get_actor(f"SERVE_REPLICA::minillm#Replica#{replica}", namespace="serve")
    return int(ray.get(actor.__ray_call__.remote(_process_id)))


def _process_id(actor: Any) -> int:
    return os.getpid()


def _counts(client: _Client, expected: Sequence[Sequence[int]]) -> dict[str, Any]:
    answers = Counter(number for number, *_ in client.answers)
    good = [(number, body) for number, status, _, body in client.answers if status == 200]
    usage = [body["usage"] for _, body in good]
    prompt_tokens = sum(each["prompt_tokens"] for each in usage)
    cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in usage)
    return {
        "requests": len(expected),
        "answered_once": sum(count == 1 for count in answers.values()),
        "status_200": len(good),
        "same_tokens": sum(body["choices"][0]["token_ids"] == expected[number] for number, body in good),
        "killed": client.killed,
        "in_flight_at_kill": client.in_flight_at_kill,
        "sent_again": client.sent_again,
        "requests_per_replica": dict(client.per_replica),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached,
        "cached_share": cached / max(1, prompt_tokens),
    }


def passed(result: Mapping[str, Any]) -> bool:
    """Whether every request was answered once, with the tokens of one engine."""
    counted = ("answered_once", "status_200", "same_tokens")
    return all(row[name] == row["requests"] for row in result["rows"] for name in counted)


def table(result: Mapping[str, Any]) -> Table:
    """A row per router."""
    from rich.table import Table

    made = Table(title="one replica killed in the middle; counts")
    headings = ("router", "requests", "answered once", "same tokens", "sent again", "per replica", "from cache")
    for heading in headings:
        made.add_column(heading, justify="left" if heading == "router" else "right")
    for row in result["rows"]:
        per_replica = ", ".join(
            f"{count}{' ✗' if name == row['killed'] else ''}" for name, count in row["requests_per_replica"].items()
        )
        counts = [str(row[name]) for name in ("requests", "answered_once", "same_tokens", "sent_again")]
        made.add_row(row["router"], *counts, per_replica, f"{row['cached_share']:.1%}")
    return made
