"""The tables of `docs/ray.md`: what `minillm cluster failover` counted and measured, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable

from results import EARLIER, Result, is_of_bundled_weights, load, revision, row_of

from minillm.cluster.prefix_table import BLOCKS_PER_REPLICA

REQUESTS_PER_REPLICA = 1


def cluster_tables() -> str:
    """What `minillm cluster failover` counted and measured, and what follows from it for a thousand replicas."""
    found, replica = load("failover"), row_of("batch", "minillm continuous")
    rows, routing = found["rows"], {cost["replicas"]: cost for cost in found["routing"]}
    lines = ["| counted | " + " | ".join(row["router"] for row in rows) + " |", "|---|" + "---|" * len(rows)]

    def line(what: str, values: Iterable[str]) -> None:
        lines.append(f"| {what} | " + " | ".join(values) + " |")

    line("requests, answered once, with the tokens of one engine", (_of_requests(row) for row in rows))
    line("of them sent to a second replica", (str(row["sent_again"]) for row in rows))
    line("requests per replica, the killed one first", (_per_replica(row) for row in rows))
    line("prompt tokens from prefix caches", (f"{row['cached_share']:.1%}" for row in rows))
    spent = rows[-1]["processor_ms_per_request"]
    choice_ms = routing[1000]["microseconds"] / 1000
    proxy_ms, gateway_ms = spent["proxy"], spent["gateway"] + choice_ms
    table_bytes = routing[1000]["bytes_per_block"] * BLOCKS_PER_REPLICA
    lines += ["", "| measured, router `prefix` | |", "|---|---|"]
    line("processor time per request in Serve's proxy", [f"{spent['proxy']:.1f} ms"])
    line("processor time per request in the gateway: tokenising, hashing, routing", [f"{spent['gateway']:.1f} ms"])
    blocks = found["config"]["engine"]["num_kv_blocks"]
    of_replica = f"memory of a replica of the bundled model, {blocks} cache blocks, plain PyTorch"
    line(of_replica, [f"{rows[-1]['replica_bytes'] / 2**20:,.0f} MiB"])
    for count, cost in routing.items():
        line(f"processor time of a choice among {count:,} replicas", [f"{cost['microseconds']:,.0f} µs"])
    line("memory of the router's table per block and replica", [f"{routing[1000]['bytes_per_block']:.0f} bytes"])
    lines += ["", "| modelled from these, 1,000 replicas | |", "|---|---|"]
    one = "tokens/s of one engine on two threads, 32 requests, at most 8 at once (measured, `benchmarks/batch.json`)"
    line(one, [f"{replica['tokens_per_s']:,.0f}"])
    every = "tokens/s, if every replica has two processors and nothing else is a limit"
    line(every, [f"{replica['tokens_per_s'] / 1000:.1f} million"])
    length = sum(load("batch")["config"]["new_tokens"]) / load("batch")["config"]["requests"]
    speed = replica["tokens_per_s"] / length
    line(f"requests/s of one such engine, {length:.0f} new tokens each on average", [f"{speed:,.0f}"])
    through = "requests/s of one gateway and proxy, a processor each, with a choice among 1,000"
    line(through, [f"{1000 / max(proxy_ms, gateway_ms):,.0f}"])
    for requests, words in ((REQUESTS_PER_REPLICA, "request/s"), (speed, "requests/s")):
        needed = requests * 1000 * (proxy_ms + gateway_ms) / 1000
        line(f"processors for gateways and proxies at {requests:,.0f} {words} per replica", [f"{needed:,.0f}"])
    share = f"memory of a gateway's table, {BLOCKS_PER_REPLICA:,} blocks per replica"
    line(share, [f"{1000 * table_bytes / 2**30:.1f} GiB"])
    together = 1000 * rows[-1]["replica_bytes"] / 2**30
    line(f"memory of the replicas together, {blocks} cache blocks each", [f"{together:,.0f} GiB"])
    machine = found["hardware"]["cpu"]["name"]
    weights = "" if is_of_bundled_weights("failover") else f", {EARLIER}"
    about = (
        f"Ray {found['versions']['ray']}, one run, {machine}{weights}, revision {revision(found)}. "
        "`benchmarks/failover.json`."
    )
    return "\n".join(lines) + f"\n\n{about}\n"


def _of_requests(row: Result) -> str:
    return f"{row['requests']}, {row['answered_once']}, {row['same_tokens']}"


def _per_replica(row: Result) -> str:
    counts = dict(row["requests_per_replica"])
    return ", ".join(map(str, [counts.pop(row["killed"]), *counts.values()]))
