"""transformers as a peer in the benchmark of many requests: padded batches, and its continuous batching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minillm.errors import MinillmError

Run = Callable[[], list[list[int]]]
Extra = Callable[[], dict[str, Any]]


class PeerError(MinillmError):
    """A peer of a benchmark failed in the middle of a run."""


def _load(model: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from minillm.models.hub import resolve

    peer = AutoModelForCausalLM.from_pretrained(resolve(model), dtype=torch.float32).eval()
    peer.generation_config.eos_token_id = None  # end of text does not stop it: all run to their full length
    return peer


def padded(model: str, prompts: list[list[int]], lengths: list[int], max_num_seqs: int) -> tuple[Run, Extra]:
    """Padded batches of `max_num_seqs` requests, each until its longest request ends."""
    import torch

    peer = _load(model)

    @torch.inference_mode()
    def run_batch(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        tokens = peer.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=max(lengths), pad_token_id=0)
        return [row[width : width + length] for row, length in zip(tokens.tolist(), lengths, strict=True)]

    starts = range(0, len(prompts), max_num_seqs)

    def run_once() -> list[list[int]]:
        return [row for i in starts for row in run_batch(prompts[i : i + max_num_seqs], lengths[i : i + max_num_seqs])]

    steps, useful = sum(max(lengths[i : i + max_num_seqs]) for i in starts), sum(lengths)
    return run_once, lambda: {
        "batch": max_num_seqs,
        "steps": steps,
        "batch_slot_utilisation": useful / (max_num_seqs * steps),
    }


def generate_batch(model: str, prompts: list[list[int]], lengths: list[int], max_num_seqs: int) -> tuple[Run, Extra]:
    """transformers' continuous batching of up to `max_num_seqs` requests at a time. A run raises `PeerError` if a
    request fails, or if the thread that generates has ended."""
    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig

    peer, requests = _load(model), list(zip(prompts, lengths, strict=True))
    greedy = GenerationConfig(do_sample=False, max_new_tokens=max(lengths), eos_token_id=-1, pad_token_id=0)
    # The fastest settings found. With the defaults it took three times as long.
    options = {
        "page_size": 32,
        "num_blocks": 16 * max_num_seqs,
        "max_batch_tokens": 512,
        "max_requests_per_batch": max_num_seqs,
    }

    @torch.inference_mode()
    def run_once() -> list[list[int]]:
        found: dict[str, list[int]] = {}
        with peer.continuous_batching_context_manager(
            generation_config=greedy, continuous_batching_config=ContinuousBatchingConfig(**options), warmup=False
        ) as manager:
            names = [manager.add_request(ids, max_new_tokens=length, eos_token_id=-1) for ids, length in requests]
            while len(found) < len(names):
                answer = manager.get_result(timeout=1)
                if answer is None:
                    if not manager.is_running():
                        raise PeerError(
                            f"transformers' continuous batching ended after {len(found)} of {len(names)} requests; its "
                            "error is above. Name the other systems with --systems"
                        )
                elif answer.error:
                    raise PeerError(
                        f"transformers' continuous batching failed: {answer.error}. Name the other systems with "
                        "--systems"
                    )
                elif answer.is_finished():
                    found[answer.request_id] = list(answer.generated_tokens)
        return [found[name] for name in names]

    return run_once, lambda: dict(options)
