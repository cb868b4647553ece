"""Decode speed of one model split over 1, 2 and 4 processes of this machine, and how long each waits for the others.

Every process has one thread. `wait` is the time of rank 0 in collectives: sending, receiving, and waiting for a rank
that is slower or has no processor of its own. `compute` is the rest of the time per token.

On one machine's processors a split loses. It runs plain PyTorch, which the compiled step of a single process beats by
far. Two processes share the caches and the memory bandwidth that one process could use alone with two threads. Each of
the two sums per layer stops all ranks until the slowest has arrived; on a busy machine that is one without a
processor. A split pays where a rank brings its own memory and bandwidth, as GPUs do, and where the model does not fit
in one of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minillm.bench.harness import Row, System, compare, result
from minillm.bench.prefill import joined_prompt
from minillm.errors import ConfigError
from minillm.hardware import usable_processors

if TYPE_CHECKING:
    from rich.table import Table

    from minillm import LLM

COUNTS = (1, 2, 4)
COMPILED, ALONE = "1 process, compiled step", "1 process"
PROMPT_TOKENS = 64
ROUNDS = 5


def run(model: str = "minicoder", rounds: int = ROUNDS, new_tokens: int = 32) -> dict[str, Any]:
    """Run every number of processes in turn, `rounds` times. Returns the result as JSON values."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        prompt = joined_prompt(model, PROMPT_TOKENS)
        missing: dict[str, str] = {}
        systems = [Splitting.of(model, 1, prompt, new_tokens, enforce_eager=False)]
        for count in COUNTS:
            try:
                systems.append(Splitting.of(model, count, prompt, new_tokens, enforce_eager=True))
            except ConfigError:
                missing[_name(count)] = "not split"
        rows: list[Row] = compare([one.system() for one in systems], rounds)
    finally:
        torch.set_num_threads(threads)
    config = {
        "model": model,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": new_tokens,
        "sampling": "greedy",
        "counted": "whole completions",
        "threads_per_process": 1,
        "processors": usable_processors(),
        "rounds": rounds,
        "left_out": missing,
    }
    return result("parallel", config, rows)


def table(outcome: dict[str, Any]) -> Table:
    """The rows for the terminal, with the time split in two."""
    from minillm.bench.tables import speed_table

    columns = {
        "compute_ms": "compute ms",
        "wait_ms": "wait ms",
        "all_reduces_per_step": "all-reduces a step",
        "bytes_per_step": "bytes a step",
    }
    return speed_table(outcome, columns)


@dataclass
class Splitting:
    """An engine over `count` processes, and how long its last completion took."""

    name: str
    llm: LLM
    prompt: Sequence[int]
    new_tokens: int
    seconds: float = 0.0
    steps: int = 0

    @classmethod
    def of(cls, model: str, count: int, prompt: Sequence[int], new_tokens: int, enforce_eager: bool) -> Splitting:
        """Start the engine. Raises `ConfigError` if `count` does not divide the model."""
        from minillm import LLM

        options = {"enforce_eager": enforce_eager, "enable_prefix_caching": False, "device": "cpu"}
        llm = LLM(model, tensor_parallel_size=count, **options)
        return cls(_name(count) if enforce_eager else COMPILED, llm, prompt, new_tokens)

    def complete(self) -> list[list[int]]:
        """The tokens of one completion."""
        from minillm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=self.new_tokens, ignore_eos=True)
        if (group := self._group) is not None:
            group.traffic.clear()
        began, before = time.perf_counter(), self.llm.engine.num_steps
        [output] = self.llm.generate([{"prompt_token_ids": list(self.prompt)}], greedy, use_tqdm=False)
        self.seconds, self.steps = time.perf_counter() - began, self.llm.engine.num_steps - before
        return [output.outputs[0].token_ids]

    def metrics(self) -> dict[str, Any]:
        """Where the time of the last completion went, and what was exchanged."""
        if (group := self._group) is None:
            return {"compute_ms": 1000 * self.seconds / self.new_tokens, "wait_ms": 0.0}
        traffic = group.traffic
        return {
            "compute_ms": 1000 * (self.seconds - traffic.seconds) / self.new_tokens,
            "wait_ms": 1000 * traffic.seconds / self.new_tokens,
            "all_reduces_per_step": traffic.num_all_reduces / self.steps,
            "bytes_per_step": traffic.num_bytes / self.steps,
        }

    def system(self) -> System:
        """This engine for `compare`."""
        return System(self.name, self.complete, None if self.name == ALONE else ALONE, self.metrics)

    @property
    def _group(self) -> Any:
        """The ranks; None if there is only one."""
        return getattr(self.llm.engine.runner.model, "group", None)


def _name(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"
