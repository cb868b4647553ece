"""Drafting with a small model (Leviathan et al. 2023; Chen et al. 2023).

The draft model has a second KV cache pool, addressed by the *same* block tables, so one allocator serves both models.
`DraftProgress` records which tokens of a request are in the draft's cache. If all γ drafts of a round were accepted,
the last of them has not been through the draft model: the next round computes it together with the bonus token.

The draft model fills blocks later than the target. When a request finds blocks in the prefix cache, they may or may not
hold the draft's keys and values. So the drafter records the hash of the contents that it has computed for each block,
and skips those blocks when it catches up with the target.

`min_survival` ends a chain where the draft model is unsure: the product of its probabilities estimates how likely all
drafts so far are accepted. Whether a chain ends depends only on the text before the draft that is left out, so the
output keeps the target's distribution. Only chains of argmaxes end early: how likely a sampled draft is accepted does
not follow from its probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from minillm.batch import Segment
from minillm.config import in_range
from minillm.errors import ConfigError, TokenizerMismatchError
from minillm.models.hub import resolve
from minillm.models.loading import load_config
from minillm.request import Request
from minillm.runtime.runner import ModelRunner
from minillm.speculative.chain_drafter import ChainDrafter, check_quantization, check_sample_method
from minillm.speculative.drafter import Draft, DraftContext, TargetInfo
from minillm.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelOptions:
    """vLLM's options of methods with a draft model."""

    model: str | None = None
    """The draft model: a bundled name, a folder or a hub id."""
    quantization: str | None = None
    """Quantisation of its weights (`int8`, `w8a8`, …). Drafts need not be exact."""
    draft_sample_method: str = "probabilistic"
    """`probabilistic` samples drafts from the draft's distribution; `greedy`, vLLM's default, takes the argmax."""

    def check(self, method: str) -> None:
        """Raise `ConfigError` for options that `method` cannot work with, `UnsupportedError` for an unknown
        quantisation."""
        if not self.model:
            raise ConfigError(f"speculative method {method!r} needs 'model', for example 'minicoder-draft'")
        check_sample_method(self.draft_sample_method)
        check_quantization(self.quantization)

    def check_target(self, target: TargetInfo) -> int | None:
        """See `Drafter.Options`. A draft model that is not here yet is downloaded."""
        assert self.model is not None
        draft_folder(self.model, target)
        return None


@dataclass(frozen=True)
class DraftModelOptions(ModelOptions):
    """The options of method `draft_model`."""

    min_survival: float = 0.0
    """minillm's own. A chain of argmaxes ends before the draft with which the product of their probabilities, by the
    draft model, falls below this. 0: it never ends early. On a GPU the host then waits for each draft."""

    def __post_init__(self) -> None:
        self.check("draft_model")
        in_range("min_survival", self.min_survival, 1.0)


def draft_folder(name: str, target: TargetInfo) -> Path:
    """The folder of the draft model `name` (see `resolve`).

    Raises `TokenizerMismatchError` or `ConfigError` if it does not fit the target, `CheckpointError` if it cannot be
    read.
    """
    folder = resolve(name)
    if not target.tokenizer.same_vocabulary(Tokenizer.from_folder(folder), target.config.vocab_size):
        raise TokenizerMismatchError(
            f"the draft model {name!r} has another tokenizer than the target, so its token ids mean other text; use a "
            "draft model with the target's tokenizer"
        )
    config = load_config(folder)
    if config.vocab_size != target.config.vocab_size:
        raise TokenizerMismatchError(
            f"the draft model {name!r} has {config.vocab_size} logits, the target {target.config.vocab_size}; use a "
            "draft model with the target's vocabulary"
        )
    if config.max_position_embeddings < target.max_model_len:
        raise ConfigError(
            f"the draft model {name!r} has a context of {config.max_position_embeddings} tokens, less than "
            f"max_model_len={target.max_model_len}; lower max_model_len"
        )
    return folder


@dataclass
class DraftProgress:
    """Which tokens of a request are in the draft model's cache."""

    num_computed: int = 0
    """Number of committed tokens, from the first on."""
    drafts: list[int] = field(default_factory=list)
    """Drafts of the last round that were computed after them. The target may have rejected some."""

    def settle(self, request: Request, block_size: int) -> None:
        """Count the accepted drafts as computed and discard the others. The last token is never counted: its logits
        are needed, so it must be computed."""
        for token in self.drafts:
            if self.num_computed >= request.num_tokens - 1 or request.token_ids[self.num_computed] != token:
                break
            self.num_computed += 1
        self.drafts = []
        most = min(request.num_tokens - 1, len(request.block_table) * block_size)
        self.num_computed = min(self.num_computed, most)


