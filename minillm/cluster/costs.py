"""What a cluster costs besides its engines: processor time per request, memory per replica, time per routing choice.

Processor time is what the operating system has counted for a process, so other work on the machine changes it little.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections import defaultdict
from typing import Any

import psutil

from minillm.cluster.prefix_table import PrefixTable

ROLES = {
    "proxy": "ray::ProxyActor",
    "gateway": "ray::ServeReplica:minillm:Gateway",
    "replica": "ray::ServeReplica:minillm:Replica",
}
"""How the processes of a cluster call themselves: Serve's HTTP server, the gateway, the replicas."""
BLOCKS_SENT = 4096
"""Blocks that each replica has been sent, where choices are timed."""


def processes() -> dict[str, list[psutil.Process]]:
    """The processes on this machine, by role."""
    found: dict[str, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter():
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:  # it has just ended, or is not ours
            continue
        for role, begin in ROLES.items():
            if title.startswith(begin):
                found[role].append(process)
    return found


def processor_seconds() -> dict[str, float]:
    """Processor time so far, by role."""
    seconds: dict[str, float] = dict.fromkeys(ROLES, 0.0)
    for role, members in processes().items():
        for process in members:
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            seconds[role] += times.user + times.system
    return seconds


def replica_bytes() -> list[int]:
    """Resident memory of each replica: weights, cache, PyTorch, Ray. What they share counts for each."""
    found = []
    for process in processes()["replica"]:
        try:
            found.append(process.memory_info().rss)
        except psutil.Error:
            continue
    return found


def routing_costs(num_replicas: int, num_blocks: int = 64, choices: int = 50) -> dict[str, Any]:
    """The mean processor time of a choice among `num_replicas`, for a prompt of `num_blocks` blocks that one of them
    was sent, and the memory of the table per block and replica."""
    draw = random.Random(0)
    sent = max(num_blocks, min(BLOCKS_SENT, BLOCKS_SENT * 16 // num_replicas))
    tracemalloc.start()
    table: PrefixTable[int] = PrefixTable()
    prompts = [[draw.randbytes(32) for _ in range(num_blocks)] for _ in range(choices)]
    began, _ = tracemalloc.get_traced_memory()
    for replica in range(num_replicas):
        table.note(replica, [draw.randbytes(32) for _ in range(sent)])
    size = tracemalloc.get_traced_memory()[0] - began
    tracemalloc.stop()
    for number, prompt in enumerate(prompts):
        table.note(number % num_replicas, prompt)
    loads = {replica: draw.randrange(8) for replica in range(num_replicas)}
    start = time.process_time()
    for prompt in prompts:
        table.note(table.rank(prompt, loads)[0], prompt)
    seconds = time.process_time() - start
    return {
        "replicas": num_replicas,
        "blocks_of_prompt": num_blocks,
        "microseconds": 1e6 * seconds / choices,
        "bytes_per_block": size / (num_replicas * sent),
    }
