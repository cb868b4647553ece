"""Stage 3 of the GPU benchmark: the real engine on real prompts, with graphs, without, and in plain PyTorch.

In fp32, greedy, several prompts at once. Graphs on and off must give the same tokens in every precision. Plain PyTorch
(`enforce_eager=True`) must give the same tokens with float weights and cache. With quantised ones its sums are added in
another order, so a number may round to another code; the share of equal tokens is reported.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minillm.bench.harness import common_prefix_share
from minillm.bench.on_gpu.findings import Report, Target
from minillm.bench.on_gpu.random_models import CONFIGS, use_kernels
from minillm.bench.on_gpu.stage_setup import StageSetup

ALL = Target(at_least=1.0)
DRAFTS = 3


@dataclass(frozen=True)
class Kind:
    """One configuration of the engine."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    drafts: bool = False
    is_exact: bool = False
    """Whether plain PyTorch must give the same tokens."""


KINDS = (
    Kind("plain", is_exact=True),
    Kind("speculation", drafts=True, is_exact=True),
    Kind("int8", {"quantization": "int8"}),
    Kind("int8 KV", {"kv_cache_dtype": "int8"}),
    Kind("w8a8", {"quantization": "w8a8"}),
)


def engine(setup: StageSetup, report: Report) -> None:
    """Run every kind three times: graphs on, graphs off, plain PyTorch."""
    with models(setup) as (target, draft):
        prompts = _prompts(setup, target)
        for kind in KINDS:
            try:
                _one_kind(setup, report, kind, target, draft, prompts)
            except Exception as problem:  # the other kinds still run
                report.note(f"{kind.name} failed", f"{type(problem).__name__}: {str(problem)[:400]}")
                report.counted(f"{kind.name}: graphs on = off", 0.0, "of all tokens", ALL)


def _one_kind(setup: StageSetup, report: Report, kind: Kind, target: str, draft: str, prompts: list[list[int]]) -> None:
    new_tokens = setup.size_for(48, 3)
    options: dict[str, Any] = {"dtype": "float32", "device": setup.clock.device, **kind.options}
    if kind.drafts:
        options["speculative_config"] = {"model": draft, "num_speculative_tokens": DRAFTS, "adaptive": False}
    tokens = {
        way: _generate(setup, way, target, options, prompts, new_tokens) for way in ("graphs", "kernels", "eager")
    }
    count = sum(map(len, tokens["eager"]))
    on_off = common_prefix_share(tokens["graphs"], tokens["kernels"])
    report.counted(f"{kind.name}: graphs on = off", on_off, "of all tokens", ALL, tokens=count)
    same = common_prefix_share(tokens["graphs"], tokens["eager"])
    target_same = ALL if kind.is_exact else None
    report.counted(f"{kind.name}: kernels = PyTorch", same, "of tokens before the first difference", target_same)
    report.note(f"{kind.name}: some tokens", tokens["graphs"][0][:8])


def _generate(
    setup: StageSetup, way: str, model: str, options: dict[str, Any], prompts: list[list[int]], new_tokens: int
) -> list[list[int]]:
    from minillm import LLM, SamplingParams

    # A rehearsal's engine would choose the CPU executor: it starts in plain PyTorch and gets the kernels afterwards.
    llm = LLM(model, enforce_eager=way == "eager" or setup.is_rehearsal, max_num_seqs=len(prompts), **options)
    runners = [llm.engine.runner, *([drafter.runner] if (drafter := llm.engine.drafter) else [])]  # type: ignore
    if way != "eager" and (way == "kernels" or setup.is_rehearsal):
        for runner in runners:
            use_kernels(setup, runner, len(prompts), llm.max_model_len, use_graphs=way == "graphs")
    if way != "eager" and any(runner.executor is None for runner in runners):
        raise RuntimeError("no executor supports the model, so it would run in plain PyTorch")
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def _prompts(setup: StageSetup, model: str) -> list[list[int]]:
    """Return held-out prompts of unequal length; a rehearsal's vocabulary is too small for them."""
    if setup.is_rehearsal:
        return [[5, 6, 7], [9, 8, 7, 6, 5, 4]]
    from minillm.bench.systems import prompt_ids

    return prompt_ids(model, 8, 4, 200)


@contextmanager
def models(setup: StageSetup) -> Iterator[tuple[str, str]]:
    """Provide target and draft: the bundled pair, or for a rehearsal a tiny random pair."""
    if not setup.is_rehearsal:
        yield "minicoder", "minicoder-draft"
        return
    import torch

    from minillm.bench.shapes import byte_tokenizer, random_decoder
    from minillm.models.loading import save_llama

    with tempfile.TemporaryDirectory() as root:
        folders = []
        for name in ("rehearsal", "rehearsal draft"):
            folder = Path(root, name.replace(" ", "-"))
            save_llama(random_decoder(CONFIGS[name]), folder, torch.float32)
            byte_tokenizer(CONFIGS[name].vocab_size).save(str(folder / "tokenizer.json"))
            folders.append(str(folder))
        yield folders[0], folders[1]
