"""Whole engines on a cache layout: what they generate, and that they leave nothing behind."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from minillm import LLM, SamplingParams
from minillm.engine.scheduler import Scheduled, Scheduler
from minillm.models.decoder import Attention, Decoder
from minillm.trace import DraftProposed
from tests.conftest import TinyPair

PROMPTS = [
    "def add(a, b):",
    "for line in",
    "import os\n\n\ndef walk(root):\n    for name in os.listdir(root):",
    "class",
]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


class PreemptingScheduler(Scheduler):
    """Throws the youngest running request out of its place before every fifth step."""

    count = 0

    def schedule(self) -> list[Scheduled]:
        self.count += 1
        if self.count % 5 == 0 and len(self.running) > 1:
            self._preempt(self.running[-1])
        return super().schedule()


ENGINES: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    {"num_kv_blocks": 2},
    {"scheduler_cls": PreemptingScheduler},
]
"""Ways to run: chunks of seven tokens, two places for four requests, with preemption."""


def draft_of(tiny: TinyPair) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(tiny.draft), "num_speculative_tokens": 3}


def generated(model: str, layout: dict[str, Any] | None, **options: Any) -> list[list[int]]:
    """Greedy tokens of all prompts; afterwards every place is free and holds no memory, in the draft's cache too. With
    a `speculative_config` there are drafts."""
    llm = LLM(model, kv_cache_config=layout, **options)
    caches = [llm.engine.runner.cache, *([llm.engine.drafter.runner.cache] if llm.engine.drafter else [])]
    idle = [one.num_bytes for one in caches]
    with llm.trace() as trace:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert bool(trace.of(DraftProposed)) == bool(options.get("speculative_config"))
    llm.engine.scheduler.check_integrity()
    assert llm.engine.pool.num_used == 0
    assert [one.num_bytes for one in caches] == idle
    return [output.outputs[0].token_ids for output in outputs]


@cache
def paged(model: str) -> list[list[int]]:
    return generated(model, None)


@torch.inference_mode()
def greedy_tokens(model: Decoder, attention: Attention, prompt: list[int]) -> list[int]:
    """The most likely tokens of a model whose attention is someone else's: the prompt at once, then one by one."""
    tokens = list(prompt)
    past = 0
    for _ in range(GREEDY.max_tokens):
        hidden = model(torch.tensor(tokens[past:]), torch.arange(past, len(tokens)), attention)
        past = len(tokens)
        tokens.append(int(model.logits(hidden[-1]).argmax()))
    return tokens[len(prompt) :]
