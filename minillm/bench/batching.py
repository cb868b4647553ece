"""Static and continuous batching of 32 greedy requests that arrive at once and have very different lengths.

Output lengths are heavy-tailed like those of real answers: most are short, a few reach the limit. A static batch runs
until its longest request ends, and the batch slots of finished requests stay empty. Continuous batching gives them to
waiting requests. Every system runs 8 requests at a time (`max_num_seqs`). Because more can help on a CPU, the padded
batch, vLLM and minillm also run all 32 at a time, which their names call `32 seats`. (transformers' continuous batching
did not gain by more.)

The systems, all of which must give the same tokens, in fp32:

- `transformers padded batch`: left-padded `generate`, a batch until its longest request ends.
- `transformers generate_batch`: transformers' continuous batching. `generate_batch` itself takes one `max_new_tokens`
  for all requests, so the requests are passed to its manager, which takes one for each.
- `minillm static`: minillm's engine, given the next batch when the previous one is done. It has no padding, and a
  finished request costs nothing, so this is the lowest cost of static batching.
- `minillm continuous`: minillm's engine, given all requests at once. `+ draft`: with the draft model while at most
  `DRAFTING` requests are unfinished, that is for the longest answers, at the end. `+ suffix`: suffix decoding, always
  on, because a look-up in the request's own text costs almost nothing.
- `vLLM CPU`, if the environment variable `MINILLM_VLLM_PYTHON` names an interpreter that has it.

With `--shape` the same token ids go to a larger checkpoint with random weights in bf16. Only vLLM (activations in bf16)
and `minillm continuous` run it, the latter with activations in fp32, in bf16 (`bf16`), and with INT8 and W8A8 weights.
Then tokens may differ, and the result says how many do.

Two utilisations are computed from the trace. *Batch slots*: running requests, summed over the steps, divided by
`max_num_seqs` · steps; once for the steps with a waiting request, and once for the whole run, at whose end only the
longest requests are left. *KV slots*: slots that hold a token, divided by all slots of allocated blocks.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from minillm.bench.batch_transformers import Extra, Run, generate_batch, padded
from minillm.bench.harness import System, compare, peak_memory_of, result
from minillm.bench.own_engine import DRAFT_FREE_METHODS, DTYPES, QUANTIZED
from minillm.bench.shapes import model_or_shape
from minillm.bench.systems import choose, draft_for, prompt_ids
from minillm.bench.vllm_peer import INTERPRETER, NO_VLLM, VllmPeer
from minillm.trace import RequestAdded, RequestFinished, StepRan, Trace
from minillm.trace.run_metrics import RunMetrics

REQUESTS = 32
MAX_NUM_SEQS = 8
"""Most requests that run at a time (`max_num_seqs`)."""
SHORTEST, LONGEST, TAIL = 8, 256, 1.0
"""Output lengths follow a Pareto distribution with this tail index, cut off at the longest."""
SEED = 0
ROUNDS = 6
DRAFTING = 3
"""Most unfinished requests with which drafting is on. With more of them, verification costs more than it saves."""
NUM_DRAFTS = 3

PADDED, GENERATE_BATCH = "transformers padded batch", "transformers generate_batch"
STATIC, CONTINUOUS, VLLM = "minillm static", "minillm continuous", "vLLM CPU"
ALL, DRAFTED, SUFFIX = f", {REQUESTS} seats", " + draft", " + suffix"
PADDED_ALL, CONTINUOUS_ALL, CONTINUOUS_DRAFTED = PADDED + ALL, CONTINUOUS + ALL, CONTINUOUS + DRAFTED
VLLM_ALL = VLLM + ALL
CONTINUOUS_SUFFIX = CONTINUOUS + SUFFIX
TRANSFORMERS = (PADDED, PADDED_ALL, GENERATE_BATCH)

BASELINES: dict[str, tuple[str, ...]] = {
    PADDED: (),
    PADDED_ALL: (PADDED,),
    GENERATE_BATCH: (PADDED,),
    VLLM: (PADDED,),
    VLLM_ALL: (PADDED_ALL, VLLM),
    STATIC: (PADDED,),
    CONTINUOUS: (*TRANSFORMERS, VLLM, STATIC),
    CONTINUOUS_ALL: (*TRANSFORMERS, VLLM_ALL, CONTINUOUS),
    CONTINUOUS_DRAFTED: (*TRANSFORMERS, VLLM, CONTINUOUS),
    CONTINUOUS_SUFFIX: (*TRANSFORMERS, VLLM, CONTINUOUS),
}
"""System → its baselines, one row each."""
SHAPE_BASELINES: dict[str, tuple[str, ...]] = {
    VLLM: (),
    VLLM_ALL: (VLLM,),
    CONTINUOUS: (VLLM,),
    f"{CONTINUOUS} bf16": (VLLM, CONTINUOUS),
    f"{CONTINUOUS} int8": (VLLM, CONTINUOUS),
    f"{CONTINUOUS} w8a8": (VLLM, CONTINUOUS),
    **{CONTINUOUS + kind + ALL: (VLLM_ALL, CONTINUOUS + kind) for kind in ("", " bf16", " int8", " w8a8")},
}
"""The same with `--shape`."""


def run(
    model: str | None = None, shape: str | None = None, systems: Sequence[str] | None = None, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Run all systems in turn on the same requests, with the same threads. Returns the result as JSON values.

    `model`, `shape`: see `model_or_shape`. Raises `ConfigError` for an unknown system.
    """
    import torch

    table = SHAPE_BASELINES if shape else BASELINES
    interpreter = os.environ.get(INTERPRETER)
    chosen = choose(list(table), systems)
    model = model_or_shape(model, shape)
    missing = {name: NO_VLLM for name in chosen if name.startswith(VLLM) and not interpreter}
    if CONTINUOUS_DRAFTED in chosen and draft_for(model, None) is None:
        missing[CONTINUOUS_DRAFTED] = "there is no draft model for it"
    names = [name for name in chosen if name not in missing]
    tokenizer = "minicoder" if shape else model
    prompts = _prompts(tokenizer)
    peers: dict[str, VllmPeer] = {}
    try:
        systems_to_compare = []
        for name in names:
            if name.startswith(VLLM):
                dtype = "bfloat16" if shape else "float32"
                peers[name] = _vllm(str(interpreter), model, prompts, dtype, _num_seqs(name))
                made = (peers[name].run, partial(getattr, peers[name], "details"))
            else:
                made = _system(name, model, prompts)
            bases = tuple(b for b in table[name] if b in names) or None
            systems_to_compare.append(System(name, made[0], bases, made[1]))
        rows = compare(
            systems_to_compare,
            rounds,
            lambda name: peers[name].peak_memory if name in peers else _peak_memory(name, model, tokenizer),
        )
    finally:
        for peer in peers.values():
            peer.close()
    config = {
        "model": shape or model,
        "draft": draft_for(model, None) if CONTINUOUS_DRAFTED in names else None,
        "requests": REQUESTS,
        "max_num_seqs": MAX_NUM_SEQS,
        "prompt_tokens": [len(ids) for ids in prompts],
        "new_tokens": output_lengths(),
        "sampling": "greedy",
        "dtype": "bfloat16 weights; activations of vLLM and `bf16` in bfloat16" if shape else "float32",
        "not_tried": "padded batches of transformers with its preallocated cache",
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "left_out": missing,
    }
    return result("batch", config, rows)


