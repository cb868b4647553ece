"""32 requests that all arrive at once and are of very different length, greedy, fp32: static or continuous batching.

Output lengths are heavy-tailed, as those of real answers are: most are short, a few are at the limit. A static batch
runs until its longest request ends, and the seats of those that ended before do nothing; continuous batching gives
them to whoever waits. Everybody may run 8 requests at a time; because more seats can help on a CPU, the padded batch
and minillm run once more with a seat for each request. (transformers' continuous batching did not gain by more seats.)

The systems, all of which must give the same tokens:

- `transformers padded batch`: left-padded `generate`, a batch until its longest request ends.
- `transformers generate_batch`: transformers' continuous batching. `generate_batch` itself takes one `max_new_tokens`
  for all requests, so the requests are given to the manager behind it, which takes one for each.
- `minillm static`: minillm's engine, given the next batch when the last one is done. Nothing is padded and a request
  that ended costs nothing more, so this is the least that waiting costs.
- `minillm continuous`: minillm's engine, given all requests at once.
- `vLLM CPU`, if the environment variable `MINILLM_VLLM_PYTHON` names an interpreter that has it.

Two figures are counted from the trace. *Batch slots* in use: requests that ran, summed over the steps, over
`max_num_seqs` · steps; once over the steps that left a request waiting, and once over the whole run, at whose end only
the longest requests are left. *KV slots* in use: slots of allocated blocks that hold a token, over all slots of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from minillm.bench.harness import Row, System, compare, peak_memory_of, result
from minillm.bench.prompts import held_out_prompts
from minillm.bench.vllm_peer import INTERPRETER, VllmPeer
from minillm.step_metrics import step_metrics, summary
from minillm.trace import Event, RequestAdded, RequestFinished, StepRan

REQUESTS = 32
SEATS = 8
"""Most requests that run at a time."""
SHORTEST, LONGEST, TAIL = 8, 256, 1.0
"""Output lengths follow a Pareto distribution with this tail index, cut off at the longest."""
SEED = 0
ROUNDS = 5

PADDED, GENERATE_BATCH = "transformers padded batch", "transformers generate_batch"
STATIC, CONTINUOUS, VLLM = "minillm static", "minillm continuous", "vLLM CPU"
ALL = f", {REQUESTS} seats"
PADDED_ALL, CONTINUOUS_ALL = PADDED + ALL, CONTINUOUS + ALL
TRANSFORMERS = (PADDED, PADDED_ALL, GENERATE_BATCH)

BASELINES: dict[str, tuple[str, ...]] = {
    PADDED: (),
    PADDED_ALL: (PADDED,),
    GENERATE_BATCH: (PADDED,),
    VLLM: (PADDED,),
    STATIC: (PADDED,),
    CONTINUOUS: (*TRANSFORMERS, VLLM, STATIC),
    CONTINUOUS_ALL: (*TRANSFORMERS, VLLM, CONTINUOUS),
}
"""System → what it is compared with, a row for each."""

Run = Callable[[], list[list[int]]]
Extra = Callable[[], dict[str, Any]]


def run(model: str = "minicoder") -> dict[str, Any]:
    """All systems in turn on the same requests, with the same threads; returns the result as JSON values."""
    import torch

    interpreter = os.environ.get(INTERPRETER)
    peer = _vllm(interpreter, model) if interpreter else None
    systems = []
    for name, baselines in BASELINES.items():
        if name != VLLM:
            run_once, extra = _system(name, model)
        elif peer is not None:
            run_once, extra = peer.run, lambda: peer.about
        else:
            continue
        present = tuple(b for b in baselines if b != VLLM or peer is not None)
        systems.append(System(name, run_once, present or None, extra))
    rows = compare(systems, ROUNDS, lambda name: peer.peak_memory if name == VLLM else _peak_memory(name, model))
    if peer is not None:
        peer.close()
    config = {
        "model": model,
        "requests": REQUESTS,
        "max_num_seqs": SEATS,
        "prompt_tokens": [len(ids) for ids in _prompts(model)],
        "new_tokens": output_lengths(),
        "sampling": "greedy",
        "dtype": "float32",
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "rounds": ROUNDS,
        **over_the_better(rows),
    }
    return result("batch", config, rows)


def over_the_better(rows: Sequence[Row]) -> dict[str, Any]:
    """Which of transformers' ways was the fastest, and how many times as fast minillm was."""
    better = max(TRANSFORMERS, key=lambda name: next(row.tokens_per_s for row in rows if row.system == name))
    ratios = {row.system: row.ratio for row in rows if row.baseline == better}
    return {
        "better_of_transformers": better,
        "continuous_over_better": ratios[CONTINUOUS],
        "continuous_32_seats_over_better": ratios[CONTINUOUS_ALL],
    }


def output_lengths() -> list[int]:
    """How many tokens each request generates: the same in every run."""
    rng = random.Random(SEED)
    return [min(LONGEST, int(SHORTEST * (1 - rng.random()) ** (-1 / TAIL))) for _ in range(REQUESTS)]


