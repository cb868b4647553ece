"""Lesson 16: two engines with the same model, requests about a few documents, and a router that sends each to one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from minillm import LLM, SamplingParams
from minillm.cache.prefix import extend_block_hashes
from minillm.models.held_out import held_out_prompts

Route = Callable[[list[int], list[set[int]], list[int]], int]
"""`(hashes of the prompt's blocks, blocks of each replica, requests queued there)` → replica, the exercise `route`."""
WAVE = 4
"""Requests that arrive together: all are routed before any is run."""


def documents(llm: LLM, count: int, num_tokens: int) -> list[list[int]]:
    """Held-out text cut into so many documents of so many tokens."""
    encode = llm.engine.tokenizer.encode
    ids: list[int] = []
    for prompt in held_out_prompts():
        ids += encode(prompt.prompt, add_special_tokens=False)
    return [ids[i * num_tokens : (i + 1) * num_tokens] for i in range(count)]


def requests(llm: LLM, texts: Sequence[Sequence[int]], count: int, hot: float = 0.0, seed: int = 0) -> list[list[int]]:
    """Prompts of a document and a question each. A share `hot` of them is about the first document, the others are
    about any."""
    draw = random.Random(seed)
    encode = llm.engine.tokenizer.encode
    questions = [encode(f"\n# question {i}\n", add_special_tokens=False) for i in range(count)]
    return [[*(texts[0] if draw.random() < hot else draw.choice(texts)), *question] for question in questions]


def blocks_of(token_ids: Sequence[int], block_size: int) -> list[int]:
    """The hash of each full block, as the prefix cache computes it (shortened to an integer)."""
    return [int.from_bytes(each[:8], "big") for each in extend_block_hashes([], token_ids, block_size)]


def round_robin() -> Route:
    """Takes turns."""
    turns = iter(range(10**9))
    return lambda blocks, cached, queued: next(turns) % len(cached)


@dataclass
class Served:
    """What became of the requests."""

    replicas: list[int] = field(default_factory=list)
    """Where each request went."""
    num_cached: int = 0
    """Prompt tokens that prefix caches had."""
    num_prompt: int = 0
    token_ids: list[list[int]] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were not computed."""
        return self.num_cached / self.num_prompt

    @property
    def busiest(self) -> float:
        """Share of the requests that the busiest replica got."""
        return max(map(self.replicas.count, set(self.replicas))) / len(self.replicas)


def serve(engines: Sequence[LLM], prompts: Sequence[list[int]], route: Route, new_tokens: int = 2) -> Served:
    """Send the prompts, in waves, to the replica that `route` says. All prefix caches are empty at the start.

    The router does not see the caches. It remembers the blocks of the prompts that it sent to each replica, as many as
    the replica has room for, the latest.
    """
    greedy = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    for engine in engines:
        engine.reset_prefix_cache()
    sent: list[dict[int, None]] = [{} for _ in engines]
    served = Served()
    for first in range(0, len(prompts), WAVE):
        queues: list[list[list[int]]] = [[] for _ in engines]
        for prompt in prompts[first : first + WAVE]:
            pool = engines[0].engine.pool
            blocks = blocks_of(prompt, pool.block_size)
            chosen = route(blocks, [set(each) for each in sent], [len(queue) for queue in queues])
            queues[chosen].append(prompt)
            served.replicas.append(chosen)
            for block in blocks:
                sent[chosen].pop(block, None)  # so that it becomes the latest
                sent[chosen][block] = None
            while len(sent[chosen]) > pool.num_blocks:
                del sent[chosen][next(iter(sent[chosen]))]
        for engine, queue in zip(engines, queues, strict=True):
            if queue:
                outputs = engine.generate([{"prompt_token_ids": p} for p in queue], greedy, use_tqdm=False)
                served.num_cached += sum(output.num_cached_tokens for output in outputs)
                served.num_prompt += sum(map(len, queue))
                served.token_ids += [output.outputs[0].token_ids for output in outputs]
    return served
