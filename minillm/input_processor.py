"""From a prompt to requests: checks the user's input and fills in defaults. vLLM's `InputProcessor`."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence, Set
from itertools import count
from numbers import Integral
from typing import Any

from minillm.cache.block_pool import BlockPool
from minillm.config import reject_unknown
from minillm.errors import ConfigError, PromptError, RequestTooLargeError
from minillm.models.config import ModelConfig
from minillm.request import Request, request_seed
from minillm.sampling import SamplingParams
from minillm.sampling.bad_words import bad_word_token_ids
from minillm.tokenizer import Detokenizer, Tokenizer

Prompt = str | Mapping[str, Any]
"""Text, or `{"prompt_token_ids": [...]}`, or `{"prompt": "text"}`; a mapping may add a `cache_salt`."""


class InputProcessor:
    """Turns each prompt into one unqueued request per completion. Any thread may call it, also during a step."""

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Tokenizer,
        pool: BlockPool,
        max_model_len: int,
        seed: int,
        shares_prompts: bool,
        names_in_use: Container[str],
    ) -> None:
        """`seed`: the engine's. `shares_prompts`: whether the completions of a prompt can share its blocks.
        `names_in_use`: ids that a request without an id does not get."""
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.pool = pool
        self.max_model_len = max_model_len
        self.seed = seed
        self.shares_prompts = shares_prompts
        self.names_in_use = names_in_use
        self._numbers = count()
        """Of the prompts."""

    def process_inputs(
        self, prompt: Prompt, params: SamplingParams | None, priority: int, request_id: str | None
    ) -> list[Request]:
        """Check a prompt. Returns one unqueued request per completion.

        Without `params`, the defaults count. A default `max_tokens`, and one of None, end where the context or the
        block pool ends (`room_after`).

        Raises `PromptError`, `ConfigError`, or `RequestTooLargeError` for a prompt that is larger than the block pool.
        """
        check_sampling_params(params)
        if not isinstance(priority, Integral) or isinstance(priority, bool):
            raise ConfigError(f"priority={priority!r} must be an integer; lower runs first")
        text, token_ids, salt = self._read_prompt(prompt)
        is_default = params is None
        if params is None:
            params = self.default_sampling_params()
        max_tokens = room = self.room_after(len(token_ids))
        if params.max_tokens is not None:
            max_tokens = min(params.max_tokens, room) if is_default else params.max_tokens
        self._check_length(len(token_ids), max_tokens)
        bad_words = bad_word_token_ids(params.bad_words or (), self.tokenizer)
        self._check_against_model(params, max_tokens, bad_words)
        number = self._next_number(is_request_id=request_id is None)
        name = str(number) if request_id is None else request_id
        tokenizer, eos = self.tokenizer, self.eos_ids
        stop_ids = params.all_stop_token_ids | (frozenset() if params.ignore_eos else eos)
        group: list[Request] = []
        for index in range(params.n):
            detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, token_ids) if params.detokenize else None
            request = Request(
                request_id=f"{name}#{index}" if params.n > 1 else name,
                prompt=text,
                token_ids=list(token_ids),
                num_prompt_tokens=len(token_ids),
                params=params,
                max_tokens=max_tokens,
                seed=request_seed(params.seed, self.seed, number, index),
                index=index,
                priority=int(priority),
                cache_salt=salt,
                fork_of=group[0] if group and self.shares_prompts else None,
                stop_ids=stop_ids,
                eos_ids=eos,
                eos_id=tokenizer.eos_id,
                detokenizer=detokenizer,
                bad_words=bad_words,
            )
            group.append(request)
        return group

    def default_sampling_params(self) -> SamplingParams:
        """For requests without parameters: the values in the checkpoint's `generation_config.json`, as in vLLM."""
        return SamplingParams(**self.model_config.sampling_defaults)

    def room_after(self, num_prompt_tokens: int) -> int:
        """The most tokens that can follow a prompt in the context and in the block pool; below 1 if there is no room
        for any. The last token of an output is never computed, so it needs no slot in the pool."""
        return min(self.max_model_len, self.pool.num_blocks * self.pool.block_size + 1) - num_prompt_tokens

    @property
    def eos_ids(self) -> frozenset[int]:
        """The end-of-text tokens of model and tokenizer."""
        own = self.tokenizer.eos_id
        is_usable = own is not None and own < self.model_config.vocab_size
        return frozenset((*self.model_config.eos_token_ids, own) if is_usable else self.model_config.eos_token_ids)

    def _next_number(self, is_request_id: bool) -> int:
        """The number of the next prompt. If it also becomes the request id, ids in use are skipped."""
        number = next(self._numbers)
        while is_request_id and str(number) in self.names_in_use:
            number = next(self._numbers)
        return number

    def _read_prompt(self, prompt: Prompt) -> tuple[str, list[int], str]:
        """Check a prompt. Returns its text, its token ids and its cache salt."""
        text, token_ids, salt = prompt, None, ""
        if isinstance(prompt, Mapping):
            reject_unknown("a prompt", prompt, {"prompt", "prompt_token_ids", "cache_salt"})
            text, token_ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
            salt = "" if salt is None else salt
            if not isinstance(salt, str):
                raise PromptError(f"cache_salt must be text, not {type(salt).__name__}")
        if token_ids is None:
            if not isinstance(text, str):
                raise PromptError(
                    f"a prompt must be text, or {{'prompt_token_ids': [...]}} for token ids, not {type(text).__name__}"
                )
            token_ids = self.tokenizer.encode(text)
        elif not isinstance(text, str | None):
            raise PromptError(f"prompt={text!r} must be text")
        if not isinstance(token_ids, Iterable) or isinstance(token_ids, Mapping | Set | bytes | bytearray):
            raise PromptError(f"prompt_token_ids={token_ids!r} must be a sequence of token ids")
        token_ids = list(token_ids)
        if not token_ids:
            raise PromptError("the prompt is empty; give at least one token")
        check_token_ids(token_ids, self.model_config.vocab_size)
        token_ids = list(map(int, token_ids))  # NumPy's integers too
        if text is None:
            text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text, token_ids, salt

    def _check_length(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise `PromptError` for more tokens than the context has, `RequestTooLargeError` for a prompt that is
        larger than the block pool."""
        if num_prompt_tokens + max(max_tokens, 1) > self.max_model_len:
            may_lower = max_tokens > 1 and num_prompt_tokens < self.max_model_len
            fix = "shorten the prompt or lower max_tokens" if may_lower else "shorten the prompt"
            raise PromptError(
                f"{num_prompt_tokens} prompt tokens and {max(max_tokens, 1)} new ones are over the context of "
                f"{self.max_model_len}; {fix}"
            )
        if self.room_after(num_prompt_tokens) < 1:  # the prompt fits the context, so not the pool
            raise RequestTooLargeError(
                f"{num_prompt_tokens} prompt tokens need {self.pool.blocks_for(num_prompt_tokens)} blocks, the pool "
                f"has {self.pool.num_blocks}; shorten the prompt, or raise num_kv_blocks or kv_cache_memory_bytes"
            )

    def _check_against_model(
        self, params: SamplingParams, max_tokens: int, bad_words: Sequence[tuple[int, ...]]
    ) -> None:
        """Raise `ConfigError` if `params` do not fit the model's vocabulary or `max_tokens`, or may leave no token to
        choose."""
        vocab_size = self.model_config.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            unknown = [token for token in getattr(params, name) or () if token >= vocab_size]
            if unknown:
                raise ConfigError(f"{name} has {unknown[0]}; ids must be integers from 0 to {vocab_size - 1}")
        if params.min_tokens > max_tokens:
            raise ConfigError(
                f"min_tokens={params.min_tokens}: the prompt leaves room for {max_tokens} tokens; lower it or shorten "
                "the prompt"
            )
        if params.min_tokens and len(params.all_stop_token_ids | self.eos_ids) >= vocab_size:
            raise ConfigError(
                f"min_tokens={params.min_tokens}: every token of the vocabulary ends the text, so none can come first; "
                "lower it to 0, or give fewer stop_token_ids"
            )
        if bad_words or params.allowed_token_ids is not None:
            forbidden = {word[-1] for word in bad_words}
            if params.min_tokens:
                forbidden |= params.all_stop_token_ids | self.eos_ids
            allowed = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
            if forbidden.issuperset(allowed):
                raise ConfigError(
                    f"bad_words and min_tokens={params.min_tokens} may forbid all {len(allowed)} allowed tokens; give "
                    "more allowed_token_ids, or leave out a bad word"
                )


def check_token_ids(token_ids: Sequence[Any], vocab_size: int) -> None:
    """Raise `PromptError` for what is no token of the vocabulary."""
    for position, token in enumerate(token_ids):
        if not isinstance(token, Integral) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise PromptError(f"prompt token {position} is {token!r}; ids must be integers from 0 to {vocab_size - 1}")


def check_sampling_params(params: SamplingParams | None) -> None:
    """Raise `ConfigError` for anything else."""
    if params is not None and not isinstance(params, SamplingParams):
        raise ConfigError(f"sampling params {params!r} must be SamplingParams(…), not {type(params).__name__}")
