"""What a user asks of one request: the parameters of sampling, checked when they are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from typing import Any

from minillm.errors import ConfigError, UnknownOptionError

MAX_N = 16384
GREEDY_BELOW = 1e-5
"""Temperatures below this mean 0. vLLM 0.32 makes 0.01 of all that lie between 0 and 0.01 instead."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled: vLLM's fields, defaults and limits.

    Checked when made, so bad parameters never exist. Raises `ConfigError` for a value out of range and
    `UnknownOptionError` for a field that minillm does not have.
    """

    n: int = 1
    """How many completions of each prompt."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together reach this probability."""
    top_k: int = 0
    """Keep this many of the likeliest tokens. 0 or -1: all tokens."""
    min_p: float = 0.0
    """Keep tokens at least this likely, as a fraction of the likeliest one's probability."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token that the output already has."""
    frequency_penalty: float = 0.0
    """Taken off the logit once per occurrence in the output."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output."""
    seed: int | None = None
    """None or -1: the engine chooses one."""
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: as many as the context allows."""
    min_tokens: int = 0
    """Before so many tokens neither end of text nor a stop token can be chosen."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report at each position, beside the chosen one; -1: the whole vocabulary."""
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        check_params(self)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty if there is none."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def all_stop_token_ids(self) -> frozenset[int]:
        """`stop_token_ids` as a set. The model's end of text is the engine's to add, or not (`ignore_eos`)."""
        return frozenset(self.stop_token_ids or ())

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken; top-k, top-p and min-p then change nothing."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether the probabilities depend on which tokens came before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


def _name_unknown_options(cls: type[SamplingParams]) -> None:
    """Let the constructor answer an unknown field with a typed error instead of a bare `TypeError`."""
    construct = cls.__init__
    known = [field.name for field in fields(cls)]

    @wraps(construct)
    def init(self: SamplingParams, **options: Any) -> None:
        for name in options:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                fix = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}"
                raise UnknownOptionError(f"SamplingParams has no option {name!r}: {fix}")
        construct(self, **options)

    cls.__init__ = init  # type: ignore[method-assign]


_name_unknown_options(SamplingParams)


_LIMITS: dict[str, tuple[type, str, Callable[[Any], bool]]] = {
    "n": (Integral, f"an integer from 1 to {MAX_N}", lambda v: 1 <= v <= MAX_N),
    "temperature": (Real, "a number from 0 (take the likeliest token) to 2", lambda v: 0 <= v <= 2),
    "top_p": (Real, "a number above 0 and up to 1 (all tokens)", lambda v: 0 < v <= 1),
    "top_k": (Integral, "a positive integer, or 0 or -1 for all tokens", lambda v: v >= -1),
    "min_p": (Real, "a number from 0 (all tokens) to 1", lambda v: 0 <= v <= 1),
    "presence_penalty": (Real, "a number from -2 to 2", lambda v: -2 <= v <= 2),
    "frequency_penalty": (Real, "a number from -2 to 2", lambda v: -2 <= v <= 2),
    "repetition_penalty": (Real, "a finite number above 0; 1 changes nothing", lambda v: 0 < v < math.inf),
    "seed": (Integral, "an integer, or None", lambda v: True),
    "max_tokens": (Integral, "an integer from 1, or None for as many as fit", lambda v: v >= 1),
    "min_tokens": (Integral, "an integer from 0", lambda v: v >= 0),
    "logprobs": (Integral, "an integer from 0, -1 for the whole vocabulary, or None", lambda v: v >= -1),
    "prompt_logprobs": (Integral, "an integer from 0, -1 for the whole vocabulary, or None", lambda v: v >= -1),
}
"""Per numeric field: its type, its limits in words, and the test. NaN fails every comparison."""
_MAY_BE_NONE = {"seed", "max_tokens", "logprobs", "prompt_logprobs"}
_FLAGS = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")


def check_params(params: SamplingParams) -> None:
    """Raise `ConfigError` naming the field, the value and the limit."""
    for name, (kind, limit, within) in _LIMITS.items():
        value = getattr(params, name)
        if value is None and name in _MAY_BE_NONE:
            continue
        if not isinstance(value, kind) or isinstance(value, bool) or not within(value):
            raise ConfigError(f"{name}={value!r}: must be {limit}")
    for name in _FLAGS:
        if not isinstance(getattr(params, name), bool):
            raise ConfigError(f"{name}={getattr(params, name)!r}: must be True or False")
    _check_stops(params)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise ConfigError(f"min_tokens={params.min_tokens}: must not be above max_tokens={params.max_tokens}")
    if params.n > 1 and params.is_greedy:
        raise ConfigError(
            f"n={params.n}: must be 1 at temperature={params.temperature}, where all completions would be the same; "
            "raise the temperature"
        )


def _check_stops(params: SamplingParams) -> None:
    stop, ids = params.stop, params.stop_token_ids
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not _is_sequence_of(strings, lambda s: isinstance(s, str) and s):
        raise ConfigError(f"stop={stop!r}: must be a string or a sequence of strings, none of them empty, or None")
    if strings and not params.detokenize:
        raise ConfigError(f"stop={stop!r}: needs detokenize=True, because stop strings are found in the text")
    tokens = () if ids is None else ids
    if not _is_sequence_of(tokens, lambda t: isinstance(t, Integral) and not isinstance(t, bool) and t >= 0):
        raise ConfigError(f"stop_token_ids={ids!r}: must be a sequence of integers from 0, or None")


def _is_sequence_of(values: Any, good: Callable[[Any], Any]) -> bool:
    return isinstance(values, Sequence) and all(map(good, values))
