"""The compiled step for other processors, compared with PyTorch limited to the same instructions.

numba can compile for any processor whose instructions this one also has, and PyTorch's libraries can be limited to AVX2
or less. So each row is a process that emulates another processor: it runs the code that would run there, at this
processor's speed. For another architecture the code is only compiled, and the instructions of its inner loops are
counted (`minillm.bench.machine_code`).

Each process compiles the step again for every kind of weights: half a minute each on an idle machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from minillm.bench.harness import Row, System, compare, result
from minillm.bench.prefill import joined_prompt
from minillm.bench.systems import choose, room_for_prompt
from minillm.errors import MinillmError

if TYPE_CHECKING:
    from rich.table import Table

KINDS = ("fp32", "int8", "w8a8", "int4")
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
AVX512 = {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_ENABLE_INSTRUCTIONS": "AVX512"}
SSE = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
HELD_TO = {
    "haswell": AVX2,
    "alderlake": {**AVX2, "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"},  # the others have no such level
    "skylake-avx512": AVX512,
    "x86-64": SSE,
    "ivybridge": SSE,
}
"""LLVM's name of a processor → the environment that limits PyTorch and its libraries to its instructions."""
NEEDS: dict[str, tuple[str, ...]] = {
    "haswell": ("avx2", "fma", "f16c"),
    "alderlake": ("avx2", "fma", "f16c", "avxvnni"),
    "skylake-avx512": ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "x86-64": (),
    "ivybridge": ("avx", "f16c"),
}
"""The same name → LLVM's names of the features that code for it may use."""
COMPILE_ONLY = ("apple-m1", "neoverse-n1", "neoverse-v1")
PROMPT_TOKENS, ROUNDS = 64, 3
PRETENDING = """
import json, sys
from minillm.bench.processors import measure_here
print(json.dumps(measure_here(*json.loads(sys.argv[1]))))
"""


def run(
    model: str = "minicoder", systems: Sequence[str] | None = None, rounds: int = ROUNDS, new_tokens: int = 32
) -> dict[str, Any]:
    """Run every processor in turn. Returns the result as JSON values.

    `systems`: names such as "haswell fp32"; None: all. A processor whose code this one does not run, or whose process
    fails, is left out. Raises `ConfigError` for an unknown name and for more new tokens than the model has room for,
    what `resolve` raises for an unknown model, and `MinillmError` if processes failed and none measured anything.
    """
    room_for_prompt(model, new_tokens, PROMPT_TOKENS)
    known = [f"{name} {kind}" for name in HELD_TO for kind in KINDS]
    chosen = choose(known, systems)
    rows, missing, failures = [], {}, []
    for name in HELD_TO:
        kinds = [kind for kind in KINDS if f"{name} {kind}" in chosen]
        if not kinds:
            continue
        if reason := unsupported_reason(name):
            missing[name] = reason
            continue
        try:
            found = _measure_as(name, [model, kinds, rounds, new_tokens])
        except MinillmError as problem:  # the others are still measured
            missing[name] = str(problem)
            failures.append(f"{name}: {problem}")
            continue
        if found["reason"]:
            missing[name] = found["reason"]
        for row in found["rows"]:
            row["config"]["processor"] = name
            rows.append(Row(**row))
    if failures and not rows:
        raise MinillmError("; ".join(failures))
    config = {
        "model": model,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": new_tokens,
        "sampling": "greedy",
        "counted": "whole completions",
        "threads": 1,
        "rounds": rounds,
        "left_out": missing,
        "held_to": HELD_TO,
        "loops": count_loops(),
    }
    return result("processors", config, rows)


HEADINGS = ("processor", "what", "tokens/s", "PyTorch's tokens/s", "speed over PyTorch's", "spread", "same tokens")


