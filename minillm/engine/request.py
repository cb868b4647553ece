"""One request: its tokens, how many of them are in the cache, and its block table. Nothing else is remembered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minillm.cache.prefix import extend_names
from minillm.outputs import Logprob
from minillm.sampling import SamplingParams, SamplingRow
from minillm.tokenizer import Detokenizer

LogprobRow = dict[int, Logprob]


@dataclass(eq=False)
class Request:
    """A prompt and the completion that grows behind it.

        token_ids:   [ prompt …… | output … ]
                       ^^^^^^^^^^^^^^^^^^ ^
                       num_computed_tokens | the rest goes through the model next

    While it decodes, exactly one token is not computed: the last one. Rolling back rejected drafts, or losing all
    blocks to preemption, lowers `num_computed_tokens` and nothing else.
    """

    request_id: str
    prompt: str
    token_ids: list[int]
    """Prompt and output together."""
    num_prompt_tokens: int
    params: SamplingParams
    max_tokens: int
    seed: int
    index: int = 0
    """Which of the prompt's `n` completions this is."""
    priority: int = 0
    """Lower runs first, if the engine schedules by priority."""
    cache_salt: str = ""
    """Only requests with the same salt can share blocks through the prefix cache."""
    fork_of: Request | None = None
    """The first completion of the same prompt, whose blocks this one shares as soon as they are filled."""
    stop_ids: frozenset[int] = frozenset()
    """End-of-text and stop tokens that end this request."""
    eos_ids: frozenset[int] = frozenset()
    """The model's end-of-text tokens, whether they end this request or not."""
    detokenizer: Detokenizer | None = None
    num_computed_tokens: int = 0
    num_draft_computed_tokens: int = 0
    """The same counter for the draft model's pool, which the same block table addresses."""
    block_table: list[int] = field(default_factory=list)
    arrival: int = 0
    """Its number in order of arrival; the scheduler gives it."""
    text: str = ""
    """The output so far; a stop string and what follows it cut off."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[LogprobRow] = field(default_factory=list)
    prompt_logprobs: dict[int, LogprobRow] = field(default_factory=dict)
    """By prompt position; position 0 has none."""
    _block_names: list[bytes] = field(default_factory=list, repr=False)
    """Tokens are only ever appended, so names once found stay true."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The output so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_new_tokens(self) -> int:
        """Committed tokens that are not in the cache yet."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """One token to go and at least one generated: a preempted request recomputes first, and that is a prefill."""
        return self.num_new_tokens == 1 and self.num_output_tokens > 0

    @property
    def num_remaining_tokens(self) -> int:
        """Output tokens it may still gain."""
        return self.max_tokens - self.num_output_tokens

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the log-probabilities of the output, as far as they were asked for."""
        chosen = zip(self.logprobs, self.output_token_ids, strict=False)
        return sum(row[token].logprob for row, token in chosen)

    @property
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.finish_reason is not None

    @property
    def takes_likeliest(self) -> bool:
        """Whether the next token, and any after it, is the one with the largest logit: no chance, nothing bent."""
        params = self.params
        return params.is_greedy and not params.has_penalties and self.num_output_tokens >= params.min_tokens

    def is_end_of_text(self, token: int) -> bool:
        """Whether `token` ends the text, and is no mere stop token."""
        return token in self.eos_ids and not self.params.ignore_eos

    def sampling_row(self, drafts: Sequence[int] = ()) -> SamplingRow:
        """What decides the distribution of the token after `token_ids` and `drafts`."""
        params = self.params
        ends_early = self.num_output_tokens + len(drafts) < params.min_tokens
        forbidden = tuple(self.stop_ids | self.eos_ids) if ends_early else ()
        if not params.has_penalties:
            return SamplingRow(params, forbidden_token_ids=forbidden)
        prompt = self.token_ids[: self.num_prompt_tokens]
        return SamplingRow(params, prompt, [*self.output_token_ids, *drafts], forbidden)

    def block_names(self, block_size: int) -> list[bytes]:
        """Names of all full blocks of its tokens, in order (see `minillm.cache.prefix`). Do not change the list."""
        return extend_names(self._block_names, self.token_ids, block_size, self.cache_salt)

    def drop_cache(self) -> None:
        """Forget what is computed; the blocks must have been freed."""
        self.block_table.clear()
        self.num_computed_tokens = self.num_draft_computed_tokens = 0


def request_seed(seed: int | None, engine_seed: int, number: int, index: int) -> int:
    """The seed of completion `index`: from the user's seed, or from the engine's and the request's number.

    `sampling.uniform` mixes it well, so it only has to differ.
    """
    base = seed if seed is not None else (engine_seed << 40) + (number << 8) + (1 << 62)
    return base * 1_000_003 + index
