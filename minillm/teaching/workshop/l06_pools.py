"""Lesson 06: what blocks waste, and whether a pool is in order after every step. Nothing here is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minillm import LLM, SamplingParams
from minillm.cache.block_pool import BlockPoolError
from minillm.teaching.submitted import submitted


def average_waste(engine: LLM, prompts: Sequence[str], params: SamplingParams) -> tuple[float, float]:
    """Mean over all steps of: wasted slots per running request, and the filled part of the allocated slots."""
    block_size = engine.engine.pool.block_size
    wasted = allocated = running = 0
    with submitted(engine, list(prompts), params) as requests:
        while engine.engine.has_requests:
            engine.engine.step()
            for request in requests:
                if not request.finished:
                    held = len(request.block_table) * block_size
                    wasted += held - request.num_computed_tokens
                    allocated += held
                    running += 1
    return wasted / running, 1 - wasted / allocated


@dataclass(frozen=True)
class Examined:
    """Tokens of all completions, whether the books of the pool balanced after every step, and blocks left behind."""

    tokens: list[list[int]]
    consistent: bool
    num_not_freed: int


def examine(engine: LLM, batches: Sequence[Sequence[tuple[list[int], SamplingParams]]]) -> Examined:
    """Run each batch of (prompt, parameters) to its end, one batch after the other, on a fresh engine.

    The cache is set to zeros first, so that reading a slot nobody has written gives the same tokens on every run.
    """
    for pool in (engine.engine.runner.cache.keys, engine.engine.runner.cache.values):
        pool.zero_()
    tokens, balanced = [], True
    for batch in batches:
        prompts = [{"prompt_token_ids": list(ids)} for ids, _ in batch]
        with submitted(engine, prompts, [params for _, params in batch]) as requests:
            while engine.engine.has_requests:
                engine.engine.step()
                try:
                    engine.engine.scheduler.check_integrity()
                except BlockPoolError:
                    balanced = False
        tokens += [request.output_token_ids for request in requests]
    return Examined(tokens, balanced, engine.engine.pool.num_used)
