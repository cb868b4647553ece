"""One request: its tokens, how many of them are in the cache, and its block table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from minillm.cache.prefix import extend_block_hashes
from minillm.outputs import Logprob
from minillm.sampling import SamplingParams, SamplingRow
from minillm.sampling.bad_words import completing_token_ids
from minillm.tokenizer import Detokenizer

LogprobRow = dict[int, Logprob]


@dataclass(eq=False)
class Request:
    """A prompt and its completion so far.

        token_ids    [ prompt …… | output …… ]
                       └─ computed ─┘└─ new ─┘

        computed     num_computed_tokens: their keys and values are in the cache
        new          num_new_tokens: they go through the model next

    A request that decodes has exactly one new token, the last one. Drafts enter `token_ids` only when they are
    accepted. Preemption frees all blocks and sets `num_computed_tokens` to 0, but it keeps `token_ids`.
    """

    request_id: str
    prompt: str
    token_ids: list[int]
    """The prompt's tokens, then the output's."""
    num_prompt_tokens: int
    params: SamplingParams
    max_tokens: int
    seed: int
    index: int = 0
    """Which of the prompt's `n` completions this is, from 0."""
    priority: int = 0
    """Lower values run first, if the engine schedules by priority."""
    cache_salt: str = ""
    """Only requests with the same salt can share blocks through the prefix cache."""
    fork_of: Request | None = None
    """The first completion of the same prompt; its prompt blocks are shared as soon as they are computed."""
    stop_ids: frozenset[int] = frozenset()
    """End-of-text and stop tokens that end this request."""
    eos_ids: frozenset[int] = frozenset()
    """The end-of-text tokens of model and tokenizer, whether they end this request or not."""
    eos_id: int | None = None
    """The tokenizer's. The others count as stop tokens, as in vLLM."""
    detokenizer: Detokenizer | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token ids that the output must not have one after the other."""
    num_computed_tokens: int = 0
    num_dropped_tokens: int = 0
    """How many tokens the request had when its cache was dropped last."""
    block_table: list[int] = field(default_factory=list)
    arrival: int = 0
    """Position in the order of arrival, set by the scheduler."""
    text: str = ""
    """The text of the output so far, cut off at a stop string."""
    num_detokenized_tokens: int = 0
    """Output tokens that `text` and `finish_reason` take into account: all of them, unless a step was interrupted."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[LogprobRow] = field(default_factory=list)
    prompt_logprobs: dict[int, LogprobRow] = field(default_factory=dict)
    """Key: position in the prompt. Position 0 has no log-probability."""
    _summed_logprobs: tuple[int, float] = (0, 0.0)
    """How many of `logprobs` were summed, and their sum: an output is asked for after each step."""
    _block_hashes: list[bytes] = field(default_factory=list, repr=False)
    """Tokens are only appended, so a computed hash stays valid."""

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The output tokens so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_new_tokens(self) -> int:
        """Number of tokens that are not in the cache yet."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether only the last output token is new. A preempted request that recomputes its tokens is in prefill."""
        return self.num_new_tokens == 1 and self.num_output_tokens > 0 and self.num_tokens > self.num_dropped_tokens

    @property
    def reports_prompt_logprobs(self) -> bool:
        """Whether this request reports log-probabilities of its prompt: of several completions, only the first does."""
        return self.params.prompt_logprobs is not None and self.index == 0

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether some log-probabilities of the prompt are still to be computed."""
        return self.reports_prompt_logprobs and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def num_remaining_tokens(self) -> int:
        """Number of output tokens that may still be generated."""
        return self.max_tokens - self.num_output_tokens

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the log-probabilities of the output tokens; 0 if none were requested."""
        (start, total), end = self._summed_logprobs, min(len(self.logprobs), self.num_output_tokens)
        for i in range(start, end):
            total += self.logprobs[i][self.token_ids[self.num_prompt_tokens + i]].logprob
        self._summed_logprobs = end, total
        return total

    @property
    def finished(self) -> bool:
        """Whether the request has ended, for any reason."""
        return self.finish_reason is not None

    @property
    def takes_argmax(self) -> bool:
        """Whether all further tokens are the argmax of the model's logits: greedy, `min_tokens` reached, no edits."""
        params = self.params
        return params.is_greedy and not params.edits_logits and self.num_output_tokens >= params.min_tokens

    @property
    def samples_with_own_seed(self) -> bool:
        """Whether a seed of the user decides its text, which should then not depend on other requests."""
        return self.params.seed is not None and not self.params.is_greedy

    def is_end_of_text(self, token: int) -> bool:
        """Whether `token` is the end-of-text token and ends this request; False for a stop token."""
        return token == self.eos_id and not self.params.ignore_eos

    def sampling_row(self, drafts: Sequence[int] = ()) -> SamplingRow:
        """The sampling parameters and the context of the token that follows `token_ids` and `drafts`."""
        params = self.params
        ends_early = self.num_output_tokens + len(drafts) < params.min_tokens
        forbidden = self.ending_ids if ends_early else ()
        if not params.has_penalties and not self.bad_words:
            return SamplingRow(params, forbidden_token_ids=forbidden)
        output = [*self.output_token_ids, *drafts]
        if self.bad_words:
            forbidden = (*forbidden, *completing_token_ids(self.bad_words, output))
        return SamplingRow(params, self.distinct_prompt_tokens, output, forbidden)

    @cached_property
    def ending_ids(self) -> tuple[int, ...]:
        """All tokens that may not come before `min_tokens`."""
        return tuple(self.stop_ids | self.eos_ids)

    @cached_property
    def distinct_prompt_tokens(self) -> np.ndarray:
        """The different tokens of the prompt, sorted, `[num_distinct]` int64."""
        return np.unique(np.array(self.token_ids[: self.num_prompt_tokens], np.int64))

    def block_hashes(self, block_size: int) -> list[bytes]:
        """Hashes of all full blocks of `token_ids`, in order (see `minillm.cache.prefix`). Do not change the list."""
        return extend_block_hashes(self._block_hashes, self.token_ids, block_size, self.cache_salt)

    def drop_cache(self) -> None:
        """Clear the block table and set the number of computed tokens to 0. The caller has freed the blocks."""
        self.block_table.clear()
        self.num_computed_tokens, self.num_dropped_tokens = 0, self.num_tokens


def request_seed(seed: int | None, engine_seed: int, number: int, index: int) -> int:
    """The seed of completion `index`, from the user's seed if there is one, else from the engine's and `number`.

    `number`: the number of the prompt. Seeds need only differ in their lower 64 bits: `sampling.uniform` hashes them.
    The engine's bases are above 2^62, where users rarely choose a seed; the factors keep the completions of two bases
    and the prompts of two engines apart.
    """
    high, low = divmod(engine_seed, 1 << 24)
    base = seed if seed is not None else high * 0x9E3779B97F4A7C15 + (low << 40) + (number << 8) + (1 << 62)
    return base * 1_000_003 + index