def output_lengths() -> list[int]:
    """The number of tokens that each request generates; the same in every run."""
    rng = random.Random(SEED)
    return [min(LONGEST, int(SHORTEST * (1 - rng.random()) ** (-1 / TAIL))) for _ in range(REQUESTS)]


def utilisation(trace: Trace, max_num_seqs: int, requests: int | None = None) -> dict[str, float | int | None]:
    """The utilisation of batch and cache by `requests` requests (None: those of the trace) with `max_num_seqs` batch
    slots.

    `batch_slot_utilisation`: running requests, summed over the steps, divided by `max_num_seqs` · steps.
    `…_while_waiting`: the same for the steps with a waiting request, including requests not yet added to the engine;
    None if there was no such step. `kv_slot_utilisation`: slots that hold a token divided by slots of allocated blocks,
    both summed over the ends of steps.
    """
    requests = requests or len(trace.of(RequestAdded))
    finished, steps = 0, []
    for event in trace:
        if isinstance(event, StepRan):
            steps.append((len(event.work), finished + len(event.work) < requests))
        elif isinstance(event, RequestFinished):
            finished += 1
    contested = [running for running, others_wait in steps if others_wait]
    return {
        "steps": len(steps),
        "batch_slot_utilisation": sum(running for running, _ in steps) / (max_num_seqs * len(steps)),
        "batch_slot_utilisation_while_waiting": sum(contested) / (max_num_seqs * len(contested)) if contested else None,
        "kv_slot_utilisation": 1 - RunMetrics.of(trace).waste_share,
    }