class DraftModelDrafter(ChainDrafter):
    """Drafts a chain of tokens per request. All requests form one batch, with one draft forward per position."""

    Options = DraftModelOptions

    def __init__(
        self, runner: ModelRunner, max_num_batched_tokens: int, greedy: bool, min_survival: float = 0.0
    ) -> None:
        super().__init__(runner, greedy)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.min_survival = min_survival
        self._progress: WeakKeyDictionary[Request, DraftProgress] = WeakKeyDictionary()
        self._filled: dict[int, bytes] = {}
        """Block id → hash of its contents, for blocks that the draft model has computed completely."""

    @classmethod
    def build(cls, context: DraftContext) -> DraftModelDrafter:
        """See `Drafter.build`."""
        options = context.options
        runner = context.new_runner(context.load_model(options.model, options.quantization))
        is_greedy = options.draft_sample_method == "greedy"
        return cls(runner, context.max_num_batched_tokens, is_greedy, options.min_survival)

    def num_computed_tokens(self, request: Request) -> int:
        """How many of the request's tokens, from the first on, are in the draft model's cache."""
        progress = self._progress.setdefault(request, DraftProgress())
        progress.settle(request, self.runner.block_size)
        return progress.num_computed

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Drafter.copy_blocks`."""
        for _, target in pairs:
            self._filled.pop(target, None)  # before the copy: an interrupt must not leave the old hash
        self.runner.cache.copy_blocks(pairs)

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """See `Drafter.free_blocks`. What the target forgets, the draft model computes anew, too."""
        for block_id in block_ids:
            self._filled.pop(block_id, None)
        self.runner.cache.free(block_ids)

    def request_dropped(self, request: Request) -> None:
        """See `Drafter.request_dropped`."""
        self._progress.pop(request, None)

    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        """See `Drafter.propose`."""
        try:
            return self._propose(requests, num_drafts)
        except BaseException:
            self._filled.clear()  # the recorded blocks may not have been computed
            self._progress.clear()
            raise

    def _propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        for request in requests:
            self.num_computed_tokens(request)  # updates the progress
        if self.is_greedy(requests):
            if self._num_behind(requests) > self.max_num_batched_tokens:
                self._catch_up(requests)
                for request in requests:
                    self.num_computed_tokens(request)  # all but the last one, whose logits are needed again
            return self._propose_together(requests, num_drafts)
        drafts = self.draw_chains(
            requests,
            num_drafts,
            self._catch_up(requests),
            lambda active, drafted: self.runner.run([self._next(requests[i], drafted[i]) for i in active]),
        )
        for request, draft in zip(requests, drafts, strict=True):
            self._progress[request] = DraftProgress(request.num_tokens, draft.token_ids[:-1])
        return drafts

    def _num_behind(self, requests: Sequence[Request]) -> int:
        """Number of committed tokens that the draft model has not computed yet, over all requests."""
        return sum(request.num_tokens - self._skip_filled(request) for request in requests)

    def _propose_together(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        """Draft greedily for each request; the first forward also computes what the draft model has missed."""
        segments = []
        for request, count in zip(requests, num_drafts, strict=True):
            start = self._progress[request].num_computed
            segments.append(self._segment(request, start, request.token_ids[start:]))
            for position in range(request.num_tokens, request.num_tokens + count - 1):
                self._filled.pop(request.block_table[position // self.runner.block_size], None)
        chains = self.draft_argmax(segments, num_drafts, self.min_survival)
        for request, chain, most in zip(requests, chains, num_drafts, strict=True):
            # The last draft was computed only where the chain ended early, to learn how likely the next one is.
            self._progress[request] = DraftProgress(request.num_tokens, chain if len(chain) < most else chain[:-1])
        return [Draft(chain) for chain in chains]

    def _catch_up(self, requests: Sequence[Request]) -> Tensor:
        """Compute all committed tokens that are not in the draft model's cache, in chunks of `max_num_batched_tokens`.

        Returns the logits after each request's last token, `[num_requests, vocab]`.
        """
        logits: list[Tensor | None] = [None] * len(requests)
        behind = list(range(len(requests)))
        while behind:
            budget, chunk, segments = self.max_num_batched_tokens, [], []
            for i in behind:
                request = requests[i]
                start = self._skip_filled(request)
                end = min(request.num_tokens, start + budget)
                if start < end:
                    segments.append(self._segment(request, start, request.token_ids[start:end]))
                    chunk.append(i)
                    budget -= end - start
            rows = self.runner.run(segments)
            for i, segment in zip(chunk, segments, strict=True):
                self._progress[requests[i]].num_computed = segment.start + len(segment.token_ids)
            behind = [i for i in behind if self._progress[requests[i]].num_computed < requests[i].num_tokens]
            if len(chunk) == len(requests) and not behind:
                return rows  # the usual case: one forward was enough
            for i, row in zip(chunk, rows, strict=True):
                logits[i] = row
        return torch.stack([row for row in logits if row is not None])

    def _skip_filled(self, request: Request) -> int:
        """Skip blocks that already hold the draft model's keys and values, but never the last token. Returns the number
        of computed tokens."""
        size, progress = self.runner.block_size, self._progress[request]
        if progress.num_computed % size == 0:
            hashes = request.block_hashes(size)
            for i in range(progress.num_computed // size, (request.num_tokens - 1) // size):
                if self._filled.get(request.block_table[i]) != hashes[i]:
                    break
                progress.num_computed += size
        return progress.num_computed

    def _next(self, request: Request, drafted: list[int]) -> Segment:
        """The segment that computes the last draft. It may be rejected, so the hash of its block is dropped."""
        start = request.num_tokens + len(drafted) - 1
        self._filled.pop(request.block_table[start // self.runner.block_size], None)
        return Segment(drafted[-1:], start, request.block_table)

    def _segment(self, request: Request, start: int, token_ids: list[int]) -> Segment:
        """The segment of the committed `token_ids` from position `start` on. Records the blocks that they fill.

        They are recorded before they are computed, so that other requests in the same forward can skip them.
        """
        size, table, end = self.runner.block_size, request.block_table, start + len(token_ids)
        for index in range(start // size, -(-end // size)):
            self._filled.pop(table[index], None)
        hashes = request.block_hashes(size)
        for index in reversed(range(end // size)):
            if self._filled.get(table[index]) == hashes[index]:
                break
            self._filled[table[index]] = hashes[index]
        return Segment(token_ids, start, request.block_table, num_prompt_tokens=request.num_prompt_tokens)
