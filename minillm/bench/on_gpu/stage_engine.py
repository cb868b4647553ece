"""Stage 3 of the GPU benchmark: the real engine on real prompts, with graphs, without, and in plain PyTorch.

Several prompts at once, in fp32 and greedy unless the kind says otherwise. Graphs on and off must give the same tokens,
in every precision and also if tokens are sampled. Plain PyTorch (`enforce_eager=True`) must give the same tokens with
float weights and cache. With quantised ones its sums are added in another order, so a number may round to another code;
the share of equal tokens is reported.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from minillm.bench.harness import common_prefix_share
from minillm.bench.on_gpu.findings import Report, Target
from minillm.bench.on_gpu.random_models import CONFIGS, use_kernels
from minillm.bench.on_gpu.stage_setup import StageSetup

Tokens = list[list[int]]
"""The tokens of every prompt."""
ALL = Target(at_least=1.0)
DRAFTS = 3
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "seed": 1}
LAST_KIND_S = 12.0
"""With less time left to the stage, no kind is begun."""


@dataclass(frozen=True)
class Kind:
    """One configuration of the engine."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    drafts: bool = False
    sampling: dict[str, Any] = field(default_factory=lambda: GREEDY)
    is_half: bool = False
    """Whether it runs in 16 bits instead of fp32. A rehearsal cannot: the interpreter multiplies them wrongly."""
    with_eager: bool = True
    """Whether plain PyTorch runs as well."""
    is_exact: bool = False
    """Whether plain PyTorch must give the same tokens."""

    @property
    def metric(self) -> str:
        """The metric that is there as soon as the kind has run."""
        return f"{self.name}: graphs on = off"


KINDS = (
    Kind("plain", is_exact=True),
    Kind("speculation", drafts=True, is_exact=True),
    Kind("16 bits", is_half=True, with_eager=False),
    Kind("sampled speculation", drafts=True, sampling=SAMPLED, with_eager=False),
    Kind("int8", {"quantization": "int8"}),
    Kind("int8 KV", {"kv_cache_dtype": "int8"}),
    Kind("w8a8", {"quantization": "w8a8"}),
    Kind("int4 KV", {"kv_cache_dtype": "int4"}, with_eager=False),
    Kind("int4", {"quantization": "int4"}, with_eager=False),
)
"""In order of importance."""


def engine(setup: StageSetup, report: Report) -> None:
    """Run every kind with graphs on and off, most also in plain PyTorch."""
    done = {metric["name"] for metric in report.so_far().metrics}
    with models(setup) as (target, draft):
        prompts = _prompts(setup, target)
        for kind in KINDS:
            if kind.metric in done or (kind.is_half and setup.is_rehearsal):
                continue
            if setup.seconds_left() < LAST_KIND_S:
                report.note(kind.name, "left out for lack of time")
                continue
            _one_kind(setup, report, kind, target, draft, prompts)


def _one_kind(setup: StageSetup, report: Report, kind: Kind, target: str, draft: str, prompts: Tokens) -> None:
    """Compare graphs on with off and report it, then compare with plain PyTorch."""
    dtype = str(setup.half).removeprefix("torch.") if kind.is_half else "float32"
    options: dict[str, Any] = {"dtype": dtype, "device": setup.clock.device, **kind.options}
    if kind.drafts:
        options["speculative_config"] = {"model": draft, "num_speculative_tokens": DRAFTS, "adaptive": False}
    run = partial(_generate, setup, kind.sampling, target, options, prompts)
    try:
        graphs, kernels = run("graphs"), run("kernels")
    except Exception as problem:  # the other kinds still run
        report.counted(kind.metric, 0.0, "of all tokens", ALL)
        report.failed(kind.name, problem)
        return
    same = common_prefix_share(graphs, kernels)
    report.counted(kind.metric, same, "of all tokens", ALL, tokens=sum(map(len, kernels)))
    report.note(f"{kind.name}: some tokens", graphs[0][:8])
    if kind.with_eager:
        report.part(f"{kind.name} in plain PyTorch", _compare_eager, report, kind, graphs, partial(run, "eager"))


def _compare_eager(report: Report, kind: Kind, graphs: Tokens, run: Callable[[], Tokens]) -> None:
    same = common_prefix_share(graphs, run())
    target = ALL if kind.is_exact else None
    report.counted(f"{kind.name}: kernels = PyTorch", same, "of tokens before the first difference", target)


def _generate(
    setup: StageSetup, sampling: dict[str, Any], model: str, options: dict[str, Any], prompts: Tokens, way: str
) -> Tokens:
    from minillm import LLM, SamplingParams

    params = SamplingParams(max_tokens=setup.size_for(48, 3), ignore_eos=True, detokenize=False, **sampling)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    # A rehearsal's engine would choose the CPU executor: it starts in plain PyTorch and gets the kernels afterwards.
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        llm = LLM(model, enforce_eager=way == "eager" or setup.is_rehearsal, max_num_seqs=len(prompts), **options)
        runners = [llm.engine.runner, *([drafter.runner] if (drafter := llm.engine.drafter) else [])]  # type: ignore
        if way != "eager" and (way == "kernels" or setup.is_rehearsal):
            for runner in runners:
                use_kernels(setup, runner, len(prompts), llm.max_model_len, use_graphs=way == "graphs")
        if way != "eager" and any(runner.executor is None for runner in runners):
            raise RuntimeError(f"no executor supports the model, so it would run in plain PyTorch: {_reasons(warned)}")
        outputs = llm.generate(given, params, use_tqdm=False)
    if way == "graphs" and not setup.is_rehearsal and not all(_uses_graphs(runner.executor) for runner in runners):
        raise RuntimeError(f"steps ran without CUDA graphs: {_reasons(warned)}")
    return [output.outputs[0].token_ids for output in outputs]


def _reasons(warned: list[warnings.WarningMessage]) -> str:
    return "; ".join(str(warning.message) for warning in warned) or "no reason was given"


def _uses_graphs(executor: Any) -> bool:
    """Whether a `GpuExecutor` has captured steps. It gives up capturing when one cannot be captured."""
    return executor.capture is not None and bool(executor.prepared)


def _prompts(setup: StageSetup, model: str) -> Tokens:
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
