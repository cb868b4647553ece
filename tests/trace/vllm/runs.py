"""Runs of the real vLLM, watched: the traces, and what vLLM itself says about them.

    python -m tests.trace.vllm.runs FOLDER [OUT]

under an interpreter that has vLLM writes `NAME.jsonl` and `NAME.json` for each run to OUT (by default this folder).
FOLDER holds the bundled `minicoder`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BLOCK = 32
"""Tokens per cache block: vLLM on a CPU wants a multiple of 32."""
CONTEXT = 256
PREFIX = "import os\nimport sys\nimport json\n\n\ndef main(argv=None):\n    parser = argparse.ArgumentParser()\n"
CLASS = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
RUNS: dict[str, dict[str, Any]] = {
    "preempted": {"num_gpu_blocks_override": 12, "max_num_batched_tokens": 64},
    "drafted": {
        "num_gpu_blocks_override": 24,
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
    },
}
"""Name → options. The first pool is too small for its requests, so that some lose their blocks."""


def prompts() -> list[tuple[Any, dict[str, Any]]]:
    """Prompts with their sampling parameters: a shared beginning, several completions, a stop string."""
    greedy = {"temperature": 0, "ignore_eos": True}
    return [
        (PREFIX + CLASS * 2, {**greedy, "max_tokens": 70}),
        (PREFIX + CLASS + "    def pop(self):\n", {**greedy, "max_tokens": 60}),
        ("def fib(n):", {"temperature": 1.0, "seed": 3, "n": 2, "ignore_eos": True, "max_tokens": 40}),
        (CLASS + "        self.items.append(item)\n", {**greedy, "max_tokens": 90}),
        (CLASS, {**greedy, "max_tokens": 50, "stop": "\n\n"}),
        ("for line in", {**greedy, "max_tokens": 9}),
    ]


def main(folder: str, out: Path) -> None:
    """Run everything."""
    import vllm

    from minillm.trace import of_vllm

    for name, options in RUNS.items():
        llm = vllm.LLM(
            folder,
            dtype="float32",
            max_model_len=CONTEXT,
            block_size=BLOCK,
            max_num_seqs=4,
            enforce_eager=True,
            enable_prefix_caching=True,
            enable_chunked_prefill=True,
            async_scheduling=False,
            disable_log_stats=False,
            **options,
        )
        texts, params = zip(*prompts(), strict=True)
        with of_vllm(llm) as trace:
            outputs = llm.generate(list(texts), [vllm.SamplingParams(**each) for each in params], use_tqdm=False)
            again = llm.generate([texts[0]], vllm.SamplingParams(**params[0]), use_tqdm=False)
        llm.generate([texts[-1]], vllm.SamplingParams(**params[-1]), use_tqdm=False)  # no longer watched
        trace.events[0] = replace(trace.events[0], model=Path(folder).name)  # not where it lies on this machine
        trace.save(out / f"{name}.jsonl")
        said = {
            "vllm": vllm.__version__,
            "prompts": [len(output.prompt_token_ids) for output in [*outputs, *again]],
            "tokens": [[list(each.token_ids) for each in output.outputs] for output in [*outputs, *again]],
            "reasons": [[each.finish_reason for each in output.outputs] for output in [*outputs, *again]],
            "cached": [output.num_cached_tokens for output in [*outputs, *again]],
            "metrics": {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value") and "perc" not in m.name},
        }
        (out / f"{name}.json").write_text(json.dumps(said) + "\n")
        del llm


if __name__ == "__main__":
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    main(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else HERE)
