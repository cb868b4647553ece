"""Lesson 16: a script on vLLM, watched; or, where vLLM is not installed, a run that was recorded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from minillm.errors import UnsupportedError
from minillm.trace import Trace, of_vllm

RECORDED = Path(__file__).with_name("vllm_drafted.jsonl")
"""A run of vLLM 0.32 on a CPU, as `tests/trace/vllm/runs.py` records it."""


def run_or_recorded(script: str, model: str, prompts: Sequence[str]) -> tuple[Trace, str]:
    """The trace of `script` on vLLM, or the recorded one; and which of both it is, in words, with the reason.

    `script` has `{module}` where it names the module, and uses `model`, `prompts` and `watch`.
    """
    reason = "vLLM is not installed here"
    if find_spec("vllm") is not None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # `of_vllm` watches the engine in this process
        names: dict[str, Any] = {"model": model, "prompts": list(prompts), "watch": of_vllm}
        try:
            exec(script.format(module="vllm"), names)
            return names["trace"], "vLLM has just run here"
        except UnsupportedError:
            reason = "the vLLM here cannot be watched"
        except (Exception, SystemExit) as problem:  # without a GPU, with too little memory, …: vLLM raises many kinds
            words = next((line.strip() for line in str(problem).splitlines() if line.strip()), "no message")
            reason = f"the vLLM here did not run ({type(problem).__name__}: {words[:120]})"
    return Trace.load(RECORDED), f"{reason}: this is a recorded run of vLLM 0.32"
