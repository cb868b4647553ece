"""The HTTP server under load, compared with the offline engine: 32 clients, each with one request at a time.

- `offline`: `LLM.generate`, given all requests at once, of which 32 run at a time.
- `server`: `minillm serve` in a process of its own, whole answers. `server, streamed`: one event per step and request.
- `vLLM server`: vLLM's, whole answers; only if `MINILLM_VLLM_PYTHON` names an interpreter that has it.

All generate the same greedy tokens from the held-out prompts, without prefix caching. `ratio` compares the tokens per
second of neighbouring runs, client included: client and server share the processor. `cpu_ms_per_token` is the
processor time of the process that has the engine, of vLLM's server that of all its processes. Time to first token and
time per token (over requests, and between tokens) are those that the clients of the last run saw.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from minillm.bench.harness import Row, System, compare, peak_memory_of, result
from minillm.bench.latency import percentile
from minillm.bench.load_client import Answer, LoadClient
from minillm.bench.server_process import ServerProcess, VllmServerProcess
from minillm.bench.systems import choose, prompt_ids
from minillm.bench.tables import speed_table
from minillm.bench.vllm_peer import INTERPRETER, NO_VLLM
from minillm.errors import ConfigError
from minillm.hardware import usable_processors

if TYPE_CHECKING:
    from rich.console import Group

OFFLINE, SERVER, STREAMED, VLLM = "offline", "server", "server, streamed", "vLLM server"
CONCURRENT = 32
REQUESTS = 64
LONGEST = 192
"""Longer prompts are cut to this many tokens."""
NEW_TOKENS = 128
ROUNDS = 6
FLAGS = ("--max-num-seqs", str(CONCURRENT), "--dtype", "float32", "--no-enable-prefix-caching")
"""Of both servers: the options of the offline engine."""


def run(
    model: str = "minicoder",
    systems: Sequence[str] | None = None,
    rounds: int = ROUNDS,
    prompts: int = REQUESTS,
    new_tokens: int = NEW_TOKENS,
) -> dict[str, Any]:
    """Run the systems in turn on the same requests. Returns the result as JSON values.

    Raises `ConfigError` for an unknown system, and for fewer requests than clients.
    """
    import torch

    from minillm.models.hub import resolve

    if prompts < CONCURRENT:
        raise ConfigError(f"{prompts} prompts are fewer than the {CONCURRENT} clients; take {CONCURRENT} or more")
    interpreter = os.environ.get(INTERPRETER)
    chosen = choose([OFFLINE, SERVER, STREAMED, VLLM], systems)
    missing = {VLLM: NO_VLLM} if VLLM in chosen and not interpreter else {}
    names = [name for name in chosen if name not in missing]
    ids = prompt_ids(model, prompts, 1, LONGEST)
    offline = Offline(model, ids, new_tokens)
    servers: dict[str, ServerProcess] = {}
    try:
        if SERVER in names or STREAMED in names:
            servers[SERVER] = servers[STREAMED] = ServerProcess(model, (*FLAGS, "--device", "cpu"))
        if VLLM in names:
            folder, threads = str(resolve(model)), torch.get_num_threads()
            servers[VLLM] = VllmServerProcess(str(interpreter), folder, model, threads, FLAGS)
        measured: dict[str, Measured] = {OFFLINE: offline}
        for name in names:
            if name != OFFLINE:
                measured[name] = Served(servers[name], model, ids, new_tokens, streamed=name == STREAMED)
        baselines = {SERVER: (OFFLINE, VLLM), STREAMED: (OFFLINE,), VLLM: (), OFFLINE: ()}
        rows = compare(
            [
                System(
                    name,
                    measured[name].run,
                    tuple(each for each in baselines[name] if each in names) or None,
                    measured[name].details,
                )
                for name in names
            ],
            rounds,
            lambda name: _peak_memory(model, new_tokens) if name == OFFLINE else servers[name].peak_memory,
        )
    finally:
        for each in set(servers.values()):
            each.close()
    config = {
        "model": model,
        "clients": CONCURRENT,
        "requests": prompts,
        "prompt_tokens": sum(map(len, ids)),
        "new_tokens": new_tokens,
        "sampling": "greedy",
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "processors": usable_processors(),
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "rounds": rounds,
        "left_out": missing,
    }
    return result("serve", config, _with_cpu_ratio(rows))


def table(outcome: dict[str, Any]) -> Group:
    """The rows for the terminal: speeds, then processor time and latencies."""
    from rich.console import Group
    from rich.table import Table

    headings = {
        "cpu_ms_per_token": "CPU ms/token",
        "cpu_ratio": "CPU ratio",
        "ttft_p50_ms": "TTFT p50 ms",
        "ttft_p90_ms": "p90",
        "tpot_p50_ms": "TPOT p50 ms",
        "tpot_p90_ms": "p90",
    }
    details = Table("system", *headings.values())
    for name, config in {row["system"]: row["config"] for row in outcome["rows"]}.items():
        details.add_row(name, *(f"{config[key]:,.4g}" if key in config else "" for key in headings))
    return Group(speed_table(outcome), details)


class Measured:
    """One system. `run` notes the processor time of its process or processes."""

    def __init__(self, cpu_seconds: Callable[[], float]) -> None:
        self.cpu_seconds = cpu_seconds
        self.cpu_ms_per_token: list[float] = []

    def run(self) -> list[list[int]]:
        """Generate all tokens."""
        before = self.cpu_seconds()
        tokens = self.generate()
        self.cpu_ms_per_token.append(1000 * (self.cpu_seconds() - before) / sum(map(len, tokens)))
        return tokens

    def generate(self) -> list[list[int]]:
        """The tokens of every request."""
        raise NotImplementedError

    def details(self) -> dict[str, Any]:
        """Further values to report. The first run is the warm-up."""
        return {"cpu_ms_per_token": statistics.median(self.cpu_ms_per_token[1:])}


class Offline(Measured):
    """`LLM.generate` in this process."""

    def __init__(self, model: str, prompts: Sequence[list[int]], new_tokens: int) -> None:
        from minillm import LLM, SamplingParams

        super().__init__(time.process_time)
        self.llm = LLM(model, max_num_seqs=CONCURRENT, dtype="float32", device="cpu", enable_prefix_caching=False)
        self.prompts = [{"prompt_token_ids": ids} for ids in prompts]
        self.params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)

    def generate(self) -> list[list[int]]:
        """The tokens of every request."""
        outputs = self.llm.generate(self.prompts, self.params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]


class Served(Measured):
    """The server, asked by a client in this process."""

    def __init__(
        self, server: ServerProcess, model: str, prompts: Sequence[list[int]], new_tokens: int, streamed: bool
    ) -> None:
        super().__init__(lambda: server.cpu_seconds)
        self.server, self.client = server, LoadClient(server.url, CONCURRENT)
        self.streamed = streamed
        own = {"temperature": 0, "max_tokens": new_tokens, "ignore_eos": True, "return_token_ids": True}
        self.bodies = [{"model": model, "prompt": ids, "stream": streamed, **own} for ids in prompts]
        self.answers: list[Answer] = []

    def generate(self) -> list[list[int]]:
        """The tokens of every request."""
        self.answers = self.client.run(self.bodies)
        return [answer.token_ids for answer in self.answers]

    def details(self) -> dict[str, Any]:
        """Processor time and vLLM's version; of streams the latencies, and how many tokens came in a chunk."""
        of_stream = latencies(self.answers) if self.streamed else {}
        return {**super().details(), **self.server.versions, **of_stream}