def _prompts(model: str) -> list[list[int]]:
    """The first held-out prompts, as ids of the model's tokenizer."""
    return prompt_ids(model, REQUESTS, 1, sys.maxsize)


def _num_seqs(name: str) -> int:
    """Most requests that run at a time."""
    return REQUESTS if name.endswith(ALL) else MAX_NUM_SEQS


def _system(name: str, model: str, prompts: list[list[int]]) -> tuple[Run, Extra]:
    max_num_seqs = _num_seqs(name)
    if name.startswith("minillm"):
        return _minillm(model, prompts, max_num_seqs, name.removesuffix(ALL))
    make = {PADDED: padded, GENERATE_BATCH: generate_batch}
    return make[name.removesuffix(ALL)](model, prompts, output_lengths(), max_num_seqs)


def _minillm(model: str, token_ids: list[list[int]], max_num_seqs: int, name: str) -> tuple[Run, Extra]:
    from minillm import LLM, SamplingParams

    options: dict[str, Any] = {"max_num_seqs": max_num_seqs, "dtype": "float32"}
    if name.endswith(DRAFTED):
        options["speculative_config"] = {
            "model": draft_for(model, None),
            "quantization": "w8a8",  # still lossless: the target verifies every draft
            "num_speculative_tokens": NUM_DRAFTS,
            "adaptive": False,
            "disable_by_batch_size": DRAFTING,
        }
    elif name.endswith(SUFFIX):
        options["speculative_config"] = DRAFT_FREE_METHODS["suffix"]
    elif name.split()[-1] in QUANTIZED:
        options["quantization"] = name.split()[-1]
    elif name.split()[-1] in DTYPES:
        options["dtype"] = DTYPES[name.split()[-1]]
    llm = LLM(model, device="cpu", enable_prefix_caching=False, **options)
    prompts = [{"prompt_token_ids": ids} for ids in token_ids]
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        for length in output_lengths()
    ]
    size = max_num_seqs if name == STATIC else REQUESTS

    def run_once() -> list[list[int]]:
        outputs = []
        for i in range(0, REQUESTS, size):
            outputs += llm.generate(prompts[i : i + size], params[i : i + size], use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def extra() -> dict[str, Any]:
        with llm.trace() as trace:
            run_once()
        return {**options, **utilisation(trace, max_num_seqs, REQUESTS)}

    return run_once, extra


def _vllm(interpreter: str, model: str, prompts: list[list[int]], dtype: str, max_num_seqs: int) -> VllmPeer:
    import torch

    from minillm.models.hub import resolve

    return VllmPeer(
        interpreter,
        torch.get_num_threads(),
        model=str(resolve(model)),
        dtype=dtype,
        prompts=prompts,
        lengths=output_lengths(),
        max_num_seqs=max_num_seqs,
    )


def _peak_memory(name: str, model: str, tokenizer: str) -> int | None:
    system = f"batching._system({name!r}, {model!r}, batching._prompts({tokenizer!r}))"
    return peak_memory_of(f"from minillm.bench import batching; {system}[0]()")
