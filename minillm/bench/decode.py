"""One request at a time, greedy, fp32: transformers' `generate`, minillm, and minillm with a draft model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minillm.bench.harness import System, compare, peak_memory_of, result
from minillm.bench.prompts import held_out_prompts

NEW_TOKENS = 128
NUM_DRAFTS = 4
PROMPTS = 8
ROUNDS = 5

NAMES = {"transformers fp32": None, "minillm fp32": "transformers fp32", "minillm fp32 + draft": "minillm fp32"}
"""System → its baseline."""


def run(model: str = "minicoder", draft: str = "minicoder-draft") -> dict[str, Any]:
    """Three systems in turn on the same held-out prompts, with the same threads; returns the result as JSON values."""
    import torch

    systems = [_system(name, model, draft) for name in NAMES]
    rows = compare(systems, ROUNDS, lambda name: _peak_memory(name, model, draft))
    config = {
        "model": model,
        "draft": draft,
        "batch": 1,
        "new_tokens": NEW_TOKENS,
        "prompt_tokens": [len(ids) for ids in _prompts(model)],
        "num_speculative_tokens": NUM_DRAFTS,
        "sampling": "greedy",
        "dtype": "float32",
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "rounds": ROUNDS,
    }
    return result("decode", config, rows)


def _system(name: str, model: str, draft: str) -> System:
    if name == "transformers fp32":
        return System(name, _transformers(model))
    run_once, extra = _minillm(model, draft if "draft" in name else None)
    return System(name, run_once, NAMES[name], extra)


def _prompts(model: str) -> list[list[int]]:
    """Held-out prompts of more than 64 tokens, as ids."""
    from minillm.models.loading import resolve
    from minillm.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(resolve(model))
    encoded = (tokenizer.encode(p.prompt) for p in held_out_prompts())
    return [ids for ids in encoded if len(ids) > 64][:PROMPTS]


def _transformers(model: str) -> Callable[[], list[list[int]]]:
    import torch
    from transformers import AutoModelForCausalLM

    from minillm.models.loading import resolve

    peer = AutoModelForCausalLM.from_pretrained(resolve(model), dtype=torch.float32).eval()
    peer.generation_config.eos_token_id = None  # end of text is a token like any other: all run to the full length
    prompts = [torch.tensor([ids]) for ids in _prompts(model)]

    @torch.inference_mode()
    def run_once() -> list[list[int]]:
        out = []
        for ids in prompts:
            tokens = peer.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                pad_token_id=0,
            )
            out.append(tokens[0, ids.shape[1] :].tolist())
        return out

    return run_once


def _minillm(model: str, draft: str | None) -> tuple[Callable[[], list[list[int]]], Callable[[], dict[str, Any]]]:
    from minillm import LLM, SamplingParams

    speculative = {"method": "draft_model", "model": draft, "num_speculative_tokens": NUM_DRAFTS} if draft else None
    llm = LLM(model, dtype="float32", device="cpu", enable_prefix_caching=False, speculative_config=speculative)
    prompts = [{"prompt_token_ids": ids} for ids in _prompts(model)]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    last: dict[str, Any] = {}

    def run_once() -> list[list[int]]:
        outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
        drafts = sum(o.metrics.num_drafts for o in outputs)
        forwards = sum(o.metrics.num_decode_forwards for o in outputs)
        last["tokens_per_forward"] = sum(o.metrics.num_output_tokens for o in outputs) / forwards
        if drafts:
            last["acceptance_rate"] = sum(o.metrics.num_accepted for o in outputs) / drafts
        return [o.outputs[0].token_ids for o in outputs]

    return run_once, lambda: dict(last)


def _peak_memory(name: str, model: str, draft: str) -> int | None:
    return peak_memory_of(f"from minillm.bench import decode; decode._system({name!r}, {model!r}, {draft!r}).run()")
