"""A draft model that is itself sped up by n-gram lookup (Staged Speculative Decoding: Spector and Re 2023).

A draft model computes one token per forward, for the same reason as the target: each token needs the one before. The
cure is the same, too. An n-gram lookup guesses the next tokens, and one forward of the draft model verifies them:

    text so far       … for item in items :         looked up: `for item in items :` was followed by `\\n print (`
    draft forward     [ :  \\n  print ( ]            4 rows: what the draft model says after each of them
    it says             \\n  print (  item           all three guesses are its own choice: 4 drafts in one forward
    verified by the target, as the drafts of any draft model

A guess is kept only if it equals the token that the draft model chooses at this place: the argmax, or for a sampled
request the token that it draws from q with the request's own uniform. So the drafts, and their q, are those of method
`draft_model`, in fewer forwards. (For a draft that is drawn, this accepts a guess x with probability q(x), which is the
exact rule for deterministic guesses.)

Wins: where text repeats itself and a forward costs about the same for one token and for five, as on a GPU and for any
model bound by memory. Loses: where a wrong guess costs a row that is not free, and where the draft model's forwards run
in one compiled loop, which a lookup between two forwards interrupts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minillm.batch import Segment
from minillm.errors import NonFiniteLogitsError
from minillm.request import Request
from minillm.runtime.runner import ModelRunner, check_finite
from minillm.sampling import argmax
from minillm.speculative.chain_drafter import warn_of_broken_logits
from minillm.speculative.draft_model import DraftModelDrafter, DraftProgress, ModelOptions
from minillm.speculative.drafter import Draft, DraftContext
from minillm.speculative.ngram import NgramDrafter, NgramOptions


@dataclass(frozen=True)
class StagedOptions(ModelOptions):
    """The options of method `staged`: those of `draft_model`, and the lookup that guesses its drafts."""

    prompt_lookup_min: int | None = 2
    prompt_lookup_max: int | None = 5
    """See `NgramOptions`."""

    def __post_init__(self) -> None:
        self.check("staged")
        _ = self.lookup  # checks the numbers

    @property
    def lookup(self) -> tuple[int, int]:
        """Fewest and most tokens that are matched."""
        return NgramOptions(self.prompt_lookup_min, self.prompt_lookup_max).lookup


@dataclass
class StagedDraft:
    """The drafts of one request in this round."""

    request: Request
    most: int
    drafts: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)

    def add(self, guesses: Sequence[int], chosen: Sequence[int], q: Sequence[Tensor]) -> None:
        """Add what the draft model chose, up to and including the first place where a guess differs."""
        agreed = next((i for i, guess in enumerate(guesses) if guess != chosen[i]), len(guesses))
        self.drafts += chosen[: agreed + 1]
        self.probs += q[: agreed + 1]


class StagedDrafter(DraftModelDrafter):
    """Drafts the tokens of `DraftModelDrafter`; one draft forward per round and request verifies several guesses."""

    Options = StagedOptions

    def __init__(self, runner: ModelRunner, max_num_batched_tokens: int, greedy: bool, guesser: NgramDrafter) -> None:
        super().__init__(runner, max_num_batched_tokens, greedy)
        self.guesser = guesser

    @classmethod
    def build(cls, context: DraftContext) -> StagedDrafter:
        """See `Drafter.build`."""
        options = context.options
        runner = context.new_runner(context.load_model(options.model, options.quantization))
        greedy = options.draft_sample_method == "greedy"
        return cls(runner, context.max_num_batched_tokens, greedy, NgramDrafter(*options.lookup))

    def _propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        is_greedy = self.is_greedy(requests)
        rounds = [StagedDraft(request, most) for request, most in zip(requests, num_drafts, strict=True)]
        for request in requests:
            self.num_computed_tokens(request)
        try:
            if self._num_behind(requests) + sum(num_drafts) > self.max_num_batched_tokens:
                self._choose(rounds, [[] for _ in rounds], self._catch_up(requests), is_greedy)
            while active := [each for each in rounds if len(each.drafts) < each.most]:
                guesses = [self._guess(each) for each in active]
                logits = self.runner.run([self._segment_with(each, g) for each, g in zip(active, guesses, strict=True)])
                self._choose(active, guesses, logits, is_greedy)
        except NonFiniteLogitsError as problem:  # drafts that were chosen before it are kept
            warn_of_broken_logits(self, problem)
        for each in rounds:
            self._progress[each.request] = DraftProgress(each.request.num_tokens, each.drafts[:-1])
        return [Draft(each.drafts, torch.stack(each.probs) if each.probs else None) for each in rounds]

    def _guess(self, each: StagedDraft) -> list[int]:
        """Guesses for the next drafts but the last one, which comes from the forward that verifies them."""
        room = each.most - len(each.drafts) - 1
        return self.guesser.guess(each.request, each.drafts, room) if room else []

    def _segment_with(self, each: StagedDraft, guesses: Sequence[int]) -> Segment:
        """The segment of all tokens that the draft model has not computed, and the guesses behind them."""
        request, size = each.request, self.runner.block_size
        if each.drafts:
            start, known = request.num_tokens + len(each.drafts) - 1, each.drafts[-1:]
        else:
            start = self._skip_filled(request)
            known = request.token_ids[start:]
            self._segment(request, start, known)  # records the blocks that committed tokens fill
        tokens = [*known, *guesses]
        # Drafts and guesses may be rejected, so the hashes of their blocks are dropped.
        for position in range(max(start, request.num_tokens), start + len(tokens)):
            self._filled.pop(request.block_table[position // size], None)
        return Segment(
            tokens, start, request.block_table, len(guesses) + 1, num_prompt_tokens=request.num_prompt_tokens
        )

    def _choose(
        self, rounds: Sequence[StagedDraft], guesses: Sequence[Sequence[int]], logits: Tensor, is_greedy: bool
    ) -> None:
        """Choose a token from each row, as `DraftModelDrafter` would, and keep those up to the first wrong guess.

        `logits`: `[sum of (guesses + 1), vocab]`.
        """
        if is_greedy:
            check_finite(logits)
            chosen, q = argmax(logits), []
        else:
            after = [
                (each.request, [*each.drafts, *some[:count]])
                for each, some in zip(rounds, guesses, strict=True)
                for count in range(len(some) + 1)
            ]
            chosen, q = self._draw(logits, after)
        first = 0
        for each, some in zip(rounds, guesses, strict=True):
            end = first + len(some) + 1
            each.add(some, chosen[first:end], list(q[first:end]))
            first = end
