"""Decode speed with 1, 2, 4 and 8 requested threads: on the machine as it is, on a busy one, and under a CPU quota.

A step's threads wait for each other at barriers, which is slow if they have to share processors with other work. The
engine then uses fewer threads (`minillm.ops.cpu.thread_choice`), so that requesting too many should cost little. Every
ratio is to one thread.

Each number of threads has its own process, which loads the model once; the processes run in turn. All must give the
same tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.bench.harness import Row, System, compare, result
from minillm.bench.prefill import joined_prompt
from minillm.bench.systems import room_for_prompt
from minillm.errors import MinillmError
from minillm.hardware import usable_processors

if TYPE_CHECKING:
    from rich.table import Table

COUNTS = (1, 2, 4, 8)
PROMPT_TOKENS = 128
ROUNDS = 6
CONTROL_GROUPS = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
"""Folders for control groups with a CPU quota, version 1 and 2."""
SHARE = 0.5
"""CPU quota in processors."""
IDLE, BUSY, LIMITED = "as it is", "a busy process for each processor", f"{SHARE} processors"
BUSY_LOOP = """
import os
parent = os.getppid()
while os.getppid() == parent:
    sum(range(10**5))
"""
"""Ends when its parent does, also one that a signal ended."""
ANSWERING = """
import json, sys
from minillm import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", enable_prefix_caching=False)
for line in sys.stdin:
    prompt, new_tokens = json.loads(line)
    greedy = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    [output] = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
    print(json.dumps(output.outputs[0].token_ids), flush=True)
"""


def run(model: str = "minicoder", rounds: int = ROUNDS, new_tokens: int = 96) -> dict[str, Any]:
    """Run every number of threads in turn, `rounds` times, in each condition. Returns the result as JSON values.

    Raises `ConfigError` for more new tokens than the model has room for.
    """
    room_for_prompt(model, new_tokens, PROMPT_TOKENS)
    prompt = joined_prompt(model, PROMPT_TOKENS)
    rows: list[Row] = []
    missing: dict[str, str] = {}
    for condition in (IDLE, BUSY, LIMITED):
        try:
            with ExitStack() as stack:
                group = stack.enter_context(control_group()) if condition == LIMITED else None
                systems = [
                    _system(stack.enter_context(Worker.started(model, count, group)), condition, prompt, new_tokens)
                    for count in COUNTS
                ]
                if condition == BUSY:
                    stack.enter_context(busy_processes(usable_processors()))
                rows += compare(systems, rounds)
        except PermissionError as problem:
            missing[condition] = f"no control group with a CPU quota can be created here ({problem})"
    config = {
        "model": model,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": new_tokens,
        "sampling": "greedy",
        "counted": "whole completions",
        "processors": usable_processors(),
        "rounds": rounds,
        "left_out": missing,
    }
    return result("threads", config, rows)


def table(outcome: dict[str, Any]) -> Table:
    """The rows for the terminal, with the condition of the machine."""
    from minillm.bench.tables import speed_table

    return speed_table(outcome, {"condition": "machine"})


class Worker:
    """A process that completes prompts with a fixed number of threads."""

    def __init__(self, count: int, process: subprocess.Popen[str]) -> None:
        self.count = count
        self.process = process

    @classmethod
    @contextmanager
    def started(cls, model: str, count: int, group: Path | None) -> Iterator[Worker]:
        """Start a worker, in the control group `group` unless it is None, and kill it after the block."""
        environment = {**os.environ, "OMP_NUM_THREADS": str(count), "NUMBA_NUM_THREADS": str(count)}
        command = [sys.executable, "-c", ANSWERING, model]
        if group is not None:
            command = ["sh", "-c", f'echo $$ > "{group / "cgroup.procs"}" && exec "$@"', "sh", *command]
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                yield cls(count, process)
            finally:
                process.kill()

    def complete(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """Complete the prompt. Returns the new tokens. Raises `MinillmError` if the process has ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps([prompt, new_tokens]) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise MinillmError(f"the process with {self.count} threads ended; its error is printed above")
        tokens: list[int] = json.loads(answer)
        return tokens


def _system(worker: Worker, condition: str, prompt: list[int], new_tokens: int) -> System:
    return System(
        _name(worker.count),
        lambda: [worker.complete(prompt, new_tokens)],
        None if worker.count == 1 else _name(1),
        lambda: {"condition": condition},
    )


def _name(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` processes that keep a processor busy."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@contextmanager
def control_group() -> Iterator[Path]:
    """Create a control group with a quota of `SHARE` processors. Raises `PermissionError` if that is not possible."""
    period = 100_000
    for root, file, text in (
        (CONTROL_GROUPS[0], "cpu.cfs_quota_us", f"{int(SHARE * period)}"),
        (CONTROL_GROUPS[1], "cpu.max", f"{int(SHARE * period)} {period}"),
    ):
        group = root / f"minillm-bench-{os.getpid()}"
        if not (root / "cgroup.procs").exists():
            continue
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / file).write_text(text)
            yield group
        finally:
            group.rmdir()
        return
    raise PermissionError("neither version of control groups is writable")
