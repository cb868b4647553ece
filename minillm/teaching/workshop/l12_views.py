"""Lesson 12: let the target draft over any part of its cache, and count how many of these drafts it accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm import LLM
from minillm.batch import Segment
from minillm.bench.speculation import slice_prompts
from minillm.cache.snapkv import observed_mass
from minillm.errors import LessonError
from minillm.request import Request
from minillm.runtime.runner import ModelRunner
from minillm.speculative.draft_policy import FixedDrafts
from minillm.speculative.drafter import DraftContext
from minillm.speculative.self_drafter import SelfDrafter
from minillm.speculative.self_sparse import OBSERVED_QUERIES
from minillm.teaching.latency import seconds_of
from minillm.teaching.workshop.l11_drafting import DraftRun, run
from minillm.trace import DraftProposed, TokensCommitted

View = Callable[[list[int], int, "Tensor | None"], tuple[list[int], int, int]]
"""`(block_table, num_tokens, attention)` → a shortened block table, the newest token's index in it, the tokens left
out. `attention` is `[num_queries, n]`, of the prompt's last queries to its n tokens."""
BlockChoice = Callable[[Tensor, int, int, int], list[int]]
"""`(attention, block_size, count, most)` → which of the blocks 0 … `count` - 1 are read: the exercise
`snapkv_blocks`."""


def whole(block_table: list[int], num_tokens: int, attention: Tensor | None) -> tuple[list[int], int, int]:
    """The view that leaves nothing out."""
    return block_table, num_tokens - 1, 0


def chosen(choice: BlockChoice, block_size: int, most: int) -> View:
    """The view of the blocks that `choice` takes, and of those from the newest token's on."""

    def view(block_table: list[int], num_tokens: int, attention: Tensor | None) -> tuple[list[int], int, int]:
        newest = (num_tokens - 1) // block_size
        none = torch.zeros(1, 0)
        kept = choice(none if attention is None else attention, block_size, newest, most)
        left_out = (newest - len(kept)) * block_size
        return [block_table[i] for i in kept] + block_table[newest:], num_tokens - 1 - left_out, left_out

    return view


class ViewDrafter(SelfDrafter):
    """The target drafts for itself over `view` of its cache; the engine's method `self_sparse` with the view open."""

    num_observed_queries = OBSERVED_QUERIES

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner, greedy=False)
        self.view: View = whole
        self.attention: dict[tuple[int, ...], Tensor] = {}
        """Of each prompt: `[num_queries, n]`, summed over layers and heads. It is kept, so that a prompt from the
        prefix cache need not be computed again."""
        self.read: list[list[int]] = []
        """For each draft step that began a round: the indices of the request's blocks that it read."""

    @classmethod
    def build(cls, context: DraftContext) -> ViewDrafter:
        """See `Drafter.build`."""
        return cls(context.target)

    def observe(self, request: Request, queries: Tensor) -> None:
        """See `Drafter.observe`."""
        prompt = tuple(request.token_ids)
        if prompt not in self.attention:
            self.attention[prompt] = observed_attention(self.runner, request, queries)

    def first_segment(self, request: Request) -> Segment:
        """See `SelfDrafter.first_segment`."""
        observed = self.attention.get(tuple(request.token_ids[: request.num_prompt_tokens]))
        table, start, left_out = self.view(request.block_table, request.num_tokens, observed)
        self.read.append([request.block_table.index(block) for block in table])
        return Segment(request.token_ids[-1:], start, table, num_skipped=left_out)


def observed_attention(runner: ModelRunner, request: Request, queries: Tensor) -> Tensor:
    """The attention of the prompt's last queries to each of its tokens, summed over layers and heads:
    `[num_queries, n]`."""
    size, n, count = runner.block_size, request.num_tokens, queries.shape[1]
    table = torch.tensor(request.block_table).unsqueeze(1) * size
    slots = (table + torch.arange(size)).flatten()[:n]
    found, config, rows = torch.zeros(count, n), runner.model.config, runner.cache.stored_rows()
    assert rows is not None
    for layer, of_layer in enumerate(queries):
        keys = rows.layer(layer, config.head_dim)[0][slots]
        for i in range(count):
            mass = observed_mass(of_layer[i : i + 1], keys[: n - count + 1 + i], config.window(layer)).sum(0)
            found[i] += F.pad(mass, (0, n - len(mass)))
    return found