def lines(outcome: dict[str, Any]) -> list[tuple[str, ...]]:
    """The result as lines under `HEADINGS`: processors that ran, those that were refused, those only compiled for."""
    from minillm.bench.tables import same_tokens

    speeds = {(row["config"]["processor"], row["system"]): f"{row['tokens_per_s']:,.0f}" for row in outcome["rows"]}
    found = [
        (
            row["config"]["processor"],
            row["system"],
            speeds[row["config"]["processor"], row["system"]],
            speeds[row["config"]["processor"], row["baseline"]],
            f"{row['ratio']:.2f}×",
            f"{row['ratio_min']:.2f} to {row['ratio_max']:.2f}",
            same_tokens(row),
        )
        for row in outcome["rows"]
        if row["baseline"] is not None
    ]
    empty = [""] * (len(HEADINGS) - 2)
    found += [(name, f"refused: {why}", *empty) for name, why in outcome["config"]["left_out"].items()]
    for name, loops in outcome["config"]["loops"].items():
        found += [(name, f"compiled only, {kind}: {text}", *empty) for kind, text in loops.items()]
    return found


def table(outcome: dict[str, Any]) -> Table:
    """The lines as a table for the terminal."""
    from rich.table import Table

    found = Table(*HEADINGS, title=f"processors on {outcome['hardware']['cpu']['name']}")
    for line in lines(outcome):
        found.add_row(*line)
    return found


def markdown(outcome: dict[str, Any]) -> str:
    """The lines as a Markdown table."""
    parts = [HEADINGS, ["---"] * len(HEADINGS), *lines(outcome)]
    return "\n".join(f"| {' | '.join(part)} |" for part in parts) + "\n"


def unsupported_reason(name: str) -> str | None:
    """Why this machine does not run code for the processor `name`, a key of `NEEDS`; None if it does."""
    from llvmlite import binding

    if binding.get_process_triple().split("-")[0] != "x86_64":
        return "its code is for x86, and this processor is of another architecture"
    features = binding.get_host_cpu_features()
    lacking = [feature for feature in NEEDS[name] if not features.get(feature)]
    return f"this processor has no {' and no '.join(lacking)}" if lacking else None


def count_loops() -> dict[str, dict[str, str]]:
    """Instruction counts of the inner loops (six rows, one panel) for the processors in `COMPILE_ONLY`."""
    from llvmlite import binding

    from minillm.bench.machine_code import Loop, byte_loop, float_loop

    def text(loop: Loop) -> str:
        times = ", ".join(f"{count} {name}" for name, count in loop.multiplications.items())
        return f"{times} of {len(loop.lines)}, {loop.spills} spilled"

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    return {
        name: {"float32": text(float_loop(name, 6, 1)), "bytes": text(byte_loop(name, 6, 1))} for name in COMPILE_ONLY
    }


def measure_here(model: str, kinds: Sequence[str], rounds: int, new_tokens: int) -> dict[str, Any]:
    """Measure in this process. Returns the rows, or the reason why the step is not compiled."""
    from minillm.ops.cpu.processor import processor

    reason = processor().unsupported_reason
    if reason is not None:
        return {"reason": reason, "rows": []}
    rows = [row for kind in kinds for row in _compare(model, kind, rounds, new_tokens)]
    return {"reason": None, "rows": [asdict(row) for row in rows]}


def _compare(model: str, kind: str, rounds: int, new_tokens: int) -> list[Row]:
    from minillm import LLM, SamplingParams

    prompt = joined_prompt(model, PROMPT_TOKENS)
    greedy = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)

    def system(name: str, baseline: str | None, eager: bool) -> System:
        quantization = None if kind == "fp32" else kind
        llm = LLM(model, quantization=quantization, enforce_eager=eager, enable_prefix_caching=False, device="cpu")

        def complete() -> list[list[int]]:
            return [
                list(o.outputs[0].token_ids)
                for o in llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
            ]

        return System(name, complete, baseline)

    plain = f"minillm eager {kind}"
    return compare([system(plain, None, True), system(f"minillm {kind}", plain, False)], rounds)


def _measure_as(name: str, arguments: list[Any]) -> dict[str, Any]:
    """Run `measure_here` in a process that compiles for `name`, with PyTorch limited to its instructions.

    Raises `MinillmError` if the process fails.
    """
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": name,
        "NUMBA_CPU_FEATURES": "",
        **HELD_TO[name],
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", PRETENDING, json.dumps(arguments)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise MinillmError(f"the process ended with status {done.returncode}; its error is printed above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