def latencies(answers: Sequence[Answer]) -> dict[str, float]:
    """Percentiles of streamed answers, in milliseconds, and the tokens per event."""
    values = {
        "ttft": [answer.ttft for answer in answers],
        "tpot": [answer.tpot for answer in answers],
        "itl": [gap for answer in answers for gap in answer.gaps],
    }
    found = {
        f"{name}_p{share}_ms": 1000 * percentile(times, share / 100)
        for name, times in values.items()
        for share in (50, 90)  # of 64 requests the 99th percentile is the largest value
    }
    num_tokens = sum(len(answer.arrivals) for answer in answers)
    return {**found, "tokens_per_event": num_tokens / sum(len(set(answer.arrivals)) for answer in answers)}


def _with_cpu_ratio(rows: Sequence[Row]) -> list[Row]:
    """Add to each server's row the offline engine's processor time per token divided by its own."""
    offline = next((row.config["cpu_ms_per_token"] for row in rows if row.system == OFFLINE), None)
    for row in rows:
        if row.system != OFFLINE and offline is not None:
            row.config["cpu_ratio"] = offline / row.config["cpu_ms_per_token"]
    return list(rows)


def _peak_memory(model: str, new_tokens: int) -> int | None:
    code = "from minillm.bench import serving as s; prompts = "
    code += f"s.prompt_ids({model!r}, {CONCURRENT}, 1, {LONGEST}); s.Offline({model!r}, prompts, {new_tokens}).run()"
    return peak_memory_of(code)
