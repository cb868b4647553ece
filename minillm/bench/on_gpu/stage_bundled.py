"""Stage 8 of the GPU benchmark: the bundled model against transformers on the same GPU, batch 1, greedy.

Decoding, on one held-out prompt of 200 tokens: 23 tokens, divided by the time of a completion of 24 tokens less that of
one of a single token. A single token needs no draft, so with a draft model this includes the draft's prefill. Latency:
the time from the call to the last of 24 tokens. So small a model is bound by launches and Python, not by memory
bandwidth, so this shows what graphs save. In fp32 the tokens must be equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from minillm.bench.on_gpu.findings import Report, Target
from minillm.bench.on_gpu.random_models import use_kernels
from minillm.bench.on_gpu.stage_engine import models
from minillm.bench.on_gpu.stage_setup import StageSetup
from minillm.bench.systems import prompt_ids
from minillm.bench.transformers_peers import _compile_config, _load

PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 200, 24, 9

Complete = Callable[[list[int], int], list[int]]
"""Prompt and number of new tokens → the completion."""


def bundled(setup: StageSetup, report: Report) -> None:
    """Measure minillm first, then transformers eager, then compiled, for which the time may not suffice."""
    with models(setup) as (model, draft):
        prompt = [5, 6, 7, 8] if setup.is_rehearsal else prompt_ids(model, 1, PROMPT_TOKENS, PROMPT_TOKENS)[0]
        tokens: dict[str, list[int]] = {}
        dtypes = {"fp32": torch.float32, **({} if setup.is_rehearsal else {"half": setup.half})}

        def measure(name: str, make: Callable[..., Complete], *arguments: Any) -> None:
            report.part(name, lambda: _measure(setup, report, name, make(setup, model, *arguments), prompt, tokens))

        for name, dtype in dtypes.items():
            measure(f"minillm {name}", _minillm, None, dtype)
        measure("minillm fp32 + draft", _minillm, draft, torch.float32)
        for name, dtype in dtypes.items():
            for way in ("eager", "static"):
                measure(f"transformers {name} {way}", _transformers, dtype, way)
        right = tokens.get("minillm fp32")
        for name in ("minillm fp32 + draft", "transformers fp32 eager"):
            if right is not None and name in tokens:
                report.counted(f"{name}: same tokens", float(tokens[name] == right), "of 1", Target(at_least=1))
        if not setup.is_rehearsal:
            report.part("compile mode", lambda: report.note("compile mode", _compile_config("cuda").mode))
            for name, dtype in dtypes.items():
                measure(f"transformers {name} compiled", _transformers, dtype, "compiled")


def _measure(
    setup: StageSetup, report: Report, name: str, complete: Complete, prompt: list[int], tokens: dict[str, list[int]]
) -> None:
    """Time the first token and all tokens in turn: the difference is the time of decoding."""
    new_tokens, all_s, decode_s = setup.size_for(NEW_TOKENS, 3), [], []
    for turn in range(setup.size_for(ROUNDS, 1) + 2):
        first = _seconds(complete, prompt, 1)[0]
        whole, found = _seconds(complete, prompt, new_tokens)
        if turn >= setup.size_for(2, 1):  # the turns before compile kernels and capture graphs
            all_s.append(whole)
            decode_s.append(max(whole - first, 1e-9) / (new_tokens - 1))
    tokens[name] = found
    report.measured(f"{name}, decode", [1 / s for s in decode_s], "tokens/s")
    report.measured(f"{name}, latency", [1000 * s for s in all_s], f"ms for {new_tokens} after {len(prompt)}")


def _seconds(complete: Complete, prompt: list[int], new_tokens: int) -> tuple[float, list[int]]:
    """Return wall-clock time, which includes Python, and the tokens, which are on the host when `complete` returns."""
    began = time.perf_counter()
    found = complete(prompt, new_tokens)
    return time.perf_counter() - began, found


def _minillm(setup: StageSetup, model: str, draft: str | None, dtype: torch.dtype) -> Complete:
    from minillm import LLM, SamplingParams

    options: dict[str, Any] = {"dtype": str(dtype)[6:], "device": setup.clock.device, "enable_prefix_caching": False}
    if draft is not None:
        options["speculative_config"] = {"model": draft, "num_speculative_tokens": 3, "adaptive": False}
    llm = LLM(model, max_num_seqs=1, enforce_eager=setup.is_rehearsal, **options)
    if setup.is_rehearsal:
        use_kernels(setup, llm.engine.runner, 1, llm.max_model_len)

    def complete(prompt: list[int], new_tokens: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        return output.outputs[0].token_ids

    return complete


def _transformers(setup: StageSetup, model: str, dtype: torch.dtype, way: str) -> Complete:
    """`eager`: with a growing cache; `static`: with a preallocated one; `compiled`: `static` with torch.compile."""
    from minillm.models.hub import resolve

    peer = _load(resolve(model), str(dtype)[6:]).to(setup.device)
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    cache: Any = None
    if way != "eager":
        from transformers import StaticCache

        cache = options["past_key_values"] = StaticCache(config=peer.config, max_cache_len=256)
        options["disable_compile"] = way == "static"
    if way == "compiled":
        options["compile_config"] = _compile_config(setup.device.type)

    def complete(prompt: list[int], new_tokens: int) -> list[int]:
        ids = torch.tensor([prompt], device=setup.device)
        with torch.inference_mode():
            if cache is not None:
                cache.reset()
            found = peer.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **options)
        return found[0, len(prompt) :].tolist()

    return complete