def utilisation(trace: Iterable[Event], seats: int, requests: int | None = None) -> dict[str, float | int | None]:
    """How full the batch and the cache were while `requests` requests (None: those of the trace) had `seats` seats.

    `batch_slot_utilisation`: requests that ran, summed over the steps, over `seats` · steps; `…_while_waiting`: over
    those steps that left a request waiting, whether the engine knew of it yet or not; None if there was no such step.
    `kv_slot_utilisation`: slots that hold a token over slots of allocated blocks, both summed over the ends of steps.
    """
    events = list(trace)
    requests = requests or sum(isinstance(event, RequestAdded) for event in events)
    finished, steps = 0, []
    for event in events:
        if isinstance(event, StepRan):
            steps.append((len(event.work), finished + len(event.work) < requests))
        elif isinstance(event, RequestFinished):
            finished += 1
    contested = [running for running, others_wait in steps if others_wait]
    return {
        "steps": len(steps),
        "batch_slot_utilisation": sum(running for running, _ in steps) / (seats * len(steps)),
        "batch_slot_utilisation_while_waiting": sum(contested) / (seats * len(contested)) if contested else None,
        "kv_slot_utilisation": summary(step_metrics(events)).slot_utilisation,
    }


def _prompts(model: str) -> list[list[int]]:
    """Held-out prompts as they come, as ids."""
    from minillm.models.loading import resolve
    from minillm.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(resolve(model))
    return [tokenizer.encode(prompt.prompt) for prompt in held_out_prompts(REQUESTS)]


def _system(name: str, model: str) -> tuple[Run, Extra]:
    seats = REQUESTS if name.endswith(ALL) else SEATS
    make = {PADDED: _padded, GENERATE_BATCH: _generate_batch, STATIC: _minillm, CONTINUOUS: _minillm}
    return make[name.removesuffix(ALL)](model, seats, name.startswith(STATIC))


def _minillm(model: str, seats: int, static: bool) -> tuple[Run, Extra]:
    from minillm import LLM, SamplingParams

    llm = LLM(model, dtype="float32", device="cpu", max_num_seqs=seats, enable_prefix_caching=False)
    prompts = [{"prompt_token_ids": ids} for ids in _prompts(model)]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in output_lengths()]
    size = seats if static else REQUESTS

    def run_once() -> list[list[int]]:
        outputs = []
        for i in range(0, REQUESTS, size):
            outputs += llm.generate(prompts[i : i + size], params[i : i + size], use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def extra() -> dict[str, Any]:
        with llm.trace() as trace:
            run_once()
        return {"max_num_seqs": seats, **utilisation(trace, seats, REQUESTS)}

    return run_once, extra


def _transformers(model: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from minillm.models.loading import resolve

    peer = AutoModelForCausalLM.from_pretrained(resolve(model), dtype=torch.float32).eval()
    peer.generation_config.eos_token_id = None  # end of text is a token like any other: all run to their full length
    return peer


def _padded(model: str, seats: int, static: bool) -> tuple[Run, Extra]:
    import torch

    peer, prompts, lengths = _transformers(model), _prompts(model), output_lengths()

    @torch.inference_mode()
    def run_batch(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        tokens = peer.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=max(lengths), pad_token_id=0)
        return [row[width : width + length] for row, length in zip(tokens.tolist(), lengths, strict=True)]

    starts = range(0, REQUESTS, seats)

    def run_once() -> list[list[int]]:
        return [row for i in starts for row in run_batch(prompts[i : i + seats], lengths[i : i + seats])]

    steps, useful = sum(max(lengths[i : i + seats]) for i in starts), sum(lengths)
    return run_once, lambda: {"batch": seats, "steps": steps, "batch_slot_utilisation": useful / (seats * steps)}


def _generate_batch(model: str, seats: int, static: bool) -> tuple[Run, Extra]:
    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig

    peer, requests = _transformers(model), list(zip(_prompts(model), output_lengths(), strict=True))
    greedy = GenerationConfig(do_sample=False, max_new_tokens=LONGEST, eos_token_id=-1, pad_token_id=0)
    # The fastest settings that were found; with its defaults it took three times as long.
    options = {"page_size": 32, "num_blocks": 16 * seats, "max_batch_tokens": 512, "max_requests_per_batch": seats}

    @torch.inference_mode()
    def run_once() -> list[list[int]]:
        found: dict[str, list[int]] = {}
        with peer.continuous_batching_context_manager(
            generation_config=greedy, continuous_batching_config=ContinuousBatchingConfig(**options), warmup=False
        ) as manager:
            names = [manager.add_request(ids, max_new_tokens=length, eos_token_id=-1) for ids, length in requests]
            while len(found) < len(names):
                answer = manager.get_result(timeout=1)
                if answer is not None and answer.is_finished():
                    found[answer.request_id] = list(answer.generated_tokens)
        return [found[name] for name in names]

    return run_once, lambda: dict(options)


def _vllm(interpreter: str, model: str) -> VllmPeer:
    import torch

    from minillm.models.loading import resolve

    return VllmPeer(
        interpreter,
        torch.get_num_threads(),
        model=str(resolve(model)),
        prompts=_prompts(model),
        lengths=output_lengths(),
        max_num_seqs=SEATS,
    )


def _peak_memory(name: str, model: str) -> int | None:
    return peak_memory_of(f"from minillm.bench import batch; batch._system({name!r}, {model!r})[0]()")