@dataclass(frozen=True)
class Accepted:
    """What became of the drafts of some prompts."""

    run: DraftRun
    rates: list[float]
    """Of each prompt: accepted drafts / judged drafts."""

    @property
    def alpha(self) -> float:
        """Accepted / judged, of all prompts together."""
        accepted, judged = self.counts
        return accepted / judged

    @property
    def counts(self) -> tuple[int, int]:
        """Accepted drafts and judged drafts, of all prompts together."""
        return sum(self.run.acceptance.accepted), sum(self.run.acceptance.judged)

    @property
    def first_draft(self) -> list[int]:
        """The drafts of the first round."""
        return next(event.token_ids for event in self.run.trace.of(DraftProposed))


def draft_with(llm: LLM, prompts: Sequence[list[int]], view: View | None, gamma: int, new_tokens: int = 32) -> Accepted:
    """Complete the prompts (token ids) greedily, one at a time, with γ drafts in every round. `view`: for an `llm` with
    the method `ViewDrafter`, what its drafts read; None: any other engine."""
    drafter: Any = llm.engine.drafter
    if view is not None:
        drafter.view = view
        drafter.read.clear()
    given: list[Mapping[str, Any]] = [{"prompt_token_ids": ids} for ids in prompts]
    found = run(llm, given, FixedDrafts(gamma), batch=1, new_tokens=new_tokens)
    return Accepted(found, acceptance_by_request(found))


def acceptance_by_request(found: DraftRun) -> list[float]:
    """Accepted / judged drafts of each request, in order."""
    counts: dict[str, list[int]] = {}
    for event in found.trace.of(TokensCommitted):
        of_request = counts.setdefault(event.request_id, [0, 0])
        of_request[0] += event.num_accepted
        of_request[1] += min(event.num_drafts, event.num_accepted + 1)
    return [accepted / max(1, judged) for accepted, judged in counts.values()]


def long_prompts(llm: LLM, count: int, length: int) -> list[list[int]]:
    """The first `length` tokens of `count` long files that the bundled model was not trained on. Raises `LessonError`
    for files that are too short."""
    prompts = [llm.engine.tokenizer.encode(text) for text in slice_prompts()["long files"][:count]]
    if len(prompts) < count or min(map(len, prompts)) < length:
        raise LessonError(f"there are no {count} files of {length} tokens; take fewer, or a shorter length")
    return [prompt[:length] for prompt in prompts]


@dataclass(frozen=True)
class FarDefinition:
    """A prompt whose end needs a definition that lies far back."""

    token_ids: list[int]
    definition: str
    blocks: range
    """The blocks of the definition."""


def far_definition(llm: LLM) -> FarDefinition:
    """A function is defined, then come 120 tokens of other code, then the text begins to call it."""
    encode, size = llm.engine.tokenizer.encode, llm.engine.runner.block_size
    other = encode(slice_prompts()["long files"][1][:3000])
    definition = encode("def check_zebra_version(text):\n    pass\n\n", add_special_tokens=False)
    call = encode("\n\n    if check_zeb", add_special_tokens=False)
    first = 2 * size + 3
    ids = [*other[:first], *definition, *other[first : first + 120], *call]
    blocks = range(first // size, (first + len(definition) - 1) // size + 1)
    return FarDefinition(ids, "def check_zebra_version", blocks)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one forward each, with the whole context cached."""

    plain: float
    draft: float
    """One draft step over the view."""
    verify: float


def step_times(llm: LLM, ids: list[int], view: View, gamma: int) -> StepTimes:
    """Time the three forwards of a round that continues `ids`. What is in the cache does not matter for the time.

    It overwrites the first blocks of the cache, so it empties the prefix cache."""
    runner, last = llm.engine.runner, len(ids) - 1
    blocks = list(range(-(-(len(ids) + gamma) // runner.block_size)))
    table, start, left_out = view(blocks, len(ids), None)
    first = Segment(ids[-1:], start, table, num_skipped=left_out)
    steps = {
        "plain": lambda: runner.run([Segment(ids[-1:], last, blocks)]),
        "draft": lambda: runner.draft([first], gamma),
        "verify": lambda: runner.run([Segment(ids[-1:] * (gamma + 1), last, blocks, num_logits=gamma + 1)]),
    }
    taken = {name: seconds_of(step, repeats=5, rounds=5) for name, step in steps.items()}
    llm.reset_prefix_cache()
    return StepTimes(taken["plain"], taken["draft"] / gamma, taken["verify"])
