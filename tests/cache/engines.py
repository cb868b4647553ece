"""Engines on a given cache layout, and in float64, where "the same tokens" can be asked of a quantised cache.

Quantising is a step function. In float32 the same key, computed in a batch of another shape, differs in its last bits;
about one number in 10^5 then falls to the other side of a step, and with INT4 that can turn a close decision. In
float64 such numbers are rarer by nine orders of magnitude, so a difference of tokens is a difference of logic.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.batch import Segment
from minillm.models.calibration import CalibrationTexts
from minillm.models.held_out import held_out_prompts
from minillm.runtime.runner import ModelRunner

DRAFT = {"method": "draft_model", "model": "minicoder-draft", "num_speculative_tokens": 4}


def engine(options: dict[str, Any], model: str = "minicoder", **more: Any) -> LLM:
    """A model in float64 on the cache layout that `options` name (`kv_cache_dtype`, `kv_cache_config`)."""
    llm = LLM(model, device="cpu", dtype="float32", enforce_eager=True, **{**options, **more})
    layout_options = {k: v for k, v in options.get("kv_cache_config", {}).items() if k != "layout"}
    runners = [llm.engine.runner, *([llm.engine.drafter.runner] if llm.engine.drafter else [])]
    for runner in runners:
        runner.model.double()
        runner.cache = type(runner.cache)(
            runner.model.config,
            llm.engine.pool.num_blocks,
            runner.block_size,
            torch.float64,
            runner.device,
            **layout_options,
        )
        runner.cache.prepare(runner.model, CalibrationTexts(llm.engine.tokenizer))
    return llm


@cache
def prompts(count: int) -> list[str]:
    """Held-out prompts of mixed lengths, some longer than a hundred tokens."""
    return [prompt.prompt for prompt in held_out_prompts(count)]


def tokens(llm: LLM, texts: Sequence[str], new_tokens: int) -> list[list[int]]:
    """Greedy tokens of all prompts together; afterwards nothing is left behind."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    outputs = llm.generate(list(texts), params, use_tqdm=False)
    llm.engine.scheduler.check_integrity()
    return [output.outputs[0].token_ids for output in outputs]


def mean_kl_to_float32(options: dict[str, Any], count: int = 2, chunk: int = 16) -> float:
    """Mean over tokens of KL(float32 cache ‖ this cache), held-out texts fed through the real cache in chunks."""
    exact, got = _exact(count, chunk), _logprobs(options, count, chunk)
    return float((exact.exp() * (exact - got)).sum(-1).mean())


@cache
def _exact(count: int, chunk: int) -> Tensor:
    return _logprobs({}, count, chunk)


def _logprobs(options: dict[str, Any], count: int, chunk: int) -> Tensor:
    """`[tokens of count texts of more than 120 tokens, vocab]`, float64."""
    llm = LLM("minicoder", device="cpu", dtype="float32", **options)
    texts = [llm.engine.tokenizer.encode(prompt.prompt) for prompt in held_out_prompts()]
    texts = [ids for ids in texts if len(ids) > 120][:count]
    return torch.cat([_teacher_forced(llm.engine.runner, ids, chunk) for ids in texts])


def _teacher_forced(runner: ModelRunner, ids: list[int], chunk: int) -> Tensor:
    table = [0] if type(runner.cache).whole_sequences else list(range(-(-len(ids) // runner.block_size)))
    parts = [ids[start : start + chunk] for start in range(0, len(ids), chunk)]
    segments = [Segment(part, i * chunk, table, len(part)) for i, part in enumerate(parts)]
    return torch.cat([runner.run([segment]) for segment in segments]).double().log_softmax(-1)


def fill_with_rubbish(pools: Sequence[Tensor]) -> None:
    """Every byte is 0xFF: NaN as a scale, the largest code as a number."""
    for pool in pools:
        pool.view(torch.uint8).fill_(255)
